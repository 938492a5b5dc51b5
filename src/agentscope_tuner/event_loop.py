"""The event loop that episodes, judges, endpoints and the sampler share."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which does as much in less time, where there is one: there is none for Windows.

    Programs that nest event loops in each other cannot do so with it; whoever imported `nest_asyncio` gets Python's.
    """
    if "nest_asyncio" in sys.modules:
        return asyncio.new_event_loop()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from synchronous code, also where an event loop is already running, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            return runner.run(work)
    outcome: list[T] = []
    errors: list[BaseException] = []
    loop = _new_event_loop()

    def target() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                outcome.append(runner.run(work))
        except BaseException as exc:
            errors.append(exc)

    def stop() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    thread = threading.Thread(target=target, name="agentscope-tuner", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # somebody interrupts the cell of a notebook
        with suppress(RuntimeError):  # the loop may be closed meanwhile
            loop.call_soon_threadsafe(stop)
        thread.join()
        raise
    if errors:
        raise errors[0]
    return outcome[0]
