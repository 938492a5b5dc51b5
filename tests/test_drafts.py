"""Guessing ahead saves steps and changes no token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import load, play, start

from agentscope_tuner.config import LoraConfig
from agentscope_tuner.engine import drafts as drafts_module
from agentscope_tuner.engine.drafts import Drafts
from agentscope_tuner.engine.native import native_kernels
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.types import ModelCall


@pytest.fixture
def kernels() -> None:
    """Guesses need compiled attention; without it these tests would compare nothing with nothing."""
    assert native_kernels() is not None


compiled = pytest.mark.usefixtures("kernels")


class Oracle(Drafts):
    """Knows what will be drawn, and is wrong now and then."""

    def __init__(self, calls: Sequence[ModelCall], wrong: float) -> None:
        super().__init__()
        self._rng = random.Random(0)
        self._wrong = wrong
        self._known = {
            (*call.prompt_ids[-6:], *call.completion_ids[:n])[-6:]: call.completion_ids[n:]
            for call in calls
            for n in range(len(call.completion_ids))
        }

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        coming = self._known.get(tuple(ids[-6:]), [])[:most]
        return [3 if self._rng.random() < self._wrong else token for token in coming]


def steps_of(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each step has, noted while the sampler runs."""
    steps: list[int] = []
    runner, hidden = sampler._runner, sampler._runner.hidden

    def noted(spans: list[Any], **options: bool) -> Any:
        steps.append(sum(tokens for _, _, tokens in spans))
        return hidden(spans, **options)

    monkeypatch.setattr(runner, "hidden", noted)
    return steps


@compiled
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_tokens_and_log_probabilities_stay_what_they_are(
    wrong: float, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_model_dir)
    plain = start(loaded, max_slots=8, draft_tokens=0)
    plain_steps = steps_of(plain, monkeypatch)
    expected = play(loaded, plain)
    guessing = start(loaded, max_slots=8)
    guessing._drafts = Oracle(expected, wrong)
    steps = steps_of(guessing, monkeypatch)
    got = play(loaded, guessing)
    assert [call.completion_ids for call in got] == [call.completion_ids for call in expected]
    assert [call.finish_reason for call in got] == [call.finish_reason for call in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5)
    if wrong == 0.0:
        assert len(steps) < 0.5 * len(plain_steps)
    if wrong:
        assert guessing.rows_decoded > 1.2 * plain.rows_decoded


@compiled
def test_adapters_and_their_guesses(tiny_model_dir: Path) -> None:
    adapters = {"solver": "a", "critic": "b"}
    loaded = load(tiny_model_dir, lora=LoraConfig(rank=4), adapters=("a", "b"))
    for name, parameter in loaded.trainable_parameters().items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    expected = play(loaded, start(loaded, draft_tokens=0), adapters=adapters)
    guessing = start(loaded)
    guessing._drafts = Oracle(expected, 0.3)
    got = play(loaded, guessing, adapters=adapters)
    assert [call.completion_ids for call in got] == [call.completion_ids for call in expected]


@compiled
def test_what_is_often_said_takes_few_steps(tiny_agent_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(tiny_agent_dir)

    async def talk(sampler: Sampler) -> list[Sample]:
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Thank you, Ava is happy now."},
        ]
        prompt = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        said: list[Sample] = []
        for name in ("one", "two", "three", "four", "five"):
            params = SamplingParams(temperature=0.0, max_tokens=30)
            said.append(await sampler.sample(prompt, params, episode_id=name))
        return said

    steps: dict[int, int] = {}
    said: dict[int, list[list[int]]] = {}
    for tokens in (0, 16):
        sampler = start(loaded, draft_tokens=tokens)
        noted = steps_of(sampler, monkeypatch)
        said[tokens] = [sample.token_ids for sample in asyncio.run(talk(sampler))]
        steps[tokens] = len(noted)
    assert said[16] == said[0]
    assert steps[16] < 0.6 * steps[0]  # two of five times word by word, then at once


@compiled
def test_ends_inside_a_guess(tiny_model_dir: Path) -> None:
    """Stop strings, end of turn and the limit of length hold, and every token is announced once."""
    loaded = load(tiny_model_dir)
    (call, *_) = play(loaded, start(loaded, draft_tokens=0), episodes=1, turns=1, tokens=30, mixed_params=False)
    for limit in (1, 2, 7):
        sampler = start(loaded)
        sampler._drafts = Oracle([call], 0.0)
        heard: list[int] = []
        params = SamplingParams(max_tokens=limit, seed=0)
        sample = asyncio.run(sampler.sample(call.prompt_ids, params, episode_id="e", on_token=heard.append))
        assert sample.token_ids == heard == call.completion_ids[:limit]
        assert len(sample.logprobs) == limit
    stop = loaded.tokenizer.decode(call.completion_ids[3:5])
    sampler = start(loaded)
    sampler._drafts = Oracle([call], 0.0)
    params = SamplingParams(max_tokens=30, seed=0, stop=(stop,))
    sample = asyncio.run(sampler.sample(call.prompt_ids, params, episode_id="e"))
    assert sample.finish_reason == "stop"
    assert sample.token_ids == call.completion_ids[: len(sample.token_ids)]
    assert len(sample.token_ids) <= 5


def test_a_table_of_successors() -> None:
    drafts = Drafts()
    drafts.learn([1, 2, 3], [4, 5, 6])
    assert drafts.guess([1, 2, 3], 9) == []  # seen once is not sure
    drafts.learn([9, 1, 2, 3], [4, 5, 6])
    assert drafts.guess([1, 2, 3], 9) == [4, 5, 6]
    assert drafts.guess([1, 2, 3], 2) == [4, 5]
    assert drafts.guess([2, 3], 9) == []
    for _ in range(3):
        drafts.learn([1, 2, 3], [7])
    assert drafts.guess([1, 2, 3], 1) == [7]


def test_what_varies_is_not_guessed() -> None:
    drafts = Drafts()
    for i in range(100):
        drafts.learn([1, 2, 3], [10 + i % 2])
    assert drafts.guess([1, 2, 3], 1) == []


def test_the_table_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "_MOST_CONTEXTS", 50)
    drafts = Drafts()
    for i in range(100):
        drafts.learn([1, 2, 3], range(10 * i, 10 * i + 10))
        assert len(drafts._next) <= 60
    drafts.learn([1, 2, 3], [4])
    drafts.learn([1, 2, 3], [4])
    assert drafts.guess([1, 2, 3], 1) == [4]


def test_new_weights_start_an_empty_table(tiny_model_dir: Path) -> None:
    sampler = start(load(tiny_model_dir))
    sampler._drafts.learn([1, 2, 3], [4])
    sampler._drafts.learn([1, 2, 3], [4])
    sampler.weights_changed(1)
    assert sampler._drafts.guess([1, 2, 3], 1) == []
