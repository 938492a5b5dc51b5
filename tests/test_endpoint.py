"""The endpoint: any client of OpenAI's chat completions drives a trained role, and every token is recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted_tools import Script
from transformers import AutoTokenizer

from agentscope_tuner import Endpoint, ModelTuner, TunerModelConfig
from agentscope_tuner.chat import ChatRenderer, parse_reply, write_reply
from agentscope_tuner.config import EngineConfig, TunerConfig, WorkflowConfig
from agentscope_tuner.engine.models import load_model
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.errors import ConfigError, RoleError
from agentscope_tuner.policy import Policy, Sample, SamplingParams
from agentscope_tuner.recorder import PolicyModel, Recorder
from agentscope_tuner.reporting import RunFolder
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedPolicy
from agentscope_tuner.types import Episode, Task
from agentscope_tuner.workflow import WorkflowRunner

HELLO = [{"role": "user", "content": "Hello."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "description": "Add two numbers.",
    },
}
Work = Callable[[ModelTuner], Awaitable[Any]]


@pytest.fixture(scope="module")
def renderer(tiny_model_dir: Path) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny_model_dir))


class PlacedScript(Script):
    """Says one line after the other, with log-probabilities that tell places apart."""

    async def sample(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Sample:
        sample = await super().sample(prompt_ids, params, **rest)
        logprobs = [-0.25 * (place + len(self.params)) for place in range(len(sample.token_ids))]
        return Sample(sample.token_ids, logprobs, sample.finish_reason, 7)


class Stuck(ScriptedPolicy):
    """Draws a few tokens, and then nothing, until its episode ends or its caller gives up."""

    def __init__(self, renderer: ChatRenderer, tokens: int = 5) -> None:
        super().__init__(renderer, lambda prompt, episode_id: "never")
        self._renderer = renderer
        self.tokens = tokens
        self.waiting: dict[str, list[asyncio.Future[Sample]]] = {}
        self.cancelled = 0
        self.asked = asyncio.Event()

    def close_episode(self, episode_id: str) -> None:
        for future in self.waiting.pop(episode_id, []):
            future.cancel()

    async def sample(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Sample:
        for token in self._renderer.encode("Hello"[: self.tokens]) if rest["on_token"] else ():
            rest["on_token"](token)
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(rest["episode_id"], []).append(future)
        self.asked.set()
        try:
            return await future
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def model_of(policy: Policy, renderer: ChatRenderer, **params: Any) -> PolicyModel:
    end = frozenset([renderer.tokenizer.eos_token_id])
    return PolicyModel(policy, renderer, end, "tiny", SamplingParams(**{"max_tokens": 256, **params}))


def play(model: PolicyModel, work: Work, *, episodes: int = 1, **config: Any) -> list[Episode]:
    """Run episodes that do `work`, after which nothing may be left over."""

    async def workflow(task, model) -> float:
        await work(model)
        return 1.0

    async def group() -> list[Episode]:
        rollout = Rollout(WorkflowRunner(workflow), None, model, WorkflowConfig(**{"timeout_s": 60, **config}), 0, {})
        async with aclosing(rollout):
            (one,) = await rollout.run([Task(main_query="Go.")], episodes, phase="test")
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return one.episodes

    return asyncio.run(group())


def finish(policy: Policy, renderer: ChatRenderer, work: Work, **options: Any) -> Episode:
    """One episode that ends well."""
    (episode,) = play(model_of(policy, renderer), work, **options)
    assert episode.error is None, episode.error.traceback or episode.error
    return episode


def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


async def create(model: ModelTuner, messages: Any = HELLO, **options: Any) -> ChatCompletion:
    endpoint = model.endpoint()
    async with client_of(endpoint) as client:
        return await client.chat.completions.create(model=endpoint.model, messages=messages, **options)


async def stream(model: ModelTuner, messages: Any = HELLO, **options: Any) -> list[ChatCompletionChunk]:
    endpoint = model.endpoint()
    async with client_of(endpoint) as client:
        options = {"model": endpoint.model, "messages": messages, "stream": True, **options}
        async with await client.chat.completions.create(**options) as chunks:
            return [chunk async for chunk in chunks]


async def post(
    endpoint: Endpoint, body: Any, key: str | None = None, path: str = "/chat/completions"
) -> httpx.Response:
    """A request as it is, and the check that errors have OpenAI's form."""
    headers = {
        "Authorization": f"Bearer {endpoint.api_key if key is None else key}",
        "Content-Type": "application/json",
    }
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(endpoint.base_url + path, content=content, headers=headers)
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/json"
        (error,) = response.json().values()
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == ("invalid_request_error" if response.status_code < 500 else "server_error")
        assert endpoint.api_key not in response.text
    return response


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


# ------------------------------------------------------------------------------------------------------ answers


