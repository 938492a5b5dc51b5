"""Completions that are being drawn, as arrays: what is done for every token is done for all of them at once."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from agentscope_tuner.engine.drafts import CONTEXT, Drafts
from agentscope_tuner.engine.native import Outcome, Prompt
from agentscope_tuner.engine.slots import Lineup, Slot, count_up
from agentscope_tuner.policy import Sample, SamplingParams

_UNIFORMS = 32
"""Random numbers that are taken at once; the generator makes four in a step."""
_COLUMNS = 128
"""Tokens of a completion for which there is room at first."""


@dataclass(eq=False, slots=True)
class Request:
    """A call of the model."""

    order: tuple[int, int]
    """(episode, call): equal whenever the run is repeated, unlike times of arrival."""
    episode_id: str
    adapter: str
    prompt_ids: list[int]
    params: SamplingParams
    future: asyncio.Future[Sample]
    on_token: Callable[[int], None] | None
    budget: int
    """Most tokens of the completion."""
    slot: Slot
    source: tuple[Slot, int] | None = None
    """Where so many tokens of its prompt were to be computed when it last asked for a slot."""
    task: asyncio.Task[Any] | None = None
    """The one that waits for it."""
    held_back: bool = False
    """Whether older episodes needed all slots when it last asked for one."""

    @property
    def watched(self) -> bool:
        """Whether every token has to be looked at."""
        return self.on_token is not None or bool(self.params.stop or self.params.stop_ids)


class _Drawn(NamedTuple):
    """R tokens that are drawn."""

    rows: np.ndarray
    """(S,) The indices of the slots for which something is drawn."""
    counts: np.ndarray
    """(S,) How many tokens for each."""
    each: np.ndarray
    """(R,) The index of each token's slot."""
    within: np.ndarray
    """(R,) The number of each token among those of its slot."""


@dataclass(frozen=True, eq=False)
class Work:
    """Tokens to be run: for each of S slots, those from some place on."""

    lineup: Lineup
    first: np.ndarray
    """(S,) The place of the first of them in its slot."""
    counts: np.ndarray
    """(S,) How many these are."""
    wanted: np.ndarray
    """(S,) Of how many of the last of them the hidden state is wanted."""
    ids: np.ndarray
    """(N,) Those of one slot after those of the other."""
    within: np.ndarray
    """(N,) The number of each token among those of its slot."""
    steps: int = 1
    """How many tokens are drawn for each slot, one after the other, where a single token of each is run."""

    @property
    def only_decodes(self) -> bool:
        """Whether a token is drawn for every slot, after the one that was drawn last."""
        return len(self.ids) == len(self.counts) and bool(self.wanted.all())

    @cached_property
    def drawing(self) -> _Drawn:
        """What is drawn."""
        some = self.wanted > 0
        rows, counts = self.lineup.index[some], self.wanted[some] * self.steps
        return _Drawn(rows, counts, np.repeat(rows, counts), count_up(counts))

    @cached_property
    def wanted_tokens(self) -> np.ndarray:
        """(R,) The numbers of the tokens of which the hidden state is wanted."""
        if self.wanted is self.counts:
            return np.arange(len(self.ids))
        return (self.within >= np.repeat(self.counts - self.wanted, self.counts)).nonzero()[0]


@dataclass(frozen=True, eq=False, slots=True)
class Drawing:
    """How R tokens are drawn, see `distributions.draw_tokens`."""

    temperature: np.ndarray
    """(R,) float32; 0 is greedy."""
    top_k: np.ndarray
    """(R,) int64; 0 is all."""
    top_p: np.ndarray
    """(R,) float32."""
    uniform: np.ndarray
    """(R,) float64, random numbers."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are excluded, however they are drawn."""
        return bool(self.top_k.any() or (self.top_p < 1).any())


class Lines(NamedTuple):
    """What is decoded in one call, see `NativeKernels.begin_decoding`."""

    sheet: array[int]
    prompts: list[Prompt]
    ids: list[int]
    """Of all prompts, one after the other."""
    active: list[int]
    """Slots of completions that are not among the prompts."""
    guesses: int
    least: int
    steps: int
    watched: list[tuple[int, int]]
    """Those that somebody listens to, and how many tokens each of them has."""


class Over(NamedTuple):
    """A request for which nothing more is drawn."""

    request: Request
    finish_reason: str


