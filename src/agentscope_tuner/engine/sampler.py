"""The sampler: continuous batching over all running episodes, with every shared prefix computed once.

Agents and sampler take turns on one event loop. Before each batch the sampler waits, within its patience, until every
open episode has asked for something or ended; so batches depend on what the episodes do, not on the clock, and equal
seeds give equal bits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from agentscope_tuner.algorithms.packing import common_prefix
from agentscope_tuner.config import EngineConfig
from agentscope_tuner.engine.decoder import ModuleDecoder
from agentscope_tuner.engine.drafts import Drafts
from agentscope_tuner.engine.model_runner import ModelRunner, Span
from agentscope_tuner.engine.models import LoadedModel
from agentscope_tuner.engine.slots import Slot, Slots
from agentscope_tuner.policy import Sample, SamplingParams, room_for_tokens

_TRUNK_TOKENS = 64
"""A trunk is at least this long ..."""
_TRUNK_USERS = 4
"""... and made when at least this many waiting prompts begin with it."""
_BUNCH = 3
"""Waiting requests begin once they are at least this fraction (one over it) of the active ones."""
_UNIFORMS = 32
"""Random numbers that are taken at once; the generator makes four in a step."""
_PATIENCE_SLICE_S = 0.01


@dataclass(eq=False, slots=True)
class _Request:
    order: tuple[int, int]
    """(episode, call): equal whenever the run is repeated, unlike times of arrival."""
    episode_id: str
    adapter: str
    prompt_ids: list[int]
    params: SamplingParams
    future: asyncio.Future[Sample]
    on_token: Callable[[int], None] | None
    budget: int
    ends: frozenset[int]
    """Tokens after which it stops."""
    slot: Slot
    uniforms: list[float] = field(default_factory=list)
    """Random numbers of its first tokens."""
    guess: list[int] = field(default_factory=list)
    """What may come after the last token."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


_NO_SLOT = Slot(-1)
_NOTHING_GUESSED = (None,)
_slot_order = attrgetter("slot.row_order")


class _Uniforms:
    """Random numbers for completions: each seed has its own stream, so none depends on its neighbours."""

    def __init__(self) -> None:
        # One generator is set to wherever it is needed, which takes a fraction of the time of making one.
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def of(self, seed: int, first: int) -> list[float]:
        """The next few of a stream, from its number `first` on, a multiple of `_UNIFORMS`."""
        place = self._state["state"]
        place["key"][:] = seed % 2**64, seed >> 64
        place["counter"][0] = first // 4
        self._bits.state = self._state
        numbers: list[float] = self._generator.random(_UNIFORMS).tolist()
        return numbers


