"""Sampling one batch while learning from another: the same updates, by the same rules, at the same time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import load
from safetensors.torch import load_file

from agentscope_tuner import TuneResult, tune
from agentscope_tuner.algorithms import Datum
from agentscope_tuner.config import AlgorithmConfig, EngineConfig
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.errors import ConfigError, ParityError, TrainingStoppedError

STEPS = 4


async def vowels(task: dict[str, Any], model: Any) -> float:
    response = await model([{"role": "user", "content": task["question"]}])
    text = str(response.content)
    return sum(map(text.count, "aeiou")) / len(text)


def train(model: Path, folder: Path, *more: str, workflow: Callable[..., Any] = vowels) -> TuneResult:
    data = folder / "tasks.jsonl"
    data.write_text("\n".join(json.dumps({"question": f"Say {i}"}) for i in range(23)))
    return tune(
        workflow,
        overrides=[
            f"model.model_path={model}", "model.max_tokens=10", "model.max_model_len=400",
            f"output_dir={folder}", "experiment_name=run", f"train_dataset.path={data}",
            f"train_dataset.total_steps={STEPS}", "algorithm.batch_size=3", "algorithm.group_size=4",
            "algorithm.learning_rate=0.01", "algorithm.save_interval_steps=1", "engine.threads=1", "seed=11",
            "algorithm.max_staleness=1", *more,
        ],
    )  # fmt: skip


def episodes_of(result: TuneResult, step: int) -> list[dict[str, Any]]:
    lines = (result.run_dir / "episodes" / f"train_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[list[Datum]]]:
    """What `Learner.train` is given, step by step."""
    seen: list[list[list[Datum]]] = []
    original = Learner.train

    def record(self: Learner, updates: list[list[Datum]], *args: Any, **kwargs: Any) -> Any:
        seen.append(deepcopy(updates))
        return original(self, updates, *args, **kwargs)

    monkeypatch.setattr(Learner, "train", record)
    return seen


@pytest.mark.parametrize("updates", [1, 2])
def test_updates_are_those_of_the_same_batches_one_after_the_other(
    updates: int, tiny_model_dir: Path, tmp_path: Path, batches: list[list[list[Datum]]]
) -> None:
    result = train(tiny_model_dir, tmp_path, f"algorithm.updates_per_epoch={updates}")
    assert len(batches) == STEPS
    learner = Learner(
        load(tiny_model_dir, max_model_len=400),
        AlgorithmConfig(learning_rate=0.01),
        EngineConfig(device="cpu"),
        10,
    )
    for number, batch in enumerate(list(batches)):
        learner.train(batch, on_policy=number == 0)
    trained = load_file(result.checkpoint / "model.safetensors")
    for name, parameter in learner.optimizer.parameters.items():
        assert torch.equal(trained[name], parameter), name


def test_every_batch_is_sampled_with_one_set_of_weights_one_update_old(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = train(tiny_model_dir, tmp_path)
    versions = [
        {call["policy_version"] for episode in episodes_of(result, step) for call in episode["calls"]}
        for step in range(1, STEPS + 1)
    ]
    assert versions == [{0}, {0}, {1}, {2}]
    apart = [metrics.kl_to_sampler for metrics in result.history]
    assert abs(apart[0]) < 1e-6 < min(apart[1:])


def test_the_next_batch_is_sampled_meanwhile(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning, sampling = threading.Event(), threading.Event()
    original = Learner.accumulate

    def accumulate(self: Learner, *args: Any, **kwargs: Any) -> Any:
        learning.set()
        assert sampling.wait(60), "nobody sampled while the gradient was computed"
        return original(self, *args, **kwargs)

    async def workflow(task: dict[str, Any], model: Any) -> float:
        if learning.is_set():
            sampling.set()
        return await vowels(task, model)

    monkeypatch.setattr(Learner, "accumulate", accumulate)
    assert train(tiny_model_dir, tmp_path, workflow=workflow).history[-1].step == STEPS


def test_a_batch_that_fails_costs_no_step_before_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    begun = []

    async def fails_later(task: dict[str, Any], model: Any) -> float:
        begun.append(task)
        if len(begun) > 2 * 12:
            raise ValueError("no more")
        return await vowels(task, model)

    settings = ("algorithm.max_resampled_groups=0",)
    with pytest.raises(TrainingStoppedError, match="no more"):
        train(tiny_model_dir, tmp_path, *settings, workflow=fails_later)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]

    result = train(tiny_model_dir, tmp_path, *settings)
    assert [metrics.step for metrics in result.history] == [1, 2, 3, 4]
    # Each step has tasks of its own: those that were taken ahead of the failure are taken again.
    asked = [tuple(sorted({e["task"]["id"] for e in episodes_of(result, step)})) for step in range(1, 5)]
    assert len({question for questions in asked for question in questions}) == 3 * STEPS


def test_an_error_of_the_learner_ends_the_run(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Learner.accumulate

    def off(self: Learner, datums: list[Datum], *args: Any) -> Any:
        datums[0].call.logprobs[0] += 1
        return original(self, datums, *args)

    monkeypatch.setattr(Learner, "accumulate", off)
    with pytest.raises(ParityError, match="must equal the sampler's"):
        train(tiny_model_dir, tmp_path)


def test_modules_that_hold_one_adapter_at_a_time_are_not_shared(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`algorithm.max_staleness` does not go with `model.lora` here"):
        train(tiny_model_dir, tmp_path, "model.lora.rank=4", "engine.fast_decoder=false")
    assert train(tiny_model_dir, tmp_path, "model.lora.rank=4", "experiment_name=fused").history[-1].step == STEPS