def test_an_answer_is_what_was_recorded(renderer: ChatRenderer) -> None:
    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        response = await post(endpoint, {"model": "tiny", "messages": HELLO})
        # Stricter than the client, which constructs its types without a look at the values.
        answers.append(ChatCompletion.model_validate(response.json(), strict=True))

    answers: list[ChatCompletion] = []
    episode = finish(PlacedScript(renderer, "It is 5."), renderer, work)
    ((answer,), (call,)) = (answers, episode.calls)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "It is 5.")
    assert (choice.finish_reason, choice.logprobs, choice.message.tool_calls) == ("stop", None, None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(call.prompt_ids)
    assert answer.usage.completion_tokens == len(call.completion_ids) == len("It is 5.") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint == "policy-version-7"
    assert (call.role, call.text) == ("default", "It is 5.")
    assert renderer.decode(call.prompt_ids).endswith("Hello.<|im_end|>\n<|im_start|>assistant\n")


def test_a_stream_is_what_was_recorded(renderer: ChatRenderer) -> None:
    got: list[str] = []

    async def work(model: ModelTuner) -> None:
        body = {"model": "tiny", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        response = await post(model.endpoint(), body)
        assert response.headers["content-type"].startswith("text/event-stream")
        got.extend(response.text.removesuffix("\n\n").split("\n\n"))

    episode = finish(PlacedScript(renderer, "Fünf - 五."), renderer, work)
    assert got.pop() == "data: [DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True) for event in got]
    assert text_of(chunks) == episode.calls[0].text == "Fünf - 五."
    assert len(chunks) > 8, "text is sent as it grows"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(episode.calls[0].completion_ids)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_and_answered(renderer: ChatRenderer, streamed: bool) -> None:
    policy = PlacedScript(renderer, "Let me see. " + write_reply("", [("add", {"a": 2, "b": "é"})]), "It is 5.")
    seen: list[Any] = []

    async def work(model: ModelTuner) -> None:
        messages: list[Any] = list(HELLO)
        if streamed:
            chunks = await stream(model, messages, tools=[ADD])
            (delta,) = [c.delta for chunk in chunks for c in chunk.choices if c.delta.tool_calls]
            seen.append((text_of(chunks), chunks[-1].choices[0].finish_reason))
            (call,) = delta.tool_calls or ()
            assert call.index == 0
            calls = [call.model_dump(exclude={"index"})]
            messages.append({"role": "assistant", "content": text_of(chunks), "tool_calls": calls})
        else:
            (choice,) = (await create(model, messages, tools=[ADD], tool_choice="auto")).choices
            seen.append((choice.message.content, choice.finish_reason))
            messages.append(choice.message)
            (call,) = choice.message.tool_calls or ()
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
            "function",
            "add",
            {"a": 2, "b": "é"},
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        answer = await create(model, messages, tools=[ADD])
        seen.append(answer.choices[0].message.content)

    episode = finish(policy, renderer, work)
    assert seen == [("Let me see.", "tool_calls"), "It is 5."]
    first, second = episode.calls
    assert first.tools == [ADD]
    assert list(first.tools[0]["function"]) == ["name", "parameters", "description"], "as the client wrote it"
    assert second.extends == 0
    beginning = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(beginning)] == beginning


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}, "none"])
def test_tool_choice(renderer: ChatRenderer, choice: Any) -> None:
    line = write_reply("", [("add", {"a": 2})])

    async def work(model: ModelTuner) -> None:
        message = (await create(model, tools=[ADD], tool_choice=choice)).choices[0].message
        assert bool(message.tool_calls) is (choice != "none")
        assert message.content == (line if choice == "none" else None)
        chunks = await stream(model, tools=[ADD], tool_choice=choice)
        assert text_of(chunks) == (line if choice == "none" else "")

    finish(PlacedScript(renderer, line, line), renderer, work)


def test_a_tool_call_of_half_characters_can_be_sent_back(renderer: ChatRenderer) -> None:
    line = '<tool_call>\n{"name": "a\\ud800", "arguments": {"a": "\\udc00"}}\n</tool_call>'

    async def work(model: ModelTuner) -> None:
        for options in ({}, {"tools": [ADD]}):
            message = (await create(model, **options)).choices[0].message
            await create(model, [*HELLO, message], **options)

    finish(PlacedScript(renderer, line, "Fine.", line, "Fine."), renderer, work)


