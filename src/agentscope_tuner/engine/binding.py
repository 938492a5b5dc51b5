"""How compiled functions are called: by addresses of tensors, sizes and numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SIZE, NUMBER = ctypes.c_int64, ctypes.c_float


class Functions:
    """Those of a compiled library, by their names."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def take(self, name: str, places: int, *rest: type, result: type | None = None) -> Any:
        """The one that takes so many addresses, and after them values of these types.

        Raises:
            AttributeError: there is none of this name.
        """
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, [ctypes.c_void_p] * places + [*rest]
        return function

    def of_each_type(self, name: str, places: int, *rest: type, result: type | None = None) -> dict[torch.dtype, Any]:
        """What is compiled for float32 and for bfloat16."""
        suffixes = {torch.float32: "float", torch.bfloat16: "bf16"}
        return {
            dtype: self.take(f"{name}_{suffix}", places, *rest, result=result) for dtype, suffix in suffixes.items()
        }


def addresses(*tensors: Tensor | None) -> Iterator[int]:
    """Of tensors; 0 of what is missing."""
    return (0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def flat(*tensors: Tensor) -> Iterator[Tensor]:
    """They are read by address, one number after the other."""
    return (tensor.contiguous() for tensor in tensors)
