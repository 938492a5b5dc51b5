"""Which of the waiting requests begin, and in which slots: where the beginnings of their prompts are, if anywhere.

Episodes may have more contexts together than there are slots. Then those that were opened first keep theirs, and others
wait: if all went on, each would overwrite what another one is about to come back to.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentscope_tuner.algorithms.packing import common_prefix
from agentscope_tuner.engine.completions import Request
from agentscope_tuner.engine.slots import Head, Slot, Slots

_TRUNK_TOKENS = 64
"""A trunk is at least this long ..."""
_TRUNK_USERS = 4
"""... and made when at least this many waiting prompts begin with it."""
FEW = 8
"""Nobody is held back for the sake of others while fewer requests than this are under way: steps of so few take about
as long."""
_CONTEXTS = 64
"""The latest contexts of an episode, to see whether it comes back to them."""

NO_SLOT = Slot(-1)


@dataclass(eq=False, slots=True)
class _Episode:
    number: int
    calls: int = 0
    contexts: dict[int, list[int]] = field(default_factory=dict)
    """Prompts by the numbers of their calls: the last one of each context."""


class Episodes:
    """Those that are open, in the order in which they were opened, and how soon such come back to a context."""

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        self._open: dict[str, _Episode] = {}
        self._gap = 0
        """Most calls of an episode from one in a context to the next one there."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, episode_id: str) -> bool:
        return episode_id in self._open

    def open(self, episode_id: str) -> None:
        """One begins."""
        self._open[episode_id] = _Episode(next(self._clock))

    def close(self, episode_id: str) -> None:
        """It is over, if it was open."""
        self._open.pop(episode_id, None)

    def forget(self) -> None:
        """What was seen counts no more: then a run that is resumed decides as one that was not interrupted."""
        self._gap = 0
        for episode in self._open.values():
            episode.contexts.clear()

    def call(self, episode_id: str, prompt_ids: list[int]) -> tuple[int, int]:
        """One of them calls: its number and that of the call; equal whenever the run is repeated."""
        if (episode := self._open.get(episode_id)) is None:
            return 0, next(self._clock)
        call, contexts = episode.calls, episode.contexts
        episode.calls += 1
        for earlier in reversed(contexts):
            if _goes_on_from(prompt_ids, contexts[earlier]):
                self._gap = max(self._gap, call - earlier)
                del contexts[earlier]
                break
        contexts[call] = prompt_ids
        if len(contexts) > _CONTEXTS:
            del contexts[next(iter(contexts))]
        return episode.number, call

    def needing(self, slot: Slot) -> int:
        """The number of the open episode that may soon come back to what is in a slot, or 0."""
        episode = self._open.get(slot.episode_id)
        if episode is None or episode.calls - 1 - slot.call >= 2 * self._gap:
            return 0
        return episode.number


