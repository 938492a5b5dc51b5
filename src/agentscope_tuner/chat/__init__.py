"""Chat templates and what models write into them."""

from agentscope_tuner.chat.parsing import Reply, ToolCall, parse_reply, write_reply
from agentscope_tuner.chat.rendering import ChatRenderer, Conversation, Message, Prompt

__all__ = [
    "ChatRenderer",
    "Conversation",
    "Message",
    "Prompt",
    "Reply",
    "ToolCall",
    "parse_reply",
    "write_reply",
]
