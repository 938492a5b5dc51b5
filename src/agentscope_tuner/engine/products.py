"""How matrix products are computed on this machine: as fast as it can, and no less exactly than was asked.

PyTorch's own choice is not the fastest for float32 on many processors, where oneDNN is; and without units of their own
for them, products in bfloat16 take longer than in float32. What is so is found out, on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.native import NativeKernels, Way, weight_tiles
from agentscope_tuner.engine.trial import shortest_times

_SHAPES = ((1, 64, 64), (17, 48, 100), (128, 192, 512), (300, 640, 1728), (64, 4096, 64), (1000, 256, 1031))
"""(rows, inner, columns) of the products that are checked."""
_ROUNDING = 3e-6
"""Largest error, relative to the largest number of the product: float32 has 24 bits, bfloat16 only 8."""
_BRIEF = (128, 512, 512)
"""(rows, inner, columns) of a product that takes about half a millisecond: what others do seldom comes in between."""
_TIMED = (128, 1024, 1024)
"""(rows, inner, columns) of the product that is timed for compiled kernels ..."""
_WEIGHTS = 16
"""... and how many weights there are where they are read from memory, not from a processor's cache."""
_ABOUT = 1.1
"""Times as long is about as long: what a model computes between its products takes less time beside compiled ones."""
_WIDENED = 2**22
"""Numbers of a weight that are widened at once."""
_MANY = 32
"""Rows from which on a weight is widened for them: for fewer, that takes longer than the product."""


# ----------------------------------------------------------------------------------------------- what the machine does


@contextmanager
def onednn_products() -> Iterator[None]:
    """Inside, float32 products are oneDNN's, provided that it computes them in float32.

    PyTorch takes oneDNN for them only where it may compute less exactly, which it does on some processors.
    """
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
            for product in (F.linear(a, b), a @ b.T.contiguous(), (b @ a.T).T):
                if (product - exact).abs().max() > _ROUNDING * exact.abs().max():
                    return False
    finally:
        settings.fp32_precision = before
    return True


@cache
def bfloat16_is_slow() -> bool:
    """Whether the processor multiplies matrices of bfloat16 more slowly than such of float32.

    It does unless it has units for that; then it is faster by far, so a measurement in passing tells.
    """
    rows, inner, columns = _BRIEF
    a, b = torch.ones(rows, inner), torch.ones(columns, inner)
    c, d = a.bfloat16(), b.bfloat16()
    with torch.inference_mode(), onednn_products():
        wide, narrow = shortest_times(lambda: F.linear(a, b), lambda: F.linear(c, d))
    return narrow > wide


def pairs_keep_up(kernels: NativeKernels) -> bool:
    """Whether compiled kernels compute products of bfloat16 in pairs, in about the time that oneDNN takes or less."""
    return kernels.way is Way.IN_PAIRS and _keeps_up_with_onednn(kernels)


@cache
def _keeps_up_with_onednn(kernels: NativeKernels) -> bool:
    rows, inner, columns = _TIMED
    x, weight = torch.ones(rows, inner).bfloat16(), torch.ones(columns, inner).bfloat16()

    def multiply(products: Products) -> Callable[[], None]:
        packed = [products.pack(weight) for _ in range(_WEIGHTS)]

        def work() -> None:
            for each in packed:
                products.linear(x, each, None, columns)

        return work

    with torch.inference_mode():
        try:
            ours, theirs = shortest_times(multiply(WideProducts(kernels)), multiply(OneDnnProducts(rows)))
        except (AttributeError, RuntimeError):  # this PyTorch lacks the packed operators
            return False
    return ours < _ABOUT * theirs


def computes_wide(loaded: LoadedModel) -> bool:
    """Whether products of a model's weights, which are bfloat16, should be computed in float32."""
    return loaded.device.type == "cpu" and loaded.model.dtype == torch.bfloat16 and bfloat16_is_slow()


# ------------------------------------------------------------------------------------------------------- the sampler


class Products(Protocol):
    """A way to multiply by a weight that stays the same for long."""

    def pack(self, weight: Tensor) -> Tensor:
        """A weight (outputs, inputs) in the form that is multiplied by."""

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """(..., inputs) to (..., outputs)."""


class PlainProducts:
    """PyTorch's own."""

    def pack(self, weight: Tensor) -> Tensor:
        """The weight as it is."""
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return F.linear(x, packed, bias)


class OneDnnProducts:
    """oneDNN's, by operators of PyTorch that are not public."""

    def __init__(self, rows: int) -> None:
        """Pack for inputs of so many rows; others will do."""
        self._rows = rows

    def pack(self, weight: Tensor) -> Tensor:
        """In oneDNN's own order."""
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._rows)
        return packed

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product


class WideProducts:
    """Of bfloat16, computed in float32 by compiled kernels: each weight is widened as it is read."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def pack(self, weight: Tensor) -> Tensor:
        """In tiles."""
        return weight_tiles(weight)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return self._kernels.linear(x, packed, bias, outputs)


class WidenedProducts(PlainProducts):
    """The same without compiled kernels: for many rows, each weight is widened before it is read."""

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return _linear(x, packed, bias)


def products_for(loaded: LoadedModel, rows: int, kernels: NativeKernels | None) -> Sequence[Products]:
    """Ways to multiply by a model's weights, the fastest first.

    Args:
        loaded: the model.
        rows: typical batch size.
        kernels: compiled ones, where they may be used.
    """
    if loaded.device.type != "cpu":
        return [PlainProducts()]
    ways: list[Products] = [OneDnnProducts(rows), PlainProducts()]
    if computes_wide(loaded):
        ways.insert(0, WidenedProducts() if kernels is None else WideProducts(kernels))
    return ways


# ------------------------------------------------------------------------------------------------ a model's own modules


def linears(*, wide: bool) -> AbstractContextManager[object]:
    """Inside, linear layers compute as they are, or in float32."""
    return WideLinears() if wide else nullcontext()


class WideLinears(TorchFunctionMode):
    """Inside, linear layers whose weights are bfloat16 compute in float32, gradients included.

    What they return has the type of their input, which may be float32. A few rows of bfloat16 are left to PyTorch.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take the place of one function."""
        return (_linear if func is F.linear else func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    few = input.dtype == torch.bfloat16 and input.shape[:-1].numel() < _MANY
    if few or weight.dtype != torch.bfloat16:
        return F.linear(input, weight, bias)
    product: Tensor = _WideLinear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return product


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Beside a frozen weight nobody needs the input again.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        wide = x.float()
        products = [F.linear(wide, part.float()) for part in _parts(weight)]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        if bias is not None:
            product += bias
        return product.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight)).float()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        parts = _parts(weight)
        pieces = grad.split([len(part) for part in parts], -1)
        grad_x = grad_weight = None
        if needs_x:
            grad_x = grad.new_zeros(len(grad), weight.shape[1])
            for piece, part in zip(pieces, parts, strict=True):
                grad_x.addmm_(piece, part.float())
            grad_x = grad_x.view(ctx.shape).to(ctx.dtype)
        if needs_weight:
            wide, grad_weight = x.reshape(-1, weight.shape[1]).float(), torch.empty_like(weight)
            for piece, part in zip(pieces, _parts(grad_weight), strict=True):
                part.copy_(piece.T @ wide)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    rows = max(1, _WIDENED // weight.shape[1])
    return torch.split(weight, rows)
