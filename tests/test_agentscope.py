"""AgentScope's own agents, formatters and tuning functions, unchanged, on a `ModelTuner`."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Dict  # noqa: UP035  # AgentScope's examples write `Dict`

import pytest
from agentscope.agent import ReActAgent
from agentscope.formatter import (
    DashScopeChatFormatter,
    DashScopeMultiAgentFormatter,
    FormatterBase,
    OpenAIChatFormatter,
    OpenAIMultiAgentFormatter,
)
from agentscope.message import ImageBlock, Msg, TextBlock, URLSource
from agentscope.model import ChatModelBase, ChatResponse, OpenAIChatModel, TrinityChatModel
from agentscope.pipeline import MsgHub
from agentscope.plan import PlanNotebook
from agentscope.rag import DocMetadata, Document, KnowledgeBase
from agentscope.token import CharTokenCounter
from agentscope.tool import Toolkit, ToolResponse
from pydantic import BaseModel, Field
from safetensors.torch import load_file
from scripted_tools import Script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentscope_tuner import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    ModelTuner,
    TuneResult,
    TunerModelConfig,
    WorkflowOutput,
    tune,
)
from agentscope_tuner.chat import ChatRenderer, write_reply
from agentscope_tuner.config import WorkflowConfig
from agentscope_tuner.errors import ConfigError
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.recorder import PolicyModel, Recorder
from agentscope_tuner.reporting import read_episodes
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import Episode, Task
from agentscope_tuner.workflow import WorkflowRunner

SWITCH = "AGENTSCOPE_DISABLE_CONSOLE_OUTPUT"
CHAT_FORMATTERS = [OpenAIChatFormatter, DashScopeChatFormatter]
FORMATTERS = [*CHAT_FORMATTERS, OpenAIMultiAgentFormatter, DashScopeMultiAgentFormatter]


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny_model_dir))


def model_of(policy: Script, params: SamplingParams) -> PolicyModel:
    end = frozenset([policy.renderer.tokenizer.eos_token_id])
    return PolicyModel(policy, policy.renderer, end, "tiny", params)


def perform(
    policy: Script,
    workflow: Callable[[dict[str, Any], ModelTuner], Awaitable[None]],
    params: SamplingParams | None = None,
) -> Episode:
    """Run one episode of something that asks `model`."""

    async def rewarded(task, model) -> float:
        await workflow(task, model)
        return 1.0

    model = model_of(policy, params or SamplingParams(max_tokens=512))
    rollout = Rollout(WorkflowRunner(rewarded), None, model, WorkflowConfig(timeout_s=30), 0, {})
    (group,) = asyncio.run(rollout.run([Task(main_query="2 + 3?")], 1, phase="test"))
    (episode,) = group.episodes
    return episode


def finish(policy: Script, workflow: Callable[[dict[str, Any], ModelTuner], Awaitable[None]]) -> Episode:
    """Like `perform`, for episodes that end well."""
    episode = perform(policy, workflow)
    assert episode.error is None, episode.error.traceback or episode.error
    assert episode.reward == {"default": 1.0}
    assert [policy.renderer.decode(call.prompt_ids) for call in episode.calls] == policy.prompts
    return episode


def add(a: int, b: int) -> ToolResponse:
    """Add two numbers.

    Args:
        a (int): One.
        b (int): The other.
    """
    return ToolResponse(content=[TextBlock(type="text", text=f"sum={a + b}")])


def toolkit(*functions: Callable[..., Any]) -> Toolkit:
    kit = Toolkit()
    for function in functions or (add,):
        kit.register_tool_function(function)
    return kit


def agent_of(model: ChatModelBase, **options: Any) -> ReActAgent:
    options = {"formatter": OpenAIChatFormatter(), "toolkit": toolkit(), **options}
    return ReActAgent(name="Friday", sys_prompt="Add with the tool.", model=model, **options)


def user(text: str) -> Msg:
    return Msg("user", text, "user")


def said(message: Msg) -> str:
    return message.get_text_content() or ""


def call(name: str, **arguments: Any) -> str:
    return write_reply("", [(name, arguments)])


def assert_extends_exactly(episode: Episode, index: int, base: int | None) -> None:
    later = episode.calls[index]
    assert later.extends == base
    if base is not None:
        earlier = episode.calls[base]
        beginning = earlier.prompt_ids + earlier.completion_ids
        assert later.prompt_ids[: len(beginning)] == beginning


# --------------------------------------------------------------------------------------------------- a ReAct agent


def test_an_agent_with_a_tool(renderer: ChatRenderer) -> None:
    policy = Script(renderer, "Let me add.\n" + call("add", a=2, b=3), "It is 5.")
    replies: list[str] = []

    async def workflow(task, model):
        assert isinstance(model, ChatModelBase)
        replies.append(said(await agent_of(model)(user(task["question"]))))

    episode = finish(policy, workflow)
    assert replies == ["It is 5."]
    assert len(episode.calls) == 2
    assert '"name": "add"' in policy.prompts[0]
    assert "Add with the tool." in policy.prompts[0]
    assert policy.prompts[1].endswith("<tool_response>\nsum=5\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert_extends_exactly(episode, 1, 0)
    assert [c.text for c in episode.calls] == ["Let me add.\n" + call("add", a=2, b=3), "It is 5."]
    assert all(c.role == "default" and c.finish_reason == "stop" and c.trainable for c in episode.calls)
    assert episode.calls[0].tools[0]["function"]["name"] == "add"


def test_a_call_that_is_not_json_is_shown_as_text_and_ends_the_reply(renderer: ChatRenderer) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 2, \n</tool_call>'
    policy = Script(renderer, broken)
    replies: list[str] = []

    async def workflow(task, model):
        replies.append(said(await agent_of(model)(user("2 + 3?"))))

    finish(policy, workflow)
    assert replies == [broken]


def test_an_unknown_tool_is_answered_and_the_agent_goes_on(renderer: ChatRenderer) -> None:
    policy = Script(renderer, call("subtract", a=2), "I cannot.")

    async def workflow(task, model):
        await agent_of(model)(user("2 - 3?"))

    episode = finish(policy, workflow)
    assert "FunctionNotFoundError" in policy.prompts[1]
    assert_extends_exactly(episode, 1, 0)


def test_memory_over_several_replies(renderer: ChatRenderer) -> None:
    policy = Script(renderer, "Hello, Ann.", call("add", a=1, b=1), "2, Ann.", "Bye, Ann.")

    async def workflow(task, model):
        agent = agent_of(model)
        for text in ("I am Ann.", "1 + 1?", "Bye."):
            await agent(user(text))

    episode = finish(policy, workflow)
    for index, base in enumerate([None, 0, 1, 2]):
        assert_extends_exactly(episode, index, base)
    last = policy.prompts[-1]
    places = [last.index(text) for text in ("I am Ann.", "Hello, Ann.", "1 + 1?", "sum=2", "2, Ann.", "Bye.")]
    assert places == sorted(places)


def test_parallel_tool_calls_run_together(renderer: ChatRenderer) -> None:
    both = asyncio.Barrier(2)

    async def first() -> ToolResponse:
        """Wait for the other."""
        await asyncio.wait_for(both.wait(), 5)
        return ToolResponse(content=[TextBlock(type="text", text="one")])

    async def second() -> ToolResponse:
        """Wait for the other."""
        await asyncio.wait_for(both.wait(), 5)
        return ToolResponse(content=[TextBlock(type="text", text="two")])

    policy = Script(renderer, call("first") + "\n" + call("second"), "Done.")

    async def workflow(task, model):
        await agent_of(model, toolkit=toolkit(first, second), parallel_tool_calls=True)(user("Both."))

    episode = finish(policy, workflow)
    results = policy.prompts[1].partition("<|im_end|>\n<|im_start|>user\n<tool_response>")[2]
    assert sorted(word for word in ("one", "two") if word in results) == ["one", "two"]
    assert results.count("</tool_response>") == 2
    assert_extends_exactly(episode, 1, 0)


def test_several_calls_one_after_the_other(renderer: ChatRenderer) -> None:
    policy = Script(renderer, call("add", a=1, b=1) + call("add", a=2, b=2), "2 and 4.")

    async def workflow(task, model):
        await agent_of(model)(user("Both."))

    episode = finish(policy, workflow)
    assert policy.prompts[1].index("sum=2") < policy.prompts[1].index("sum=4")
    assert_extends_exactly(episode, 1, 0)


def test_an_agent_that_does_not_finish_summarizes(renderer: ChatRenderer) -> None:
    policy = Script(renderer, call("add", a=1, b=1), call("add", a=2, b=2), "I only got to 4.")
    replies: list[str] = []

    async def workflow(task, model):
        replies.append(said(await agent_of(model, max_iters=2)(user("Add forever."))))

    episode = finish(policy, workflow)
    assert replies == ["I only got to 4."]
    assert "You have failed to generate response within the maximum iterations" in policy.prompts[2]
    assert episode.calls[2].tools is None
    assert_extends_exactly(episode, 1, 0)
    assert_extends_exactly(episode, 2, None)  # summaries are asked for without tools: another system prompt


def test_a_plan_s_hints_come_and_go(renderer: ChatRenderer) -> None:
    policy = Script(renderer, call("add", a=1, b=1), "No plan needed.")

    async def workflow(task, model):
        await agent_of(model, plan_notebook=PlanNotebook())(user("1 + 1?"))

    episode = finish(policy, workflow)
    assert [prompt.count("<system-hint>") for prompt in policy.prompts] == [1, 1]
    assert_extends_exactly(episode, 1, None)
    assert policy.prompts[1].index("sum=2") < policy.prompts[1].index("<system-hint>")


# ----------------------------------------------------------------------------------------------- structured output


class Answer(BaseModel):
    """What the agent has to deliver."""

    result: int = Field(description="The sum.")
    unit: str = "apples"


def test_structured_output_of_a_reply(renderer: ChatRenderer) -> None:
    policy = Script(
        renderer,
        "I think it is 5.",
        call("generate_response", result="five"),
        call("generate_response", result=5),
        f"There are 5. {call('add', a=1, b=1)}",
    )
    replies: list[Msg] = []

    async def workflow(task, model):
        replies.append(await agent_of(model)(user("2 + 3?"), structured_model=Answer))

    episode = finish(policy, workflow)
    assert replies[0].metadata == {"result": 5, "unit": "apples"}
    # Asked for text only, so what looks like a call is text.
    assert said(replies[0]) == f"There are 5. {call('add', a=1, b=1)}"
    assert "Structured output is required" in policy.prompts[1]
    assert "Arguments Validation Error" in policy.prompts[2]
    assert "Now generate a text response" in policy.prompts[3]
    assert "Structured output is required" not in policy.prompts[2], "hints are forgotten after use"
    assert_extends_exactly(episode, 1, 0)
    assert_extends_exactly(episode, 2, 0)  # the hint is gone, so the second call is not part of the third's history
    assert_extends_exactly(episode, 3, 2)


def test_text_and_structured_output_at_once(renderer: ChatRenderer) -> None:
    policy = Script(renderer, "It is 5.\n" + call("generate_response", result=5, unit="pears"), "Bye.")
    replies: list[Msg] = []

    async def workflow(task, model):
        agent = agent_of(model)
        replies.append(await agent(user("2 + 3?"), structured_model=Answer))
        replies.append(await agent(user("Bye.")))

    episode = finish(policy, workflow)
    assert replies[0].metadata == {"result": 5, "unit": "pears"}
    assert [said(reply) for reply in replies] == ["It is 5.", "Bye."]
    assert_extends_exactly(episode, 1, None)  # the tool that took the output is gone


@pytest.mark.parametrize(
    ("line", "metadata"),
    [
        (call("generate_structured_output", result=5), {"result": 5, "unit": "apples"}),
        ("So:\n" + call("generate_structured_output", result="5", unit="pears"), {"result": 5, "unit": "pears"}),
        ('{"result": 5}', {"result": 5, "unit": "apples"}),
        (call("generate_structured_output", result="five"), None),
        ("It is 5.", None),
        ("5", None),
        ("null", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_of_the_model_itself(
    renderer: ChatRenderer, line: str, metadata: dict[str, Any] | None, stream: bool
) -> None:
    policy = Script(renderer, line)
    responses: list[ChatResponse] = []

    async def workflow(task, model):
        model.stream = stream
        response = await model([{"role": "user", "content": "2 + 3?"}], structured_model=Answer)
        responses.extend([chunk async for chunk in response] if stream else [response])

    episode = finish(policy, workflow)
    assert responses[-1].metadata == metadata
    assert '"name": "generate_structured_output"' in policy.prompts[0]
    assert "The sum." in policy.prompts[0]
    assert len(episode.calls) == 1


def test_structured_output_of_thousands_of_brackets_is_none(renderer: ChatRenderer) -> None:
    responses: list[ChatResponse] = []

    async def workflow(task, model):
        responses.append(await model([{"role": "user", "content": "2 + 3?"}], structured_model=Answer))

    episode = perform(Script(renderer, "[" * 5000), workflow, SamplingParams(max_tokens=6000))
    assert episode.error is None
    assert responses[0].metadata is None


# ------------------------------------------------------------------------------------------------------ tool choice

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("tool_choice", "kinds"),
    [
        (None, ["text", "tool_use"]),
        ("auto", ["text", "tool_use"]),
        ("required", ["text", "tool_use"]),
        ("add", ["text", "tool_use"]),
        ("none", ["text"]),
    ],
)
def test_tool_choice(renderer: ChatRenderer, tool_choice: str | None, kinds: list[str]) -> None:
    line = "Adding. " + call("add", a=2)
    policy = Script(renderer, line)
    responses: list[ChatResponse] = []

    async def workflow(task, model):
        messages = [{"role": "user", "content": "2 + 3?"}]
        responses.append(await model(messages, tools=TOOLS, tool_choice=tool_choice))

    finish(policy, workflow)
    content = responses[0].content
    assert [block["type"] for block in content] == kinds
    assert content[0]["text"] == (line if kinds == ["text"] else "Adding.")
    if len(content) == 2:
        assert (content[1]["name"], content[1]["input"]) == ("add", {"a": 2})
    assert responses[0].metadata is None


@pytest.mark.parametrize(("tool_choice", "error"), [("subtract", ValueError), ("", ValueError), (3, TypeError)])
def test_a_tool_choice_that_makes_no_sense(renderer: ChatRenderer, tool_choice: Any, error: type[Exception]) -> None:
    async def workflow(task, model):
        with pytest.raises(error) as theirs:
            ChatModelBase("m", stream=False)._validate_tool_choice(tool_choice, TOOLS)
        with pytest.raises(error) as ours:
            await model([{"role": "user", "content": "2 + 3?"}], tools=TOOLS, tool_choice=tool_choice)
        assert str(ours.value) == str(theirs.value)
        await model([{"role": "user", "content": "2 + 3?"}], tools=TOOLS, tool_choice=tool_choice)

    episode = perform(Script(renderer), workflow)
    assert episode.error.kind == error.__name__
    assert episode.calls == []


# -------------------------------------------------------------------------------------------------------- streaming


@pytest.fixture(params=["tags are tokens", "tags are text"])
def any_renderer(request: pytest.FixtureRequest, tiny_model_dir: Path) -> ChatRenderer:
    """Qwen has a token for `<tool_call>`; other models spell it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    if request.param == "tags are tokens":
        return ChatRenderer(tokenizer)
    content = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    spelled = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    spelled.chat_template = tokenizer.chat_template
    assert len(spelled.encode("<tool_call>")) == len("<tool_call>")
    return ChatRenderer(spelled)


