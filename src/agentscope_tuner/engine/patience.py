"""Whom batches wait for, and how long: open episodes that act between two calls of the model.

An episode may act in several tasks, each of which will ask for something, end, or wait for others. It is waited for
while any of its tasks may still ask by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from agentscope_tuner.engine.completions import Request

_SLICE_S, _LEAST_S = 0.01, 0.0025
_NEEDED_SHARE = 8
"""Patience that was lost is regained where at least this fraction (one over it) of what is left was needed."""
_LOOP_TURNS = 32
"""So many turns the event loop takes before nothing more is expected of whoever waited for a task that has ended."""
_TURNS_TO_FOLLOW = 8
"""So many it takes at least before the next step, where others may follow of whom we do not know yet: the next episode
once one has done its part; other agents, once the first of those that were started together has asked, or some end."""

_Task = asyncio.Task[Any]

_last_to_ask: ContextVar[ref[_Task] | None] = ContextVar("last_to_ask", default=None)
"""The task that asked last in this context: the running one, or the one that started it after having asked."""


class Patience:
    """For the episodes of one sampler."""

    def __init__(self, most_s: float, pending: Mapping[str, Collection[Request]]) -> None:
        """Have as much as there may be.

        Args:
            most_s: how long to wait for those that need it.
            pending: by episode, what it asked for and has not got.
        """
        self.seconds = self._most_s = most_s
        """What is left of it: waiting in vain halves it, waiting with success doubles it."""
        self._pending = pending
        self._away: dict[str, set[_Task | None]] = {}
        """Episodes that are waited for, and the tasks in which they act; None: they have just begun."""
        self._slow: dict[str, set[_Task | None]] = {}
        """The same of those that patience did not last for."""
        self._watched: WeakSet[_Task] = WeakSet()
        """Tasks of whose end we are told."""
        self._turns = 0
        """So many turns of the event loop are left to those that follow."""
        self._quiet = asyncio.Event()

    def __len__(self) -> int:
        """How many episodes are waited for."""
        return len(self._away)

    def __contains__(self, episode_id: object) -> bool:
        """Whether an episode is waited for."""
        return episode_id in self._away

    @property
    def ended(self) -> bool:
        """Whether any episode acts for longer than patience lasted."""
        return bool(self._slow)

    def leave(self, episode_id: str, task: _Task | None = None) -> None:
        """An episode acts, in a task; it is waited for."""
        acting = self._away.setdefault(episode_id, set())
        if task is not None and task not in self._watched and self._asks_elsewhere(episode_id, task):
            self._watched.add(task)
            task.add_done_callback(partial(self._ended, episode_id))
        acting.add(task)
        self._quiet.clear()

    def come_back(self, episode_id: str, task: _Task | None) -> None:
        """It asks for something, in the running task; whoever started that one waits for it."""
        asked = _last_to_ask.get()
        starter = asked and asked()
        if task is not None:
            _last_to_ask.set(ref(task))
        for episodes in (self._away, self._slow):
            if (acting := episodes.get(episode_id)) is None:
                continue
            acting.discard(task)
            if others := {each for each in acting if each in (None, starter) or each.done()}:
                acting -= others
                self._turns = _TURNS_TO_FOLLOW
            if not acting:
                del episodes[episode_id]
        self._tell()

    def pause(self, episode_id: str) -> None:
        """It is not waited for until it acts again."""
        self._turns = _TURNS_TO_FOLLOW
        self._no_longer_away(episode_id)

    def close(self, episode_id: str) -> None:
        """It is over."""
        self._slow.pop(episode_id, None)
        self.pause(episode_id)

    def _ended(self, episode_id: str, task: _Task, turns: int = _LOOP_TURNS) -> None:
        """One of its tasks is over. If nothing comes of that, only the others are waited for, if there are any."""
        acting = self._away.get(episode_id, set())
        if task not in acting or not (len(acting) > 1 or self._asks_elsewhere(episode_id, task)):
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._ended, episode_id, task, turns - 1)
            return
        acting.discard(task)
        if not acting:
            self._no_longer_away(episode_id)

    def _no_longer_away(self, episode_id: str) -> None:
        self._away.pop(episode_id, None)
        self._tell()

    def _asks_elsewhere(self, episode_id: str, task: _Task) -> bool:
        """Whether another task of an episode waits for a completion."""
        return any(request.task is not task for request in self._pending.get(episode_id, ()))

    def _tell(self) -> None:
        if not self._away:
            self._quiet.set()

    def enter_loop(self) -> None:
        """From now on, `last` is awaited in this event loop: events belong to the one they are awaited in."""
        self._quiet = asyncio.Event()
        self._tell()

    async def last(self, step: Callable[[], object]) -> None:
        """Let every open episode that can run do so, until all of them wait or patience ends.

        Args:
            step: what is being computed meanwhile; patience begins anew with the next one.
        """
        await asyncio.sleep(0)
        while (not self._away or await self._lasts(step)) and self._turns:
            self._turns -= 1
            await asyncio.sleep(0)

    async def _lasts(self, step: Callable[[], object]) -> bool:
        """Whether all of them come back before it ends."""
        # It is spent in slices, so that a pause of the whole process costs one of them, not all.
        begun, slice_s = time.monotonic(), min(_SLICE_S, self.seconds)
        computed, spent = step(), 0
        while spent * slice_s < self.seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(slice_s):
                    await self._quiet.wait()
            if not self._away:
                # That those who need no time come back says nothing about others.
                if _NEEDED_SHARE * (time.monotonic() - begun) > self.seconds:
                    self.seconds = min(self.seconds * 2, self._most_s)
                return True
            earlier, computed = computed, step()
            spent = spent + 1 if computed is earlier else 0
        # Slow ones are not waited for again until they have come back; and where waiting proves useless, as with tools
        # that call over a network, there is less and less of it.
        self.seconds = max(self.seconds / 2, min(_LEAST_S, self._most_s))
        for episode_id, acting in self._away.items():
            self._slow.setdefault(episode_id, set()).update(acting)
        self._away.clear()
        self._quiet.set()
        return False
