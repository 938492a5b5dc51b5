"""The learner's compiled kernels, as PyTorch calls them: in float32, but for what linear layers see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentscope_tuner.engine.binding import NUMBER, SIZE, Functions, addresses, flat

_SIDE = 16
"""Rows of a register that holds a matrix."""


@dataclass(frozen=True, eq=False, slots=True)
class Heads:
    """How a layer's projections of N tokens become queries, keys and values."""

    norms: Sequence[Tensor]
    """Weights (d,) of norms over the heads of queries and of keys; or none."""
    cosines: Tensor
    """Of rotary embedding (length, d), float32; ..."""
    sines: Tensor
    positions: Tensor
    """... read at (N,)."""
    kv_heads: int
    scaling: float
    """Of the queries."""
    eps: float
    """Of all norms."""

    @property
    def size(self) -> int:
        """Numbers of a head."""
        return self.cosines.shape[1]


def _whole(shape: Sequence[int]) -> tuple[int, int]:
    """With rows added that fill the last registers, where these hold matrices."""
    rows, columns = shape
    return -(-rows // _SIDE) * _SIDE, columns


class LearnerKernels:
    """Parts of a forward pass and of its gradient."""

    def __init__(self, functions: Functions) -> None:
        take, of_each_type = functions.take, functions.of_each_type
        self._tree_attend = take("tree_attend", 7, *[SIZE] * 5)
        self._tree_attend_backward = take("tree_attend_backward", 11, *[SIZE] * 6)
        self._layer_in = of_each_type("layer_in", 16, *[SIZE] * 5, NUMBER, NUMBER)
        self._layer_in_backward = of_each_type("layer_in_backward", 23, *[SIZE] * 5, NUMBER, NUMBER)
        self._layer_out = of_each_type("layer_out", 11, *[SIZE] * 4, NUMBER)
        self._layer_out_backward = of_each_type("layer_out_backward", 17, *[SIZE] * 4)
        self._in_strips = take("whether_in_strips", 0, SIZE, SIZE, result=SIZE)
        self._weight_gradient = take("weight_gradient_bf16", 3, *[SIZE] * 5)
        self._rms_norm = of_each_type("rms_norm", 6, SIZE, SIZE, NUMBER)
        self._rms_norm_backward = of_each_type("rms_norm_backward", 7, SIZE, SIZE)
        self._rotate = take("rotate", 5, SIZE, SIZE, SIZE, NUMBER)
        self._swiglu = of_each_type("swiglu", 3, SIZE)
        self._swiglu_backward = of_each_type("swiglu_backward", 5, SIZE)
        self._choose = of_each_type("choose", 6, SIZE, SIZE)
        self._choose_backward = of_each_type("choose_backward", 7, SIZE, SIZE)

    def tree_attend(self, q: Tensor, k: Tensor, v: Tensor, stretches: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of stretches of tokens that see some spans of a packed row, and themselves causally.

        Args:
            q: (N, H, d), scaled.
            k: (N, K, d).
            v: like `k`.
            stretches: (S, 4) each one's first token and end, first span, and number of spans.
            spans: (any, 2) first token and end. Stretches lie side by side.

        Returns:
            Outputs (N, H, d); and (2, N, H) what is subtracted from scores, and their exponentials multiplied by.
        """
        q, k, v = flat(q, k, v)
        out, normalizers = torch.empty_like(q), q.new_empty(2, *q.shape[:2])
        sizes = (len(stretches), *k.shape[:2], q.shape[1] // k.shape[1], q.shape[2])
        self._tree_attend(*addresses(q, k, v, out, normalizers, stretches, spans), *sizes)
        return out, normalizers

    def tree_attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normalizers: Tensor, stretches: Tensor,
        spans: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k and v."""
        grad, q, k, v = flat(grad, q, k, v)
        tokens, kv_heads, d = k.shape
        parts = -(-torch.get_num_threads() // kv_heads)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = k.new_zeros(parts, *k.shape), v.new_zeros(parts, *v.shape)
        sizes = (len(stretches), tokens, kv_heads, q.shape[1] // kv_heads, d, parts)
        self._tree_attend_backward(
            *addresses(grad, q, k, v, out, normalizers, grad_q, grad_k, grad_v, stretches, spans), *sizes
        )
        grad_k, grad_v = (grads.squeeze(0) if parts == 1 else grads.sum(0) for grads in (grad_k, grad_v))
        return grad_q, grad_k, grad_v

    def layer_in(
        self, x: Tensor, norm: Tensor, projections: Sequence[Tensor], bias: Tensor | None, heads: Heads
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """A layer up to its attention.

        Args:
            x: (N, D), what the layers before it add up to; float32.
            norm: its weight (D,), float32.
            projections: the weights (H d, D), (K d, D) and (K d, D) of those to queries, keys and values; float32 or
                bfloat16, in which all sizes have to be even.
            bias: theirs ((H + 2 K) d,), joined, if they have any, of the same type.
            heads: what becomes of them.

        Returns:
            Queries (N, H, d), scaled; keys and values (N, K, d); and for the gradient the norm's scales (N,), and what
            was projected (N, (H + 2 K) d) where heads have norms, of the weights' type. All others are float32.
        """
        x, *projections = flat(x, *projections)
        tokens, kv_heads, d = len(x), heads.kv_heads, heads.size
        outputs = sum(map(len, projections))
        count = outputs // d - 2 * kv_heads
        q, k, v = (x.new_empty(tokens, n, d) for n in (count, kv_heads, kv_heads))
        scales = x.new_empty(tokens)
        projected = projections[0].new_empty(tokens, outputs) if heads.norms else None
        self._layer_in[projections[0].dtype](
            *addresses(x, norm, *projections, bias, *(heads.norms or (None, None)), heads.cosines, heads.sines),
            *addresses(heads.positions, scales, projected, q, k, v), *x.shape, count, kv_heads, d, heads.scaling,
            heads.eps,
        )  # fmt: skip
        return q, k, v, scales, projected

    def layer_in_backward(
        self, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, grad_x: Tensor, x: Tensor, norm: Tensor,
        projections: Sequence[Tensor], bias: Tensor | None, heads: Heads, scales: Tensor, projected: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of x, to which `grad_x` is added; of norm, projections, bias; and of norms over heads, if any."""
        grad_x, x, *projections = flat(grad_x, x, *projections)
        count, d = grad_q.shape[1:]
        weight, outputs = projections[0], [len(projection) for projection in projections]
        normed, grad_projected = weight.new_empty(x.shape), weight.new_empty(len(x), sum(outputs))
        grad = torch.empty_like(x)
        grad_norm, grad_bias, *grad_norms = (
            None if given is None else x.new_empty(given.shape) for given in (norm, bias, *heads.norms)
        )
        self._layer_in_backward[weight.dtype](
            *addresses(grad_q, grad_k, grad_v, grad_x, x, norm, *projections, *(heads.norms or (None, None))),
            *addresses(heads.cosines, heads.sines, heads.positions, scales, projected, normed, grad_projected, grad),
            *addresses(grad_norm, grad_bias, *(grad_norms or (None, None))),
            *x.shape, count, heads.kv_heads, d, heads.scaling, heads.eps,
        )  # fmt: skip
        grad_weights = self._gradient(grad_projected, normed, len(x)).split(outputs)
        return grad, grad_norm, *grad_weights, grad_bias, *grad_norms

    def layer_out(
        self, x: Tensor, attended: Tensor, out: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer from its attention on.

        Args:
            x: (N, D), what the layers before it add up to; float32.
            attended: (N, H d), by its attention; like the weights float32 or bfloat16.
            out: the weight (D, H d) that this is multiplied by,
            norm: the norm's (D,), float32,
            gate: that of gates (I, D),
            up: of what they let pass (I, D),
            down: and the last one's (D, I).
            eps: of the norm.

        Returns:
            The sum (N, D) with this layer; and for the gradient that before the norm (N, D), the norm's scales (N,),
            and gate and up, joined, in the weights' type: (N, 2 I), or strips of it, see `kernels/strips.h`.
        """
        x, attended, out, gate, up, down = flat(x, attended, out, gate, up, down)
        middle, y = torch.empty_like(x), torch.empty_like(x)
        scales, joined = x.new_empty(len(x)), out.new_empty(_whole((len(x), 2 * len(gate))))
        places = addresses(x, attended, out, norm, gate, up, down, middle, scales, joined, y)
        self._layer_out[out.dtype](*places, *x.shape, attended.shape[1], len(gate), eps)
        return y, middle, scales, joined

    def layer_out_backward(
        self, grad: Tensor, attended: Tensor, out: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
        middle: Tensor, scales: Tensor, joined: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients of x, attended, and the five weights."""
        grad, attended, out, gate, up, down = flat(grad, attended, out, gate, up, down)
        tokens, inner = len(grad), len(gate)
        gated, normed = out.new_empty(_whole((tokens, inner))), out.new_empty(grad.shape)
        grad_joined = torch.empty_like(joined)
        grad_middle, grad_attended = torch.empty_like(grad), grad.new_empty(attended.shape)
        # What is multiplied is of the weights' type; of float32 there are no copies.
        rounded = grad.to(out.dtype)
        rounded_middle = grad_middle if out.dtype == grad.dtype else torch.empty_like(rounded)
        grad_norm = torch.empty_like(norm)
        places = addresses(
            grad, rounded, middle, scales, joined, out, norm, gate, up, down, gated, grad_joined, normed, grad_middle,
            rounded_middle, grad_attended, grad_norm,
        )  # fmt: skip
        self._layer_out_backward[out.dtype](*places, *grad.shape, attended.shape[1], inner)
        strips = self._lie_in_strips(out.dtype, grad.shape[1], inner)
        grad_out = self._gradient(rounded_middle, attended, tokens)
        grad_gates = self._gradient(grad_joined, normed, tokens, grad_strips=strips).split(inner)
        grad_down = self._gradient(rounded, gated, tokens, x_strips=strips)
        return grad_middle, grad_attended, grad_out, grad_norm, *grad_gates, grad_down

    def _lie_in_strips(self, dtype: torch.dtype, *columns: int) -> bool:
        return dtype == torch.bfloat16 and bool(self._in_strips(*columns))

    def _gradient(
        self, grad: Tensor, x: Tensor, tokens: int, *, grad_strips: bool = False, x_strips: bool = False
    ) -> Tensor:
        """Of a weight: the transpose of grad (N, outputs) times x (N, inputs), of which both may lie in strips."""
        outputs, inputs = grad.shape[1], x.shape[1]
        if not self._lie_in_strips(x.dtype, outputs, inputs):
            return grad[:tokens].T @ x[:tokens]
        weight = x.new_empty(outputs, inputs)
        self._weight_gradient(*addresses(grad, x, weight), tokens, outputs, inputs, grad_strips, x_strips)
        return weight

    def rms_norm(
        self, x: Tensor, change: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The RMS norm of `x + change`, for x (..., d) and weight (d,).

        Args:
            x: float32.
            change: (..., d) in `dtype`; None: there is none.
            weight: float32.
            eps: added to the mean square.
            dtype: of the norm, float32 or bfloat16.

        Returns:
            The sum (..., d), which is x itself where nothing changes; its norm, `sum * scale * weight`; and scale
            (...), the inverse root of the mean square.
        """
        x, d = x.contiguous(), x.shape[-1]
        change = None if change is None else change.contiguous()
        total = x if change is None else torch.empty_like(x)
        y, scale = torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1])
        self._rms_norm[dtype](*addresses(x, change, weight, total, y, scale), x.numel() // d, d, eps)
        return total, y, scale

    def rms_norm_backward(
        self, grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the sum and of weight, in float32, by that of the norm and what else there is of the sum's."""
        grad, d = grad.contiguous(), total.shape[-1]
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_x, grad_weight = torch.empty_like(total), torch.empty_like(weight)
        places = addresses(grad, grad_total, total, weight, scale, grad_x, grad_weight)
        self._rms_norm_backward[grad.dtype](*places, total.numel() // d, d)
        return grad_x, grad_weight

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Rotary embedding of x (N, H, d) at positions (N,) by tables (length, d); or its transpose."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._rotate(*addresses(x, cosines, sines, positions, y), *x.shape, -1.0 if back else 1.0)
        return y

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, in float32 or bfloat16."""
        gate, up = flat(gate, up)
        y = torch.empty_like(gate)
        self._swiglu[y.dtype](*addresses(gate, up, y), y.numel())
        return y

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        grad, gate, up = flat(grad, gate, up)
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._swiglu_backward[grad.dtype](*addresses(grad, gate, up, grad_gate, grad_up), grad.numel())
        return grad_gate, grad_up

    def choose(self, logits: Tensor, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is known of tokens (n,) drawn by logits (n, V) at temperatures (n,), where 0 counts as 1.

        Args:
            logits: float32 or bfloat16. All else is float32.
            tokens: those that were drawn.
            temperatures: each one's.

        Returns:
            Log-probabilities (n,), entropies (n,) of the distributions, logarithms (n,) of their sums of exponentials.
        """
        logprobs, entropies, logsums = temperatures.new_empty(3, len(logits))
        self._choose[logits.dtype](
            *addresses(logits, tokens, temperatures, logprobs, entropies, logsums), *logits.shape
        )
        return logprobs, entropies, logsums

    def choose_backward(
        self, grad_logprobs: Tensor, grad_entropies: Tensor, logits: Tensor, tokens: Tensor, temperatures: Tensor,
        entropies: Tensor, logsums: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of logits, which it takes the place of."""
        grad_logprobs, grad_entropies = flat(grad_logprobs, grad_entropies)
        given = (grad_logprobs, grad_entropies, logits, tokens, temperatures, entropies, logsums)
        self._choose_backward[logits.dtype](*addresses(*given), *logits.shape)
        return logits
