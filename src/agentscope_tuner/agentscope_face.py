"""The policy as an AgentScope 1.0 chat model."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from typing import Any

from agentscope.message import TextBlock, ThinkingBlock, ToolUseBlock
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.model._model_usage import ChatUsage  # exported nowhere else in 1.0
from pydantic import BaseModel, ValidationError

from agentscope_tuner.chat import TOOL_CALL_OPEN, Reply, parse_reply
from agentscope_tuner.recorder import Completion, Recorder


class RoleModel(ChatModelBase):
    """The chat model of one role: the policy where the role is trained, its default model where it is not."""

    def __init__(self, recorder: Recorder, role: str, agent: str | None = None) -> None:
        self._recorder = recorder
        self._role = role
        self._agent = agent
        # Not through `super()`, which would switch off the streaming of the user's own default model.
        self.model_name = recorder.model.name
        self._stream = False

    @property
    def stream(self) -> bool:
        """Whether calls return a generator of growing responses. Agents may switch it."""
        if self._is_trained:
            return self._stream
        return bool(self._recorder.default_model(self._role).stream)

    @stream.setter
    def stream(self, value: bool) -> None:
        if not self._is_trained and self._recorder.roles.get(self._role) is not None:
            self._recorder.default_model(self._role).stream = value
        self._stream = value

    @property
    def _is_trained(self) -> bool:
        return self._recorder.is_trained(self._role)

    async def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | None = None,
        structured_model: type[BaseModel] | None = None,
        **options: Any,
    ) -> ChatResponse | AsyncGenerator[ChatResponse, None]:
        """Answer `messages`, as any AgentScope chat model does.

        Args:
            messages: as an OpenAI or DashScope formatter writes them.
            tools: JSON schemas the model may call.
            tool_choice: `auto`, `none`, `required` or a tool's name; see `Recorder.draw`.
            structured_model: answer with one call of a tool that takes this model's fields; the validated fields are
                in the response's metadata, which is None when the model did not produce them.
            options: `temperature`, `top_p`, `top_k`, `max_tokens`, `stop` of this call.
        """
        if not self._is_trained:
            given = {"tools": tools, "tool_choice": tool_choice, "structured_model": structured_model}
            return await self._ask_default(messages, {k: v for k, v in given.items() if v is not None} | options)
        if tool_choice is not None:
            self._validate_tool_choice(tool_choice, tools or [])
        if structured_model is not None:
            tools, tool_choice = [_tool_for(structured_model)], "required"
        if self._stream:
            return self._streamed(messages, tools, tool_choice, structured_model, options)
        begun = time.perf_counter()
        completion = await self._complete(messages, tools, tool_choice, options)
        return _response(completion, structured_model, time.perf_counter() - begun, _named())

    async def _complete(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        tool_choice: str | None,
        options: dict[str, Any],
        on_token: Callable[[int], None] | None = None,
    ) -> Completion:
        drawn = await self._recorder.draw(
            self._role, messages, tools=tools, tool_choice=tool_choice, options=options, on_token=on_token,
            agent=self._agent,
        )  # fmt: skip
        return self._recorder.record(drawn)

    async def _ask_default(
        self, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> ChatResponse | AsyncGenerator[ChatResponse, None]:
        """Ask the default model; in an episode that is continued, what it said before is said again."""
        model = self._recorder.default_model(self._role)
        place = self._recorder.ask()
        answer = self._recorder.replayed(place)
        if answer is not None and not isinstance(answer, ChatResponse | list):
            raise self._recorder.diverged(place)
        if answer is None:
            with self._recorder.elsewhere():
                answer = await model(messages, **options)
        if isinstance(answer, ChatResponse):
            self._recorder.answers[place] = answer
            self._tell(messages, answer)
            return answer
        kept: list[ChatResponse] = []
        self._recorder.answers[place] = kept
        return self._keep(answer, kept, messages)

    async def _keep(
        self,
        chunks: AsyncGenerator[ChatResponse, None] | list[ChatResponse],
        kept: list[ChatResponse],
        messages: list[dict[str, Any]],
    ) -> AsyncGenerator[ChatResponse, None]:
        """The chunks of a stream, as they come or once more."""
        async for chunk in _again(chunks) if isinstance(chunks, list) else chunks:
            kept.append(chunk)
            yield chunk
        if kept:
            self._tell(messages, kept[-1])

    def _tell(self, messages: list[dict[str, Any]], answer: ChatResponse) -> None:
        if self._recorder.on_answer is not None:
            self._recorder.on_answer(self._role, self._agent or self._role, messages, answer)

    async def _streamed(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        tool_choice: str | None,
        structured_model: type[BaseModel] | None,
        options: dict[str, Any],
    ) -> AsyncGenerator[ChatResponse, None]:
        begun = time.perf_counter()
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        call = asyncio.ensure_future(self._complete(messages, tools, tool_choice, options, tokens.put_nowait))
        call.add_done_callback(lambda _: tokens.put_nowait(None))
        # Half a tool call cannot be shown; the text before it can.
        read = self._recorder.reading((TOOL_CALL_OPEN, *self._recorder.stop_strings(options)))
        shown, named = "", _named()
        try:
            while (token := await tokens.get()) is not None:
                reply = read(token)
                if reply.text != shown and not reply.text.endswith("�"):
                    shown = reply.text
                    yield ChatResponse(content=_blocks(reply), **named)
            yield _response(await call, structured_model, time.perf_counter() - begun, named)
        finally:
            call.cancel()


async def _again(chunks: list[ChatResponse]) -> AsyncGenerator[ChatResponse, None]:
    for chunk in chunks:
        yield chunk


def respond(
    text: str,
    tools: list[dict[str, Any]] | None,
    tool_choice: str | None,
    structured_model: type[BaseModel] | None,
) -> ChatResponse:
    """A model's text as an AgentScope response, with the tool calls it holds."""
    wants_calls = structured_model is not None or (bool(tools) and tool_choice != "none")
    reply = parse_reply(text, tools=wants_calls)
    metadata = None if structured_model is None else _structured(reply, structured_model)
    return ChatResponse(content=_blocks(reply), metadata=metadata)


