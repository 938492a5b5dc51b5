"""Strings at which completions stop, found in tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BYTES = 4
"""Of a character, at most. Some decoders read nothing of bytes that begin amid one."""


class StopStrings:
    """Finds strings in the text of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A token that no string ends with is told apart without the text of those before it.
        self._may_end = lru_cache(maxsize=2**16)(self._one_may_end)

    def reached(self, stops: tuple[str, ...], token_ids: np.ndarray) -> bool:
        """Whether the last token completed one of these strings."""
        if not self._may_end(stops, int(token_ids[-1])):
            return False
        # A token is at least a byte; some decoders treat the first one's space in their own way.
        longest = max(len(stop.encode()) for stop in stops) + 1
        for more in range(_BYTES):
            text = self._tokenizer.decode(token_ids[-longest - more :].tolist(), skip_special_tokens=False)
            if any(stop in text for stop in stops):
                return True
            if "\ufffd" not in text:
                return False
        return False

    def _one_may_end(self, stops: tuple[str, ...], token: int) -> bool:
        """Whether one of these ends with a character of the token's own text, or one that may be of several tokens."""
        own = self._tokenizer.decode([token], skip_special_tokens=False)
        return any(stop[-1] in own or stop[-1] == " " or not stop[-1].isascii() for stop in stops)
