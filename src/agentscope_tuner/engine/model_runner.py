"""The model's forward pass over the sampler's slots: which rows are run at once, and how they are laid out.

Whoever schedules (see `sampler`) says which slots need keys and values; they are computed here, a bounded number of
tokens at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentscope_tuner.algorithms.distributions import draw_tokens
from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.attention import (
    MOST_PADDING,
    MOST_SCORES,
    GpuRowLayout,
    RowLayout,
    SlotGroup,
    SlotLayout,
    SlotRows,
)
from agentscope_tuner.engine.completions import Drawing, Lines, Work
from agentscope_tuner.engine.decoder import (
    Decoder,
    GpuDecoder,
    ModuleDecoder,
    WholeDecoder,
    cache_shape,
)
from agentscope_tuner.engine.decoder_choice import choose_decoder
from agentscope_tuner.engine.fast_forms import has_whole_form, kernels_for
from agentscope_tuner.engine.joined_linear import Speakers, Voices
from agentscope_tuner.engine.kv_cache import KVCache, PrefixStack
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.native import Job, Outcome
from agentscope_tuner.engine.recorded_steps import RecordedSteps
from agentscope_tuner.engine.slots import Lineup, Slot, Trunk, count_up
from agentscope_tuner.errors import ConfigError

_SCORES_TOGETHER = 2**19
"""Attention scores that a processor computes at once for several prompts: they stay in its cache."""
_TRUNK_NUMBERS = 2**15
"""Where rows are padded, trunks take some 100 us of calls a step and layer. They pay from so many numbers of keys on
that need not be read."""
_STACKS = 2
"""How many sets of trunks are kept side by side: those that ran last."""
_STACK_NUMBERS = 2**19
"""Numbers of keys per layer up to which trunks are put side by side; with longer ones, products are large anyway."""
_SLOTS_SHARE = 7 / 8
"""Of the cache; the rest is for what sequences share."""
STEPS, _GPU_STEPS = 8, 16
"""So many steps may be taken at once, where nobody can come or go in between."""
_BESIDE_DECODING = 512
"""Prompt tokens computed in a step in which others draw, so that it does not hold them up for long."""


class _Arrangement(NamedTuple):
    """How the slots of a lineup are attended without compiled kernels."""

    order: np.ndarray
    """(S,) The lineup's slots, those that are attended together as neighbours."""
    together: list[SlotRows]
    speakers: list[tuple[str, int]]
    """See `ModelRunner._speakers`."""


def _by_trunk(slots: Iterable[Slot], most_tokens: int) -> list[list[Slot]]:
    """Groups of slots, each in the order of the cache.

    Those without a trunk are one group; all others are, where their trunks have no more than so many tokens and neither
    trunks nor slots are padded much; otherwise those of each trunk.
    """
    ordered = sorted(slots, key=attrgetter("index"))
    by_trunk: dict[Trunk | None, list[Slot]] = defaultdict(list)
    for slot in ordered:
        by_trunk[slot.trunk].append(slot)
    plain = by_trunk.pop(None, None)
    groups = list(by_trunk.values())
    if len(groups) > 1:
        lengths = [len(trunk.ids) for trunk in by_trunk if trunk is not None]
        rows = [len(group) for group in groups]
        shared = [slot for slot in ordered if slot.trunk is not None]
        between = shared[-1].index - shared[0].index + 1
        if (
            len(groups) * max(rows) <= MOST_PADDING * sum(rows)
            and len(groups) * max(lengths) <= min(MOST_PADDING * sum(lengths), most_tokens)
            and between <= MOST_PADDING * sum(rows)
        ):
            groups = [shared]
    return groups if plain is None else [plain, *groups]


