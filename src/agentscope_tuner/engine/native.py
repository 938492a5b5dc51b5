"""Compiled kernels, as PyTorch calls them; `trial` says whether they may be called."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from agentscope_tuner.engine.binding import NUMBER, SIZE, Functions, addresses
from agentscope_tuner.engine.learner_kernels import LearnerKernels

TILE = 32
"""Keys of so many tokens lie side by side in the cache, number by number."""
_PIECE = 32
"""About so many rows, at most, one thread takes through a model at once; ..."""
_PIECE_IN_MATRICES = 64
"""... and so many where products are computed by matrices, which are faster with more."""


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
    voice: int
    """The number of its voice."""


class Outcome(ctypes.Structure):
    """What some steps of decoding did, once they are done, see `Outcome` in `kernels/whole.cpp`."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("_over", "_whether_stopped", "_count", "rows", "steps", "most_drawn")
    ]
    _count: int
    rows: int
    """How many tokens of completions were run, guesses included."""
    steps: int
    """How many."""
    most_drawn: int
    """How many tokens a completion has that got some, at most."""

    def __init__(self, most: int) -> None:
        """For at most so many completions."""
        self._slots, self._stopped = array("q", bytes(8 * most)), array("q", bytes(8 * most))
        super().__init__(_place(self._slots), _place(self._stopped))

    @property
    def over(self) -> dict[int, bool]:
        """The slots of completions that are over, and whether they were stopped."""
        return dict(zip(self._slots[: self._count], map(bool, self._stopped[: self._count]), strict=True))


class Way(IntEnum):
    """How products of bfloat16 are computed, see `kernels/pairs.h`."""

    ONE_BY_ONE = 0
    """As floats."""
    IN_PAIRS = 1
    """Two numbers at a time, by an instruction for them."""
    IN_MATRICES = 2
    """As many as fit into registers that hold matrices."""


class Job(Generic[R]):
    """What helping threads compute. It has to be finished, by any one thread: until then it is being written to."""

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


