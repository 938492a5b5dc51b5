"""AgentScope's schemas are made once for many agents, and are what each agent would have made itself."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Literal
from weakref import ref

import agentscope._utils._common as common
import numpy as np
import pytest
import shortuuid
from agentscope.agent import AgentBase, ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.pipeline import stream_printing_messages
from agentscope.tool import Toolkit, ToolResponse
from pydantic import BaseModel, Field

from agentscope_tuner.many_agents import (
    copy_messages_quickly,
    draw_ids_quickly,
    share_schemas,
    share_signatures,
    skip_pauses,
)


class Answer(BaseModel):
    """What is delivered."""

    number: float = Field(description="The result.")
    unit: Literal["m", "s"] = "m"


class Where(BaseModel):
    """A place."""

    city: str


class Report(BaseModel):
    """One that holds another."""

    where: Where
    lines: list[str]


class Changing(BaseModel):
    """One that describes itself anew each time."""

    number: int

    @classmethod
    def model_json_schema(cls, *args: Any, **options: Any) -> dict[str, Any]:
        """Count."""
        schema = super().model_json_schema(*args, **options)
        cls.counted = getattr(cls, "counted", 0) + 1
        schema["properties"]["number"]["description"] = f"the {cls.counted}th"
        return schema


class Shop:
    """Has a tool."""

    def buy(self, what: str, pieces: int = 1) -> ToolResponse:
        """Buy something.

        Args:
            what (str): the thing.
            pieces (int): how many.
        """
        return ToolResponse(content=[])


def search(query: str, limit: int | None = None, *more: str, **rest: Any) -> ToolResponse:  # noqa: D417
    """Search for it.

    At length.

    Args:
        query (str): what for.
        limit (int): how many.
    """
    return ToolResponse(content=[])


@pytest.fixture(autouse=True)
def shared() -> None:
    share_schemas()
    share_schemas()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each class that pydantic is asked to build for a tool."""
    names: list[str] = []
    build = common.create_model

    def counted(name: str, **fields: Any) -> Any:
        names.append(name)
        return build(name, **fields)

    monkeypatch.setattr(common, "create_model", counted)
    return names


def schema_of(tool: Any, model: type[BaseModel] | None = None, **options: Any) -> dict[str, Any]:
    """As a new agent's toolkit has it."""
    toolkit = Toolkit()
    toolkit.register_tool_function(tool, **options)
    (name,) = toolkit.tools
    toolkit.set_extended_model(name, model)
    (schema,) = toolkit.get_json_schemas()
    return schema


def unshared(tool: Any, model: type[BaseModel] | None = None, **options: Any) -> dict[str, Any]:
    """The same by AgentScope alone."""
    inside: Any = sys.modules[Toolkit.__module__]
    kind, ours = inside.RegisteredToolFunction, inside._parse_tool_function
    getter = kind.extended_json_schema
    kind.extended_json_schema, inside._parse_tool_function = property(getter.fget.__wrapped__), ours.__wrapped__
    try:
        return schema_of(tool, model, **options)
    finally:
        kind.extended_json_schema, inside._parse_tool_function = getter, ours


@pytest.mark.parametrize("model", [None, Answer, Report])
@pytest.mark.parametrize(
    ("tool", "options"),
    [
        (search, {}),
        (search, {"include_long_description": False}),
        (search, {"include_var_positional": True, "include_var_keyword": True}),
        (search, {"func_name": "find", "func_description": "Find it."}),
        (search, {"preset_kwargs": {"limit": 3}}),
        (partial(search, limit=3), {}),
        (Shop().buy, {}),
        (Shop.buy, {}),
    ],
)
def test_schemas_are_those_of_agentscope(tool: Any, options: dict[str, Any], model: type[BaseModel] | None) -> None:
    expected = unshared(tool, model, **options)
    for _ in range(3):
        schema = schema_of(tool, model, **options)
        assert schema == expected
        schema["function"]["parameters"]["properties"].clear()  # it is the agent's own
        schema["function"]["name"] = "spoiled"


def test_a_tool_is_looked_at_once(built: list[str]) -> None:
    def tool(a: int) -> ToolResponse:
        """Add one."""
        return ToolResponse(content=[])

    for _ in range(5):
        schema_of(tool, Answer)
        schema_of(Shop().buy)
    assert len(built) <= 2  # a method may be known from another test


