"""Strings at which completions stop are found with the token that completes them, and with no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agentscope_tuner.engine.stopping import StopStrings

LETTERS = ["a", "b", ">", "\n", "\u2581", "é", "ab", "b>", "\u2581a", "a\n", "\u6f22"]


def llama(decodes: list[list[int]]) -> PreTrainedTokenizerFast:
    """Words after a space, or bytes; notes what is decoded."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {text: 256 + number for number, text in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    class Watched(PreTrainedTokenizerFast):
        def decode(self, token_ids: Any, **options: Any) -> Any:
            decodes.append(list(token_ids))
            return super().decode(token_ids, **options)

    return Watched(tokenizer_object=tokenizer)


text = st.lists(st.integers(256, 255 + len(LETTERS)), min_size=1, max_size=12)
characters = st.sampled_from(["é", "\u6f22", "a", ">", "\n"]).map(lambda one: list(one.encode()))


@pytest.mark.parametrize("stops", [("b>",), ("a\n", "zz"), (" a ",), ("é",), ("a\u6f22", ">")])
@given(parts=st.lists(text | characters, min_size=1, max_size=4))
@settings(deadline=None)
def test_a_string_is_reached_with_its_last_token(stops: tuple[str, ...], parts: list[list[int]]) -> None:
    tokenizer = llama([])
    strings = StopStrings(tokenizer)
    ids = np.array([256, *(token for part in parts for token in part)])
    for end in range(1, len(ids) + 1):
        said = any(stop in tokenizer.decode(ids[:end].tolist()) for stop in stops)
        assert strings.reached(stops, ids[:end]) == said
        if said:
            break


def test_a_token_that_ends_none_of_them_is_decoded_once() -> None:
    decodes: list[list[int]] = []
    strings = StopStrings(llama(decodes))
    ids = np.array([256, 257] * 50)
    assert not any(strings.reached(("b>", "</call>"), ids[:end]) for end in range(1, len(ids)))
    assert decodes == [[256], [257]]
