"""Names that Trinity imports."""

from typing import Any

ChatTemplateContentFormat = Any
ConversationMessage = Any


def parse_chat_messages(*args: Any, **options: Any) -> Any:
    """Only for images and the like, which need vLLM itself."""
    raise NotImplementedError("vLLM is not installed")


async def parse_chat_messages_async(*args: Any, **options: Any) -> Any:
    """Only for images and the like, which need vLLM itself."""
    raise NotImplementedError("vLLM is not installed")