def redescribe(tool: Callable[..., Any]) -> None:
    tool.__doc__ = "Another task."


def rename(tool: Callable[..., Any]) -> None:
    tool.__name__ = "another"


def annotate(tool: Callable[..., Any]) -> None:
    tool.__annotations__["a"] = Literal["x", "y"]


def set_default(tool: Callable[..., Any]) -> None:
    tool.__defaults__ = (7,)


@pytest.mark.parametrize("change", [redescribe, rename, annotate, set_default])
def test_a_tool_that_changes_is_looked_at_again(change: Callable[..., Any], built: list[str]) -> None:
    def tool(a: int) -> ToolResponse:
        """Add one."""
        return ToolResponse(content=[])

    before = schema_of(tool)
    change(tool)
    after = schema_of(tool)
    assert after != before
    assert after == unshared(tool)
    assert len(built) == 3


def test_another_model_or_another_tool_is_another_schema() -> None:
    other = deepcopy(schema_of(search))
    other["function"]["description"] = "Something else."
    for schema in (None, other, None):
        for model in (Answer, Report, Answer):
            assert schema_of(search, model, json_schema=deepcopy(schema)) == unshared(
                search, model, json_schema=deepcopy(schema)
            )


def test_a_model_that_describes_itself_is_asked_every_time() -> None:
    texts = [str(schema_of(search, Changing)) for _ in range(3)]
    assert len(set(texts)) == 3


def test_an_agentscope_of_other_insides_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = sys.modules[Toolkit.__module__]
    kind = inside.RegisteredToolFunction
    getter = kind.extended_json_schema
    monkeypatch.delattr(inside, "_parse_tool_function")
    monkeypatch.delattr(inside, "RegisteredToolFunction")
    share_schemas.__wrapped__()
    assert not hasattr(inside, "_parse_tool_function")
    assert kind.extended_json_schema is getter


def test_an_agent_s_methods_are_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener(AgentBase):
        heard: Any = None

        async def observe(self, msg: Msg | list[Msg] | None, loudly: bool = False) -> None:
            self.heard = msg, loudly

    share_signatures()
    inspected: list[Any] = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda *args: inspected.append(args) or signature(*args))
    monkeypatch.setattr(sys.modules[type(AgentBase).__module__], "inspect", inspect)
    share_signatures.__wrapped__()
    listeners = [Listener(), Listener()]
    seen: list[dict[str, Any]] = []
    listeners[1].register_instance_hook("pre_observe", "see", lambda agent, given: seen.append(given))
    said = Msg("user", "a", "user")
    for listener in listeners * 2:
        asyncio.run(listener.observe(said, loudly=True))
        assert listener.heard == (said, True)
    assert len(inspected) == 1
    assert [given["loudly"] for given in seen] == [True] * 2


def test_signatures_of_an_agentscope_of_other_insides_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = sys.modules[type(AgentBase).__module__]
    monkeypatch.delattr(inside, "inspect")
    share_signatures.__wrapped__()
    assert not hasattr(inside, "inspect")


class Greeter(ChatModelBase):
    """Says hello."""

    def __init__(self) -> None:
        super().__init__("greeter", stream=False)

    async def __call__(self, *args: Any, **options: Any) -> ChatResponse:
        """Say it."""
        return ChatResponse(content=[TextBlock(type="text", text="Hello.")])


def test_agents_do_not_sleep_after_an_answer_and_their_messages_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = sys.modules[ReActAgent.__module__]
    slept: list[float] = []
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda delay, *args: slept.append(delay) or sleep(delay, *args))
    monkeypatch.setattr(inside, "asyncio", asyncio)
    monkeypatch.setenv("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")

    async def stream() -> list[tuple[str, bool]]:
        agent = ReActAgent(name="a", sys_prompt="b", model=Greeter(), formatter=OpenAIChatFormatter())
        streamed = stream_printing_messages([agent], agent(Msg("user", "c", "user")))
        return [(message.get_text_content(), last) async for message, last in streamed]

    heard = asyncio.run(stream())
    assert heard == [("Hello.", True)]
    assert max(slept) > 0  # or there is nothing to skip any more
    slept.clear()
    skip_pauses.__wrapped__()
    assert asyncio.run(stream()) == heard
    assert set(slept) == {0}
    asyncio.run(inside.asyncio.sleep(0.01))
    assert slept[-1] == 0.01
    assert inside.asyncio.CancelledError is asyncio.CancelledError


