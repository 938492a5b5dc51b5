"""Which tokens lie where in the sampler's key-value cache. No tensors are computed here.

A sequence lives in a *slot*, where it stays for the episode's next turn. A prefix that many sequences share, such as a
system prompt, is a *trunk*: stored once, and attended once for all of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np

from agentscope_tuner.algorithms.packing import common_prefix
from agentscope_tuner.engine.kv_cache import Prefix

_MAX_TRUNKS = 32
_LAST_USED = attrgetter("last_used")
_HEAD_TOKENS = 16
"""Slots and trunks, which have more, are found by the first tokens they hold."""
Head = tuple[str, tuple[int, ...]]
"""An adapter and first tokens."""


@dataclass(eq=False, slots=True)
class Trunk:
    """A prefix that sequences share."""

    adapter: str
    ids: list[int]
    cache: Prefix
    number: int
    """Later ones have higher ones."""
    place: int = 0
    """Unlike those of all others that are kept."""
    last_used: int = 0


@dataclass(eq=False, slots=True)
class Slot:
    """A place for one sequence."""

    index: int
    adapter: str = ""
    """Keys and values are those of this adapter; no other can use them."""
    trunk: Trunk | None = None
    ids: list[int] = field(default_factory=list)
    """Own tokens, after the trunk's."""
    cached: int = 0
    """How many of them have keys and values."""
    busy: bool = False
    episode_id: str = ""
    call: int = 0
    """Which of its episode's calls it was last used by."""
    voice: int = 0
    """The number of the adapter among the model's voices."""
    last_used: int = 0
    head: Head = ("", ())
    """Under which it is found."""
    row_order: tuple[str, int, int] = ("", 0, 0)
    """Slots that share an adapter, and within it a trunk, are neighbours in this order."""

    @property
    def begins(self) -> tuple[int, int]:
        """The place of its trunk, or -1, and how many tokens that has."""
        return (-1, 0) if self.trunk is None else (self.trunk.place, len(self.trunk.ids))

    @property
    def missing(self) -> int:
        """How many of its tokens have no keys and values yet."""
        return len(self.ids) - self.cached

    @property
    def prefilling(self) -> bool:
        """Whether its prompt is being computed: of a sequence that is being continued, one token is missing."""
        return self.busy and self.missing > 1


def _head(adapter: str, ids: list[int]) -> Head:
    return adapter, tuple(ids[:_HEAD_TOKENS])


def _shared(slot: Slot, own: list[int]) -> int:
    """How many of the first tokens of a sequence a slot has or is about to have; the last one is always computed."""
    tokens = min(common_prefix(slot.ids, own), len(own) - 1)
    return tokens if slot.prefilling else min(tokens, slot.cached)


