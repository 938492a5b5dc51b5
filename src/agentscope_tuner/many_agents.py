"""What AgentScope does for one agent, where hundreds of them run at once and are made anew for every episode."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, wraps
from types import FunctionType, ModuleType, NoneType, SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agentscope.agent import AgentBase, ReActAgent
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg
from agentscope.tool import Toolkit
from pydantic import BaseModel

T = TypeVar("T")
Schema = dict[str, Any]
Known = WeakKeyDictionary[Any, tuple[object, Schema]]
"""By function or model, as long as it lives: what its last schema was made of, and that schema."""

_PAUSE_S = 0.001
"""How long AgentScope's ReAct agents sleep after every answer."""
_ID_LETTERS = 22
"""In an id."""
_ATOMS = frozenset({str, int, float, bool, NoneType})
"""Nothing of these can be changed."""


@contextmanager
def quiet_agents() -> Iterator[None]:
    """Agents made inside do not print what they say."""
    switch = "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"
    before = os.environ.get(switch)
    os.environ[switch] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def relieve_agents() -> None:
    """From now on, AgentScope does not do for every agent what can be done once, or more quickly."""
    share_schemas()
    share_signatures()
    skip_pauses()
    draw_ids_quickly()
    copy_messages_quickly()


@cache
def share_schemas() -> None:
    """From now on, AgentScope makes a tool's JSON schema once, and copies it while function and model are the same.

    Without that, every agent has pydantic build a class for each of its tools, and describe its `structured_model` in
    every step: half a millisecond each time, which is as much as a small model takes to answer. There is no public
    place to say so; an AgentScope of other insides stays as it is.
    """
    inside: Any = sys.modules[Toolkit.__module__]
    parse = getattr(inside, "_parse_tool_function", None)
    if parse is not None:
        inside._parse_tool_function = _once_per_function(parse)
    tool = getattr(inside, "RegisteredToolFunction", None)
    extended = getattr(tool, "extended_json_schema", None)
    if tool is not None and isinstance(extended, property) and extended.fget is not None:
        tool.extended_json_schema = property(_once_per_model(extended.fget))


def _once_per_function(parse: Callable[..., Schema]) -> Callable[..., Schema]:
    known: Known = WeakKeyDictionary()

    @wraps(parse)
    def parse_once(tool_func: Any, *args: Any, **options: Any) -> Schema:
        function = getattr(tool_func, "__func__", tool_func)  # methods are made anew whenever they are looked up
        if not isinstance(function, FunctionType):
            return parse(tool_func, *args, **options)
        # All that the schema is made of; whoever writes tasks into descriptions changes it.
        source = (function.__name__, function.__doc__, _parameters(function), tool_func is function, args, options)
        return _recall(known, function, source, lambda: parse(tool_func, *args, **options))

    return parse_once


def _parameters(function: FunctionType) -> object:
    if vars(function):  # such as what it wraps
        return inspect.signature(function)
    by_name, annotations = dict(function.__kwdefaults__ or {}), dict(function.__annotations__)
    return function.__code__, function.__defaults__, by_name, annotations


@cache
def share_signatures() -> None:
    """From now on, AgentScope looks at the signature of a method of agents once, not whenever it is called.

    It does so for hooks, in every `reply`, `print` and `observe`, be there hooks or not. As for `share_schemas`, there
    is no public place to say so.
    """
    known: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()

    def once(function: Any) -> inspect.Signature:
        signature = known.get(function)
        if signature is None:
            signature = known[function] = inspect.signature(function)
        return signature

    _let_see(type(AgentBase), inspect, signature=once)


@cache
def skip_pauses() -> None:
    """From now on, AgentScope's ReAct agents do not sleep after every answer, but let everybody else go on.

    They sleep so that whoever streams their messages gets the last one, for which a turn of the event loop is enough. A
    small model computes a step in the time, and waits. As for `share_schemas`, there is no public place to say so.
    """

    async def sleep(delay: float, result: Any = None) -> Any:
        return await asyncio.sleep(0 if delay <= _PAUSE_S else delay, result)

    _let_see(ReActAgent, asyncio, sleep=sleep)


@cache
def draw_ids_quickly() -> None:
    """From now on, AgentScope's ids of messages, replies and agents take a tenth of the time to draw.

    They are as long as before, of the same letters, and as random. As for `share_schemas`, there is no public place to
    say so.
    """
    shortuuid = getattr(sys.modules[Msg.__module__], "shortuuid", None)
    if shortuuid is None:
        return
    letters = shortuuid.get_alphabet().encode()
    letter_of = bytes(letters[number % len(letters)] for number in range(256))

    def uuid(*options: Any, **named: Any) -> str:
        if options or named:
            return str(shortuuid.uuid(*options, **named))
        return os.urandom(_ID_LETTERS).translate(letter_of).decode()

    for kind in (Msg, AgentBase):
        _let_see(kind, shortuuid, uuid=uuid)


@cache
def copy_messages_quickly() -> None:
    """From now on, agents' memories copy messages in a third of the time.

    As for `share_schemas`, there is no public place to say so.
    """
    inside: Any = sys.modules[InMemoryMemory.__module__]
    if getattr(inside, "deepcopy", None) is deepcopy:
        inside.deepcopy = _deepcopy


def _deepcopy(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: _deepcopy(item) for key, item in value.items()}
    if kind is list:
        return [_deepcopy(item) for item in value]
    if kind is Msg:
        copied = object.__new__(Msg)
        vars(copied).update(_deepcopy(vars(value)))
        return copied
    return deepcopy(value)


def _let_see(kind: type, module: ModuleType, **changes: Any) -> None:
    """Change what a module is like where a class of AgentScope is written, if it is used there under its own name."""
    inside = sys.modules[kind.__module__]
    if getattr(inside, module.__name__, None) is module:
        setattr(inside, module.__name__, SimpleNamespace(**(vars(module) | changes)))


def _once_per_model(extend: Callable[[Any], Schema]) -> Callable[[Any], Schema]:
    known: Known = WeakKeyDictionary()

    @wraps(extend)
    def extend_once(tool: Any) -> Schema:
        model = tool.extended_model
        # One that describes itself may do so differently every time.
        if not isinstance(model, type) or any(
            "model_json_schema" in vars(kind) for kind in model.__mro__ if kind is not BaseModel
        ):
            return extend(tool)
        return _recall(known, model, tool.json_schema, lambda: extend(tool))

    return extend_once


def _recall(known: Known, owner: object, source: object, make: Callable[[], Schema]) -> Schema:
    """A copy of what was made for its owner; it is made anew where it would be made of something else."""
    found = known.get(owner)
    if found is None or not _equal(found[0], source):
        found = known[owner] = (_copy(source), make())
    return _copy(found[1])


def _copy(value: T) -> T:
    """Of what JSON holds; `deepcopy` takes three times as long."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}  # type: ignore[return-value]
    return [_copy(item) for item in value] if isinstance(value, list) else value  # type: ignore[return-value]


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # defaults can be anything, arrays too
        return False
