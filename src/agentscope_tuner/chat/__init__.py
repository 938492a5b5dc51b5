"""Chat templates and what models write into them."""

from agentscope_tuner.chat.parsing import (
    TOOL_CALL_OPEN,
    Reply,
    ToolCall,
    parse_reply,
    settled_text,
    write_reply,
)
from agentscope_tuner.chat.rendering import ChatRenderer, Conversation, Message, Prompt

__all__ = [
    "TOOL_CALL_OPEN",
    "ChatRenderer",
    "Conversation",
    "Message",
    "Prompt",
    "Reply",
    "ToolCall",
    "parse_reply",
    "settled_text",
    "write_reply",
]
