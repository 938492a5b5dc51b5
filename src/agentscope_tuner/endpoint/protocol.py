"""OpenAI's chat completions, as far as a trained policy can honour them: requests in, replies out.

What a request may hold and would have no effect is refused, in OpenAI's own form of an error. Replies are plain
dictionaries: they are made for every token that is streamed.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError, model_validator

from agentscope_tuner.chat import Reply
from agentscope_tuner.errors import ConfigError, EpisodeTimeoutError, PromptTooLongError, UnsupportedContentError
from agentscope_tuner.recorder import Completion

_MAX_CHOICES = 128


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "server_error" if status >= 500 else "invalid_request_error",
                "param": param,
                "code": code,
            }
        }


def refusal_of(exc: Exception) -> Refusal:
    """How a client hears of what went wrong with its call."""
    match exc:
        case Refusal():
            return exc
        case PromptTooLongError():
            return Refusal(400, str(exc), code="context_length_exceeded", param="messages")
        case UnsupportedContentError():
            return Refusal(400, str(exc), code="unsupported_content", param="messages")
        case EpisodeTimeoutError():
            return Refusal(401, f"{exc}; its API keys have expired", code="expired_api_key")
        case ConfigError():
            return Refusal(400, str(exc), code="invalid_value")
        case TemplateError():
            return Refusal(400, f"the model's chat template refuses these messages: {exc}", param="messages")
    return Refusal(500, f"{type(exc).__name__}: {exc}", code="internal_error")


# ---------------------------------------------------------------------------------------------------- requests


class _Part(BaseModel):
    """One part of a message's content. The recorder refuses parts that are not text, and says why."""

    model_config = ConfigDict(extra="allow")
    text: str | None = None


class _CalledFunction(BaseModel):
    name: str
    arguments: str = ""


class _ToolCall(BaseModel):
    type: Literal["function"] = "function"
    id: str | None = None
    function: _CalledFunction


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> _Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a `{self.role}` message needs `content`")
        unknown = _set_keys(self, ignored={"refusal", "annotations", "reasoning_content"})
        if unknown:
            raise ValueError(f"a trained policy cannot read `{unknown[0]}` of a message; send text and tool calls")
        return self