LINES = [
    "It is 5.",
    "Let me add.\n" + call("add", a=2, b=3),
    call("add", a=2, b=3) + call("add", a=4, b=5),
    "1 < 2 and 猫 é <b>bold</b> a<b",
    "  spaced  out \n\n text  ",
    "<think>Hm, 2 and 3.</think>It is 5.",
    "<think>cut off",
    'A broken <tool_call>{"name": </tool_call> call',
    "ends in <tool",
    "",
]


@pytest.mark.parametrize("line", LINES)
def test_streamed_chunks_grow_into_the_unstreamed_response(any_renderer: ChatRenderer, line: str) -> None:
    responses: list[ChatResponse] = []
    chunks: list[ChatResponse] = []
    messages = [{"role": "user", "content": "2 + 3?"}]

    async def workflow(task, model):
        responses.append(await model(messages, tools=TOOLS))
        model.stream = True
        assert model.stream
        chunks.extend([chunk async for chunk in await model(messages, tools=TOOLS)])

    episode = finish(Script(any_renderer, line, line), workflow)

    def shown(response: ChatResponse) -> list[dict[str, Any]]:
        return [{key: value for key, value in block.items() if key != "id"} for block in response.content]

    def text(response: ChatResponse) -> str:
        return "".join(block["text"] for block in response.content if block["type"] == "text")

    (unstreamed,) = responses
    assert shown(chunks[-1]) == shown(unstreamed)
    assert chunks[-1].usage.input_tokens == unstreamed.usage.input_tokens == len(episode.calls[1].prompt_ids)
    assert chunks[-1].usage.output_tokens == unstreamed.usage.output_tokens == len(episode.calls[1].completion_ids)
    texts = [text(chunk) for chunk in chunks]
    for before, after in pairwise(texts):
        assert after.startswith(before), "what was shown is not taken back"
    for chunk in chunks[:-1]:
        assert not [block for block in chunk.content if block["type"] == "tool_use"]
        assert "<tool_call" not in text(chunk)
    if line == "It is 5.":
        assert texts == ["I", "It", "It i", "It is", "It is 5", "It is 5.", "It is 5."]
    assert episode.calls[0].completion_ids == episode.calls[1].completion_ids
    assert episode.calls[0].prompt_ids == episode.calls[1].prompt_ids


