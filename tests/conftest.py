"""Models for tests, a tiny random one and the one that ships, and what else several of them need."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Kernels for GPUs run here, too, in Triton's interpreter. It has to know before Triton is imported, which others do.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentscope_tuner.engine.native import NativeKernels, Way
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.engine.trial import native_kernels

# With models this small a second thread costs more than it computes.
torch.set_num_threads(1)

TEMPLATE = Path(__file__).parents[1] / "recipes" / "tiny_agent" / "chat_template.jinja"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 30,000 parameters with a tokenizer of one token per byte."""
    directory = tmp_path_factory.mktemp("tiny-model")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    for tag in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"):
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = TEMPLATE.read_text()
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
    )
    # Larger than trained models start, so that different contexts make a difference.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_agent_dir() -> Path:
    """The model that ships."""
    return Path(model_directory("tiny-agent"))


@pytest.fixture
def kernels() -> None:
    """Compiled kernels are there; without them, tests of what needs them would compare nothing with nothing."""
    assert native_kernels() is not None


@pytest.fixture(params=[*Way])
def kernels_each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeKernels:
    """Compiled ones that multiply bfloat16 in one of these ways; the processor may have only the first."""
    kernels = native_kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "way", request.param)
    return kernels


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C counts, also where whoever runs the tests in the background has it ignored, which children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