class NativeKernels(LearnerKernels):
    """What the sources in `kernels` offer, on tensors: to the learner, and here to the sampler."""

    def __init__(self, library: ctypes.CDLL) -> None:
        functions = Functions(library)
        super().__init__(functions)
        take, of_each_type = functions.take, functions.of_each_type
        self._attend = of_each_type("attend", 8, *[SIZE] * 5)
        self._add_norm = of_each_type("add_norm", 4, SIZE, SIZE, NUMBER)
        self._split_heads = of_each_type("split_heads", 11, *[SIZE] * 5, NUMBER, NUMBER)
        self._gate_joined = of_each_type("gate_joined", 2, SIZE, SIZE)
        self._begin_pass = of_each_type("begin_pass", 3, SIZE, SIZE, NUMBER, NUMBER, result=ctypes.c_void_p)
        self._begin_decoding = of_each_type("begin_decoding", 7, *[SIZE] * 8, NUMBER, NUMBER, result=ctypes.c_void_p)
        self._finish = take("finish", 1)
        self._draw = of_each_type("draw", 5, SIZE, SIZE)
        self._copy_slot = of_each_type("copy_slot", 1, *[SIZE] * 7)
        self._learn = take("learn", 2, SIZE, SIZE)
        self._guess = take("guess", 5, SIZE, SIZE)
        self._multiply = take("multiply_bf16", 4, *[SIZE] * 3)
        self._compute_by = take("compute_by", 0, SIZE, result=SIZE)
        self.way = Way.ONE_BY_ONE

    @property
    def way(self) -> Way:
        """How products of bfloat16 are computed. It stays what it is where the processor cannot do what is asked."""
        return self._way

    @way.setter
    def way(self, wanted: Way) -> None:
        if self._compute_by(wanted):
            self._way = wanted

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
        places = addresses(q, out, keys, values, trunks, trunk_of, slots, lengths)
        self._attend[keys.dtype](*places, rows, kv_heads, heads // kv_heads, d, capacity)
        return out

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add y (N, D) to x (N, D) float32 in place; the RMS norm of the sum (N, D), in the type of `weight` (D,)."""
        out = torch.empty(x.shape, dtype=weight.dtype)
        self._add_norm[weight.dtype](*addresses(x, y, weight, out), *x.shape, eps)
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
        q_norm, k_norm = (0, 0) if norms is None else addresses(*norms)
        places = (*addresses(*table, positions, slots, own, q, keys, values),)
        self._split_heads[joined.dtype](
            joined.data_ptr(), q_norm, k_norm, *places, rows, heads, kv_heads, d, capacity, scaling, eps
        )
        return q

    def gate_joined(self, joined: Tensor) -> Tensor:
        """`silu(gate) * up` (N, I) of both side by side (N, 2 I)."""
        rows, width = joined.shape
        out = joined.new_empty(rows, width // 2)
        self._gate_joined[joined.dtype](*addresses(joined, out), rows, width // 2)
        return out

    def begin_pass(self, model: SmallModel, rows: Sequence[Tensor], trunks: Tensor, wanted: Tensor) -> Job[Tensor]:
        """Begin to run new tokens, B rows, through a small model: to final hidden states (R, D).

        Args:
            model: all layers, of each voice.
            rows: (B,) each: ids of tokens, positions in their sequences; in which slots, at what places of them, and
                how many of a slot's tokens each sees; trunks as in `attend`; voices. Rows of a slot are neighbours, and
                so are those of a voice.
            trunks: (L, any, 3) as in `attend`, for each layer.
            wanted: (R,) of which rows the hidden states are wanted, in their order.
        """
        hidden = model.norm.new_empty(len(wanted), len(model.norm))
        batch = array("q", [*addresses(*rows, wanted, trunks), len(rows[0]), trunks.shape[1], len(wanted)])
        job = self._begin_pass[model.norm.dtype](
            model.places.data_ptr(), _place(batch), hidden.data_ptr(), self._piece(model), torch.get_num_threads(),
            model.scaling, model.eps,
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
        least: int,
        steps: int,
    ) -> Job[Outcome]:
        """Begin with steps of decoding.

        Args:
            model: all layers, of each voice.
            sheet: addresses and sizes, see `Sheet` in `kernels/whole.cpp`: of completions in all slots.
            prompts: what is computed beside the first step.
            ids: (N,) of all of these tokens, of one prompt after those of the other.
            active: (C,) slots of completions that are not among the prompts.
            copies: what is done before: from a slot to another, so many tokens; one after the other.
            trunks: (L, any, 3) as in `attend`, for each layer.
            guesses: most tokens that are guessed for a completion at once.
            least: so many steps in any case; they end with the first after them by which a completion is over.
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
            ctypes.addressof(outcome), len(active), len(copies), trunks.shape[1], guesses, least, steps,
            self._piece(model), torch.get_num_threads(), model.scaling, model.eps,
        )  # fmt: skip
        return Job(self._finish, job, outcome, (model, columns, trunks))

    def _piece(self, model: SmallModel) -> int:
        matrices = model.norm.dtype == torch.bfloat16 and self.way is Way.IN_MATRICES
        return _PIECE_IN_MATRICES if matrices else _PIECE

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
        self._multiply(*addresses(x, tiles, bias, out), x.numel() // inputs, inputs, outputs)
        return out

    def draw(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B,) and log-probabilities (B,) for logits (B, V), as `distributions.draw_tokens` without truncation.

        Args:
            logits: of each row.
            temperatures: (B,) float32; 0 is greedy.
            uniforms: (B,) float64 in [0, 1).
        """
        tokens, logprobs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        places = addresses(logits, temperatures, uniforms, tokens, logprobs)
        self._draw[logits.dtype](*places, *logits.shape)
        return tokens, logprobs

    def learn(self, table: Tensor, tokens: Tensor) -> None:
        """Remember in a table (2^n, 2) what followed which tokens (N,), see `drafts`."""
        self._learn(*addresses(table, tokens), len(tokens), len(table).bit_length() - 1)

    def guess(self, table: Tensor, tokens: Tensor, starts: Tensor, most: Tensor, counts: Tensor) -> None:
        """Write to `tokens` what probably follows each context, see `drafts`, and to `counts` how many these are."""
        self._guess(*addresses(table, tokens, starts, most, counts), len(starts), len(table).bit_length() - 1)

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


def to_tiles(keys: Tensor) -> Tensor:
    """Keys (..., T, d), T a multiple of `TILE`, as the cache holds them: (..., T / TILE, d, TILE), see `to_pairs`."""
    *outer, tokens, d = keys.shape
    # A pair moves as one number, which is far faster.
    whole = F.pad(keys, (0, d % 2)).contiguous().view(torch.int32) if keys.dtype == torch.bfloat16 else keys
    tiles = whole.reshape(*outer, tokens // TILE, TILE, whole.shape[-1]).transpose(-1, -2)
    tiles = tiles.clone(memory_format=torch.contiguous_format)
    rows = whole.shape[-1] * whole.element_size() // keys.element_size()
    return tiles.view(keys.dtype).view(*outer, tokens // TILE, rows, TILE)


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
