"""From messages to token ids, such that what was sampled is never tokenized again.

An episode's calls form a conversation: usually each prompt is an earlier prompt, the reply to it, and something new.
`Conversation.render` finds the longest recorded call whose messages and reply begin the new messages, takes its
exact ids, and renders only what follows. Where the template rewrites history (thinking is stripped, a hint message
was removed) the recorded ids do not apply; the prompt is rendered from text, and a branch begins.
"""

from __future__ import annotations

import itertools
import json
import marshal
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from agentscope_tuner.chat.parsing import THINK_OPEN, Reply
from agentscope_tuner.chat.templates import Parts, TurnTemplate
from agentscope_tuner.errors import ConfigError, ModelError, UnsupportedContentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_Key = tuple[str | bytes, ...]

_SENTINEL = "\ue000reply\ue001"
"""Stands for recorded replies while the rest is rendered; private-use characters, so no template touches it."""


_sorted_json = json.JSONEncoder(sort_keys=True).encode

_PLAIN_FORMAT = 2
"""Of `marshal`: the last one that writes equal values alike, whatever parts they share."""


def _freeze(value: Any) -> bytes:
    """What a template is given, as a key for what it writes, in a fifth of the time that JSON takes."""
    try:
        return marshal.dumps(value, _PLAIN_FORMAT)
    except ValueError:  # strings of a class of their own, and the like
        return marshal.dumps(json.loads(json.dumps(value)), _PLAIN_FORMAT)


Frozen = tuple[bytes, ...]
"""Messages, each as `_freeze` writes it."""


@dataclass(eq=False, slots=True)
class Written:
    """What the template writes for messages and tools."""

    text: str
    messages: Frozen
    tools: bytes
    parts: Parts | None = None
    """Known once another text went on from this one."""


def _thaw(messages: Frozen) -> list[Message]:
    return [*map(marshal.loads, messages)]