class Sampler:
    """A `Policy` over a loaded model."""

    def __init__(self, loaded: LoadedModel, engine: EngineConfig) -> None:
        """Make room for the cache.

        Raises:
            ConfigError: not even one sequence of `max_model_len` tokens fits into `engine.kv_cache_gb`.
        """
        self._loaded = loaded
        self._runner = ModelRunner(loaded, engine)
        self._prefill_tokens = engine.prefill_tokens
        self._draft_tokens = engine.draft_tokens if self._runner.flat else 0
        self._patience = self._most_patience = engine.patience_ms / 1000
        self.policy_version = 0
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        self.rows_decoded = 0
        """Tokens that were run to draw the next one, guesses included."""
        self._uniforms = _Uniforms()
        self._clock = itertools.count(1)
        self._opened: dict[str, int] = {}
        self._calls: dict[str, int] = defaultdict(int)
        self._away: set[str] = set()
        """Open episodes that are between two calls."""
        self._quiet = asyncio.Event()
        self._pending: set[_Request] = set()
        """Everybody who awaits a completion: in one of the next three lists, or being computed."""
        self._waiting: list[_Request] = []
        self._prefilling: list[_Request] = []
        """Those with a slot, of whose prompts something is not computed."""
        self._decoding: list[_Request] = []
        """Those with a slot whose next token can be drawn."""
        self._pump: asyncio.Task[None] | None = None
        self._forget()

    @property
    def runs_modules(self) -> bool:
        """Whether the model's own modules compute; they hold one adapter at a time."""
        return isinstance(self._runner.decoder, ModuleDecoder)

    # ------------------------------------------------------------------------------------------- the policy

    def open_episode(self, episode_id: str) -> None:
        """An episode begins and will call `sample`."""
        self._opened[episode_id] = next(self._clock)
        self._leave(episode_id)

    def close_episode(self, episode_id: str) -> None:
        """The episode is over; whatever it still waits for is dropped."""
        self._opened.pop(episode_id, None)
        self._calls.pop(episode_id, None)
        self._return(episode_id)
        for request in [r for r in self._pending if r.episode_id == episode_id]:
            self._drop(request)
            self._pending.discard(request)
            request.future.cancel()
        for slot in self._slots:
            if slot.episode_id == episode_id:
                slot.episode_id = ""

    def pause_episode(self, episode_id: str) -> None:
        """The episode waits for somebody else; do not wait for it."""
        self._return(episode_id)

    def resume_episode(self, episode_id: str) -> None:
        """The episode goes on."""
        if episode_id in self._opened:
            self._leave(episode_id)

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
        call = self._calls[episode_id]
        self._calls[episode_id] += 1
        request = _Request(
            order=(self._opened.get(episode_id, 0), call),
            episode_id=episode_id,
            adapter=adapter,
            prompt_ids=prompt_ids,
            params=params,
            future=asyncio.get_running_loop().create_future(),
            on_token=on_token,
            budget=min(params.max_tokens, room),
            ends=self._loaded.end_of_turn_ids | params.stop_ids,
            slot=_NO_SLOT,
        )
        self._pending.add(request)
        self._waiting.append(request)
        self._return(episode_id)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run(), name="sampler")
        try:
            return await request.future
        except asyncio.CancelledError:
            self._drop(request)
            raise
        finally:
            self._pending.discard(request)
            if episode_id in self._opened:
                self._leave(episode_id)

    def weights_changed(self, version: int) -> None:
        """Take the model's new weights; nothing that was computed with the old ones is used again.

        `version` is the number of updates they have seen.

        Raises:
            RuntimeError: completions are under way.
        """
        if self._pending:
            raise RuntimeError("weights changed while completions were under way")
        self._runner.decoder.refresh()
        self.policy_version = version
        self._forget()

    # ---------------------------------------------------------------------------------------------- batching

    def _forget(self) -> None:
        self._slots = Slots(self._runner.cache.slots, self._runner.trunk_tokens)
        self._runner.forget_prefixes()
        self._drafts = Drafts()

    def _leave(self, episode_id: str) -> None:
        self._away.add(episode_id)
        self._quiet.clear()

    def _return(self, episode_id: str) -> None:
        self._away.discard(episode_id)
        if not self._away:
            self._quiet.set()

    async def _run(self) -> None:
        self._quiet = asyncio.Event()  # events belong to the loop they are awaited in
        if not self._away:
            self._quiet.set()
        try:
            while True:
                await self._settle()
                if not (self._waiting or self._prefilling or self._decoding):
                    return
                with torch.inference_mode():
                    if self._may_admit():
                        self._admit()
                    self._step()
        except Exception as exc:  # everybody who waits has to hear of it
            for request in self._pending:
                if not request.future.done():
                    request.future.set_exception(exc)
            self._pending, self._waiting, self._prefilling, self._decoding = set(), [], [], []
            self._forget()

    def _may_admit(self) -> bool:
        """Whether waiting requests should begin now."""
        begun = len(self._prefilling) + len(self._decoding)
        if not self._waiting or begun == len(self._slots):
            return False
        # Where rows are padded, a prefill is a step of its own; with few rows it costs almost as much as with many, and
        # holds up everybody else. So they begin in bunches.
        return self._runner.flat or len(self._waiting) * _BUNCH >= begun

    async def _settle(self) -> None:
        """Let every open episode that can run do so, until all of them wait or patience ends."""
        await asyncio.sleep(0)
        if not self._away:
            return
        # Patience is spent in slices, so that a pause of the whole process costs one of them, not all.
        for _ in range(int(self._patience / _PATIENCE_SLICE_S)):
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_SLICE_S):
                    await self._quiet.wait()
            if not self._away:
                self._patience = min(self._patience * 2, self._most_patience)
                return
        # Slow ones are not waited for again until they have come back; and where waiting proves useless, as with tools
        # that call over a network, there is less and less of it.
        self._patience = max(self._patience / 2, min(_PATIENCE_SLICE_S, self._most_patience))
        self._away.clear()
        self._quiet.set()

    def _admit(self) -> None:
        """Give waiting requests their slots."""
        free = sum(not slot.busy for slot in self._slots)
        self._waiting.sort(key=lambda request: request.order)
        batch, self._waiting = self._waiting[:free], self._waiting[free:]
        self._make_trunks(batch)
        ready, later = self._place(batch)
        self._prefilling += [request for request in ready if request.slot.prefilling]
        self._decoding += [request for request in ready if not request.slot.prefilling]
        self._waiting = later + self._waiting

    def _make_trunks(self, batch: list[_Request]) -> None:
        families: dict[tuple[str, tuple[int, ...]], list[list[int]]] = defaultdict(list)
        for request in batch:
            ids = request.prompt_ids
            if len(ids) > _TRUNK_TOKENS and self._slots.trunk_of(request.adapter, ids) is None:
                families[request.adapter, tuple(ids[:_TRUNK_TOKENS])].append(ids)
        scratches: list[Slot] = []
        for (adapter, _), prompts in families.items():
            if len(prompts) < _TRUNK_USERS:
                continue
            first, last = min(prompts), max(prompts)
            # At least one token of every prompt has to be run to get its logits.
            shared = min(common_prefix(first, last), min(map(len, prompts)) - 1)
            planned = sum(len(scratch.ids) for scratch in scratches)
            if self._runner.worth_a_trunk(len(prompts), shared) and self._slots.room_for_trunk(planned + shared):
                scratch = self._slots.victim()
                self._slots.fill(scratch, adapter, None, first[:shared], 0)
                scratch.busy = True
                scratches.append(scratch)
        self._compute(scratches)
        for scratch in scratches:
            cache = self._runner.cache.take(scratch.index, scratch.cached)
            self._slots.add_trunk(scratch.adapter, scratch.ids, cache)
            self._slots.release(scratch)

    def _compute(self, slots: list[Slot]) -> None:
        """Everything that these miss."""
        while slots := sorted((slot for slot in slots if slot.missing), key=attrgetter("row_order")):
            plan = self._runner.plan(slots)
            self._runner.hidden([Span(slot, plan[slot], 0) for slot in slots if slot in plan])
            for slot, tokens in plan.items():
                slot.cached += tokens
                self.tokens_prefilled += tokens

    def _place(self, batch: list[_Request]) -> tuple[list[_Request], list[_Request]]:
        """Find slots. Requests that can share what others are about to compute come back as the second list."""
        ready: list[_Request] = []
        later: list[_Request] = []
        for request in batch:
            trunk = self._slots.trunk_of(request.adapter, request.prompt_ids)
            own = request.prompt_ids[len(trunk.ids) :] if trunk else request.prompt_ids
            best, overlap = self._slots.nearest(request.adapter, trunk, own, request.episode_id)
            if best is not None and overlap > best.cached:
                later.append(request)
                continue
            if best is not None and not best.busy and best.episode_id in ("", request.episode_id):
                slot = best
            else:
                slot = self._slots.victim(keep=best)
                if best is not None and best is not slot:
                    self._runner.cache.reserve(overlap)
                    self._runner.cache.copy(best.index, slot.index, overlap)
            self._slots.fill(slot, request.adapter, trunk, own, overlap)
            slot.busy = True
            slot.episode_id = request.episode_id
            request.slot = slot
            ready.append(request)
        return ready, later

    def _drop(self, request: _Request) -> None:
        for where in (self._waiting, self._prefilling, self._decoding):
            if request in where:
                where.remove(request)
                if where is not self._waiting:
                    self._slots.release(request.slot)

    # --------------------------------------------------------------------------------------------- computing

    def _step(self) -> None:
        """Run what the requests with slots miss, as much as goes at once, and draw for those that miss nothing then."""
        prefilling = self._prefilling
        plan = self._runner.plan([r.slot for r in prefilling], beside=len(self._decoding)) if prefilling else {}
        # Where rows are padded, those that decode wait for those that prefill.
        decoding = self._decoding if self._runner.flat or not plan else []
        self._guess(decoding)
        requests = sorted((*decoding, *(r for r in prefilling if r.slot in plan)), key=_slot_order)
        spans: list[Span] = []
        drawing: list[_Request] = []
        for request in requests:
            slot, wanted = request.slot, len(request.guess) + 1
            tokens = plan.get(slot, wanted)
            if tokens == slot.missing:
                drawing.append(request)
            else:
                wanted = 0
            spans.append(Span(slot, tokens, wanted))
        hidden = self._runner.hidden(spans)
        for slot, tokens in plan.items():
            slot.cached += tokens
            self.tokens_prefilled += tokens
        for request in decoding:
            self.rows_decoded += len(request.guess) + 1
            if request.guess:
                del request.slot.ids[-len(request.guess) :]
        if decoding:
            self._decoding = []
        if plan:
            drawn = set(drawing)
            self._prefilling = [request for request in prefilling if request not in drawn]
        if drawing:
            self._draw(drawing, hidden)

    def _guess(self, requests: list[_Request]) -> None:
        """Append to each sequence what may come after its last token, to be run with it."""
        most = min(self._draft_tokens, self._prefill_tokens // max(1, len(requests)) - 1)
        guess = self._drafts.guess
        for request in requests:
            if guessed := guess(request.slot.ids, min(most, request.budget - len(request.token_ids) - 1)):
                request.guess = guessed
                request.slot.ids += guessed

    def _draw(self, requests: list[_Request], hidden: Tensor) -> None:
        """Draw the next token of each request, and those after it as long as the one before was guessed.

        `hidden` (rows, D) has a row for each request, and one more for each token of its guess.
        """
        params: list[SamplingParams] = []
        uniforms: list[float] = []
        for request in requests:
            first, rows = len(request.token_ids), len(request.guess) + 1
            while len(request.uniforms) < first + rows:
                request.uniforms += self._uniforms.of(request.params.seed, len(request.uniforms))
            # A token has its random number, whether it is drawn now or was guessed wrongly and is drawn later.
            if rows == 1:
                uniforms.append(request.uniforms[first])
                params.append(request.params)
            else:
                uniforms += request.uniforms[first : first + rows]
                params += [request.params] * rows
        tokens, logprobs = (drawn.tolist() for drawn in self._runner.draw(hidden, params, uniforms))
        row = 0
        for request in requests:
            rows = len(request.guess) + 1
            self._accept(request, tokens, logprobs, row)
            row += rows

    def _accept(self, request: _Request, tokens: list[int], logprobs: list[float], row: int) -> None:
        """Take what was drawn, from a row on: the first token, and each whose predecessor was guessed."""
        slot, guess, token_ids = request.slot, request.guess, request.token_ids
        for guessed in (*guess, None) if guess else _NOTHING_GUESSED:
            token = tokens[row]
            # Everything before a token was run to draw it.
            slot.cached = len(slot.ids)
            token_ids.append(token)
            request.logprobs.append(logprobs[row])
            if request.on_token is not None:
                request.on_token(token)
            if token in request.ends or (request.params.stop and self._said_stop(request)):
                self._finish(request, "stop")
                return
            if len(token_ids) == request.budget:
                self._finish(request, "length")
                return
            slot.ids.append(token)
            if token != guessed:
                break
            row += 1
        if guess:
            request.guess = []
        self._decoding.append(request)

    def _finish(self, request: _Request, reason: str) -> None:
        self._slots.release(request.slot)
        self._drafts.learn(request.prompt_ids, request.token_ids)
        self.tokens_sampled += len(request.token_ids)
        if not request.future.done():
            request.future.set_result(Sample(request.token_ids, request.logprobs, reason, self.policy_version))
            # Its episode can go on; it is waited for before the next batch.
            if request.episode_id in self._opened:
                self._leave(request.episode_id)

    def _said_stop(self, request: _Request) -> bool:
        """Whether the last token completed one of the strings at which to stop."""
        stops = request.params.stop
        # A token is at least a byte; some decoders treat the first one's space in their own way.
        tail = request.token_ids[-max(len(stop.encode()) for stop in stops) - 4 :]
        text = self._loaded.tokenizer.decode(tail, skip_special_tokens=False)
        return any(stop in text for stop in stops)
