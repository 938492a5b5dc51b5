"""From the text a model wrote to what it meant: thinking, text, tool calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
"""Around a tool call."""
_TOOL_CALL = re.compile(f"{TOOL_CALL_OPEN}(.*?){TOOL_CALL_CLOSE}", re.DOTALL)
_CALLS = 2**12
"""Of one reply: more than fit into a completion."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a reply."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, taken apart."""

    text: str
    """What is said to the user, stripped of surrounding white space."""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def parse_reply(
    completion: str, *, tools: bool, thinks: bool = False, place: int | None = None, speaker: int = 0
) -> Reply:
    """Take a completion apart; with `tools=False` tool calls stay text.

    With `thinks`, the prompt ended inside a thinking block: everything before its end is thought, and nothing is done.
    A tool call that is not valid JSON of the right form stays in the text, where the agent, its hints and whoever
    reads the transcript can see it. The ids of tool calls are made of the reply's `place` in its episode, and of which
    model speaks there, so that they are the same whenever that is repeated: some templates show them to the model.
    Without a place they are random.
    """
    thinking, text = _split_thinking(completion, thinks)
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _tool_call(match.group(1).strip(), _call_id(speaker, place, len(calls)))
        if call is None:
            return match.group(0)
        calls.append(call)
        return ""

    if tools:
        # What is opened after the last end has none, and is not looked at: a model may open thousands.
        done, end, rest = text.rpartition(TOOL_CALL_CLOSE)
        text = _TOOL_CALL.sub(take, done + end) + rest
    return Reply(text=text.strip(), thinking=thinking, tool_calls=calls)


def settled_text(text: str, marks: Sequence[str]) -> str:
    """What stays of a text when more is written: nothing from a mark on, nor what may be the beginning of one."""
    for mark in marks:
        text = text.partition(mark)[0]
    begun = [n for mark in (*marks, THINK_OPEN) for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return text[: len(text) - max(begun, default=0)]


def write_reply(reply_text: str, calls: list[tuple[str, Mapping[str, Any]]]) -> str:
    """The completion that says this, with no tags in it, and makes these calls: the inverse of `parse_reply`."""
    parts = [reply_text] if reply_text else []
    for name, arguments in calls:
        # JSON may write `/` as `\/`; so an argument that holds a closing tag does not close the call.
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False).replace("</", "<\\/")
        parts.append(f"{TOOL_CALL_OPEN}\n{body}\n{TOOL_CALL_CLOSE}")
    return "\n".join(parts)


def _split_thinking(completion: str, thinks: bool) -> tuple[str, str]:
    # Some templates open the thinking block in the prompt, so a completion may hold only its end.
    before, close, after = completion.partition(THINK_CLOSE)
    if close:
        return before.replace(THINK_OPEN, "", 1).strip(), after
    opened = completion.lstrip()
    if thinks or opened.startswith(THINK_OPEN):  # cut off while thinking
        return opened.removeprefix(THINK_OPEN).strip(), ""
    return "", completion


def _call_id(speaker: int, place: int | None, number: int) -> str:
    # Templates of the Mistral family take nothing but nine letters and digits.
    if place is None:
        return secrets.token_hex(5)[:9]
    return f"{ascii_lowercase[speaker % 26]}{place * _CALLS + number:08x}"


def _tool_call(body: str, call_id: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):  # thousands of brackets are not too many for a model
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(id=call_id, name=name, arguments=arguments)