class Completions:
    """Requests whose prompts are computed, and what was drawn for them.

    Between steps, all but the last token of each sequence have keys and values. That one is run next, together with
    what may come after it: guesses, each of which holds if it is what is drawn at its place.
    """

    def __init__(
        self,
        slots: int,
        end_ids: Collection[int],
        said_stop: Callable[[tuple[str, ...], np.ndarray], bool],
        drafts: Drafts | None,
    ) -> None:
        """Have a row for each of so many slots.

        Args:
            slots: how many there are.
            end_ids: tokens that end every completion.
            said_stop: whether the last of these tokens completed one of these strings.
            drafts: learn from what is complete, and say what may come next.
        """
        self._drafts = drafts
        self._ends = np.zeros(max(end_ids, default=-1) + 2, bool)
        """Of tokens, the last of them and all that follow together: those that end every completion."""
        self._ends[[*end_ids]] = True
        self._said_stop = said_stop
        self._requests: dict[int, Request] = {}
        """By the rows, which are those of their slots."""
        self._lineup: Lineup | None = None
        # Of each: the place of the prompt's last token in its slot; how many tokens are drawn, how many guessed after
        # them, and how many there may be; how many random numbers are at hand.
        self._prompt_end, self._drawn, self._guessed, self._budget, self._numbers = np.zeros((5, slots), np.int64)
        self._top_k = np.zeros(slots, np.int64)
        self._temperature, self._top_p = np.zeros((2, slots), np.float32)
        self._watched = np.zeros(slots, bool)
        self._listeners = 0
        """How many requests have to be looked at for every token."""
        self._tokens: np.ndarray = np.zeros((slots, CONTEXT + _COLUMNS), np.int64)
        """The last ones of the prompt, those drawn, those guessed."""
        self._logprobs: np.ndarray = np.zeros((slots, _COLUMNS), np.float32)
        self._uniforms: np.ndarray = np.zeros((slots, _COLUMNS))
        self._streams = _Streams()
        self._seeds = np.zeros((slots, 2), np.uint64)
        # Of the trunk that each begins with: its place, or -1, and how many tokens it has. The number of its voice.
        self._trunk_of, self._begun, self._voice = np.zeros((3, slots), np.int64)
        self._most_drawn = 0
        """How many tokens were drawn, of any completion so far."""
        self._truncating = 0
        """How many requests exclude some tokens, however these are drawn."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.slot.index) is request

    def add(self, request: Request) -> None:
        """Draw for a request from now on: its prompt is computed."""
        row, params = request.slot.index, request.params
        self._requests[row] = request
        self._lineup = None
        self._prompt_end[row] = len(request.slot.ids) - 1
        self._drawn[row] = self._guessed[row] = self._numbers[row] = 0
        self._budget[row] = request.budget
        self._temperature[row], self._top_k[row], self._top_p[row] = params.temperature, params.top_k, params.top_p
        self._watched[row] = watched = request.watched
        self._listeners += watched
        self._truncating += params.truncates
        self._seeds[row] = params.seed % 2**64, params.seed >> 64
        self._trunk_of[row], self._begun[row] = request.slot.begins
        self._voice[row] = request.slot.voice
        context = request.prompt_ids[-CONTEXT:]
        self._tokens[row, :CONTEXT] = [-1] * (CONTEXT - len(context)) + context

    def remove(self, request: Request) -> None:
        """Draw no more for a request."""
        row = request.slot.index
        del self._requests[row]
        self._lineup = None
        self._listeners -= request.watched
        self._truncating -= request.params.truncates

    def take(self, request: Request) -> tuple[list[int], list[float]]:
        """All that was drawn for a request, and its log-probabilities; its slot keeps what has keys and values."""
        row, drawn = request.slot.index, int(self._drawn[request.slot.index])
        token_ids: list[int] = self._tokens[row, CONTEXT : CONTEXT + drawn].tolist()
        logprobs: list[float] = self._logprobs[row, :drawn].tolist()
        if token_ids:
            request.slot.ids += token_ids[:-1]
            request.slot.cached = len(request.slot.ids)
        return token_ids, logprobs

    def guess(self, most: int) -> None:
        """Guess what comes after each last token: at most so many tokens."""
        if self._drafts is None or most < 1 or not self._requests:
            return
        rows = self._all.index
        drawn = self._drawn[rows]
        self._reserve(int(drawn.max()) + most)
        starts = rows * self._tokens.shape[1] + drawn
        self._guessed[rows] = self._drafts.guess(self._tokens, starts, np.minimum(most, self._budget[rows] - drawn - 1))

    def work(self, plan: Mapping[Slot, int], *, steps: int = 1) -> Work:
        """What is run next: so many missing tokens of the slots of a plan, beside all completions.

        Completions of those whose prompts are complete by that are added already. Without a plan, so many steps are
        run, but just one where somebody listens, and none that nobody has use for.
        """
        beside = [slot for slot in self._all.slots if slot not in plan]
        lineup = Lineup([*plan, *beside]) if plan else self._all
        rows = lineup.index
        drawn, counts = self._drawn[rows], self._guessed[rows] + 1
        first, column = self._prompt_end[rows] + drawn, drawn + (CONTEXT - 1)
        wanted = counts
        if plan:
            wanted = counts.copy()
            place = {row: i for i, row in enumerate(rows.tolist())}
            places = [place[slot.index] for slot in plan]
            first[places] = [slot.cached for slot in plan]
            counts[places] = [*plan.values()]
            wanted[places] = [slot.index in self._requests for slot in plan]
            column[places] = 0
        within = count_up(counts)
        columns = np.repeat(column, counts) + within
        # Of prompts, which are not here, just any tokens, which are then replaced.
        ids = self._tokens[np.repeat(rows, counts), np.minimum(columns, self._tokens.shape[1] - 1)]
        if plan:
            ends = counts.cumsum()
            for slot, tokens in plan.items():
                end = ends[place[slot.index]]
                ids[end - tokens : end] = slot.ids[slot.cached : slot.cached + tokens]
        steps = 1 if plan or self._listeners else min(steps, int((self._budget[rows] - drawn).max(initial=1)))
        return Work(lineup, first, counts, wanted, ids, within, steps)

    def drawing(self, work: Work) -> Drawing:
        """How to draw what is wanted of work."""
        rows, wanted, each, within = work.drawing
        needed = self._drawn[rows] + wanted
        for i in (self._numbers[rows] < needed).nonzero()[0].tolist():
            self._have_numbers(int(rows[i]), int(needed[i]))
        # A token has its random number, whether it is drawn now or was guessed wrongly and is drawn later.
        uniform = self._uniforms[each, self._drawn[each] + within]
        return Drawing(self._temperature[each], self._top_k[each], self._top_p[each], uniform)

    def accept(self, work: Work, tokens: np.ndarray, logprobs: np.ndarray) -> list[Over]:
        """Take what was drawn for work: tokens (R,) and their log-probabilities (R,).

        Of each completion the first token is taken, and each that comes after one that was guessed; or, of several
        steps, each until it is over. Returns the requests that are over by that.
        """
        rows, wanted, each, within = work.drawing
        begun, number = self._drawn[rows], self._drawn[each] + within
        ends = self._ends.take(tokens, mode="clip")
        after = wanted.cumsum()
        if work.steps > 1:  # nothing was guessed
            broken = ends | (number + 1 >= self._budget[each])
        else:
            broken = ends | (self._tokens[each, CONTEXT + number] != tokens)
        broken[after - 1] = True
        last = broken.nonzero()[0]
        last = last[last.searchsorted(after - wanted)]
        # What comes later is overwritten.
        self._tokens[each, CONTEXT + number] = tokens
        self._logprobs[each, number] = logprobs
        self._drawn[rows] = number[last] + 1
        self._guessed[rows] = 0
        if len(rows):
            self._most_drawn = max(self._most_drawn, int(self._drawn[rows].max()))
        stopped = ends[last]
        if self._listeners:
            watched = self._watched[rows].nonzero()[0]
            for i, row, first in zip(watched.tolist(), rows[watched].tolist(), begun[watched].tolist(), strict=True):
                stopped[i] |= self._tell(row, first)
        over = stopped | (self._drawn[rows] == self._budget[rows])
        finished = self._over((self._requests.get(int(rows[i])), stopped[i]) for i in over.nonzero()[0].tolist())
        for request, _ in finished:
            self._learn(request.slot.index)
        return finished

    @property
    def tokens_drawn(self) -> int:
        """How many tokens are drawn for all of them."""
        return int(self._drawn[[*self._requests]].sum())

    @property
    def truncating(self) -> bool:
        """Whether some tokens are excluded for some completion, however they are drawn."""
        return self._truncating > 0

    def lines(self, plan: Mapping[Slot, int], guesses: int, least: int, steps: int) -> Lines:
        """What is decoded and drawn in one call.

        Args:
            plan: so many missing tokens of these slots are computed beside the first step. Completions of those whose
                prompts are complete by that are added already.
            guesses: most tokens that are guessed for a completion at once.
            least: so many steps are done in any case; those after them until a completion is over.
            steps: so many at most; just one where somebody listens.
        """
        if self._listeners:
            least = steps = 1
        more = steps * (guesses + 1)
        self._reserve(self._most_drawn + more + 1)
        prompts: list[Prompt] = []
        ids: list[int] = []
        for slot, tokens in plan.items():
            end = slot.cached + tokens
            complete = slot.index in self._requests
            prompts.append(Prompt(slot.index, slot.cached, tokens, complete, *slot.begins, slot.voice))
            ids += slot.ids[slot.cached : end]
        active = [*(self._requests.keys() - {prompt.slot for prompt in prompts})]
        watched: list[tuple[int, int]] = []
        if self._listeners:
            watched = [(row, int(self._drawn[row])) for row, request in self._requests.items() if request.watched]
        return Lines(self._sheet, prompts, ids, active, guesses, least, steps, watched)

    def decoded(self, lines: Lines, outcome: Outcome) -> tuple[list[Over], int]:
        """The requests that are over by what was decoded, and how many tokens of completions were run."""
        over = outcome.over
        self._most_drawn = max(self._most_drawn, outcome.most_drawn)
        for row, first in lines.watched:
            if self._tell(row, first):
                if row not in over:
                    self._learn(row)
                over[row] = True
        return self._over((self._requests.get(row), stopped) for row, stopped in over.items()), outcome.rows

    @cached_property
    def _sheet(self) -> array[int]:
        """See `Sheet` in `kernels/whole.cpp`."""
        arrays = (
            self._tokens, self._logprobs, self._drawn, self._prompt_end, self._budget, self._trunk_of, self._begun,
            self._voice, self._seeds, self._temperature, self._ends,
        )  # fmt: skip
        table, bits = (0, 0) if self._drafts is None else self._drafts.place
        sizes = self._tokens.shape[1], len(self._ends), bits
        return array("q", [*(each.ctypes.data for each in arrays), table, *sizes])

    @property
    def _all(self) -> Lineup:
        if self._lineup is None:
            self._lineup = Lineup([request.slot for request in self._requests.values()])
        return self._lineup

    def _have_numbers(self, row: int, needed: int) -> None:
        """Have random numbers for so many tokens of a completion."""
        begin = int(self._numbers[row])
        count = -(-(needed - begin) // _UNIFORMS) * _UNIFORMS
        self._reserve(begin + count)
        self._uniforms[row, begin : begin + count] = self._streams.of(self._requests[row].params.seed, begin, count)
        self._numbers[row] += count

    def _tell(self, row: int, first: int) -> bool:
        """Tell whoever listens of the tokens from this number on; whether one ends the completion for them.

        Those after it are not drawn.
        """
        until = int(self._drawn[row])
        for drawn in range(first + 1, until + 1):
            request = self._requests.get(row)
            if request is None:  # whoever was told before ended it
                break
            self._drawn[row] = drawn
            text = self._tokens[row, CONTEXT : CONTEXT + drawn]
            token, params = int(text[-1]), request.params
            if request.on_token is not None:
                request.on_token(token)
            if token in params.stop_ids or (params.stop and self._said_stop(params.stop, text)):
                return True
        return False

    def _learn(self, row: int) -> None:
        """Guess better by a completion that is over."""
        if self._drafts is not None:
            self._drafts.learn(self._tokens[row, : CONTEXT + self._drawn[row]])

    def _over(self, requests: Iterable[tuple[Request | None, bool]]) -> list[Over]:
        # Some may have been ended meanwhile, by whoever was told of a token among others.
        over = [(request, stopped) for request, stopped in requests if request is not None]
        for request, _ in over:
            self.remove(request)
        return [Over(request, "stop" if stopped else "length") for request, stopped in over]

    def _reserve(self, columns: int) -> None:
        """Have room for completions of so many tokens."""
        missing = columns - self._logprobs.shape[1]
        if missing > 0:
            wider = ((0, 0), (0, max(missing, self._logprobs.shape[1])))
            self._tokens, self._logprobs, self._uniforms = (
                np.pad(array, wider) for array in (self._tokens, self._logprobs, self._uniforms)
            )
            self.__dict__.pop("_sheet", None)


class _Streams:
    """Random numbers: each seed has its own stream, so that no completion depends on its neighbours."""

    def __init__(self) -> None:
        # One generator is set to wherever it is needed, which takes a fraction of the time of making one.
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def of(self, seed: int, first: int, count: int) -> np.ndarray:
        """So many numbers of a stream, from number `first` on, a multiple of four."""
        place = self._state["state"]
        place["key"][:] = seed % 2**64, seed >> 64
        place["counter"][0] = first // 4
        self._bits.state = self._state
        return self._generator.random(count)