def test_three_choices_are_three_calls(renderer: ChatRenderer) -> None:
    async def work(model: ModelTuner) -> None:
        answer = await create(model, n=3)
        assert [(c.index, c.message.content) for c in answer.choices] == [(0, "a"), (1, "bb"), (2, "ccc")]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 + 3 + 4
        chunks = await stream(model, n=3, stream_options={"include_usage": True})
        assert [text_of(chunks, i) for i in range(3)] == ["dddd", "e", "ff"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
        assert chunks[-1].usage.completion_tokens == 5 + 2 + 3

    policy = PlacedScript(renderer, "a", "bb", "ccc", "dddd", "e", "ff")
    episode = finish(policy, renderer, work)
    assert [call.text for call in episode.calls] == ["a", "bb", "ccc", "dddd", "e", "ff"]
    assert len({params.seed for params in policy.params}) == 6


def test_logprobs_are_the_recorded_ones(renderer: ChatRenderer) -> None:
    found: list[list[Any]] = []

    async def work(model: ModelTuner) -> None:
        answer = await create(model, logprobs=True, top_logprobs=0)
        found.append(answer.choices[0].logprobs.content)
        chunks = await stream(model, logprobs=True)
        pieces = [chunk.choices[0].logprobs for chunk in chunks]
        found.append([token for piece in pieces if piece for token in piece.content])

    episode = finish(PlacedScript(renderer, "So é.", "So é."), renderer, work)
    for tokens, call in zip(found, episode.calls, strict=True):
        assert [token.logprob for token in tokens] == call.logprobs
        assert [token.token for token in tokens] == [renderer.decode([i]) for i in call.completion_ids]
        assert bytes(tokens[0].bytes) == b"S"
        assert tokens[3].bytes is None, "half of a character"
        assert tokens[-1].token == "<|im_end|>"


def test_stop_strings_end_the_text_and_are_recorded(renderer: ChatRenderer) -> None:
    async def work(model: ModelTuner) -> None:
        assert (await create(model, stop="STOP")).choices[0].message.content == "One"
        assert text_of(await stream(model, stop=["STOP", "never"])) == "One"

    episode = finish(PlacedScript(renderer, "One STOP two", "One STOP two"), renderer, work)
    for call in episode.calls:
        assert renderer.decode(call.completion_ids).startswith("One STOP")


def test_sampling_options_reach_the_policy(renderer: ChatRenderer) -> None:
    policy = PlacedScript(renderer, "One two", "One", "One")

    async def work(model: ModelTuner) -> None:
        answer = await create(model, temperature=0.5, top_p=0.9, max_tokens=3, user="me", presence_penalty=0)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("One", "length")
        await create(model, max_completion_tokens=9, extra_body={"top_k": 5})
        await create(model, temperature=None, stop=None, tools=None, n=None, logprobs=None, seed=None)

    finish(policy, renderer, work)
    shown = [(p.temperature, p.top_p, p.top_k, p.max_tokens) for p in policy.params]
    assert shown == [(0.5, 0.9, 0, 3), (1.0, 1.0, 5, 9), (1.0, 1.0, 0, 256)]


def test_all_forms_of_messages(renderer: ChatRenderer) -> None:
    policy = PlacedScript(renderer, "Fine.")
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Three", "name": "Ann"},
    ]
    finish(policy, renderer, lambda model: create(model, messages))
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [
        ("system", "Be kind."), ("user", "One\ntwo"), ("assistant", ""), ("user", "Three"),
    ])  # fmt: skip
    assert policy.prompts == [said + "<|im_start|>assistant\n"]


THOUGHT = "<think>2 and 3</think>\n\nIt is 5."


@pytest.mark.parametrize("opens", [False, True])
def test_thinking_is_not_text(renderer: ChatRenderer, tiny_model_dir: Path, opens: bool) -> None:
    line = THOUGHT
    if opens:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
        tokenizer.chat_template += "{%- if add_generation_prompt %}<think>\n{% endif %}"
        renderer, line = ChatRenderer(tokenizer), THOUGHT.removeprefix("<think>")

    async def work(model: ModelTuner) -> None:
        message = (await create(model)).choices[0].message
        assert (message.content, message.model_extra) == ("It is 5.", {"reasoning_content": "2 and 3"})
        chunks = await stream(model)
        assert text_of(chunks) == "It is 5."
        extras = [chunk.choices[0].delta.model_extra for chunk in chunks]
        assert [extra for extra in extras if extra] == [{"reasoning_content": "2 and 3"}]

    episode = finish(PlacedScript(renderer, line, line), renderer, work)
    assert episode.calls[0].text == line


@pytest.mark.parametrize("line", ["2 and 3</think>It is 5.", " 2 and 3 \n</think>\n\nIt is 5. "])
def test_text_that_turns_out_to_be_thinking_is_not_taken_back(renderer: ChatRenderer, line: str) -> None:
    async def work(model: ModelTuner) -> None:
        assert text_of(await stream(model)) == told(line, streamed=True)

    finish(PlacedScript(renderer, line), renderer, work)


def test_a_broken_tool_call_is_streamed_as_text(renderer: ChatRenderer) -> None:
    line = "Well. <tool_call>\n{nonsense\n</tool_call>"

    async def work(model: ModelTuner) -> None:
        chunks = await stream(model, tools=[ADD])
        assert text_of(chunks) == line
        assert chunks[-1].choices[0].finish_reason == "stop"

    finish(PlacedScript(renderer, line), renderer, work)


