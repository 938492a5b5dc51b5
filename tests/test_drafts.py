"""Guessing ahead saves steps and changes no token."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import greedy, load, play, start

from agentscope_tuner.config import LoraConfig
from agentscope_tuner.engine import completions
from agentscope_tuner.engine import drafts as drafts_module
from agentscope_tuner.engine.completions import Completions
from agentscope_tuner.engine.drafts import CONTEXT, Drafts
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.engine.trial import native_kernels
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.types import ModelCall

compiled = pytest.mark.usefixtures("kernels")


class Oracle(Drafts):
    """A table of what will be drawn, which is wrong now and then, and learns nothing more.

    It is a table, and no method, so that compiled decoding reads it as well.
    """

    def __init__(self, calls: Sequence[ModelCall], wrong: float) -> None:
        kernels = native_kernels()
        assert kernels is not None
        super().__init__(kernels)
        rng = random.Random(0)
        for call in calls:
            said = [*call.prompt_ids[-CONTEXT:], *call.completion_ids]
            guessed = said[:CONTEXT] + [3 if rng.random() < wrong else token for token in call.completion_ids]
            for at in range(CONTEXT, len(said)):
                context, taken = said[at - CONTEXT : at], guessed[at - CONTEXT : at]
                # A guess may also follow one that is wrong.
                for before in {tuple(context[:i] + taken[i:]) for i in range(CONTEXT + 1)}:
                    for _ in range(2):  # what was seen once is not sure
                        super().learn(np.array([*before, guessed[at]]))

    def learn(self, tokens: np.ndarray) -> None:
        """It knows."""


def table() -> Drafts:
    kernels = native_kernels()
    assert kernels is not None
    return Drafts(kernels)


def learn(drafts: Drafts, *tokens: int) -> None:
    drafts.learn(np.array(tokens))


def guesses(drafts: Drafts, ids: Sequence[int], most: int) -> list[int]:
    """Those for a single sequence."""
    tokens = np.array([*ids[-CONTEXT:], *range(most)])
    (count,) = drafts.guess(tokens, np.array([0]), np.array([most]))
    return tokens[CONTEXT : CONTEXT + count].tolist()


def steps_of(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of completions each step runs, or several steps together, noted while the sampler runs."""
    steps: list[int] = []
    runner, begin, decode = sampler._runner, sampler._runner.begin, sampler._runner.decode

    def noted(work: Any, drawing: Any) -> Any:
        steps.append(int(work.wanted.sum()))
        return begin(work, drawing)

    def noted_decoding(*given: Any) -> Any:
        job = decode(*given)
        done = functools.cache(job.finish)

        def finish() -> Any:
            if not done.cache_info().currsize:
                steps.extend([done().rows] * done().steps)
            return done()

        job.finish = finish
        return job

    monkeypatch.setattr(runner, "begin", noted)
    monkeypatch.setattr(runner, "decode", noted_decoding)
    return steps


@compiled
@pytest.mark.parametrize("mixed", [True, False], ids=["truncated", "in one call"])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_tokens_and_log_probabilities_stay_what_they_are(
    wrong: float, mixed: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_model_dir)
    plain = start(loaded, max_slots=8, draft_tokens=0)
    plain_steps = steps_of(plain, monkeypatch)
    expected = play(loaded, plain, mixed_params=mixed)
    monkeypatch.setattr(completions, "_COLUMNS", 1)  # more room is made on the way
    guessing = start(loaded, max_slots=8)
    guessing._completions._drafts = Oracle(expected, wrong)
    steps = steps_of(guessing, monkeypatch)
    got = play(loaded, guessing, mixed_params=mixed)
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
    guessing._completions._drafts = Oracle(expected, 0.3)
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
        sampler._completions._drafts = Oracle([call], 0.0)
        heard: list[int] = []
        params = SamplingParams(max_tokens=limit, seed=0)
        sample = asyncio.run(sampler.sample(call.prompt_ids, params, episode_id="e", on_token=heard.append))
        assert sample.token_ids == heard == call.completion_ids[:limit]
        assert len(sample.logprobs) == limit
    stop = loaded.tokenizer.decode(call.completion_ids[3:5])
    sampler = start(loaded)
    sampler._completions._drafts = Oracle([call], 0.0)
    params = SamplingParams(max_tokens=30, seed=0, stop=(stop,))
    sample = asyncio.run(sampler.sample(call.prompt_ids, params, episode_id="e"))
    assert sample.finish_reason == "stop"
    assert sample.token_ids == call.completion_ids[: len(sample.token_ids)]
    assert len(sample.token_ids) <= 5


