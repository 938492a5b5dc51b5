"""The sampler: continuous batching over all running episodes, with every shared prefix computed once.

Agents and sampler share one event loop. Before each batch the sampler waits, within its patience, until every open
episode has asked for something or ended, in each task in which it acts; so batches depend on what the episodes do, not
on the clock, and equal seeds give equal bits.

A small model is computed by helping threads meanwhile. Then agents act during the batch that follows the one in which
their completions ended, however long it takes, and the one after it is theirs again; where many act, as soon as some
of them have asked again. Batches depend on nothing else.

Who acts for longer than patience lasts, calls a tool over a network, say. Meanwhile steps are computed in a thread, so
that the event loop serves each of the call's waits at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.completions import Completions, Over, Request
from agentscope_tuner.engine.drafts import Drafts
from agentscope_tuner.engine.model_runner import STEPS, ModelRunner
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.patience import Patience
from agentscope_tuner.engine.placing import FEW, NO_SLOT, Episodes, Placing
from agentscope_tuner.engine.slots import Slot, Slots
from agentscope_tuner.engine.stopping import StopStrings
from agentscope_tuner.policy import Sample, SamplingParams, room_for_tokens

_CROWD, _CROWD_SHARE = 32, 8
"""Once so many requests have come, or half as many while others act, a small model goes on with them, if they are this
fraction (one over it) of the open episodes. So some act while others are computed, and not all at the same time."""
_CHEAP_ROWS = 32
"""A step of so many rows takes little longer than one of a single row, which reads all weights as well. Further rows
are paid for one by one, so nothing is gained by guesses there, even by those that hold."""
_ACTING = 8
"""So many agents act about as long as a step of a small model takes. While more do, more steps are taken; ..."""
_MANY_ACTING = 24
"""... while so many do, also where completions are over before the last of them: agents still act then."""


class _Step(NamedTuple):
    """What is being computed; of a small model it may be several steps at once."""

    completions: Completions
    plan: dict[Slot, int]
    """How many missing tokens of which prompts."""
    compute: Callable[[], object]
    """Does what is left; nothing, where that was done."""
    accept: Callable[[], tuple[list[Over], int]]
    """The requests that are over by it, and how many tokens of completions were run."""


class Sampler:
    """A `Policy` over a loaded model."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig) -> None:
        """Make room for the cache.

        Raises:
            ConfigError: not even one sequence of `max_model_len` tokens fits into `engine.kv_cache_gb`.
        """
        self._loaded = loaded
        self._said_stop = StopStrings(loaded.tokenizer).reached
        self._runner = ModelRunner(loaded, engine)
        self._draft_tokens = engine.draft_tokens
        self._drafts = Drafts(self._runner.cache.kernels) if self._runner.cache.kernels is not None else None
        self.policy_version = 0
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        self.rows_decoded = 0
        """Tokens that were run to draw the next one, guesses included."""
        self._episodes = Episodes()
        self._pending: dict[str, set[Request]] = {}
        """By episode, everybody who awaits a completion: in one of the next two lists, or among the completions."""
        self._patience = Patience(engine.patience_ms / 1000, self._pending)
        self._waiting: list[Request] = []
        self._prefilling: list[Request] = []
        """Those with a slot, of whose prompts something is not computed."""
        self._dropped: list[Slot] = []
        """Slots of requests that ended while a step was computed for them."""
        self._over: list[Over] = []
        """Those whose completions are complete, and who have not heard of it."""
        self._arrived = 0
        """How many requests have come since the last step began."""
        self._pump: asyncio.Task[None] | None = None
        self._step: _Step | None = None
        """The one that is being computed, if there is any."""
        self._thread = ThreadPoolExecutor(1, "sampler")
        self._computing: Future[object] | None = None
        """What this thread computes of it, if anything."""
        self._forget()

    @property
    def tokens_drawn(self) -> int:
        """`tokens_sampled`, and those of completions that are under way."""
        return self.tokens_sampled + self._completions.tokens_drawn

    @property
    def runs_modules(self) -> bool:
        """Whether the model's own modules compute; they hold one adapter at a time."""
        return self._runner.runs_modules

    # ------------------------------------------------------------------------------------------- the policy

    def open_episode(self, episode_id: str) -> None:
        """An episode begins and will call `sample`."""
        self._episodes.open(episode_id)
        self._patience.leave(episode_id)

    def close_episode(self, episode_id: str) -> None:
        """The episode is over; whatever it still waits for is dropped."""
        self._episodes.close(episode_id)
        self._patience.close(episode_id)
        for request in self._pending.pop(episode_id, ()):
            self._drop(request)
            request.future.cancel()
        self._slots.end_episode(episode_id)
        for request in self._waiting:
            request.held_back = False

    def pause_episode(self, episode_id: str) -> None:
        """The episode waits for somebody else; do not wait for it."""
        self._patience.pause(episode_id)

    def resume_episode(self, episode_id: str) -> None:
        """The episode goes on, in this task."""
        if episode_id in self._episodes:
            self._patience.leave(episode_id, asyncio.current_task())

    async def sample(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        episode_id: str,
        adapter: str = "",
        on_token: Callable[[int], None] | None = None,
    ) -> Sample:
        """Complete `prompt_ids` with an adapter of the model; `on_token` sees each token as it is drawn.

        Raises:
            PromptTooLongError: the prompt leaves no room in the context.
        """
        room = room_for_tokens(prompt_ids, self._loaded.max_model_len)
        request = Request(
            order=self._episodes.call(episode_id, prompt_ids),
            episode_id=episode_id,
            adapter=adapter,
            prompt_ids=prompt_ids,
            params=params,
            future=asyncio.get_running_loop().create_future(),
            on_token=on_token,
            budget=min(params.max_tokens, room),
            slot=NO_SLOT,
            task=asyncio.current_task(),
        )
        self._pending.setdefault(episode_id, set()).add(request)
        self._waiting.append(request)
        self._patience.come_back(episode_id, request.task)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run(), name="sampler")
        self._arrived += 1
        if self._may_go_on():
            try:
                self._admit()
                self._complete()
                self._begin()
            except Exception as exc:
                self._fail(exc)
        try:
            return await request.future
        except (asyncio.CancelledError, GeneratorExit):
            self._drop(request)
            raise
        finally:
            self._no_longer_pending(request)
            if episode_id in self._episodes:
                self._patience.leave(episode_id, request.task)

    def weights_changed(self, version: int) -> None:
        """Take the model's new weights; nothing that was computed with the old ones is used again.

        `version` is the number of updates they have seen.

        Raises:
            RuntimeError: completions are under way.
        """
        if self._pending:
            raise RuntimeError("weights changed while completions were under way")
        self._join()  # nobody waits for what it draws, but it reads the weights
        self._runner.weights_changed()
        self.policy_version = version
        self._forget()

    # ---------------------------------------------------------------------------------------------- batching

    def _forget(self) -> None:
        self._slots = Slots(self._runner.cache.slots, self._runner.trunk_tokens, self._loaded.voices)
        self._episodes.forget()
        self._placing = Placing(self._slots, self._episodes, self._runner.worth_a_trunk)
        self._dropped.clear()
        self._runner.forget_prefixes()
        if self._drafts is not None:
            self._drafts.forget()
        self._completions = Completions(len(self._slots), self._loaded.end_of_turn_ids, self._said_stop, self._drafts)

    def _no_longer_pending(self, request: Request) -> None:
        pending = self._pending.get(request.episode_id, set())
        pending.discard(request)
        if not pending:
            self._pending.pop(request.episode_id, None)

    async def _run(self) -> None:
        self._patience.enter_loop()
        try:
            while True:
                if not (self._runner.overlaps and self._begun):
                    self._deliver()
                    await self._patience.last(lambda: self._step)
                    if not (self._waiting or self._begun):
                        return
                if self._step is None:
                    self._begin()
                try:
                    # Those whose completions ended in the last step act while this one is computed, and take part in
                    # the next one: also where it would have been over before.
                    if self._runner.overlaps:
                        await self._patience.last(lambda: self._step)
                        self._admit()
                    if self._patience.ended and self._step is not None and self._runner.may_compute_in_thread:
                        self._computing = self._thread.submit(self._step.compute)
                        await asyncio.shield(asyncio.wrap_future(self._computing))
                finally:
                    self._complete()
        except Exception as exc:
            self._fail(exc)

    def _may_go_on(self) -> bool:
        """Whether to begin with those who have come, of many who are about to ask for something."""
        crowd = _CROWD // 2 if self._patience else _CROWD
        return self._runner.small and self._arrived >= max(crowd, len(self._episodes) / _CROWD_SHARE)

    def _fail(self, exc: Exception) -> None:
        """Everybody who waits has to hear of an error."""
        for request in itertools.chain(*self._pending.values()):
            if not request.future.done():
                request.future.set_exception(exc)
        self._pending.clear()
        self._waiting, self._prefilling, self._over = [], [], []
        self._forget()

    @property
    def _begun(self) -> int:
        """How many requests have slots."""
        return len(self._prefilling) + len(self._completions)

    @property
    def _under_way(self) -> int:
        """How many requests have slots, or are about to come back to one."""
        return self._begun + len(self._over) + len(self._patience)

    @property
    def _may_admit(self) -> bool:
        """Whether waiting requests should begin now."""
        return self._begun < len(self._slots) and self._ready > 0

    @property
    def _ready(self) -> int:
        """How many waiting requests are not held back."""
        if self._under_way < FEW:
            return len(self._waiting)
        return sum(not request.held_back for request in self._waiting)

    def _admit(self) -> None:
        """Give waiting requests their slots, if they should begin now."""
        if not self._may_admit:
            return
        # Episodes between two calls come back to what their slots hold; nobody takes these from them meanwhile.
        free = self._slots.free(self._episodes.needing, self._patience)
        self._waiting.sort(key=lambda request: request.order)
        chosen, others = self._waiting[: len(free)], self._waiting[len(free) :]
        self._placing.place(chosen, free, {} if self._step is None else self._step.plan, self._under_way)
        later: list[Request] = []
        for request in chosen:
            if request.slot is NO_SLOT:
                later.append(request)
            elif request.slot.prefilling:
                self._prefilling.append(request)
            else:
                self._completions.add(request)
        self._waiting = later + others

    def _copy(self) -> None:
        """What new requests share."""
        self._runner.cache.copy(self._placing.copies)
        self._placing.copies.clear()

    def _drop(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            return
        if request in self._prefilling:
            self._prefilling.remove(request)
        elif request in self._completions:
            self._completions.remove(request)
            self._completions.take(request)
        else:
            return
        if self._step is None:
            self._slots.release(request.slot)
        else:  # it is being written to
            self._dropped.append(request.slot)

    # --------------------------------------------------------------------------------------------- computing

    def _begin(self) -> None:
        """Run what the requests with slots miss, as much as goes at once, and draw for those that miss nothing then."""
        while self._dropped:
            self._slots.release(self._dropped.pop())
        if self._ready + self._begun + len(self._over) > len(self._slots):
            self._deliver()  # somebody who waits takes their slots
        self._arrived = 0
        try:
            self._admit()
            self._step = self._plan()
        finally:  # what need not be done before, is done meanwhile
            self._deliver()

    def _plan(self) -> _Step:
        completions = self._completions
        slots = [*self._placing.trunk_slots.values(), *(request.slot for request in self._prefilling)]
        plan = self._runner.plan(slots, beside=len(completions)) if slots else {}
        complete = [request for request in self._prefilling if plan.get(request.slot) == request.slot.missing]
        rows = len(completions) + len(complete)
        guesses = max(0, min(self._draft_tokens, _CHEAP_ROWS // max(1, rows) - 1))
        self._prefilling = [request for request in self._prefilling if plan.get(request.slot) != request.slot.missing]
        draws = self._runner.draws and not (completions.truncating or any(r.params.truncates for r in complete))
        if not draws:
            self._copy()
            completions.guess(guesses)
        for request in complete:
            completions.add(request)
        # Whoever acts now, or waits to share what these steps compute, takes part in those after them.
        acting = len(self._patience) + len(self._over)
        awaited = acting or self._prefilling or self._may_admit
        # Of many rows each is paid for, so nothing is lost where some are over before the call is.
        few = max(1, min(STEPS, rows // _CHEAP_ROWS))
        soon = max(few, min(STEPS, 1 + acting // _ACTING))
        if draws:
            least = soon if acting >= _MANY_ACTING else few
            lines = completions.lines(plan, guesses, least, soon if awaited else STEPS)
            copies, self._placing.copies = self._placing.copies, []
            job = self._runner.decode(lines, copies, self._slots.trunks)
            return _Step(completions, plan, job.finish, lambda: completions.decoded(lines, job.finish()))
        most = self._runner.most_steps
        work = completions.work(plan, steps=min(soon, most) if awaited else most)
        compute = self._runner.begin(work, completions.drawing(work))
        rows = len(work.ids) * work.steps - sum(plan.values())
        return _Step(completions, plan, compute, lambda: (completions.accept(work, *compute()), rows))

    def _join(self) -> _Step | None:
        """Compute what is left of the step that was begun, if there is one."""
        step, self._step = self._step, None
        computing, self._computing = self._computing, None
        if step is not None:
            (step.compute if computing is None else computing.result)()
        return step

    def _complete(self) -> None:
        """Join the step, and take what was computed unless everything was forgotten meanwhile."""
        step = self._join()
        if step is not None and step.completions is self._completions:
            self._end(step)

    def _end(self, step: _Step) -> None:
        """Take what was computed."""
        for slot, count in step.plan.items():
            # Where its request ended meanwhile, all that it holds is counted already.
            slot.cached = min(slot.cached + count, len(slot.ids))
            self.tokens_prefilled += count
        for head, slot in [*self._placing.trunk_slots.items()]:
            if not slot.missing:
                self._slots.add_trunk(slot.adapter, slot.ids, self._runner.cache.take(slot.index, slot.cached))
                self._slots.release(slot)
                del self._placing.trunk_slots[head]
        over, rows = step.accept()
        self._over += over
        self.rows_decoded += rows

    def _deliver(self) -> None:
        """Give those their completions for whom these are complete."""
        over, self._over = self._over, []
        for request, finish_reason in over:
            token_ids, logprobs = self._completions.take(request)
            self._slots.release(request.slot)
            self.tokens_sampled += len(token_ids)
            if not request.future.done():
                request.future.set_result(Sample(token_ids, logprobs, finish_reason, self.policy_version))
                # Its episode can go on; it is waited for before the next batch.
                if request.episode_id in self._episodes:
                    self._patience.leave(request.episode_id, request.task)