def test_a_stop_string_is_never_streamed(renderer: ChatRenderer) -> None:
    chunks: list[ChatResponse] = []

    async def workflow(task, model):
        model.stream = True
        messages = [{"role": "user", "content": "2 + 3?"}]
        chunks.extend([chunk async for chunk in await model(messages, stop=["\nUser:"])])

    finish(Script(renderer, "It is 5.\nUser: no"), workflow)
    assert [chunk.content[0]["text"] for chunk in chunks if chunk.content][-1] == "It is 5."
    assert not [chunk for chunk in chunks if "User" in str(chunk.content)]


def test_an_agent_streams(renderer: ChatRenderer) -> None:
    policy = Script(renderer, "Let me add.\n" + call("add", a=2, b=3), "It is 5.", call("add", a=1, b=1), "Enough.")
    replies: list[str] = []
    shown: list[str] = []

    async def workflow(task, model):
        model.stream = True
        agent = agent_of(model, max_iters=3)

        async def watch(self: Any, kwargs: dict[str, Any]) -> None:
            shown.append(said(kwargs["msg"]))

        agent.register_instance_hook("pre_print", "watch", watch)
        replies.append(said(await agent(user("2 + 3?"))))
        agent.max_iters = 1
        replies.append(said(await agent(user("1 + 1?"))))  # ends in a summary, which is streamed too

    episode = finish(policy, workflow)
    assert replies == ["It is 5.", "Enough."]
    assert {"L", "Let", "Let me add.", "It i", "It is 5.", "Enough", "Enough."} <= set(shown)
    assert_extends_exactly(episode, 1, 0)
    assert len(episode.calls) == 4