@compiled
def test_a_table_of_successors() -> None:
    drafts = table()
    learn(drafts, 1, 2, 3, 4, 5, 6)
    assert guesses(drafts, [1, 2, 3], 9) == []  # seen once is not sure
    learn(drafts, 1, 2, 3, 4, 5, 6)
    assert guesses(drafts, [1, 2, 3], 9) == [4, 5, 6]
    assert guesses(drafts, [1, 2, 3], 2) == [4, 5]
    assert guesses(drafts, [1, 2, 3], 0) == []
    assert guesses(drafts, [7, 2, 3], 9) == []
    for _ in range(3):
        learn(drafts, 1, 2, 3, 7)
    assert guesses(drafts, [1, 2, 3], 1) == [7]
    learn(drafts, 1, 2)


@compiled
def test_many_sequences_are_guessed_at_once() -> None:
    drafts = table()
    for _ in range(2):
        learn(drafts, 1, 2, 3, 4, 5)
        learn(drafts, 2**20, 8, 9, 151_000, 6, 5, 4)
    rows = np.zeros((4, 9), np.int64)
    rows[:, 1:4] = [[2**20, 8, 9], [3, 3, 3], [1, 2, 3], [1, 2, 3]]
    counts = drafts.guess(rows, np.arange(4) * 9 + 1, np.array([3, 3, 3, 1]))
    assert counts.tolist() == [3, 0, 2, 1]
    assert rows[:, 4:7].tolist() == [[151_000, 6, 5], [0, 0, 0], [4, 5, 0], [4, 0, 0]]


@compiled
def test_what_varies_is_not_guessed() -> None:
    drafts = table()
    for i in range(100):
        learn(drafts, 1, 2, 3, 10 + i % 2)
    assert guesses(drafts, [1, 2, 3], 1) == []


@compiled
def test_a_full_table_keeps_what_is_said_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "_TABLE_BITS", 3)
    drafts = table()
    for i in range(200):
        for _ in range(3):
            learn(drafts, 1, 2, 3, 4)
        learn(drafts, *range(10 * i, 10 * i + 5))
    assert guesses(drafts, [1, 2, 3], 1) == [4]
    assert len(drafts._table) == 8
    for i in range(20):
        learn(drafts, *range(10 * i, 10 * i + 50))
    for _ in range(9):
        learn(drafts, 8, 7, 6, 5)
    assert guesses(drafts, [8, 7, 6], 1) == [5], "what is said no more makes room"


@compiled
def test_new_weights_start_an_empty_table(tiny_model_dir: Path) -> None:
    sampler = start(load(tiny_model_dir))
    drafts = sampler._drafts
    assert drafts is not None
    for _ in range(2):
        learn(drafts, 1, 2, 3, 4)
    assert guesses(drafts, [1, 2, 3], 1) == [4]
    sampler.weights_changed(1)
    assert guesses(drafts, [1, 2, 3], 1) == []


@compiled
def test_nothing_is_guessed_where_every_row_is_paid_for(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    lines = Completions.lines

    def recorded(self: Completions, plan: object, guesses: int, *steps: int) -> object:
        asked.append((len(self), guesses))
        return lines(self, plan, guesses, *steps)

    monkeypatch.setattr(Completions, "lines", recorded)
    greedy(start(load(tiny_model_dir), max_slots=64), [[5, 6, 7 + i] for i in range(40)], tokens=24)
    greedy(start(load(tiny_model_dir), max_slots=64), [[5, 6, 7 + i] for i in range(4)], tokens=24)
    assert {guesses for rows, guesses in asked if rows > 16} == {0}
    assert 7 in {guesses for rows, guesses in asked if rows == 4}