def test_models(renderer: ChatRenderer) -> None:
    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint(name="gpt-like")
        assert endpoint.model == "gpt-like"
        async with client_of(endpoint) as client:
            assert [one.id async for one in client.models.list()] == ["gpt-like"]
            answer = await client.chat.completions.create(model="gpt-like", messages=HELLO)
            assert answer.model == "gpt-like"

    finish(PlacedScript(renderer, "Fine."), renderer, work)


# ----------------------------------------------------------------------------------------------- refused requests

FINE = {"model": "tiny", "messages": HELLO}


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        (b"{", 400, None, "not valid JSON"),
        (b"", 400, None, "not valid JSON"),
        (b"[" * 100_000, 400, None, "not valid JSON"),
        (b"[]", 400, None, "malformed"),
        (b"\xff", 400, None, "not valid JSON"),
        ({"messages": HELLO}, 400, "model", "Field required"),
        ({"model": "tiny"}, 400, "messages", "Field required"),
        ({**FINE, "messages": []}, 400, "messages", "at least 1"),
        ({**FINE, "messages": "Hello"}, 400, "messages", "valid list"),
        ({**FINE, "messages": ["Hello"]}, 400, "messages[0]", "valid dictionary"),
        ({**FINE, "messages": [{"role": "king", "content": ""}]}, 400, "messages[0].role", "'user'"),
        ({**FINE, "messages": [{"role": "user"}]}, 400, "messages[0]", "a `user` message needs `content`"),
        ({**FINE, "messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "valid string"),
        ({**FINE, "messages": [{**HELLO[0], "audio": {"id": 1}}]}, 400, "messages[0]", "cannot read `audio`"),
        (
            {**FINE, "messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]},
            400, "messages[0].tool_calls[0].function", "Field required",
        ),
        (
            {**FINE, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            400, "messages", "a block of type `image_url`",
        ),
        ({**FINE, "model": "gpt-5"}, 404, "model", "this API key is for `tiny`"),
        ({**FINE, "temperature": "hot"}, 400, "temperature", "valid number"),
        ({**FINE, "temperature": -1}, 400, None, "out of range"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": ""}], "temperature": NaN}', 400, None, "out of"),
        ({**FINE, "top_p": 0}, 400, None, "out of range"),
        ({**FINE, "max_tokens": 0}, 400, None, "out of range"),
        ({**FINE, "max_tokens": 1.5}, 400, "max_tokens", "valid integer"),
        ({**FINE, "n": 0}, 400, "n", "greater than or equal to 1"),
        ({**FINE, "n": 1000}, 400, "n", "less than or equal to 128"),
        ({**FINE, "stream": "yes"}, 400, "stream", "valid boolean"),
        ({**FINE, "stream_options": {"include_usage": True}}, 400, "stream_options", "no effect without `stream`"),
        ({**FINE, "stop": ""}, 400, "stop", "at least 1 character"),
        ({**FINE, "stop": ["a", 5]}, 400, "stop", "valid string"),
        ({**FINE, "tools": [{"type": "search"}]}, 400, "tools[0].type", "'function'"),
        ({**FINE, "tools": [{"type": "function"}]}, 400, "tools[0].function", "Field required"),
        ({**FINE, "tool_choice": "required"}, 400, "tool_choice", "there are no `tools`"),
        (
            {**FINE, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            400, "tool_choice", "names `sub`, which is not in `tools` (add)",
        ),
        ({**FINE, "top_logprobs": 2}, 400, "top_logprobs", "use `logprobs` alone"),
        ({**FINE, "seed": 3}, 400, "seed", "is not supported by a trained model, got 3"),
        ({**FINE, "response_format": {"type": "json_object"}}, 400, "response_format", "ask for a tool call"),
        ({**FINE, "presence_penalty": 0.5}, 400, "presence_penalty", "got 0.5; remove it"),
        ({**FINE, "parallel_tool_calls": False}, 400, "parallel_tool_calls", "answer the first call only"),
        ({**FINE, "functions": [{}]}, 400, "functions", "use `tools`"),
        ({**FINE, "temprature": 1}, 400, "temprature", "`temprature` is not supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_cannot_be_served(
    renderer: ChatRenderer, streamed: bool, body: Any, status: int, param: str | None, message: str
) -> None:
    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        given = (
            {"stream": True, **body} if streamed and isinstance(body, dict) and "stream_options" not in body else body
        )
        response = await post(endpoint, given)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert message in error["message"]
        assert (await post(endpoint, FINE)).status_code == 200, "the episode goes on"

    (call,) = finish(PlacedScript(renderer, "Fine."), renderer, work).calls
    assert call.text == "Fine."


def test_other_routes(renderer: ChatRenderer) -> None:
    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        for path in ("/responses", "/completions", "/../docs", "/models"):
            response = await post(endpoint, FINE, path=path)
            assert response.status_code == (405 if path == "/models" else 404)
            assert "is not served; use `POST /v1/chat/completions`" in response.json()["error"]["message"]
        await create(model)

    finish(PlacedScript(renderer, "Fine."), renderer, work)


def test_a_template_that_refuses(renderer: ChatRenderer, tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template += (
        "{%- if messages[0].role == 'tool' %}{{ raise_exception('Begin otherwise.') }}{% endif %}"
    )

    async def work(model: ModelTuner) -> None:
        response = await post(model.endpoint(), {**FINE, "messages": [{"role": "tool", "content": "5"}]})
        assert response.status_code == 400
        assert response.json()["error"]["message"].endswith("chat template refuses these messages: Begin otherwise.")
        await create(model)

    strict = ChatRenderer(tokenizer)
    finish(PlacedScript(strict, "Fine."), strict, work)


def test_what_nobody_foresaw(renderer: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Script):
        async def sample(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Sample:
            if "Break" in self.renderer.decode(prompt_ids):
                if rest["on_token"]:
                    rest["on_token"](50)
                raise RuntimeError("out of memory")
            return await super().sample(prompt_ids, params, **rest)

    messages = [{"role": "user", "content": "Break."}]

    async def work(model: ModelTuner) -> None:
        with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
            await create(model, messages)
        with pytest.raises(openai.APIError, match="RuntimeError: out of memory"):
            await stream(model, messages)
        await create(model)

    finish(Broken(renderer, "Fine."), renderer, work)
    assert [(r.name, r.exc_info is not None) for r in caplog.records if r.levelno >= logging.ERROR] == [
        ("agentscope_tuner.endpoint.server", True)
    ] * 2
    assert "Bearer" not in caplog.text


# ------------------------------------------------------------------------------------------------ keys and episodes


def test_keys(renderer: ChatRenderer) -> None:
    keys: list[Endpoint] = []

    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        async with httpx.AsyncClient(timeout=60) as client:
            for headers in ({}, {"Authorization": endpoint.api_key}, {"Authorization": "Basic abc"}):
                response = await client.post(f"{endpoint.base_url}/chat/completions", json=FINE, headers=headers)
                assert response.status_code == 401
                assert "send the endpoint's as `Authorization: Bearer" in response.json()["error"]["message"]
        for key in ("nonsense", endpoint.api_key[:-1], endpoint.api_key + "x"):
            response = await post(endpoint, FINE, key)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        for old in keys:  # of the episode before, which is over
            response = await post(endpoint, FINE, old.api_key)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "expired_api_key")
            assert "its episode is over" in response.json()["error"]["message"]
            with pytest.raises(openai.AuthenticationError):
                async with client_of(old) as client:
                    await client.models.list()
        assert (await post(endpoint, FINE)).status_code == 200
        assert endpoint.api_key not in repr(endpoint)
        keys.append(endpoint)

    policy = PlacedScript(renderer, "One.", "Two.")
    episodes = play(model_of(policy, renderer), work, episodes=2, max_concurrency=1)
    assert [[call.text for call in episode.calls] for episode in episodes] == [["One."], ["Two."]]
    assert keys[0].base_url == keys[1].base_url, "one server for all episodes"
    assert len({endpoint.api_key for endpoint in keys}) == 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", httpx.URL(keys[0].base_url).port))


def test_no_key_is_written_down(renderer: ChatRenderer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys: list[str] = []

    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        keys.append(endpoint.api_key)
        await post(endpoint, FINE)
        response = await post(endpoint, {**FINE, "model": "other"})
        response.raise_for_status()

    (episode,) = play(model_of(PlacedScript(renderer, "Fine."), renderer), work)
    assert episode.error is not None
    assert episode.error.kind == "HTTPStatusError"
    folder = RunFolder(tmp_path / "run")
    folder.prepare(TunerConfig(experiment_name="run", model=TunerModelConfig(model_path="tiny-agent")))
    with folder:
        folder.write_episode(episode, phase="train", step=1)
    written = "".join(path.read_text() for path in folder.path.rglob("*") if path.is_file())
    assert "Fine." in written
    own = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert keys[0] not in written + "".join(own)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_episode_that_ends_meanwhile(renderer: ChatRenderer, streamed: bool) -> None:
    """The workflow's time is up, while a client in another task still waits for its answer."""
    policy = Stuck(renderer)
    seen: list[Any] = []
    late: list[asyncio.Task[None]] = []

    async def ask(endpoint: Endpoint) -> None:
        async with client_of(endpoint) as client:
            options: dict[str, Any] = {"model": endpoint.model, "messages": HELLO}
            try:
                if streamed:
                    async for chunk in await client.chat.completions.create(stream=True, **options):
                        seen.append(chunk.choices[0].delta.content)
                else:
                    await client.chat.completions.create(**options)
            except openai.APIError as exc:
                seen.append(exc)

    async def workflow(task, model) -> float:
        late.append(asyncio.ensure_future(ask(model.endpoint())))
        await policy.asked.wait()
        if streamed:
            while len(seen) < 6:  # the role, and five letters
                await asyncio.sleep(0)
        return 1.0

    async def run() -> Episode:
        rollout = Rollout(WorkflowRunner(workflow), None, model_of(policy, renderer), WorkflowConfig(), 0, {})
        async with aclosing(rollout):
            (group,) = await rollout.run([Task(main_query="Go.")], 1, phase="test")
            await late[0]
        return group.episodes[0]

    episode = asyncio.run(run())
    assert episode.calls == [], "what was cut off is not recorded"
    assert policy.cancelled == 1
    error = seen.pop()
    assert "is over; its API keys have expired" in str(error)
    assert error.code == "expired_api_key"
    assert isinstance(error, openai.APIError if streamed else openai.AuthenticationError)
    assert seen == (["", *"Hello"] if streamed else [])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_client_that_goes_away_takes_its_call_with_it(renderer: ChatRenderer, streamed: bool, tokens: int) -> None:
    policy = Stuck(renderer, tokens)

    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        body = {**FINE, "stream": streamed, "n": 2}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(timeout=60) as client:
            request = client.build_request("POST", f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
            asking = asyncio.ensure_future(client.send(request, stream=True))
            await policy.asked.wait()
            if streamed and tokens:
                await (await asking).aclose()
            else:
                asking.cancel()
            while policy.cancelled < 2:
                await asyncio.sleep(0.001)

    (episode,) = play(model_of(policy, renderer), work)
    assert episode.error is not None
    assert episode.error.kind == "NoTrainedCallError"


def test_choices_that_nobody_received_are_not_recorded(renderer: ChatRenderer) -> None:
    class OneIsStuck(Stuck):
        """Of the first request's choices one is never there."""

        calls = 0

        async def sample(self, prompt_ids: list[int], params: SamplingParams, **rest: Any) -> Sample:
            self.calls += 1
            if self.calls == 2:
                return await super().sample(prompt_ids, params, **rest)
            return await ScriptedPolicy.sample(self, prompt_ids, params, **rest)

    policy = OneIsStuck(renderer)

    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            url, body = f"{endpoint.base_url}/chat/completions", {**FINE, "n": 3}
            asking = asyncio.ensure_future(client.post(url, json=body))
            while policy.calls < 3:
                await asyncio.sleep(0.001)
            asking.cancel()
            while policy.cancelled < 1:
                await asyncio.sleep(0.001)
            assert len((await client.post(url, json=body)).json()["choices"]) == 3

    episode = finish(policy, renderer, work)
    assert len(episode.calls) == 3


def test_a_client_that_goes_away_before_it_has_asked(renderer: ChatRenderer, caplog: pytest.LogCaptureFixture) -> None:
    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(endpoint.base_url).port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\nhalf".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await create(model)

    finish(PlacedScript(renderer, "Fine."), renderer, work)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_workflow_that_hangs_in_a_thread_is_let_go(renderer: ChatRenderer) -> None:
    policy = Stuck(renderer)
    errors: list[Exception] = []

    def ask(endpoint: Endpoint) -> None:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            try:
                client.chat.completions.create(model=endpoint.model, messages=HELLO)
            except openai.AuthenticationError as exc:
                errors.append(exc)

    async def work(model: ModelTuner) -> None:
        await asyncio.to_thread(ask, model.endpoint())

    async def run() -> Episode:
        async def workflow(task, model) -> float:
            await work(model)
            return 1.0

        config = WorkflowConfig(timeout_s=0.3)
        rollout = Rollout(WorkflowRunner(workflow), None, model_of(policy, renderer), config, 0, {})
        async with aclosing(rollout):
            (group,) = await rollout.run([Task(main_query="Go.")], 1, phase="test")
            while not errors:
                await asyncio.sleep(0.001)
        return group.episodes[0]

    episode = asyncio.run(run())
    assert episode.error is not None
    assert episode.error.kind == "EpisodeTimeoutError"
    assert "keys have expired" in str(errors[0])


def test_the_event_loops_end_closes_a_server_that_nobody_closed(renderer: ChatRenderer) -> None:
    endpoints: list[Endpoint] = []

    async def workflow(task, model) -> float:
        endpoints.append(model.endpoint())
        if task["question"] == "ask":
            await create(model)
        return 1.0

    policy = PlacedScript(renderer, "Fine.", "Fine.")
    rollout = Rollout(WorkflowRunner(workflow), None, model_of(policy, renderer), WorkflowConfig(), 0, {})
    for question in ("ask", "", "ask"):  # the second never gives the server a turn to start
        (group,) = asyncio.run(rollout.run([Task(main_query=question)], 1, phase="test"))
        assert bool(group.episodes[0].calls) is (question == "ask")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", httpx.URL(endpoints[-1].base_url).port))


def test_signals_stay_as_they_are(renderer: ChatRenderer) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def work(model: ModelTuner) -> None:
        inside = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        await create(model)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == inside

    finish(PlacedScript(renderer, "Fine."), renderer, work)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# ----------------------------------------------------------------------------------------------------------- roles


def test_each_role_has_an_endpoint_of_its_own(renderer: ChatRenderer) -> None:
    async def work(model: ModelTuner) -> None:
        for role in ("wolf", "seer", "wolf"):
            model.register_model(role)
            endpoint = model.endpoint(role)
            async with client_of(endpoint) as client:
                await client.chat.completions.create(model=endpoint.model, messages=HELLO)

    episode = finish(PlacedScript(renderer, "a", "b", "c"), renderer, work, trainable_targets=["wolf", "seer"])
    assert [call.role for call in episode.calls] == ["wolf", "seer", "wolf"]
    assert episode.reward == {"wolf": 1.0, "seer": 1.0}


def test_roles_without_an_endpoint(renderer: ChatRenderer) -> None:
    policy = PlacedScript(renderer)

    async def unknown(model: ModelTuner) -> None:
        model.endpoint("wolf")

    async def untrained(model: ModelTuner) -> None:
        model.endpoint()

    async def in_a_thread(model: ModelTuner) -> None:
        with pytest.raises(ConfigError):
            await asyncio.to_thread(model.endpoint)
        model.endpoint()
        await asyncio.to_thread(model.endpoint)  # whether the server is there or not

    with pytest.raises(RoleError, match=re.escape("role `wolf` is not registered")):
        play(model_of(policy, renderer), unknown)
    with pytest.raises(RoleError, match=re.escape("role `default` is not trained, so it has no endpoint; name it in")):
        play(model_of(policy, renderer), untrained, trainable_targets=["wolf"])
    with pytest.raises(ConfigError, match="where no event loop runs, as in a thread; call it in `execute` itself"):
        play(model_of(policy, renderer), in_a_thread)
    with pytest.raises(ConfigError, match="made by hand; let a `Rollout` run the workflow"):
        ModelTuner(Recorder(model_of(policy, renderer), episode_id="e", seed=0)).endpoint()


def test_auxiliary_models_have_endpoints_too(renderer: ChatRenderer) -> None:
    async def workflow(task, model, auxiliary_models) -> float:
        assert (await create(model)).choices[0].message.content == "Trained."
        assert (await create(auxiliary_models["grader"])).choices[0].message.content == "Right."
        return 1.0

    async def run() -> Episode:
        trained = model_of(PlacedScript(renderer, "Trained."), renderer)
        grader = model_of(PlacedScript(renderer, "Right."), renderer)
        rollout = Rollout(WorkflowRunner(workflow), None, trained, WorkflowConfig(), 0, {"grader": grader})
        async with aclosing(rollout):
            (group,) = await rollout.run([Task(main_query="Go.")], 1, phase="test")
        return group.episodes[0]

    episode = asyncio.run(run())
    assert episode.error is None, episode.error
    assert [call.text for call in episode.calls] == ["Trained."]


# ---------------------------------------------------------------------------------------------- threads, processes


def test_sync_clients_in_threads(renderer: ChatRenderer) -> None:
    def converse(endpoint: Endpoint) -> str:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            messages: list[Any] = list(HELLO)
            for _ in range(3):
                message = client.chat.completions.create(model=endpoint.model, messages=messages).choices[0].message
                messages += [message, {"role": "user", "content": "Go on."}]
            chunks = client.chat.completions.create(model=endpoint.model, messages=messages, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def work(model: ModelTuner) -> None:
        said = await asyncio.to_thread(converse, model.endpoint())
        assert said == f"I am {model._recorder.episode_id}."

    policy = ScriptedPolicy(renderer, lambda prompt, episode_id: f"I am {episode_id}.")
    for episode in play(model_of(policy, renderer), work, episodes=8):
        assert episode.error is None, episode.error.traceback or episode.error
        assert [call.extends for call in episode.calls] == [None, 0, 1, 2]
        assert {call.text for call in episode.calls} == {f"I am {episode.workflow_task.episode_id}."}


def test_a_client_in_another_process(renderer: ChatRenderer) -> None:
    script = (
        "import sys, openai\n"
        "base_url, api_key, model = sys.stdin.read().split()\n"
        "with openai.OpenAI(base_url=base_url, api_key=api_key) as client:\n"
        "    for chunk in client.chat.completions.create(\n"
        "        model=model, messages=[{'role': 'user', 'content': 'Hello.'}], stream=True\n"
        "    ):\n"
        "        print(chunk.choices[0].delta.content or '', end='')\n"
    )

    async def work(model: ModelTuner) -> None:
        endpoint = model.endpoint()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        # Through a pipe: a command line is for everybody to read.
        given = f"{endpoint.base_url} {endpoint.api_key} {endpoint.model}"
        said, _ = await process.communicate(given.encode())
        assert (process.returncode, said.decode()) == (0, "It is 5.")

    (call,) = finish(PlacedScript(renderer, "It is 5."), renderer, work).calls
    assert call.text == "It is 5."


# ------------------------------------------------------------------------------------------------- the real sampler


class Logged:
    """The real sampler, and what it drew, by episode."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.drawn: dict[str, list[tuple[list[int], Sample]]] = {}
        for name in ("open_episode", "close_episode", "pause_episode", "resume_episode"):
            setattr(self, name, getattr(sampler, name))

    async def sample(self, prompt_ids: list[int], params: SamplingParams, *, episode_id: str, **rest: Any) -> Sample:
        sample = await self.sampler.sample(prompt_ids, params, episode_id=episode_id, **rest)
        copy = Sample(list(sample.token_ids), list(sample.logprobs), sample.finish_reason, sample.policy_version)
        self.drawn.setdefault(episode_id, []).append((list(prompt_ids), copy))
        return sample


@contextmanager
def real_model(**settings: Any) -> Iterator[tuple[PolicyModel, Logged]]:
    config = TunerModelConfig(model_path="tiny-agent", max_tokens=8, **settings)
    loaded = load_model(config, EngineConfig(device="cpu"))
    logged = Logged(Sampler(loaded, EngineConfig(device="cpu")))
    renderer = ChatRenderer(loaded.tokenizer)
    yield PolicyModel(logged, renderer, loaded.end_of_turn_ids, "tiny-agent", PolicyModel.params_of(config)), logged


def told(text: str, *, streamed: bool) -> str:
    """What a client has of a completion. Text that turns out to be thinking is not taken back."""
    before, closed, _ = text.partition("</think>")
    streamed_thinking = before.strip() if streamed and closed and "<think>" not in before else ""
    return streamed_thinking + parse_reply(text, tools=True).text


def test_a_thousand_calls_are_recorded_as_they_were_sampled() -> None:
    """64 episodes at once, each with eight streamed and eight unstreamed calls of a growing conversation."""
    heard: dict[str, list[str]] = {}

    async def work(model: ModelTuner) -> None:
        endpoint, own = model.endpoint(), model._recorder.episode_id
        said = heard[own] = []
        async with client_of(endpoint) as client:
            messages: list[Any] = [{"role": "user", "content": f"My name is {own}. What is my name?"}]
            for turn in range(16):
                options: dict[str, Any] = {"model": endpoint.model, "messages": messages, "tools": [ADD]}
                if turn % 2:
                    chunks = [c async for c in await client.chat.completions.create(stream=True, **options)]
                    message = {"role": "assistant", "content": text_of(chunks)}
                    said.append(text_of(chunks))
                else:
                    reply = (await client.chat.completions.create(**options)).choices[0].message
                    message = {"role": "assistant", "content": reply.content or ""}
                    said.append(reply.content or "")
                messages = [*messages[-4:], message, {"role": "user", "content": f"{own} goes on."}]

    with real_model() as (model, logged):
        episodes = play(model, work, episodes=64, timeout_s=300)
        assert logged.sampler._pending == {}
        assert len(logged.sampler._episodes) == 0
    for episode in episodes:
        assert episode.error is None, episode.error.traceback or episode.error
        own = episode.workflow_task.episode_id
        recorded = [
            (c.prompt_ids, Sample(c.completion_ids, c.logprobs, c.finish_reason, c.policy_version))
            for c in episode.calls
        ]
        assert recorded == logged.drawn[own]
        assert len(recorded) == 16
        for call in episode.calls:
            assert own in model.renderer.decode(call.prompt_ids)
        assert heard[own] == [told(call.text, streamed=turn % 2 == 1) for turn, call in enumerate(episode.calls)]
    assert sum(len(episode.calls) for episode in episodes) == 1024


def test_a_prompt_that_is_too_long() -> None:
    async def work(model: ModelTuner) -> None:
        with pytest.raises(openai.BadRequestError, match=r"and `model\.max_model_len` is 64; raise it") as caught:
            await create(model, [{"role": "user", "content": "apples " * 100}])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError):
            await stream(model, [{"role": "user", "content": "apples " * 100}])
        await create(model)

    with real_model(max_model_len=64) as (model, _):
        (episode,) = play(model, work)
    assert episode.error is None, episode.error.traceback or episode.error


def test_slow_clients_do_not_hold_up_the_others() -> None:
    """One agent thinks for long between two calls; the sampler goes on without it."""
    done: list[str] = []

    async def work(model: ModelTuner) -> None:
        slow = model._recorder.episode_id.endswith("-0")
        for _ in range(2):
            await create(model)
            await asyncio.sleep(1.0 if slow else 0)
        done.append("slow" if slow else "fast")

    with real_model() as (model, _):
        episodes = play(model, work, episodes=4)
    assert not [episode.error for episode in episodes if episode.error]
    assert done == ["fast", "fast", "fast", "slow"]