def _tiles(counts: np.ndarray, most: int) -> np.ndarray:
    """First row and number of rows (T, 2) of pieces of at most so many, of counts (S,) of rows one after the other."""
    pieces = -(-counts // most)
    within = count_up(pieces) * most
    tiles: np.ndarray = np.stack(
        [np.repeat(counts.cumsum() - counts, pieces) + within, np.minimum(np.repeat(counts, pieces) - within, most)], 1
    )
    return tiles


def _arrays(drawn: tuple[Tensor, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs = drawn
    return tokens.numpy(force=True), logprobs.numpy(force=True)


def _places(trunks: Sequence[Trunk], layers: int) -> Tensor:
    """Addresses and lengths (L, any, 3) of trunks in all layers, by their places, see `NativeKernels.attend`."""
    places = torch.zeros(layers, 1 + max((trunk.place for trunk in trunks), default=-1), 3, dtype=torch.int64)
    if trunks:
        places[:, [trunk.place for trunk in trunks]] = PrefixStack([trunk.cache for trunk in trunks]).places
    return places


class ModelRunner:
    """Runs a model over spans of slots, and keeps their keys and values."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig) -> None:
        """Plan the cache.

        Raises:
            ConfigError: not even one sequence of `max_model_len` tokens fits into `engine.kv_cache_gb`.
        """
        self._loaded = loaded
        self._device = loaded.device
        shape = cache_shape(loaded)
        token_bytes = 2 * math.prod(shape) * loaded.model.dtype.itemsize
        sequence_gb = token_bytes * loaded.max_model_len / 1e9
        if sequence_gb > engine.kv_cache_gb:
            raise ConfigError(
                f"`engine.kv_cache_gb` is {engine.kv_cache_gb}, but one sequence of {loaded.max_model_len} tokens "
                f"takes {sequence_gb:.2f} GB; raise it, or lower `model.max_model_len`"
            )
        slots = min(engine.max_slots, max(1, int(_SLOTS_SHARE * engine.kv_cache_gb / sequence_gb)))
        self.trunk_tokens = int((engine.kv_cache_gb - slots * sequence_gb) * 1e9 / token_bytes)
        """How many tokens trunks may have together: what slots leave of the budget."""
        self._choose = functools.partial(choose_decoder, loaded, slots, engine)
        self._has_whole_form = functools.partial(has_whole_form, loaded, engine)
        self.decoder: Decoder = self._choose()
        like = torch.empty(0, dtype=loaded.model.dtype, device=self._device)
        kernels = kernels_for(loaded, engine)
        self.cache = KVCache(shape, slots, loaded.max_model_len + 1, like, kernels)
        self._heads: int = loaded.model.config.get_text_config().num_attention_heads
        self._prefill_tokens = engine.prefill_tokens
        self._stack = functools.lru_cache(maxsize=_STACKS)(PrefixStack)
        self._arranged: tuple[Lineup, _Arrangement] | None = None
        """What ran last, where rows are padded."""
        self._trunks: tuple[Trunk, ...] = ()
        self._trunk_places = _places((), shape[0])
        self._on_gpu = self.decoder.kernels if isinstance(self.decoder, GpuDecoder) else None
        self._steps: RecordedSteps | None = None
        if isinstance(self.decoder, GpuDecoder):
            self._steps = RecordedSteps(self.decoder, self.cache, _GPU_STEPS)
        self._compiled = kernels is not None or self._on_gpu is not None
        """Whether attention is: it pads nothing, and reads the keys and values of a sequence once for all its rows."""

    def weights_changed(self) -> None:
        """Read the weights again."""
        if self.small and not self._has_whole_form():  # versions of adapters have become too many
            self.decoder = self._choose()
        else:
            self.decoder.refresh()
        if self._steps is not None:
            self._steps.weights_changed()

    def worth_a_trunk(self, sequences: int, tokens: int) -> bool:
        """Whether so many sequences should share their first tokens in place, rather than by a copy for each."""
        if self._compiled:
            return self._on_gpu is None  # there, every slot has its own
        return sequences * tokens * self.cache.token_size >= _TRUNK_NUMBERS

    def plan(self, prefilling: Sequence[Slot], *, beside: int = 0) -> dict[Slot, int]:
        """Which slots' missing tokens to compute at once, and how many of each, beside so many that decode."""
        plan: dict[Slot, int] = {}
        # A GPU computes a whole prompt in the time that a step takes there, when its kernels are launched one by one.
        cut = beside and self._on_gpu is None
        room = min(self._prefill_tokens, _BESIDE_DECODING) if cut else self._prefill_tokens
        for slot in prefilling:
            if room > 0:
                plan[slot] = min(slot.missing, room)
                room -= plan[slot]
        return plan

    @property
    def small(self) -> bool:
        """Whether all layers are run in one call, on a processor, as those of small models are."""
        return isinstance(self.decoder, WholeDecoder)

    @property
    def overlaps(self) -> bool:
        """Whether what was begun goes on while something else is done."""
        return self.small or self._on_gpu is not None

    @property
    def may_compute_in_thread(self) -> bool:
        """Whether any thread may finish what was begun, while others read the model."""
        return self._on_gpu is None and not self.runs_modules

    @property
    def runs_modules(self) -> bool:
        """Whether the model's own modules compute; they hold one adapter at a time."""
        return isinstance(self.decoder, ModuleDecoder)

    @property
    def draws(self) -> bool:
        """Whether steps can be decoded and drawn in one call."""
        return isinstance(self.decoder, WholeDecoder) and self.decoder.draws

    @property
    def most_steps(self) -> int:
        """How many steps can be taken at once, where nothing is prefilled."""
        return 1 if self._steps is None else _GPU_STEPS

    def decode(self, lines: Lines, copies: Sequence[tuple[int, int, int]], trunks: Sequence[Trunk]) -> Job[Outcome]:
        """Begin with steps of decoding, in one call, and before with copies: from a slot to another, so many tokens.

        `trunks` are all that are kept.
        """
        assert isinstance(self.decoder, WholeDecoder) and self.cache.kernels is not None
        if self._trunks != (kept := tuple(trunks)):
            self._trunks, self._trunk_places = kept, _places(kept, len(self.cache.keys))
        if lines.ids:
            self.decoder.check(min(lines.ids), max(lines.ids))
        return self.cache.kernels.begin_decoding(
            self.decoder.over(self.cache), lines.sheet, lines.prompts, lines.ids, lines.active, copies,
            self._trunk_places, guesses=lines.guesses, least=lines.least, steps=lines.steps,
        )  # fmt: skip

    def begin(self, work: Work, drawing: Drawing) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Begin to run work, which may go on by itself.

        What is returned finishes it, once, and draws what is wanted of it: tokens (R,) and log-probabilities (R,).
        """
        if self._steps is not None and work.only_decodes:
            return functools.cache(self._steps.begin(work, drawing))
        if isinstance(self.decoder, WholeDecoder):
            ids, positions, layout = self._rows(work)
            assert isinstance(layout, RowLayout)
            wanted, speakers = torch.from_numpy(work.wanted_tokens), self._speakers_of(work)
            job = self.decoder.begin(ids, positions, layout, wanted, speakers)
            return functools.cache(lambda: _arrays(self._draw(job.finish(), drawing)))
        if self._on_gpu is not None:  # it computes what was launched by itself
            drawn = self._draw(self.hidden(work), drawing)
            return functools.cache(lambda: _arrays(drawn))
        return functools.cache(lambda: _arrays(self._draw(self.hidden(work), drawing)))

    @torch.inference_mode()
    def hidden(self, work: Work) -> Tensor:
        """The hidden states (R, D) that are wanted."""
        # Every token is a row of its own. All keys and values are written before any are read.
        if not self._compiled:
            return self._arranged_rows(work)
        ids, positions, layout = self._rows(work)
        wanted = self._some(work.wanted_tokens, len(ids))
        return self.decoder.hidden(ids[:, None], positions[:, None], layout, self._speakers_of(work), wanted)[:, 0]

    def _some(self, wanted: np.ndarray, count: int) -> Tensor | None:
        """Rows that are wanted of so many, or None: all, as they are."""
        in_place = np.array_equal(wanted, np.arange(count))
        return None if in_place else self._sent(torch.from_numpy(wanted))

    def _rows(self, work: Work) -> tuple[Tensor, Tensor, RowLayout | GpuRowLayout]:
        """Ids (N,), positions (N,) and layout for compiled attention."""
        lineup, counts = work.lineup, work.counts
        rows = (work.first, lineup.index, lineup.trunk_of, lineup.begun)
        if len(work.ids) > len(counts):
            first, *rest = (np.repeat(row, counts) for row in rows)
            rows = (first + work.within, *rest)
        own, slots, trunk_of, begun = (torch.from_numpy(row) for row in rows)
        ids = torch.from_numpy(work.ids)
        if self._on_gpu is not None:
            tiles = torch.from_numpy(
                _tiles(counts, self._on_gpu.rows_together(self._heads, self.cache.keys[0].shape[1]))
            )
            ids, own, slots, tiles = map(self._sent, (ids, own, slots, tiles))
            return ids, own, GpuRowLayout(self.cache, self._on_gpu, own, slots, tiles)
        stack = self._stack(tuple(trunk.cache for trunk in lineup.trunks)) if lineup.trunks else None
        return ids, own + begun, RowLayout(self.cache, own, slots, trunk_of, stack)

    def _sent(self, tensor: Tensor) -> Tensor:
        """On its way to the device: nobody waits for what that computes before."""
        return tensor.to(self._device, non_blocking=True)

    def _speakers_of(self, work: Work) -> Speakers:
        if self._on_gpu is not None and self._loaded.adapters:
            return Voices(self._sent(torch.from_numpy(np.repeat(work.lineup.voice, work.counts))))
        return self._speakers(zip(work.lineup.slots, work.counts.tolist(), strict=True))

    def _speakers(self, rows: Iterable[tuple[Slot, int]]) -> list[tuple[str, int]]:
        """The adapters of neighbouring slots, and of how many rows each is."""
        if not self._loaded.adapters:
            return []
        return [
            (adapter, sum(count for _, count in run))
            for adapter, run in itertools.groupby(rows, key=lambda row: row[0].adapter)
        ]

    def _arranged_rows(self, work: Work) -> Tensor:
        """In the order in which slots are attended together."""
        if self._arranged is None or self._arranged[0] is not work.lineup:
            self._arranged = work.lineup, self._arrange(work)
        order, together, speakers = self._arranged[1]
        first, counts = work.first[order], work.counts[order]
        groups: list[SlotGroup] = []
        done = 0
        for slots in together:
            rows = slice(done, done + len(slots))
            groups.append(SlotGroup(slots, first[rows], counts[rows], self._heads, self.cache))
            done = rows.stop
        within = count_up(counts)
        tokens = np.repeat((work.counts.cumsum() - work.counts)[order], counts) + within
        positions = np.repeat(work.lineup.begun[order] + first, counts) + within
        ids, places = (torch.from_numpy(array)[:, None].to(self._device) for array in (work.ids[tokens], positions))
        wanted = self._some(tokens.argsort()[work.wanted_tokens], len(tokens))
        return self.decoder.hidden(ids, places, SlotLayout(self.cache, groups), speakers, wanted)[:, 0]

    def _arrange(self, work: Work) -> _Arrangement:
        number = {slot: number for number, slot in enumerate(work.lineup.slots)}
        ordered: list[Slot] = []
        together: list[SlotRows] = []
        for slots in self._attended_together(work.lineup.slots, work.counts.tolist()):
            places = {trunk: place for place, trunk in enumerate(dict.fromkeys(slot.trunk for slot in slots))}
            prefixes = tuple(trunk.cache for trunk in places if trunk is not None)
            stack = self._stack(prefixes) if prefixes else None
            of_row = [places[slot.trunk] for slot in slots]
            together.append(SlotRows([slot.index for slot in slots], self.cache, stack, of_row))
            ordered += slots
        order = np.array([number[slot] for slot in ordered])
        return _Arrangement(order, together, self._speakers((slot, int(work.counts[number[slot]])) for slot in ordered))

    def _attended_together(self, slots: Sequence[Slot], counts: Sequence[int]) -> Iterator[list[Slot]]:
        """Groups of slots with so many new tokens each; those of an adapter are neighbours."""
        most_tokens = _STACK_NUMBERS // self.cache.token_size
        most_scores = _SCORES_TOGETHER if self._device.type == "cpu" else MOST_SCORES
        for _, run in itertools.groupby(zip(slots, counts, strict=True), key=lambda row: row[0].adapter):
            alike: list[Slot] = []
            fewest = 1
            for slot, count in sorted(run, key=itemgetter(1)):
                keys = slot.cached + count + (len(slot.trunk.ids) if slot.trunk else 0)
                scores = (len(alike) + 1) * self._heads * count * keys
                if alike and count > 1 and (fewest == 1 or count > 2 * fewest + 16 or scores > most_scores):
                    yield from _by_trunk(alike, most_tokens)
                    alike = []
                if not alike:
                    fewest = count
                alike.append(slot)
            yield from _by_trunk(alike, most_tokens)

    def forget_prefixes(self) -> None:
        """None of those that were used is used again."""
        self._stack.cache_clear()
        self._trunks = ()
        self._arranged = None

    @torch.inference_mode()
    def _draw(self, hidden: Tensor, drawing: Drawing) -> tuple[Tensor, Tensor]:
        """Tokens (R,) and log-probabilities (R,) that follow hidden states (R, D)."""
        if not len(hidden):
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        logits = self.decoder.logits(hidden)
        by = drawing.temperature, drawing.top_k, drawing.top_p, drawing.uniform
        temperature, top_k, top_p, uniform = map(torch.from_numpy, by)
        kernels = self.cache.kernels or self._on_gpu
        if kernels is not None and not drawing.truncates:
            return kernels.draw(logits, self._sent(temperature), self._sent(uniform))
        return draw_tokens(logits.float(), temperature, top_k, top_p, uniform)