def test_pauses_of_an_agentscope_of_other_insides_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = sys.modules[ReActAgent.__module__]
    monkeypatch.delattr(inside, "asyncio")
    skip_pauses.__wrapped__()
    assert not hasattr(inside, "asyncio")


def test_ids_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = [sys.modules[kind.__module__] for kind in (Msg, AgentBase)]
    for module in inside:
        monkeypatch.setattr(module, "shortuuid", shortuuid)
    before = Msg("a", "b", "user").id
    draw_ids_quickly.__wrapped__()
    monkeypatch.setattr(shortuuid, "uuid", lambda *args, **named: (args, named))
    ids = [Msg("a", "b", "user").id for _ in range(2_000)]
    assert len({*ids, before}) == 2_001
    assert {len(one) for one in ids} == {len(before)}
    assert {*"".join(ids)} == {*shortuuid.get_alphabet()}
    assert len({AgentBase().id, AgentBase().id} | {*ids}) == 2_002
    assert inside[0].shortuuid.uuid("name", pad_length=3) == str((("name",), {"pad_length": 3}))


def test_ids_of_an_agentscope_of_other_insides_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = sys.modules[Msg.__module__]
    monkeypatch.delattr(inside, "shortuuid")
    draw_ids_quickly.__wrapped__()
    assert not hasattr(inside, "shortuuid")


class Named(Msg):
    """A message of a class of its own."""


def test_memories_hold_copies_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = sys.modules[InMemoryMemory.__module__]
    monkeypatch.setattr(inside, "deepcopy", deepcopy)
    copy_messages_quickly.__wrapped__()
    assert inside.deepcopy is not deepcopy
    blocks: list[Any] = [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"n": [1, 2.5, None, True, {"x": ("t", [])}]}},
    ]
    metadata = {"found": [{"k": "v"}], "when": Answer(number=1), "set": {1}}
    messages = [kind("a", blocks, "assistant", metadata=metadata) for kind in (Msg, Named)]

    async def remembered() -> list[Msg]:
        memory = InMemoryMemory()
        await memory.add(messages, marks=["hint"])
        return await memory.get_memory(mark="hint")

    kept = asyncio.run(remembered())
    assert [type(message) for message in kept] == [Msg, Named]
    for message, copied in zip(messages, kept, strict=True):
        assert vars(copied) == vars(message)
        blocks[1]["input"]["n"][4]["x"][1].append("changed")
        metadata["found"].append("changed")
        metadata["set"].add(2)
        metadata["when"].number = 2
        assert copied.content[1]["input"]["n"][4] == {"x": ("t", [])}
        assert copied.metadata == {"found": [{"k": "v"}], "when": Answer(number=1), "set": {1}}
        blocks[1]["input"]["n"][4]["x"][1].clear()
        metadata |= {"found": [{"k": "v"}], "set": {1}}
        metadata["when"].number = 1


def test_memories_of_an_agentscope_of_other_insides_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: Any = sys.modules[InMemoryMemory.__module__]
    monkeypatch.setattr(inside, "deepcopy", None)
    copy_messages_quickly.__wrapped__()
    assert inside.deepcopy is None


@pytest.mark.filterwarnings("ignore:Default value:pydantic.json_schema.PydanticJsonSchemaWarning")
def test_a_default_that_cannot_be_compared() -> None:
    def tool(a: Any = 0) -> ToolResponse:
        """Take an array."""
        return ToolResponse(content=[])

    tool.__defaults__ = (np.zeros(3),)
    first = schema_of(tool)
    tool.__defaults__ = (np.ones(3),)
    assert schema_of(tool) == first == unshared(tool)


def a_tool() -> Any:
    def tool(a: int) -> ToolResponse:
        """Add one."""
        return ToolResponse(content=[])

    schema_of(tool)
    return ref(tool)


def a_model() -> Any:
    class Own(BaseModel):
        """Made for one episode."""

        b: int

    schema_of(search, Own)
    return ref(Own)


@pytest.mark.parametrize("make", [a_tool, a_model])
def test_what_an_episode_makes_is_forgotten_with_it(make: Callable[[], Any]) -> None:
    gone = make()
    gc.collect()
    assert gone() is None