class _Function(BaseModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


class _NamedFunction(BaseModel):
    name: str


class _NamedTool(BaseModel):
    type: Literal["function"]
    function: _NamedFunction


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


_Stop = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    """The form of a request. Its messages and tools are passed on as they came, in their own order of keys."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    n: Annotated[StrictInt, Field(ge=1, le=_MAX_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: StrictBool | None = None
    stop: _Stop | list[_Stop] | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None


_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop")

_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""They say who asks or what for, and would change no completion of OpenAI's either."""

_NEUTRAL: dict[str, list[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logit_bias": [{}],
    "top_logprobs": [0],
    "response_format": [{"type": "text"}],
    "parallel_tool_calls": [True],
    "store": [False],
    "service_tier": ["auto", "default"],
    "modalities": [["text"]],
}
"""Values of options that are not supported under which there is nothing to do."""

_REMEDIES = {
    "seed": "every call has random numbers of its own, from the run's seed, or the episodes of a group would be alike",
    "top_logprobs": "only the log-probabilities of the sampled tokens are recorded; use `logprobs` alone",
    "response_format": "forced tokens are not sampled ones; ask for a tool call with the schema as its parameters",
    "parallel_tool_calls": "the policy may call several tools at once; answer the first call only",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks for, in the recorder's terms."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str | None
    options: dict[str, Any]
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool


def parse_chat_request(body: bytes, *, serves: str) -> ChatRequest:
    """Check a request for a completion of the model `serves`.

    Raises:
        Refusal: it is malformed, asks for another model, or for what a trained policy does not do.
    """
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise Refusal(400, f"the request's body is not valid JSON: {exc}") from None
    try:
        asked = _Body.model_validate(raw)
    except ValidationError as exc:
        first = exc.errors()[0]
        # A union is reported per member; the path up to the first name of a type is the client's own.
        param = _path(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        where = f"`{param}`: " if param else ""
        raise Refusal(400, f"the request is malformed: {where}{message}", param=param or None) from None
    for key in _set_keys(asked, ignored=_LABELS):
        value = raw[key]
        if value not in _NEUTRAL.get(key, []):
            remedy = _REMEDIES.get(key, "remove it")
            message = f"`{key}` is not supported by a trained model, got {_shown(value)}; {remedy}"
            raise Refusal(400, message, code="unsupported_parameter", param=key)
    if asked.model != serves:
        message = f"model `{asked.model}` does not exist here; this API key is for `{serves}`"
        raise Refusal(404, message, code="model_not_found", param="model")
    if asked.stream_options is not None and not asked.stream:
        raise Refusal(400, "`stream_options` has no effect without `stream`; remove it", param="stream_options")
    return ChatRequest(
        messages=[
            {**message, "role": "system"} if message["role"] == "developer" else message for message in raw["messages"]
        ],
        tools=raw.get("tools") or None,
        tool_choice=_tool_choice(asked),
        options={key: raw[key] for key in _SAMPLING if raw.get(key) is not None},
        n=asked.n or 1,
        stream=bool(asked.stream),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        logprobs=bool(asked.logprobs),
    )


def _tool_choice(asked: _Body) -> str | None:
    """`none`, `auto` or `required`; the name of a tool is a request like `required`."""
    choice = asked.tool_choice
    known = [tool.function.name for tool in asked.tools or ()]
    if isinstance(choice, _NamedTool):
        name = choice.function.name
        if name not in known:
            message = f"`tool_choice` names `{name}`, which is not in `tools` ({', '.join(known) or 'none are given'})"
            raise Refusal(400, message, param="tool_choice")
        return "required"
    if choice == "required" and not known:
        raise Refusal(400, "`tool_choice` is `required`, but there are no `tools`", param="tool_choice")
    return choice


def _set_keys(model: BaseModel, *, ignored: set[str]) -> list[str]:
    """Keys that a model does not know, and that are set."""
    extra = model.model_extra or {}
    return [key for key, value in extra.items() if value is not None and key not in ignored]


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step == "str" or step.startswith(("_", "list[", "literal[", "constrained-str")):
            break
        else:
            path += f".{step}" if path else step
    return path


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ----------------------------------------------------------------------------------------------------- replies


@dataclass(frozen=True, slots=True)
class Answer:
    """What all pieces of one answer have in common."""

    model: str
    token_text: Callable[[int], str]
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completions: Sequence[Completion], *, logprobs: bool) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [
            {
                "index": index,
                "message": message_of(completion.reply),
                "finish_reason": finish_reason_of(completion),
                "logprobs": self.logprobs_of(completion) if logprobs else None,
            }
            for index, completion in enumerate(completions)
        ]
        return self._envelope("chat.completion", choices, completions) | {"usage": usage_of(completions)}

    def chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A piece of one choice."""
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return self._envelope("chat.completion.chunk", [choice])

    def last_chunks(self, index: int, completion: Completion, rest: str, *, logprobs: bool) -> list[dict[str, Any]]:
        """What is left of a choice once it is complete: the `rest` of its text, and what cannot be sent in pieces."""
        reply = completion.reply
        deltas: list[dict[str, Any]] = []
        if reply.thinking:
            deltas.append({"reasoning_content": reply.thinking})
        if rest:
            deltas.append({"content": rest})
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(_tool_calls(reply))]
        recorded = self.logprobs_of(completion) if logprobs else None
        end = self.chunk(index, {}, finish_reason=finish_reason_of(completion), logprobs=recorded)
        return [*(self.chunk(index, delta) for delta in deltas), end]

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The piece that counts tokens."""
        return self._envelope("chat.completion.chunk", [], completions) | {"usage": usage_of(completions)}

    def logprobs_of(self, completion: Completion) -> dict[str, Any]:
        """Every sampled token with its recorded log-probability, those that are not text included."""
        tokens = []
        for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            token = self.token_text(token_id)
            # A token may be part of a character, which is no text.
            bytes_ = None if "�" in token else list(token.encode())
            tokens.append({"token": token, "logprob": logprob, "bytes": bytes_, "top_logprobs": []})
        return {"content": tokens, "refusal": None}

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], completions: Sequence[Completion] = ()
    ) -> dict[str, Any]:
        envelope = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if completions:
            envelope["system_fingerprint"] = f"policy-version-{completions[0].policy_version}"
        return envelope


def message_of(reply: Reply) -> dict[str, Any]:
    """The assistant's message."""
    calls = _tool_calls(reply)
    message: dict[str, Any] = {"role": "assistant", "content": reply.text if reply.text or not calls else None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(reply: Reply) -> list[dict[str, Any]]:
    # The model may have escaped half of a surrogate pair, which no client could send back: arguments stay escaped.
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name.encode(errors="replace").decode(),
                "arguments": json.dumps(call.arguments),
            },
        }
        for call in reply.tool_calls
    ]


def finish_reason_of(completion: Completion) -> str:
    """`stop`, `length` or `tool_calls`."""
    called = bool(completion.reply.tool_calls) and completion.finish_reason == "stop"
    return "tool_calls" if called else completion.finish_reason


def usage_of(completions: Sequence[Completion]) -> dict[str, int]:
    """Recorded tokens; the prompt counts once, however many choices there are."""
    prompt = completions[0].prompt_tokens
    written = sum(completion.completion_tokens for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
