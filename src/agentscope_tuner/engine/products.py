"""Float32 matrix products by oneDNN, which on many processors is faster at them than PyTorch's own choice.

PyTorch takes oneDNN for them only where it may compute less exactly. Whether it would is found out, on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_SHAPES = ((1, 64, 64), (17, 48, 100), (128, 192, 512), (300, 640, 1728), (64, 4096, 64), (1000, 256, 1031))
"""(rows, inner, columns) of the products that are checked."""
_ROUNDING = 3e-6
"""Largest error, relative to the largest number of the product: float32 has 24 bits, bfloat16 only 8."""


@contextmanager
def onednn_products() -> Iterator[None]:
    """Inside, float32 products are oneDNN's, provided that it computes them in float32."""
    if not onednn_is_exact():
        yield
        return
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@cache
def onednn_is_exact() -> bool:
    """Whether products that may be rounded to bfloat16 are not.

    Asked first where nothing else computes: the switch is the whole process's.
    """
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if not torch.backends.mkldnn.is_available() or not hasattr(settings, "fp32_precision"):
        return False
    generator = torch.Generator().manual_seed(0)
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        for rows, inner, columns in _SHAPES:
            a, b = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
            exact = a.double() @ b.double().T
            for product in (torch.nn.functional.linear(a, b), a @ b.T.contiguous(), (b @ a.T).T):
                if (product - exact).abs().max() > _ROUNDING * exact.abs().max():
                    return False
    finally:
        settings.fp32_precision = before
    return True