class Slow(Script):
    """Draws one token after the other."""

    async def sample(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Sample:
        on_token = rest.pop("on_token")
        sample = await super().sample(prompt_ids, params, **rest)
        for token in sample.token_ids if on_token is not None else ():
            await asyncio.sleep(0.002)
            on_token(token)
        return sample


def test_a_stream_that_is_not_read_to_its_end_is_not_sampled_to_its_end(renderer: ChatRenderer) -> None:
    read: list[str] = []

    async def workflow(task, model):
        model.stream = True
        stream = await model([{"role": "user", "content": "2 + 3?"}])
        async for chunk in stream:
            read.append(chunk.content[0]["text"])
            if len(read) == 2:
                break
        await stream.aclose()
        await asyncio.sleep(0.1)
        model.stream = False
        await model([{"role": "user", "content": "2 + 4?"}])

    episode = perform(Slow(renderer, "It is 5.", "It is 6."), workflow)
    assert episode.error is None
    assert read == ["I", "It"]
    assert [recorded.text for recorded in episode.calls] == ["It is 6."]


def test_an_error_reaches_who_reads_the_stream(renderer: ChatRenderer) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/cat.png"}}]}

    async def workflow(task, model):
        model.stream = True
        async for _ in await model([image]):
            pass

    episode = perform(Script(renderer), workflow)
    assert episode.error.kind == "UnsupportedContentError"


# -------------------------------------------------------------------------------------------- knowledge and memory


class Shelf(KnowledgeBase):
    """A knowledge base of one document."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def retrieve(self, query: str, limit: int = 5, score_threshold: float | None = None, **_: Any) -> Any:
        self.asked.append(query)
        content = TextBlock(type="text", text="Apples cost 7.")
        return [Document(DocMetadata(content, doc_id="d", chunk_id=0, total_chunks=1), score=0.9)]

    async def add_documents(self, documents: Any, **_: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rewritten", "asked"),
    [(call("generate_structured_output", rewritten_query="price of apples"), "price of apples"), ("Hm.", "How much?")],
)
def test_queries_are_rewritten_without_streaming(
    renderer: ChatRenderer, stream: bool, rewritten: str, asked: str
) -> None:
    policy = Script(renderer, rewritten, "They cost 7.")
    shelf = Shelf()
    replies: list[str] = []

    async def workflow(task, model):
        model.stream = stream
        replies.append(said(await agent_of(model, knowledge=shelf)(user("How much?"))))
        assert model.stream is stream

    episode = finish(policy, workflow)
    assert shelf.asked == [asked]
    assert replies == ["They cost 7."]
    assert "rewrite the above user query" in policy.prompts[0]
    assert "Apples cost 7." in policy.prompts[1]
    assert len(episode.calls) == 2


def test_memory_is_compressed_by_the_trained_model(renderer: ChatRenderer) -> None:
    summary = {
        "task_overview": "Add.",
        "current_state": "Added 1 and 1.",
        "important_discoveries": "Sums grow.",
        "next_steps": "Add more.",
        "context_to_preserve": "None.",
    }
    policy = Script(renderer, "2.", "4.", call("generate_structured_output", **summary), "6.")
    config = ReActAgent.CompressionConfig(
        enable=True, agent_token_counter=CharTokenCounter(), trigger_threshold=400, keep_recent=1
    )

    async def workflow(task, model):
        agent = agent_of(model, compression_config=config)
        for text in ("1 + 1?", "2 + 2?" + " please" * 40, "3 + 3?"):
            await agent(user(text))

    episode = finish(policy, workflow)
    assert "Sums grow." in policy.prompts[-1]
    assert "1 + 1?" not in policy.prompts[-1]
    assert [c.extends for c in episode.calls] == [None, 0, None, None]


# ------------------------------------------------------------------------------------------------------- formatters


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_every_formatter_carries_tools_and_turns(renderer: ChatRenderer, formatter: type[FormatterBase]) -> None:
    policy = Script(renderer, call("add", a=2, b=3), "It is 5.", call("add", a=5, b=1), "It is 6.")
    replies: list[str] = []

    async def workflow(task, model):
        agent = agent_of(model, formatter=formatter())
        for text in ("2 + 3?", "And 1?"):
            replies.append(said(await agent(user(text))))

    episode = finish(policy, workflow)
    assert replies == ["It is 5.", "It is 6."]
    assert_extends_exactly(episode, 1, 0)
    assert_extends_exactly(episode, 3, 2)
    if formatter in CHAT_FORMATTERS:
        assert_extends_exactly(episode, 2, 1)
    last = policy.prompts[-1]
    places = [last.index(text) for text in ("Add with the tool.", "2 + 3?", "sum=5", "It is 5.", "And 1?", "sum=6")]
    assert places == sorted(places)


@pytest.mark.parametrize("formatter", [OpenAIMultiAgentFormatter, DashScopeMultiAgentFormatter, OpenAIChatFormatter])
def test_two_agents_talk_in_one_episode(renderer: ChatRenderer, formatter: type[FormatterBase]) -> None:
    policy = Script(renderer, "Hello.", "Hi, Ann.", "Again.", "Still here.")

    async def workflow(task, model):
        ann = ReActAgent("Ann", "You are Ann.", model, formatter())
        bob = ReActAgent("Bob", "You are Bob.", model, formatter())
        async with MsgHub([ann, bob], announcement=Msg("host", "Begin.", "assistant")):
            for agent in (ann, bob, ann, bob):
                await agent()

    episode = finish(policy, workflow)
    assert [("You are Ann." in p, "You are Bob." in p) for p in policy.prompts] == [(True, False), (False, True)] * 2
    assert "Hi, Ann." in policy.prompts[2]
    assert "Again." in policy.prompts[3]
    assert len(episode.calls) == 4


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_an_image_ends_the_episode_and_is_named(renderer: ChatRenderer, formatter: type[FormatterBase]) -> None:
    image = ImageBlock(type="image", source=URLSource(type="url", url="https://example.org/cat.png"))
    message = Msg("user", [TextBlock(type="text", text="What is this?"), image], "user")

    async def workflow(task, model):
        await agent_of(model, formatter=formatter())(message)

    episode = perform(Script(renderer), workflow)
    assert episode.error.kind == "UnsupportedContentError"
    assert "holds a block of type `image" in episode.error.message


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_thinking_is_shown_and_not_sent_back(renderer: ChatRenderer, formatter: type[FormatterBase]) -> None:
    policy = Script(renderer, "<think>2 and 3</think>" + call("add", a=2, b=3), "<think>five</think>It is 5.", "Bye.")
    replies: list[Msg] = []

    async def workflow(task, model):
        agent = agent_of(model, formatter=formatter())
        replies.append(await agent(user("2 + 3?")))
        await agent(user("Bye."))

    episode = finish(policy, workflow)
    assert [block["type"] for block in replies[0].content] == ["thinking", "text"]
    assert replies[0].content[0]["thinking"] == "five"
    assert "2 and 3" not in policy.prompts[1]
    assert "five" not in policy.prompts[2]
    assert [c.extends for c in episode.calls] == [None, None, None]
    assert episode.calls[0].text.startswith("<think>2 and 3</think>")


# ---------------------------------------------------------------------------------------------- usage and options


def test_usage_counts_the_recorded_tokens(renderer: ChatRenderer) -> None:
    responses: list[ChatResponse] = []

    async def workflow(task, model):
        messages = [{"role": "user", "content": "2 + 3?"}]
        responses.append(await model(messages))
        messages += [{"role": "assistant", "content": "It is 5."}, {"role": "user", "content": "Sure?"}]
        responses.append(await model(messages))

    episode = finish(Script(renderer, "It is 5.", "Yes."), workflow)
    for response, recorded in zip(responses, episode.calls, strict=True):
        assert response.usage.input_tokens == len(recorded.prompt_ids)
        assert response.usage.output_tokens == len(recorded.completion_ids)
        assert 0 <= response.usage.time < 10
    assert responses[0].id != responses[1].id
    for response in (*responses, ChatResponse(content=[])):  # written as AgentScope itself writes them
        assert datetime.strptime(response.created_at, "%Y-%m-%d %H:%M:%S.%f") <= datetime.now()
        assert re.fullmatch(re.escape(response.created_at[:-6]) + r".{6}_[0-9a-f]{6}", response.id)
    assert responses[1].usage.output_tokens == len("Yes.") + 1
    assert responses[1].usage.input_tokens > responses[0].usage.input_tokens + responses[0].usage.output_tokens


BASE = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, max_tokens=20, stop=("STOP",))


def sampled_with(renderer: ChatRenderer, line: str, base: SamplingParams, **options: Any) -> tuple[Script, Episode]:
    policy = Script(renderer, line)

    async def workflow(task, model):
        await model([{"role": "user", "content": "2 + 3?"}], **options)

    return policy, perform(policy, workflow, params=base)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.9, 0.95, 40, 20, ("STOP",))),
        ({"temperature": 0.3, "top_p": 0.5, "top_k": 3, "max_tokens": 7}, (0.3, 0.5, 3, 7, ("STOP",))),
        ({"max_completion_tokens": 5}, (0.9, 0.95, 40, 5, ("STOP",))),
        ({"max_tokens": 9999}, (0.9, 0.95, 40, 20, ("STOP",))),
        ({"stop": "END"}, (0.9, 0.95, 40, 20, ("STOP", "END"))),
        ({"stop": ["a", "b"], "top_k": 0}, (0.9, 0.95, 0, 20, ("STOP", "a", "b"))),
        ({"temperature": 0}, (0.0, 0.95, 40, 20, ("STOP",))),
        ({"temperature": None, "top_p": None, "stop": None, "seed": None}, (0.9, 0.95, 40, 20, ("STOP",))),
    ],
)
def test_options_of_one_call(renderer: ChatRenderer, options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    policy, episode = sampled_with(renderer, "It is 5.", BASE, **options)
    assert episode.error is None, episode.error
    (params,) = policy.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.stop) == expected
    (recorded,) = episode.calls
    assert (recorded.temperature, recorded.top_p, recorded.top_k) == expected[:3]
    assert recorded.trainable is (expected[0] > 0)


def test_greedy_evaluation_stays_greedy_whatever_an_agent_asks_for(renderer: ChatRenderer) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    policy, episode = sampled_with(renderer, "It is 5.", greedy, temperature=1.0, top_p=0.5, top_k=2, max_tokens=3)
    (params,) = policy.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.0, 1.0, 0, 3)
    assert episode.calls[0].text == "It "


def test_max_tokens_cuts_and_a_stop_string_ends(renderer: ChatRenderer) -> None:
    _, episode = sampled_with(renderer, "It is 5.", BASE, max_tokens=4)
    (cut,) = episode.calls
    assert (cut.text, cut.finish_reason, len(cut.completion_ids)) == ("It i", "length", 4)
    assert cut.completion_ids[-1] != renderer.tokenizer.eos_token_id
    _, episode = sampled_with(renderer, "It is 5. STOP END", BASE, stop=["END", "is"])
    (stopped,) = episode.calls
    assert stopped.text == "It "
    assert renderer.decode(stopped.completion_ids).startswith("It is 5. STOP"), "what was sampled is kept whole"


def test_every_call_has_random_numbers_of_its_own(renderer: ChatRenderer) -> None:
    def seeds() -> list[int]:
        policy = Script(renderer, *"abc")

        async def workflow(task, model):
            for _ in range(3):
                await model([{"role": "user", "content": "2 + 3?"}])

        finish(policy, workflow)
        return [params.seed for params in policy.params]

    first = seeds()
    assert len(set(first)) == 3
    assert seeds() == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presence_penalty": 0.5}, "a trained model does not honour `presence_penalty`; it takes max_compl"),
        ({"temperatur": 0.5}, "does not honour `temperatur`"),
        ({"seed": 3}, "does not honour `seed`"),
        ({"temperature": -1}, "sampling options are out of range: {'temperature': -1}"),
        ({"top_p": 0}, "out of range"),
        ({"top_k": -1}, "out of range"),
        ({"max_tokens": 0}, "out of range"),
        ({"temperature": float("nan")}, "out of range"),
    ],
)
def test_options_that_cannot_be_honoured_end_the_run(
    renderer: ChatRenderer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sampled_with(renderer, "It is 5.", BASE, **options)
    assert message in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- console


async def speaks(task: Any, model: Any) -> None:
    await agent_of(model)(user("2 + 3?"))


@pytest.mark.parametrize("before", [None, "false", "true"])
def test_agents_are_silent_inside_and_the_switch_is_put_back(
    renderer: ChatRenderer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if before is not None:
        monkeypatch.setenv(SWITCH, before)
    inside: list[str | None] = []

    async def workflow(task, model):
        inside.append(os.environ.get(SWITCH))
        await speaks(task, model)

    finish(Script(renderer, "Let me see. " + call("add", a=2, b=3), "It is 5."), workflow)
    assert inside == ["true"]
    assert os.environ.get(SWITCH) == before
    assert capsys.readouterr().out == ""


def test_agents_outside_speak_as_ever(
    renderer: ChatRenderer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    model = model_of(Script(renderer, "It is 5."), SamplingParams(max_tokens=64))
    asyncio.run(speaks({}, ModelTuner(Recorder(model, episode_id="outside", seed=0))))
    assert "Friday: It is 5." in capsys.readouterr().out


def test_the_switch_is_put_back_when_the_run_ends_with_an_error(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    with pytest.raises(ConfigError):
        sampled_with(renderer, "It is 5.", BASE, top_p=7)
    assert SWITCH not in os.environ


# ------------------------------------------------------------------------------- AgentScope's own tuning functions
#
# As AgentScope publishes them, with one import changed. Its GSM8K reward comes from Trinity-RFT; this one also pays
# for plain letters, so that a model of random weights has something to learn.


class GSM8KResponseStructure(BaseModel):
    """Response structure for GSM8K tasks."""

    result: str = Field(
        description=(
            "Your solution of the given math problem. Put your final answer in boxed format, e.g., \\boxed{42}"
        ),
    )


def gsm8k_reward(response: str, truth: str) -> dict[str, float]:
    letters = sum(letter.isascii() and letter.isalnum() for letter in response)
    return {"accuracy": float(f"\\boxed{{{truth}}}" in response), "format_score": letters / (len(response) + 1)}


SYS_PROMPT = (
    "You are an agent specialized in solving math problems with tools. "
    "Please solve the math problem given to you. You can write and "
    "execute Python code to perform calculation or verify your answer. "
    "You should return your final answer within \\boxed{{}}."
)


async def run_react_agent_1(task: Dict, model: TrinityChatModel) -> float:  # noqa: UP006
    """A workflow function that computes its reward."""
    agent = ReActAgent(
        name="react_agent",
        sys_prompt=SYS_PROMPT,
        model=model,
        enable_meta_tool=True,
        formatter=OpenAIChatFormatter(),
    )
    response = await agent.reply(
        msg=Msg("user", task["question"], role="user"),
        structured_model=GSM8KResponseStructure,
    )
    truth = task["answer"].split("####")[1].strip()
    result = response.metadata["result"] if response.metadata else response.get_text_content() or ""
    reward = gsm8k_reward(response=result, truth=truth)
    return sum(reward.values())


async def run_react_agent_2(
    task: Dict,  # noqa: UP006
    model: OpenAIChatModel,
    auxiliary_models: Dict[str, OpenAIChatModel] | None = None,  # noqa: UP006
) -> WorkflowOutput:
    """A workflow function that leaves the reward to a judge."""
    assert auxiliary_models is None or len(auxiliary_models) == 0, "No auxiliary models are used in this workflow."
    agent = ReActAgent(
        name="react_agent",
        sys_prompt=SYS_PROMPT,
        model=model,
        enable_meta_tool=True,
        formatter=OpenAIChatFormatter(),
    )
    response = await agent.reply(
        msg=Msg("user", task["question"], role="user"),
    )
    return WorkflowOutput(
        response=response,
    )


async def gsm8k_judge(
    task: Dict,  # noqa: UP006
    response: Msg,
    auxiliary_models: Dict[str, OpenAIChatModel] | None = None,  # noqa: UP006
) -> JudgeOutput:
    """A judge function that compares the boxed answer."""
    assert auxiliary_models is None or len(auxiliary_models) == 0, "No auxiliary models are used in this workflow."
    truth = task["answer"]
    if isinstance(truth, str) and "####" in truth:  # noqa: SIM108  # as published
        truth = truth.split("####")[1].strip()
    else:
        truth = str(truth)
    result = response.get_text_content()
    reward_dict = gsm8k_reward(response=result or "", truth=truth)
    return JudgeOutput(
        reward=sum(reward_dict.values()),
        metrics=reward_dict,
    )


def tune_as_published(model: Path, tmp_path: Path, *, steps: int, **functions: Any) -> TuneResult:
    data = tmp_path / "gsm8k"
    data.mkdir()
    rows = [
        {"question": f"Ann has {n} apples and buys {n}. How many?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        for n in range(2, 2 + 2 * steps)
    ]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tune(
        **functions,
        train_dataset=DatasetConfig(path=str(data), split="train"),
        model=TunerModelConfig(model_path=str(model), max_model_len=3000, max_tokens=8, temperature=1.0),
        algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=4, learning_rate=1e-6, batch_size=2),
        monitor_type="tensorboard",
        overrides=[f"output_dir={tmp_path / 'runs'}", "engine.threads=1", "engine.kv_cache_gb=0.2"],
    )


def episodes_of(result: TuneResult) -> Iterator[dict[str, Any]]:
    for path in sorted((result.run_dir / "episodes").glob("train_*.jsonl")):
        yield from read_episodes(path)


def assert_was_trained(result: TuneResult, model: Path, tmp_path: Path, *, steps: int) -> None:
    assert result.run_dir.parent == tmp_path / "runs"
    assert [metrics.step for metrics in result.history] == list(range(1, steps + 1))
    for metrics in result.history:
        assert metrics.episodes >= 8
        assert metrics.episodes_failed == 0
        assert metrics.tokens_trained > 0
        assert metrics.reward_std > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, result.checkpoint))
    moved = [name for name in before if not before[name].equal(after[name])]
    assert moved, "no weight changed"
    events = EventAccumulator(str(result.run_dir / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert shown == [(metrics.step, pytest.approx(metrics.reward_mean)) for metrics in result.history]


def test_agentscopes_first_style_is_trained(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tune_as_published(tiny_model_dir, tmp_path, steps=1, workflow_func=run_react_agent_1)
    assert_was_trained(result, tiny_model_dir, tmp_path, steps=1)
    for episode in episodes_of(result):
        # The model of random weights calls no tool: ten rounds of asking for one, and a summary.
        assert len(episode["calls"]) == 11
        assert "Structured output is required" in str(episode["calls"][1]["messages"])
    assert "react_agent:" not in capsys.readouterr().out


def test_agentscopes_second_style_is_trained(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = {"workflow_func": run_react_agent_2, "judge_func": gsm8k_judge}
    result = tune_as_published(tiny_model_dir, tmp_path, steps=2, **functions)
    assert_was_trained(result, tiny_model_dir, tmp_path, steps=2)
    for metrics in result.history:
        assert 0 < metrics.extra["judge/format_score"] == pytest.approx(metrics.reward_mean)
        assert metrics.extra["judge/accuracy"] == 0
    for episode in episodes_of(result):
        assert len(episode["calls"]) == 1
        (one,) = episode["calls"]
        assert len(one["completion_ids"]) <= 8
        assert one["temperature"] == 1.0
    assert "react_agent:" not in capsys.readouterr().out
