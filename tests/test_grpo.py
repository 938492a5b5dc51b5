"""Advantages and losses, against TRL's GRPOTrainer where both have the variant."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from engine_tools import gradients, load, play, relative_difference, start
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agentscope_tuner.algorithms import Datum, build_datums, compute_advantages, weigh
from agentscope_tuner.algorithms.losses import entropy, k3_divergence
from agentscope_tuner.config import AlgorithmConfig, EngineConfig
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.types import Episode, EpisodeError, EpisodeGroup, ModelCall, Task, WorkflowTask


def a_call(role: str = "r", tokens: int = 3, temperature: float = 1.0) -> ModelCall:
    return ModelCall(role, [], None, [5, 6], [7] * tokens, [-1.0] * tokens, temperature, 1.0, 0, "stop", "", 0)


def a_group(*rewards: dict[str, float] | None, calls: int = 1) -> EpisodeGroup:
    task = Task(main_query="q")
    episodes = []
    for i, reward in enumerate(rewards):
        said = [a_call(role) for role in (reward or {}) for _ in range(calls)]
        error = EpisodeError("ValueError", "x") if reward is None else None
        episodes.append(Episode(WorkflowTask(task=task, group_index=i), said, reward, error=error))
    return EpisodeGroup(task, episodes)


# ---------------------------------------------------------------------------------------------------- advantages


def test_group_normalised_advantages_are_trls() -> None:
    rewards = [1.0, 0.0, 0.5, 0.25]
    (advantages,) = compute_advantages([a_group(*({"r": r} for r in rewards))], "group_std")
    scored = torch.tensor(rewards)
    expected = (scored - scored.mean()) / (scored.std() + 1e-4)
    assert torch.allclose(torch.tensor([credit.advantages[0] for credit in advantages]), expected, atol=1e-6)


def test_mean_only_advantages_keep_their_scale() -> None:
    (advantages,) = compute_advantages([a_group({"r": 3.0}, {"r": 1.0})], "mean_only")
    assert [credit.advantages[0] for credit in advantages] == [1.0, -1.0]


def test_roles_are_compared_with_their_own_kind() -> None:
    group = a_group({"wolf": 1.0, "seer": 0.0}, {"wolf": 0.0, "seer": 0.0}, {"wolf": 0.5, "seer": 9.0})
    (advantages,) = compute_advantages([group], "mean_only")
    assert {(c.trajectory.role, c.trajectory.reward): c.advantages[0] for c in advantages} == {
        ("wolf", 1.0): 0.5, ("wolf", 0.0): -0.5, ("wolf", 0.5): 0.0,
        ("seer", 0.0): -3.0, ("seer", 9.0): 6.0,
    }  # fmt: skip


def test_failed_episodes_and_silent_groups_take_no_part() -> None:
    groups = [a_group({"r": 1.0}, None, {"r": 0.0}), a_group({"r": 1.0}, {"r": 1.0}), a_group({"r": 1.0}, None)]
    first, second, third = compute_advantages(groups, "mean_only")
    assert [credit.advantages[0] for credit in first] == [0.5, -0.5]
    assert second == third == []


def test_one_advantage_per_episode_however_many_calls() -> None:
    (advantages,) = compute_advantages([a_group({"r": 1.0}, {"r": 0.0}, calls=5)], "mean_only")
    (datums,) = build_datums([advantages])
    assert [datum.advantage for datum in datums] == [0.5] * 5 + [-0.5] * 5
    weigh(datums, "episode", 99)
    assert sum(d.weight * len(d.call.completion_ids) for d in datums) == pytest.approx(1.0)


def test_weights() -> None:
    datums = [Datum(a_call(tokens=tokens), 1.0, 0.0, trajectory) for tokens, trajectory in ((2, 0), (4, 0), (2, 1))]
    weigh(datums, "token", 10)
    assert [d.weight for d in datums] == [1 / 8] * 3
    weigh(datums, "episode", 10)
    assert [d.weight for d in datums] == [1 / 12, 1 / 12, 1 / 4]
    weigh(datums, "constant", 10)
    assert [d.weight for d in datums] == [1 / 20] * 3


def test_groups_are_dealt_out_and_none_is_lost() -> None:
    groups = [a_group({"r": 1.0}, {"r": 0.0}) for _ in range(5)]
    dealt = build_datums(compute_advantages([*groups, a_group({"r": 1.0}, {"r": 1.0})], "group_std"), updates=2)
    assert [len(datums) for datums in dealt] == [6, 4]
    assert build_datums([[], []]) == []


# --------------------------------------------------------------------------------------------------------- losses


def test_k3_is_never_negative_and_zero_at_equality() -> None:
    a, b = torch.randn(1000), torch.randn(1000)
    assert (k3_divergence(a, b) >= 0).all()
    assert k3_divergence(a, a).abs().max() == 0


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -torch.inf, 0.0, -torch.inf]], requires_grad=True)
    found = entropy(logits)
    assert torch.allclose(found, torch.tensor([4.0, 2.0]).log())
    found.sum().backward()
    assert torch.isfinite(logits.grad).all()


VARIANTS = {
    "token": dict(ours=dict(loss_weighting="token"), trl=dict(loss_type="bnpo")),
    "token-dapo": dict(ours=dict(loss_weighting="token"), trl=dict(loss_type="dapo")),
    "episode": dict(ours=dict(loss_weighting="episode"), trl=dict(loss_type="grpo")),
    "constant": dict(ours=dict(loss_weighting="constant"), trl=dict(loss_type="dr_grpo")),
    "wide clip": dict(
        ours=dict(clip_low=0.1, clip_high=0.5), trl=dict(loss_type="bnpo", epsilon=0.1, epsilon_high=0.5)
    ),
    "kl": dict(ours=dict(loss_weighting="episode", kl_coef=0.3), trl=dict(loss_type="grpo", beta=0.3)),
    "entropy": dict(ours=dict(entropy_coef=0.2), trl=dict(loss_type="bnpo", entropy_coef=0.2)),
    "entropy, episode": dict(
        ours=dict(entropy_coef=0.2, loss_weighting="episode"), trl=dict(loss_type="grpo", entropy_coef=0.2)
    ),
    "tempered": dict(ours={}, trl=dict(loss_type="bnpo", temperature=0.7)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_equal_trls(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    ours, theirs = VARIANTS[name]["ours"], VARIANTS[name]["trl"]
    loaded = load(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=8, turns=1, mixed_params=False)
    rng = random.Random(2)
    for call in calls:
        call.temperature = theirs.get("temperature", 1.0)
    algorithm = AlgorithmConfig(epochs_per_batch=2, **ours)
    learner = Learner(loaded, algorithm, EngineConfig(device="cpu"), 12)
    for call, logprobs in zip(calls, learner.logprobs(calls), strict=True):
        call.logprobs = [value + rng.gauss(0, 0.3) for value in logprobs.tolist()]
    reference = [torch.tensor([value + rng.gauss(0, 0.3) for value in call.logprobs]) for call in calls]
    datums = [Datum(call, rng.gauss(0, 1), 0.0, i) for i, call in enumerate(calls)]
    weigh(datums, algorithm.loss_weighting, 12)
    metrics = learner.accumulate(datums, reference if algorithm.kl_coef else None)
    mine = gradients(loaded)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_completion_length=12,
            per_device_train_batch_size=len(calls), num_generations=len(calls), gradient_accumulation_steps=1,
            activation_checkpointing=False, **{"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, **theirs},
        ),
        train_dataset=Dataset.from_list([{"prompt": "x"}]),
        processing_class=loaded.tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1

    def padded(rows: list[list[float]], left: bool = False) -> torch.Tensor:
        width = max(map(len, rows))
        return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])

    inputs = {
        "prompt_ids": padded([c.prompt_ids for c in calls], left=True),
        "prompt_mask": padded([[1] * len(c.prompt_ids) for c in calls], left=True),
        "completion_ids": padded([c.completion_ids for c in calls]),
        "completion_mask": padded([[1] * len(c.completion_ids) for c in calls]),
        "advantages": torch.tensor([datum.advantage for datum in datums]),
        "old_per_token_logps": padded([c.logprobs for c in calls]),
        "ref_per_token_logps": padded([r.tolist() for r in reference]),
        "num_items_in_batch": torch.tensor(sum(len(c.completion_ids) for c in calls)),
    }
    model = trainer.model.train()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    trls = {parameter: model.get_parameter(parameter).grad for parameter in mine}
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert relative_difference(mine, trls) < 1e-4
