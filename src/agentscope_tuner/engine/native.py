"""Compiled kernels, as PyTorch calls them; `trial` says whether they may be called."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32
"""Keys of so many tokens lie side by side in the cache, number by number."""
_PIECE = 32
"""About so many rows, at most, one thread takes through a small model at once."""


R = TypeVar("R")


@dataclass(frozen=True, eq=False, slots=True)
class SmallModel:
    """A model that is run as a whole."""

    places: Tensor
    """Addresses and sizes, see `Model` in `kernels/whole.cpp`."""
    norm: Tensor
    """Weight (D,) of the last norm."""
    scaling: float
    """Of the queries."""
    eps: float
    """Of the norms."""


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


class Prompt(NamedTuple):
    """Some tokens of a prompt, see `Prompts` in `kernels/whole.cpp`."""

    slot: int
    first: int
    """The place of the first of them in the slot."""
    tokens: int
    """How many."""
    complete: bool
    """Whether the prompt is complete by them, and something is drawn."""
    trunk: int
    """The place of the trunk that it begins with, or -1 ..."""
    begun: int
    """... and how many tokens that has."""


class Outcome(ctypes.Structure):
    """What some steps of decoding did, once they are done, see `Outcome` in `kernels/whole.cpp`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("_over", "_whether_stopped", "_count", "rows", "steps", "most_drawn", "last_place")
    ]
    _count: int
    rows: int
    """How many tokens of completions were run, guesses included."""
    steps: int
    """How many."""
    most_drawn: int
    """How many tokens a completion has that got some, at most."""
    last_place: int
    """The place of the last token in its slot, for the one for which it comes last."""

    def __init__(self, most: int) -> None:
        """For at most so many completions."""
        self._slots, self._stopped = array("q", bytes(8 * most)), array("q", bytes(8 * most))
        super().__init__(_place(self._slots), _place(self._stopped))

    @property
    def over(self) -> dict[int, bool]:
        """The slots of completions that are over, and whether they were stopped."""
        return dict(zip(self._slots[: self._count], map(bool, self._stopped[: self._count]), strict=True))


class Job(Generic[R]):
    """What helpers of this thread compute. It has to be finished: until then it is being written to."""

    def __init__(self, finish: Callable[[int], None], address: int, result: R, reads: object) -> None:
        self._finish = finish
        self._address: int | None = address
        self._result = result
        self._reads = reads  # stays where it is

    def finish(self) -> R:
        """Compute with the helpers what is left."""
        if self._address is not None:
            self._finish(self._address)
            self._address = None
        return self._result