class ChatRenderer:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, enable_thinking: bool | None = None) -> None:
        """Check that the template can be used.

        Raises:
            ModelError: the tokenizer has no chat template.
            ConfigError: `enable_thinking` is set, and the template does not know it.
        """
        template = tokenizer.chat_template
        if not template:
            raise ModelError(
                f"tokenizer of `{tokenizer.name_or_path}` has no chat template; agents need an instruction-tuned "
                "model, or add a `chat_template.jinja` beside its tokenizer"
            )
        if enable_thinking is not None and "enable_thinking" not in str(template):
            raise ConfigError(
                f"`model.enable_thinking` has no effect: the chat template of `{tokenizer.name_or_path}` does not "
                "know it; remove it"
            )
        self.tokenizer = tokenizer
        self._options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._marks = self._independent_marks()
        # A prompt, which the episodes of a group begin with, or a piece of one.
        self._encode = lru_cache(maxsize=4096 if self._marks else 512)(self._tokenize)
        self.written = lru_cache(maxsize=1024)(self._write_whole)
        """What the template writes for messages and tools."""
        # Replies are marked alike, so a group's episodes often go on alike.
        self.written_after = lru_cache(maxsize=1024)(self._write_after)
        """`written`, of messages that may begin with those of a `Written`, and of the same tools."""
        self._variables = lru_cache(maxsize=64)(self._variables_with)
        self._turns = lru_cache(TurnTemplate.of)
        self.token_text = lru_cache(maxsize=1024)(self._decode_one)
        """`decode`, of a single token."""

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The prompt as the template writes it, ready for the assistant's turn."""
        return self.written(tuple(map(_freeze, messages)), _freeze([*tools] if tools else None)).text

    def _write_after(self, before: Written, messages: Frozen) -> Written:
        return self._go_on(before, messages) or self.written(messages, before.tools)

    def _go_on(self, before: Written, messages: Frozen) -> Written | None:
        known, tools = len(before.messages), before.tools
        if messages[:known] != before.messages:
            return None
        variables = self._variables(tools)
        template = self._turns(self.tokenizer.get_chat_template(tools=variables["tools"]))
        if template is None:
            return None
        if before.parts is None:
            whole = template.write(_thaw(before.messages), variables)
            if whole is None or whole[0] != before.text:
                return None
            before.parts = whole[1]
        following = template.write(_thaw(messages), variables, known, before.parts)
        if following is None:
            return None
        text, parts = following
        return Written(before.text.removesuffix(before.parts.end) + text, messages, tools, parts)

    def _write_whole(self, messages: Frozen, tools: bytes) -> Written:
        return Written(self._apply_template(messages, tools), messages, tools)

    def _variables_with(self, tools: bytes) -> dict[str, Any]:
        """What a template is told besides messages, as `apply_chat_template` does."""
        given = {"tools": marshal.loads(tools), "documents": None, "add_generation_prompt": True}
        return {**self.tokenizer.special_tokens_map, **self._options, **given}

    def _apply_template(self, messages: Frozen, tools: bytes) -> str:
        rendered = self.tokenizer.apply_chat_template(
            _thaw(messages), tools=marshal.loads(tools), tokenize=False, add_generation_prompt=True, **self._options
        )
        return str(rendered)

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether prompts end inside a thinking block, so that a completion holds only its end."""
        return self.text([{"role": "user", "content": "Hello."}], None).rstrip().endswith(THINK_OPEN)

    def encode(self, text: str, known: dict[str, tuple[int, ...]] | None = None) -> list[int]:
        """Token ids of a piece of prompt; the template has already written every special token.

        Pieces of it are looked up in what is `known`, and kept there.
        """
        if self._marks is None:
            return list(self._encode(text))
        known = {} if known is None else known
        # Between two special tokens there is a message, or a part of one, that was probably seen before: a system
        # prompt, tools, an earlier turn.
        ids: list[int] = []
        for piece in filter(None, self._marks.split(text)):
            if piece not in known:
                known[piece] = self._encode(piece)
            ids += known[piece]
        return ids

    def _independent_marks(self) -> re.Pattern[str] | None:
        """What splits a text into pieces, and is one, such that each is tokenized as if it stood alone.

        These are special tokens that the template writes. None where that cannot be said: some tokenizers take white
        space into a special token, or put a space before a text, but not before what follows a special token.
        """
        if self._backend is None or self._backend.encode_special_tokens:
            return None
        added = {token.content: token for token in self.tokenizer.added_tokens_decoder.values()}
        template = str(self.tokenizer.chat_template)
        marks = [mark for mark in added if mark and mark in template]
        # Those in a normalized text are looked for later, between the others.
        marks = [
            mark for mark in marks if not (added[mark].normalized or any(_overlap(mark, other) for other in added))
        ]
        if not marks or any(added[mark].lstrip or added[mark].rstrip or added[mark].single_word for mark in marks):
            return None
        pattern = re.compile(f"({'|'.join(map(re.escape, marks))})")
        for text in ("a b", " a", "a ", "\na", "1"):
            probe = text.join(["", *marks, ""])
            pieces = [self._tokenize(piece) for piece in pattern.split(probe)]
            if self._tokenize(probe) != tuple(itertools.chain.from_iterable(pieces)):
                return None
        return pattern

    def _tokenize(self, text: str) -> tuple[int, ...]:
        # A tool call's JSON may hold half of a surrogate pair, which is not text.
        text = text.encode(errors="replace").decode()
        if self._backend is not None:
            # Some are published with these, and whoever uses the tokenizer elsewhere may set them.
            if self._backend.truncation or self._backend.padding:
                self._backend.no_truncation()
                self._backend.no_padding()
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=False))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decoding(self) -> Callable[[int], str]:
        """`decode`, of tokens that come one by one: takes the next one, and gives the text of all so far.

        What is half a character is told with its other half.
        """
        return _Decoding(self, self._backend)

    def _decode_one(self, token: int) -> str:
        return self.decode([token])


class _Decoding:
    def __init__(self, renderer: ChatRenderer, backend: Tokenizer | None) -> None:
        self._renderer = renderer
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._text = ""

    def __call__(self, token: int) -> str:
        self._ids.append(token)
        if self._backend is not None:
            try:
                self._text += self._stream.step(self._backend, token) or ""
                return self._text
            except Exception:  # it has no type of its own; where bytes are no character, the text before may change
                self._backend = None
        return self._renderer.decode(self._ids)


def _overlap(mark: str, other: str) -> bool:
    """Whether two different texts can be found in a third one such that they share letters."""
    if mark == other:
        return False
    shared = range(1, min(len(mark), len(other)))
    return mark in other or other in mark or any(mark.endswith(other[:n]) or other.endswith(mark[:n]) for n in shared)


@dataclass(slots=True)
class Prompt:
    """A rendered prompt."""

    ids: list[int]
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    node: int
    """Where these messages end in the conversation's message trie."""
    extends: int | None
    """The recorded call whose prompt and completion ids begin `ids`."""
    replies: tuple[int, ...]
    """Which of the messages are replies whose recorded ids are among `ids`."""
    written: Written
    """What the template writes for these messages, with `_SENTINEL` for each of those replies."""

    @property
    def text(self) -> str:
        """The text of that."""
        return self.written.text


@dataclass(slots=True)
class _Recorded:
    prompt: Prompt
    completion_ids: list[int]
    end_of_turn: str
    """Text of the end-of-turn token that was sampled; empty when the completion was cut off."""
    has_thinking: bool