def _blocks(reply: Reply) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    blocks: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if reply.thinking:
        blocks.append(ThinkingBlock(type="thinking", thinking=reply.thinking))
    if reply.text:
        blocks.append(TextBlock(type="text", text=reply.text))
    for call in reply.tool_calls:
        blocks.append(ToolUseBlock(type="tool_use", id=call.id, name=call.name, input=call.arguments))
    return blocks


def _named() -> dict[str, Any]:
    """Of an answer, its `id` and `created_at`.

    As AgentScope writes them, which asks for the time twice, and takes as long as all else here.
    """
    now = datetime.now().isoformat(" ", "milliseconds")
    return {"id": f"{now}_{secrets.token_hex(3)}", "created_at": now}


def _response(
    completion: Completion, structured_model: type[BaseModel] | None, seconds: float, named: dict[str, Any]
) -> ChatResponse:
    return ChatResponse(
        content=_blocks(completion.reply),
        usage=ChatUsage(
            input_tokens=completion.prompt_tokens, output_tokens=completion.completion_tokens, time=seconds
        ),
        metadata=None if structured_model is None else _structured(completion.reply, structured_model),
        **named,
    )


def _tool_for(structured_model: type[BaseModel]) -> dict[str, Any]:
    schema = structured_model.model_json_schema()
    schema.pop("title", None)
    return {
        "type": "function",
        "function": {
            "name": "generate_structured_output",
            "description": "Generate the required structured output with this function",
            "parameters": schema,
        },
    }


def _structured(reply: Reply, structured_model: type[BaseModel]) -> dict[str, Any] | None:
    """The fields from a tool call, or from a reply that is nothing but their JSON."""
    candidates: list[Any] = [call.arguments for call in reply.tool_calls]
    if not candidates:
        try:
            candidates = [json.loads(reply.text)]
        except (ValueError, RecursionError):
            return None
    try:
        return structured_model.model_validate(candidates[-1]).model_dump()
    except ValidationError:
        return None