class Placing:
    """Gives requests their slots."""

    def __init__(self, slots: Slots, episodes: Episodes, worth_a_trunk: Callable[[int, int], bool]) -> None:
        self._slots = slots
        self._episodes = episodes
        self._worth_a_trunk = worth_a_trunk
        self.trunk_slots: dict[Head, Slot] = {}
        """Where something is computed that many of those who wait begin with."""
        self.copies: list[tuple[int, int, int]] = []
        """From which slot to which other one so many tokens go, before the next step; in this order."""

    def place(
        self, requests: Sequence[Request], free: dict[Slot, int], planned: Mapping[Slot, int], active: int
    ) -> None:
        """Find slots for all but those that are held back, and those that can share what others are about to compute.

        Args:
            requests: in the order in which they may choose.
            free: see `Slots.free`; those that are taken are removed.
            planned: how many tokens of which slots are being computed.
            active: how many requests are under way, or about to come back.
        """
        candidates = [request for request in requests if not _can_share_later(request, planned)]
        for request in self._without_trunks(candidates, free):
            if request.held_back and _is_held_back(request, next(iter(free.values())), active):
                continue
            trunk = self._slots.trunk_of(request.adapter, request.prompt_ids)
            own = request.prompt_ids[len(trunk.ids) :] if trunk else request.prompt_ids
            best, overlap, outgrown = self._slots.nearest(request.adapter, trunk, own, request.episode_id)
            if best is not None and overlap > _held(best, planned):
                request.source = best, overlap
                continue
            if best is not None and not best.busy and _may_go_on_in(best, overlap, request):
                slot = best
            elif outgrown is not None:
                slot = outgrown
            else:
                slot = next(slot for slot in free if slot is not best or len(free) == 1)
                request.held_back = _is_held_back(request, free[slot], active)
                if request.held_back:
                    continue
            if best is not None and best is not slot:
                self.copies.append((best.index, slot.index, overlap))
            self._slots.fill(slot, request.adapter, trunk, own, overlap)
            slot.busy = True
            free.pop(slot, None)  # it is not there where another agent of the same episode acts
            self._slots.keep_for(request.episode_id, request.order[1], slot)
            request.slot = slot
            active += 1

    def _without_trunks(self, requests: list[Request], free: dict[Slot, int]) -> list[Request]:
        """Let what many prompts begin with be computed in a slot of its own; returns those who do not wait for that."""
        families: dict[Head, list[Request]] = defaultdict(list)
        waiting: set[Request] = set()
        for request in requests:
            ids = request.prompt_ids
            head = request.adapter, tuple(ids[:_TRUNK_TOKENS])
            if head in self.trunk_slots:
                waiting.add(request)
            elif len(ids) > _TRUNK_TOKENS and self._slots.trunk_of(request.adapter, ids) is None:
                families[head].append(request)
        for head, family in families.items():
            if len(family) < _TRUNK_USERS:
                continue
            prompts = [request.prompt_ids for request in family]
            first, last = min(prompts), max(prompts)
            # At least one token of every prompt has to be run to get its logits.
            shared = min(common_prefix(first, last), min(map(len, prompts)) - 1)
            planned = sum(len(slot.ids) for slot in self.trunk_slots.values())
            if self._worth_a_trunk(len(prompts), shared) and self._slots.room_for_trunk(planned + shared):
                slot = next(iter(free))
                self._slots.fill(slot, family[0].adapter, None, first[:shared], 0)
                slot.busy = True
                del free[slot]
                self.trunk_slots[head] = slot
                waiting.update(family)
        return [request for request in requests if request not in waiting]


def _held(slot: Slot, planned: Mapping[Slot, int]) -> int:
    """How many tokens of a slot will have keys and values before the next step."""
    return slot.cached + planned.get(slot, 0)


def _can_share_later(request: Request, planned: Mapping[Slot, int]) -> bool:
    """Whether a beginning of its prompt is still to be computed, where it was when it last asked for a slot."""
    if request.source is None:
        return False
    slot, tokens = request.source
    return slot.prefilling and _held(slot, planned) < tokens


def _is_held_back(request: Request, needed_by: int, active: int) -> bool:
    """Whether a request does not take what an older episode needs, or its own."""
    return 0 < needed_by <= request.order[0] and active >= FEW


def _may_go_on_in(slot: Slot, overlap: int, request: Request) -> bool:
    """Whether nobody needs what a slot has beyond so many tokens, which begin the request's prompt."""
    # Most of what its episode has there is this history, a little what several agents' prompts begin with.
    return slot.episode_id == "" or (slot.episode_id == request.episode_id and 2 * overlap >= slot.cached)


def _goes_on_from(prompt_ids: list[int], earlier: list[int]) -> bool:
    """Whether a prompt continues an earlier one, but for its end: what leads to an answer is not always kept."""
    tokens = len(earlier) - len(earlier) // 16
    return earlier[tokens - 1 : tokens] == prompt_ids[tokens - 1 : tokens] and earlier[:tokens] == prompt_ids[:tokens]