class Conversation:
    """The recorded calls of one episode, found again by their messages."""

    def __init__(self, renderer: ChatRenderer, end_of_turn_ids: frozenset[int]) -> None:
        self._renderer = renderer
        self._end_of_turn_ids = end_of_turn_ids
        self._calls: list[_Recorded] = []
        # A trie over messages: (parent node, message key) -> node. Tools are the first step from the root.
        self._nodes: dict[tuple[int, _Key], int] = {}
        self._call_at: dict[int, int] = {}
        self._pieces: dict[str, tuple[int, ...]] = {}
        """See `ChatRenderer.encode`: all episodes together have more than are remembered for all."""
        self._rewritten: set[tuple[int, int]] = set()
        """Calls, and what came next, where the template wrote another beginning: it does so again."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Prompt:
        """Token ids for `messages`, recorded ids first wherever they apply.

        Raises:
            UnsupportedContentError: a message holds something other than text and tool calls.
        """
        plain = [plain_message(message) for message in messages]
        schema = [dict(tool) for tool in tools] if tools else None
        frozen_tools = _freeze(schema)
        node = self._step(0, (frozen_tools,))
        nodes = [node := self._step(node, _key(message)) for message in plain]
        for position, (at, following) in reversed([*enumerate(itertools.pairwise([*nodes, node]))]):
            call = self._call_at.get(at)
            if call is None or (call, following) in self._rewritten:
                continue
            extended = self._extend(call, position, plain)
            if extended is not None:
                ids, replies, written = extended
                return Prompt(ids, plain, schema, node, call, replies, written)
            self._rewritten.add((call, following))
        written = self._renderer.written(tuple(map(_freeze, plain)), frozen_tools)
        return Prompt(self._renderer.encode(written.text, self._pieces), plain, schema, node, None, (), written)

    def add(self, prompt: Prompt, completion_ids: list[int], reply: Reply) -> int:
        """Record a reply; returns the index of the call."""
        last = completion_ids[-1] if completion_ids else -1
        ended = self._renderer.token_text(last) if last in self._end_of_turn_ids else ""
        self._calls.append(_Recorded(prompt, completion_ids, ended, bool(reply.thinking)))
        node = self._step(prompt.node, _key(reply_message(reply)))
        self._call_at[node] = len(self._calls) - 1
        return len(self._calls) - 1

    def _step(self, node: int, key: _Key) -> int:
        return self._nodes.setdefault((node, key), len(self._nodes) + 1)

    def _extend(
        self, call: int, position: int, messages: list[Message]
    ) -> tuple[list[int], tuple[int, ...], Written] | None:
        """`ids`, `replies` and `written` of a `Prompt` that extends a recorded call, whose reply is at this position.

        None when the template would write another beginning.
        """
        recorded = self._calls[call]
        if recorded.has_thinking:
            return None  # Agents do not send thinking back, so at inference time the model would not see it.
        replies = (*recorded.prompt.replies, position)
        marked = messages.copy()
        for place in replies:
            marked[place] = {"role": "assistant", "content": _SENTINEL}
        try:
            written = self._renderer.written_after(recorded.prompt.written, tuple(map(_freeze, marked)))
        except (TemplateError, ValueError):  # a template that insists on the call its tool messages answer
            return None
        text, start, end = written.text, recorded.prompt.written.text, recorded.end_of_turn
        if not text.startswith(start):
            return None
        # Some templates write white space around a reply; what counts is what was sampled.
        space, found, after = text[len(start) :].partition(_SENTINEL)
        if not found or space.strip():
            return None
        if end:
            space, found, after = after.partition(end)
            if not found or space.strip():
                return None
        ids = recorded.prompt.ids + recorded.completion_ids + self._renderer.encode(after, self._pieces)
        return ids, replies, written


def plain_message(message: Mapping[str, Any]) -> Message:
    """A message in the form chat templates expect: content a string, tool arguments an object.

    Raises:
        UnsupportedContentError: the content holds anything but text.
    """
    plain: Message = {"role": message["role"], "content": _plain_content(message)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in message["tool_calls"]]
    for key in ("name", "tool_call_id"):
        if message.get(key):
            plain[key] = message[key]
    return plain


def reply_message(reply: Reply) -> Message:
    """The message under which a reply comes back in the next prompt."""
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def _plain_content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        # OpenAI's form is {"type": "text", "text": ...}; DashScope's is {"text": ...}.
        if not isinstance(block, Mapping) or "text" not in block or block.get("type", "text") != "text":
            kind = block.get("type") or "/".join(block) if isinstance(block, Mapping) else type(block).__name__
            raise UnsupportedContentError(
                f"a `{message['role']}` message holds a block of type `{kind}`, and a trained policy reads text only; "
                "describe it in text, or give this role a default model and do not train it"
            )
        texts.append(block["text"] or "")
    return "\n".join(texts)


def _plain_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # templates write a string as it is
            arguments = json.loads(arguments)
    plain = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id"):
        plain["id"] = call["id"]
    return plain


def _key(message: Message) -> _Key:
    """What makes two messages the same to the model. The id of a call it wrote is ours, not the model's."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    # An agent's own name comes back with its replies, but was not known when they were recorded.
    name = "" if message["role"] == "assistant" else message.get("name", "")
    written = _sorted_json(calls) if calls else ""
    return message["role"], name, message["content"].strip(), written