class NativeKernels:
    """What the sources in `kernels` offer, on tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def take(name: str, addresses: int, *sizes: type) -> Any:
            function = getattr(library, name)
            function.restype = None
            function.argtypes = [ctypes.c_void_p] * addresses + [*sizes]
            return function

        size, number = ctypes.c_int64, ctypes.c_float

        def of_each_type(name: str, addresses: int, *sizes: type) -> dict[torch.dtype, Any]:
            suffixes = {torch.float32: "float", torch.bfloat16: "bf16"}
            return {dtype: take(f"{name}_{suffix}", addresses, *sizes) for dtype, suffix in suffixes.items()}

        self._attend = of_each_type("attend", 8, *[size] * 5)
        self._add_norm = of_each_type("add_norm", 4, size, size, number)
        self._split_heads = of_each_type("split_heads", 11, *[size] * 5, number, number)
        self._gate_joined = of_each_type("gate_joined", 2, size, size)
        self._begin_pass = of_each_type("begin_pass", 3, size, size, number, number)
        self._begin_decoding = of_each_type("begin_decoding", 7, *[size] * 7, number, number)
        for function in (*self._begin_pass.values(), *self._begin_decoding.values()):
            function.restype = ctypes.c_void_p
        self._finish = take("finish", 1)
        self._draw = of_each_type("draw", 5, size, size)
        self._copy_slot = of_each_type("copy_slot", 1, *[size] * 7)
        self._learn = take("learn", 2, size, size)
        self._guess = take("guess", 5, size, size)
        self._multiply = take("multiply_bf16", 4, *[size] * 3)
        self._compute_in_pairs = library.compute_in_pairs
        self._compute_in_pairs.restype, self._compute_in_pairs.argtypes = size, [size]
        self.in_pairs = False
        self._tree_attend = take("tree_attend", 7, *[size] * 4)
        self._tree_attend_backward = take("tree_attend_backward", 11, *[size] * 6)
        self._layer_in = take("layer_in", 14, *[size] * 5, number, number)
        self._layer_in_backward = take("layer_in_backward", 21, *[size] * 5, number, number)
        self._layer_out = take("layer_out", 10, *[size] * 4, number)
        self._layer_out_backward = take("layer_out_backward", 14, *[size] * 4)
        self._rms_norm = of_each_type("rms_norm", 6, size, size, number)
        self._rms_norm_backward = of_each_type("rms_norm_backward", 7, size, size)
        self._rotate = take("rotate", 5, size, size, size, number)
        self._swiglu = of_each_type("swiglu", 3, size)
        self._swiglu_backward = of_each_type("swiglu_backward", 5, size)
        self._choose = take("choose", 6, size, size)
        self._choose_backward = take("choose_backward", 7, size, size)

    @property
    def in_pairs(self) -> bool:
        """Whether products of bfloat16 are computed two numbers at a time, by an instruction for them.

        It stays false where the processor has none.
        """
        return self._in_pairs

    @in_pairs.setter
    def in_pairs(self, wanted: bool) -> None:
        self._in_pairs = bool(self._compute_in_pairs(wanted))

    # ------------------------------------------------------------------------------- the sampler, float32 or bfloat16

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, trunks: Tensor, trunk_of: Tensor
    ) -> Tensor:
        """Outputs (B, H, d) of new tokens, a row for each. Rows of one sequence are faster as neighbours.

        Args:
            q: (B, H, d) float32, scaled.
            keys: (slots, K, capacity / TILE, d, TILE), see `to_tiles`.
            values: (slots, K, capacity, d), see `to_pairs`.
            slots: (B,) where each row's sequence lies.
            lengths: (B,) how many of the slot's tokens a row sees.
            trunks: (any, 3) prefixes that rows see first: addresses of keys (K, P / TILE, d, TILE) and of values (K, P,
                d), like those of a slot, and P.
            trunk_of: (B,) the trunk of each row, or -1; the same for all rows of a slot.
        """
        rows, heads, d = q.shape
        kv_heads, capacity = values.shape[1:3]
        out = torch.empty(q.shape, dtype=keys.dtype)
        addresses = _addresses(q, out, keys, values, trunks, trunk_of, slots, lengths)
        self._attend[keys.dtype](*addresses, rows, kv_heads, heads // kv_heads, d, capacity)
        return out

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add y (N, D) to x (N, D) float32 in place; the RMS norm of the sum (N, D), in the type of `weight` (D,)."""
        out = torch.empty(x.shape, dtype=weight.dtype)
        self._add_norm[weight.dtype](*_addresses(x, y, weight, out), *x.shape, eps)
        return out

    def split_heads(
        self,
        joined: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        table: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        own: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        eps: float,
    ) -> Tensor:
        """Write keys and values of new tokens into the cache, and return their queries (B, H, d), float32 and scaled.

        Args:
            joined: (B, (H + 2 K) d) projections: queries, keys, values.
            norms: weights (d,) of norms over the heads of queries and of keys, if the model has them.
            table: cosines and sines (length, d), float32.
            positions: (B,) where each token is in its sequence,
            slots: (B,) in which slot that is,
            own: (B,) and at what place of the slot.
            keys: (slots, K, capacity / TILE, d, TILE), see `to_tiles`.
            values: (slots, K, capacity, d), see `to_pairs`.
            scaling: of the queries.
            eps: of the norms.
        """
        kv_heads, capacity, d = values.shape[1:]
        rows, width = joined.shape
        heads = width // d - 2 * kv_heads
        q = torch.empty(rows, heads, d)
        q_norm, k_norm = (0, 0) if norms is None else _addresses(*norms)
        addresses = (*_addresses(*table, positions, slots, own, q, keys, values),)
        self._split_heads[joined.dtype](
            joined.data_ptr(), q_norm, k_norm, *addresses, rows, heads, kv_heads, d, capacity, scaling, eps
        )
        return q

    def gate_joined(self, joined: Tensor) -> Tensor:
        """`silu(gate) * up` (N, I) of both side by side (N, 2 I)."""
        rows, width = joined.shape
        out = joined.new_empty(rows, width // 2)
        self._gate_joined[joined.dtype](*_addresses(joined, out), rows, width // 2)
        return out

    def begin_pass(self, model: SmallModel, rows: Sequence[Tensor], trunks: Tensor, wanted: Tensor) -> Job[Tensor]:
        """Begin to run new tokens, B rows, through a small model: to final hidden states (R, D).

        Args:
            model: all layers.
            rows: (B,) each: ids of tokens, positions in their sequences; in which slots, at what places of them, and
                how many of a slot's tokens each sees; trunks as in `attend`. Rows of a slot are neighbours.
            trunks: (L, any, 3) as in `attend`, for each layer.
            wanted: (R,) of which rows the hidden states are wanted, in their order.
        """
        hidden = model.norm.new_empty(len(wanted), len(model.norm))
        batch = array("q", [*_addresses(*rows, wanted, trunks), len(rows[0]), trunks.shape[1], len(wanted)])
        job = self._begin_pass[model.norm.dtype](
            model.places.data_ptr(), _place(batch), hidden.data_ptr(), _PIECE, torch.get_num_threads(), model.scaling,
            model.eps,
        )  # fmt: skip
        return Job(self._finish, job, hidden, (model, rows, trunks, wanted))

    def begin_decoding(
        self,
        model: SmallModel,
        sheet: array[int],
        prompts: Sequence[Prompt],
        ids: Sequence[int],
        active: Sequence[int],
        copies: Sequence[tuple[int, int, int]],
        trunks: Tensor,
        *,
        guesses: int,
        steps: int,
    ) -> Job[Outcome]:
        """Begin with steps of decoding. They end with one in which a completion is over.

        Args:
            model: all layers.
            sheet: addresses and sizes, see `Sheet` in `kernels/whole.cpp`: of completions in all slots.
            prompts: what is computed beside the first step.
            ids: (N,) of all of these tokens, of one prompt after those of the other.
            active: (C,) slots of completions that are not among the prompts.
            copies: what is done before: from a slot to another, so many tokens; one after the other.
            trunks: (L, any, 3) as in `attend`, for each layer.
            guesses: most tokens that are guessed for a completion at once.
            steps: most of them.
        """
        # Tensors take longer to make than these few numbers take to read.
        columns = [array("q", column) for column in (*zip(*prompts, strict=True), ids)]
        places = map(_place, columns) if prompts else [0] * (len(Prompt._fields) + 1)
        beside = array("q", [*places, len(prompts)])
        going_on, copied = array("q", active), array("q", itertools.chain.from_iterable(copies))
        outcome = Outcome(len(active) + len(prompts))
        job = self._begin_decoding[model.norm.dtype](
            model.places.data_ptr(), *map(_place, (sheet, beside, going_on, copied)), trunks.data_ptr(),
            ctypes.addressof(outcome), len(active), len(copies), trunks.shape[1], guesses, steps, _PIECE,
            torch.get_num_threads(), model.scaling, model.eps,
        )  # fmt: skip
        return Job(self._finish, job, outcome, (model, columns, trunks))

    def linear(self, x: Tensor, tiles: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """A linear layer in bfloat16, computed in float32.

        Args:
            x: (..., inputs).
            tiles: the weight (see `weight_tiles`).
            bias: (outputs,), if the layer has one.
            outputs: how many there are.
        """
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], outputs)
        inputs = x.shape[-1]
        self._multiply(*_addresses(x, tiles, bias, out), x.numel() // inputs, inputs, outputs)
        return out

    def draw(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B,) and log-probabilities (B,) for logits (B, V), as `distributions.draw_tokens` without truncation.

        Args:
            logits: of each row.
            temperatures: (B,) float32; 0 is greedy.
            uniforms: (B,) float64 in [0, 1).
        """
        tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        addresses = _addresses(logits, temperatures, uniforms, tokens, logprobs)
        self._draw[logits.dtype](*addresses, *logits.shape)
        return tokens, logprobs

    def learn(self, table: Tensor, tokens: Tensor) -> None:
        """Remember in a table (2^n, 2) what followed which tokens (N,), see `drafts`."""
        self._learn(*_addresses(table, tokens), len(tokens), len(table).bit_length() - 1)

    def guess(self, table: Tensor, tokens: Tensor, starts: Tensor, most: Tensor, counts: Tensor) -> None:
        """Write to `tokens` what probably follows each context, see `drafts`, and to `counts` how many these are."""
        self._guess(*_addresses(table, tokens, starts, most, counts), len(starts), len(table).bit_length() - 1)

    def copy_slot(self, places: Tensor, values: Tensor, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one slot to another.

        Args:
            places: (2 L,) addresses of the keys of all layers, then of their values.
            values: (slots, K, capacity, d) of any layer, for its shape and type.
            source: the slot to read.
            target: the slot to write.
            tokens: how many.
        """
        sizes = (len(places) // 2, *values.shape[1:], source, target, tokens)
        self._copy_slot[values.dtype](places.data_ptr(), *sizes)

    # ------------------------------------------------------------ the learner, float32 but for what linear layers see

    def tree_attend(self, q: Tensor, k: Tensor, v: Tensor, stretches: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of stretches of tokens that see some spans of a packed row, and themselves causally.

        Args:
            q: (N, H, d), scaled.
            k: (N, K, d).
            v: like `k`.
            stretches: (S, 4) each one's first token and end, first span, and number of spans.
            spans: (any, 2) first token and end.

        Returns:
            Outputs (N, H, d), and the logarithms of the sums of exponentials (N, H).
        """
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, logsums = torch.empty_like(q), q.new_empty(q.shape[:2])
        sizes = (len(stretches), k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        self._tree_attend(*_addresses(q, k, v, out, logsums, stretches, spans), *sizes)
        return out, logsums

    def tree_attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsums: Tensor, stretches: Tensor,
        spans: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k and v."""
        grad, q, k, v = grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
        tokens, kv_heads, d = k.shape
        parts = -(-torch.get_num_threads() // kv_heads)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = k.new_zeros(parts, *k.shape), v.new_zeros(parts, *v.shape)
        sizes = (len(stretches), tokens, kv_heads, q.shape[1] // kv_heads, d, parts)
        self._tree_attend_backward(
            *_addresses(grad, q, k, v, out, logsums, grad_q, grad_k, grad_v, stretches, spans), *sizes
        )
        grad_k, grad_v = (grads.squeeze(0) if parts == 1 else grads.sum(0) for grads in (grad_k, grad_v))
        return grad_q, grad_k, grad_v

    def layer_in(
        self, x: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor | None, heads: Heads
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """A layer up to its attention.

        Args:
            x: (N, D), what the layers before it add up to.
            norm: its weight (D,).
            qkv: the weight ((H + 2 K) d, D) of joined projections: queries, keys, values.
            bias: theirs, if they have any.
            heads: what becomes of them.

        Returns:
            Queries (N, H, d), scaled; keys and values (N, K, d); and for the gradient the norm's scales (N,), and the
            projections (N, (H + 2 K) d) where heads have norms.
        """
        x, qkv = _flat(x, qkv)
        tokens, kv_heads, d = len(x), heads.kv_heads, heads.size
        count = len(qkv) // d - 2 * kv_heads
        q, k, v = (x.new_empty(tokens, n, d) for n in (count, kv_heads, kv_heads))
        scales, projected = x.new_empty(tokens), x.new_empty(tokens, len(qkv)) if heads.norms else None
        self._layer_in(
            *_addresses(x, norm, qkv, bias, *(heads.norms or (None, None)), heads.cosines, heads.sines),
            *_addresses(heads.positions, scales, projected, q, k, v), *x.shape, count, kv_heads, d, heads.scaling,
            heads.eps,
        )  # fmt: skip
        return q, k, v, scales, projected

    def layer_in_backward(
        self, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, grad_x: Tensor, x: Tensor, norm: Tensor, qkv: Tensor,
        bias: Tensor | None, heads: Heads, scales: Tensor, projected: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of x, to which `grad_x` is added; of norm, qkv, bias; and of the heads' norms, if there are any."""
        grad_x, x, qkv = _flat(grad_x, x, qkv)
        count, d = grad_q.shape[1:]
        normed, grad_projected, grad = torch.empty_like(x), x.new_empty(len(x), len(qkv)), torch.empty_like(x)
        grad_norm, grad_bias, *grad_norms = (
            None if weight is None else torch.empty_like(weight) for weight in (norm, bias, *heads.norms)
        )
        self._layer_in_backward(
            *_addresses(grad_q, grad_k, grad_v, grad_x, x, norm, qkv, *(heads.norms or (None, None))),
            *_addresses(heads.cosines, heads.sines, heads.positions, scales, projected, normed, grad_projected, grad),
            *_addresses(grad_norm, grad_bias, *(grad_norms or (None, None))),
            *x.shape, count, heads.kv_heads, d, heads.scaling, heads.eps,
        )  # fmt: skip
        return grad, grad_norm, grad_projected.T @ normed, grad_bias, *grad_norms

    def layer_out(
        self, x: Tensor, attended: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A layer from its attention on.

        Args:
            x: (N, D), what the layers before it add up to.
            attended: (N, H d), by its attention.
            out: the weight (D, H d) that this is multiplied by,
            norm: the norm's (D,),
            gate_up: that of gate and up (2 I, D), joined,
            down: and the last one's (D, I).
            eps: of the norm.

        Returns:
            The sum (N, D) with this layer; and for the gradient that before the norm (N, D), the norm's scales (N,),
            gate and up (N, 2 I).
        """
        x, attended, out, gate_up, down = _flat(x, attended, out, gate_up, down)
        middle, y = torch.empty_like(x), torch.empty_like(x)
        scales, joined = x.new_empty(len(x)), x.new_empty(len(x), len(gate_up))
        addresses = _addresses(x, attended, out, norm, gate_up, down, middle, scales, joined, y)
        self._layer_out(*addresses, *x.shape, attended.shape[1], down.shape[1], eps)
        return y, middle, scales, joined

    def layer_out_backward(
        self, grad: Tensor, attended: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, middle: Tensor,
        scales: Tensor, joined: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients of x, attended, and the four weights."""
        grad, attended, out, gate_up, down = _flat(grad, attended, out, gate_up, down)
        tokens, inner = len(grad), down.shape[1]
        gated, grad_joined = grad.new_empty(tokens, inner), torch.empty_like(joined)
        normed, grad_middle, grad_attended = (torch.empty_like(given) for given in (grad, grad, attended))
        grad_norm = torch.empty_like(norm)
        addresses = _addresses(
            grad, middle, scales, joined, out, norm, gate_up, down, gated, grad_joined, normed, grad_middle,
            grad_attended, grad_norm,
        )  # fmt: skip
        self._layer_out_backward(*addresses, *grad.shape, attended.shape[1], inner)
        weights = (grad_middle.T @ attended, grad_norm, grad_joined.T @ normed, grad.T @ gated)
        return grad_middle, grad_attended, *weights

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
        self._rms_norm[dtype](*_addresses(x, change, weight, total, y, scale), x.numel() // d, d, eps)
        return total, y, scale

    def rms_norm_backward(
        self, grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the sum and of weight, in float32, by that of the norm and what else there is of the sum's."""
        grad, d = grad.contiguous(), total.shape[-1]
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_x, grad_weight = torch.empty_like(total), torch.empty_like(weight)
        addresses = _addresses(grad, grad_total, total, weight, scale, grad_x, grad_weight)
        self._rms_norm_backward[grad.dtype](*addresses, total.numel() // d, d)
        return grad_x, grad_weight

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Rotary embedding of x (N, H, d) at positions (N,) by tables (length, d); or its transpose."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._rotate(*_addresses(x, cosines, sines, positions, y), *x.shape, -1.0 if back else 1.0)
        return y

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, in float32 or bfloat16."""
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        self._swiglu[y.dtype](*_addresses(gate, up, y), y.numel())
        return y

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._swiglu_backward[grad.dtype](*_addresses(grad, gate, up, grad_gate, grad_up), grad.numel())
        return grad_gate, grad_up

    def choose(self, logits: Tensor, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is known of tokens (n,) drawn by logits (n, V) at temperatures (n,), where 0 counts as 1.

        Returns:
            Log-probabilities (n,), entropies (n,) of the distributions, logarithms (n,) of their sums of exponentials.
        """
        logprobs, entropies, logsums = logits.new_empty(3, len(logits))
        self._choose(*_addresses(logits, tokens, temperatures, logprobs, entropies, logsums), *logits.shape)
        return logprobs, entropies, logsums

    def choose_backward(
        self, grad_logprobs: Tensor, grad_entropies: Tensor, logits: Tensor, tokens: Tensor, temperatures: Tensor,
        entropies: Tensor, logsums: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of logits, which it takes the place of."""
        grad_logprobs, grad_entropies = grad_logprobs.contiguous(), grad_entropies.contiguous()
        given = (grad_logprobs, grad_entropies, logits, tokens, temperatures, entropies, logsums)
        self._choose_backward(*_addresses(*given), *logits.shape)
        return logits


def to_tiles(keys: Tensor) -> Tensor:
    """Keys (..., T, d), T a multiple of `TILE`, as the cache holds them: (..., T / TILE, d, TILE), see `to_pairs`."""
    *outer, tokens, d = keys.shape
    return to_pairs(keys.reshape(*outer, tokens // TILE, TILE, d).transpose(-1, -2)).contiguous()


def to_pairs(rows: Tensor) -> Tensor:
    """Rows (..., N, width) as compiled products read them: as they are, but in bfloat16 two that are added up together.

    An odd N is made even with zeros. Pairs are (..., N / 2, width, 2), in the shape of the rows.
    """
    if rows.dtype != torch.bfloat16:
        return rows
    rows = F.pad(rows, (0, 0, 0, rows.shape[-2] % 2))
    pairs: Tensor = rows.unflatten(-2, (-1, 2)).transpose(-1, -2)
    return pairs.reshape(rows.shape)


def weight_tiles(weight: Tensor) -> Tensor:
    """The weight (outputs, inputs) of a linear layer in tiles, like keys, filled up with zeros."""
    missing = -len(weight) % TILE
    return to_tiles(F.pad(weight, (0, 0, 0, missing)) if missing else weight)


def _place(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _flat(*tensors: Tensor) -> Iterator[Tensor]:
    """They are read by address, one number after the other."""
    return (tensor.contiguous() for tensor in tensors)


def _addresses(*tensors: Tensor | None) -> Iterator[int]:
    """Of tensors; 0 of what is missing."""
    return (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
