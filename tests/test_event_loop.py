"""Which event loop everything runs on, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from types import ModuleType

import pytest

from agentscope_tuner.event_loop import run_to_end


async def _kind() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_it_is_the_fast_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nest_asyncio", raising=False)
    assert run_to_end(_kind()) == "uvloop"

    async def cell() -> str:
        return run_to_end(_kind())

    assert asyncio.run(cell()) == "uvloop", "in a notebook, too"


@pytest.mark.parametrize("name", ["nest_asyncio", "uvloop"])
def test_it_is_pythons_own_where_the_fast_one_will_not_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = name == "uvloop"
    monkeypatch.setitem(sys.modules, name, None if missing else ModuleType(name))
    assert run_to_end(_kind()).startswith("asyncio")


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_ends_the_work_in_order() -> None:
    ended = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_to_end(work())
    assert ended == [True]


def test_an_interrupted_cell_of_a_notebook_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), []

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    join = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        assert began.wait(10)
        raise KeyboardInterrupt

    async def cell() -> None:
        monkeypatch.setattr(threading.Thread, "join", interrupted)
        run_to_end(work())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert ended == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "agentscope-tuner"]