def count_up(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each of these counts, one after the other."""
    within: np.ndarray = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return within


class Lineup:
    """Some slots in the order of rows: those that share an adapter, and within it a trunk, are neighbours."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = sorted(slots, key=attrgetter("row_order"))

    @cached_property
    def index(self) -> np.ndarray:
        """(S,) of the slots."""
        return np.array([slot.index for slot in self.slots], np.int64)

    @cached_property
    def voice(self) -> np.ndarray:
        """(S,) of the slots."""
        return np.array([slot.voice for slot in self.slots], np.int64)

    @cached_property
    def trunks(self) -> list[Trunk]:
        """Those that the slots' tokens come after."""
        return list(dict.fromkeys(slot.trunk for slot in self.slots if slot.trunk is not None))

    @cached_property
    def trunk_of(self) -> np.ndarray:
        """(S,) The number of each slot's trunk, or -1."""
        numbers: dict[Trunk | None, int] = {trunk: number for number, trunk in enumerate(self.trunks)}
        numbers[None] = -1
        return np.array([numbers[slot.trunk] for slot in self.slots], np.int64)

    @cached_property
    def begun(self) -> np.ndarray:
        """(S,) How many tokens each slot's trunk has."""
        tokens = np.array([*(len(trunk.ids) for trunk in self.trunks), 0])
        begun: np.ndarray = tokens[self.trunk_of]
        return begun


class Slots:
    """All slots and trunks, at first empty."""

    def __init__(self, count: int, trunk_tokens: int, voices: Mapping[str, int]) -> None:
        """Make `count` slots for adapters of these numbers; trunks may have `trunk_tokens` tokens together."""
        self._trunk_tokens = trunk_tokens
        self._voices = voices
        self._clock = itertools.count(1)
        self._slots = [Slot(i) for i in range(count)]
        self._trunks: list[Trunk] = []
        self._trunks_by_head: dict[Head, list[Trunk]] = defaultdict(list)
        self._by_head: dict[Head, dict[int, Slot]] = {}
        self._by_episode: dict[str, set[Slot]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def trunk_of(self, adapter: str, ids: list[int]) -> Trunk | None:
        """The longest trunk that `ids` go on from."""
        alike = self._trunks_by_head.get(_head(adapter, ids), ())
        begun = [trunk for trunk in alike if len(trunk.ids) < len(ids) and ids[: len(trunk.ids)] == trunk.ids]
        return max(begun, key=lambda trunk: len(trunk.ids), default=None)

    def add_trunk(self, adapter: str, ids: list[int], cache: Prefix) -> None:
        """Keep a prefix."""
        now = next(self._clock)
        taken = {trunk.place for trunk in self._trunks}
        place = next(place for place in itertools.count() if place not in taken)
        trunk = Trunk(adapter, ids, cache, now, place, now)
        self._trunks.append(trunk)
        self._trunks_by_head[_head(adapter, ids)].append(trunk)

    @property
    def trunks(self) -> list[Trunk]:
        """All that are kept."""
        return self._trunks

    def room_for_trunk(self, tokens: int) -> bool:
        """Whether one more trunk may be kept; for it, others are dropped that no running episode needs."""
        together = sum(len(trunk.ids) for trunk in self._trunks)
        used = {id(slot.trunk) for slot in self._slots if slot.busy or slot.episode_id}
        unused = sorted((t for t in self._trunks if id(t) not in used), key=lambda t: t.last_used, reverse=True)
        while unused and (together + tokens > self._trunk_tokens or len(self._trunks) >= _MAX_TRUNKS):
            trunk = unused.pop()
            together -= len(trunk.ids)
            self._trunks.remove(trunk)
            self._trunks_by_head[_head(trunk.adapter, trunk.ids)].remove(trunk)
            for slot in self._slots:
                if slot.trunk is trunk:  # what it holds goes on from there
                    self.fill(slot, slot.adapter, None, [], 0)
                    slot.last_used = 0
        return together + tokens <= self._trunk_tokens

    def nearest(
        self, adapter: str, trunk: Trunk | None, own: list[int], episode_id: str
    ) -> tuple[Slot | None, int, Slot | None]:
        """Where a sequence's beginning is.

        Returns:
            The slot that has most of it, how many tokens that is, and a free slot of the same episode all of whose
            tokens begin the sequence, the longest: it is outgrown, and may be overwritten. What is about to be computed
            counts as well.
        """
        best: Slot | None = None
        outgrown: Slot | None = None
        overlap = 0
        alike = [slot for slot in self._by_head.get(_head(adapter, own), {}).values() if slot.trunk is trunk]
        # Between equals, the episode's own slot: it can go on in place.
        for slot in (slot for slot in alike if slot.episode_id == episode_id):
            n = _shared(slot, own)
            if n >= overlap:
                best, overlap = slot, n
            if not slot.busy and n == slot.cached > (outgrown.cached if outgrown else 0):
                outgrown = slot
        for slot in alike:
            # Most of the others have no more of it.
            if slot.ids[overlap : overlap + 1] == own[overlap : overlap + 1] and (n := _shared(slot, own)) > overlap:
                best, overlap = slot, n
        return best, overlap, outgrown

    def free(self, needed_by: Callable[[Slot], int], awaited: Container[str] = ()) -> dict[Slot, int]:
        """Those that may be overwritten, and the number of the episode that needs what is there, or 0.

        Those of ended episodes come first, and last those that are needed, by the episodes with the highest numbers
        first; otherwise those unused for longest. Episodes that are awaited keep theirs.
        """
        free = [slot for slot in self._slots if not slot.busy]
        ended = sorted((slot for slot in free if not slot.episode_id), key=_LAST_USED)
        kept = {slot: needed_by(slot) for slot in free if slot.episode_id and slot.episode_id not in awaited}
        order = sorted(kept, key=lambda slot: (kept[slot] > 0, -kept[slot], slot.last_used))
        return dict.fromkeys(ended, 0) | {slot: kept[slot] for slot in order}

    def fill(self, slot: Slot, adapter: str, trunk: Trunk | None, own: list[int], cached: int) -> None:
        """Make `own` the slot's tokens, of which the first `cached` are in place."""
        slot.adapter, slot.trunk, slot.ids, slot.cached = adapter, trunk, list(own), cached
        slot.voice = self._voices[adapter]
        slot.row_order = (adapter, trunk.number if trunk else 0, slot.index)
        slot.last_used = next(self._clock)
        if trunk is not None:
            trunk.last_used = slot.last_used
        self._index(slot)

    def keep_for(self, episode_id: str, call: int, slot: Slot) -> None:
        """The slot is an episode's from this call on, until that is over."""
        slot.call = call
        if slot.episode_id != episode_id:
            self._by_episode[slot.episode_id].discard(slot)
            if not self._by_episode[slot.episode_id]:
                del self._by_episode[slot.episode_id]
            self._by_episode[episode_id].add(slot)
            slot.episode_id = episode_id

    def end_episode(self, episode_id: str) -> None:
        """Its slots are anybody's."""
        for slot in self._by_episode.pop(episode_id, ()):
            slot.episode_id = ""

    def release(self, slot: Slot) -> None:
        """Its sequence is complete; the tokens stay for the next turn."""
        slot.busy = False
        slot.last_used = next(self._clock)
        self._index(slot)

    def _index(self, slot: Slot) -> None:
        """Let a slot be found by what it holds now."""
        if slot.index in (before := self._by_head.get(slot.head, {})):
            del before[slot.index]
            if not before:
                del self._by_head[slot.head]
        slot.head = _head(slot.adapter, slot.ids)
        self._by_head.setdefault(slot.head, {})[slot.index] = slot
