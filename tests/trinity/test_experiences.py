"""What is handed to Trinity is what the embedded engine would learn from."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from trinity.common.config import AlgorithmConfig, Config, TrainerConfig
from trinity.common.experience import Experience
from trinity.trainer.tinker.tinker_trainer import TinkerTrainerWrapper
from trinity.trainer.tinker.utils import to_tinker_input
from trinity.trainer.verl.losses import TrinityPolicyLoss
from trinity.trainer.verl.utils import to_data_proto
from verl.utils.tensordict_utils import index_select_tensor_dict

from agentscope_tuner.algorithms import build_datums, compute_advantages, weigh
from agentscope_tuner.algorithms.losses import policy_loss
from agentscope_tuner.backends.trinity.algorithm import (
    STEP_SIZE,
    Grpo,
    SummedLoss,
    WeighedAdvantages,
    nothing_learned,
    padded,
    to_experiences,
    without_reference,
)
from agentscope_tuner.backends.trinity.strands import strands_of
from agentscope_tuner.types import Episode, EpisodeError, EpisodeGroup, ModelCall, Task, WorkflowTask


def a_call(role: str, prompt: list[int], rng: random.Random, reward: float = 0.0) -> ModelCall:
    completion = [rng.randrange(3, 900) for _ in range(rng.randrange(3, 9))]
    logprobs = [-rng.random() for _ in completion]
    return ModelCall(role, [], None, prompt, completion, logprobs, 1.0, 1.0, 0, "stop", "", 0, reward=reward)


def talk(role: str, rng: random.Random, turns: int, *, branch_at: int | None = None) -> list[ModelCall]:
    """Calls that extend one another; at `branch_at` the history is rewritten."""
    history = [1, 2, *(rng.randrange(3, 900) for _ in range(12))]
    calls = []
    for turn in range(turns):
        if turn == branch_at:
            history = history[:-6]
        call = a_call(role, list(history), rng)
        calls.append(call)
        history = [*call.prompt_ids, *call.completion_ids, *(rng.randrange(3, 900) for _ in range(4))]
    return calls


def a_batch(*, turn_rewards: bool = False) -> list[EpisodeGroup]:
    """Groups of two roles, with branches, a failed episode, and one group that earned the same throughout."""
    rng = random.Random(7)
    groups = []
    for index in range(4):
        episodes = []
        for member in range(4):
            calls = talk("solver", rng, 3, branch_at=2 if member == 1 else None) + talk("critic", rng, 2)
            if turn_rewards and member % 2:
                calls[1].reward = 0.25
            task = WorkflowTask(task=Task(task_id=str(index)), episode_id=f"train1-{index}-{member}")
            episode = Episode(task, calls=calls)
            if index == 1 and member == 2:
                episode.error = EpisodeError("ValueError", "broken", "")
            else:
                episode.reward = (
                    {"solver": 1.0, "critic": 0.5}
                    if index == 3
                    else {"solver": rng.random() + sum(call.reward for call in calls), "critic": rng.random()}
                )
            episodes.append(episode)
        groups.append(EpisodeGroup(task.task, episodes))
    return groups


def experiences_of(groups: list[EpisodeGroup], weighting: str = "token") -> list[Experience]:
    """As the adapter and the explorer's pipeline make them, serialized in between."""
    found = []
    for index, group in enumerate(groups):
        for experience in to_experiences(compute_advantages([group], "group_std")[0], str(index)):
            experience.eid.batch = 1
            found.append(experience)
    found = Experience.deserialize_many(Experience.serialize_many(found))
    return WeighedAdvantages(weighting, max_tokens=64).process(found)[0]


def sampled(experience: Experience) -> torch.Tensor:
    """Which tokens the policy wrote, over the whole sequence."""
    return torch.cat([torch.zeros(experience.prompt_length, dtype=torch.bool), experience.action_mask.bool()])


@pytest.mark.parametrize("weighting", ["token", "episode", "constant"])
@pytest.mark.parametrize("turn_rewards", [False, True])
def test_tokens_logprobs_and_what_each_token_counts_are_those_of_the_local_backend(
    weighting: str, turn_rewards: bool
) -> None:
    groups = a_batch(turn_rewards=turn_rewards)
    (datums,) = build_datums(compute_advantages(groups, "group_std"))
    weigh(datums, weighting, 64)
    expected = defaultdict(list)
    for datum in datums:
        for place, token in enumerate(datum.call.completion_ids):
            context = tuple(datum.call.prompt_ids + datum.call.completion_ids[:place])
            expected[(context, token)].append((datum.call.logprobs[place], datum.advantage * datum.weight))

    experiences = experiences_of(groups, weighting)
    found = defaultdict(list)
    for experience in experiences:
        tokens, start = experience.tokens.tolist(), experience.prompt_length
        for place in sampled(experience).nonzero()[:, 0].tolist():
            share = experience.advantages[place - start].item()
            found[(tuple(tokens[:place]), tokens[place])].append((experience.logprobs[place - start].item(), share))
    written = {
        (tuple(call.prompt_ids + call.completion_ids[:place]), token)
        for credits in compute_advantages(groups, "group_std")
        for credit in credits
        for call in credit.trajectory.calls
        for place, token in enumerate(call.completion_ids)
    }
    assert found.keys() == written
    for key in written - expected.keys():  # turns that are not compared with any other
        assert all(share == 0 for _, share in found[key])
    for key, values in expected.items():
        for (logprob, share), (own_logprob, own_share) in zip(sorted(found[key]), sorted(values), strict=True):
            assert logprob == pytest.approx(own_logprob, rel=1e-6)
            assert share == pytest.approx(own_share, rel=1e-5)


def test_groups_compare_within_task_and_role_and_carry_their_rewards() -> None:
    groups = a_batch()
    experiences = experiences_of(groups)
    assert {experience.eid.tid for experience in experiences} == {
        f"1/{index}:{role}" for index in range(3) for role in ("solver", "critic")
    }
    for experience in experiences:
        index, role = experience.eid.task.split(":")
        rewards = {round(episode.reward[role], 6) for episode in groups[int(index)].succeeded}
        assert round(experience.reward, 6) in rewards
    by_task = defaultdict(set)
    for experience in experiences:
        by_task[experience.eid.tid].add(experience.eid.rid)
    assert len(by_task["1/1:solver"]) == 3, "the failed episode takes no part"
    assert len(by_task["1/0:solver"]) == 4


def test_six_turns_that_extend_one_another_are_one_experience() -> None:
    rng = random.Random(0)
    group = EpisodeGroup(Task(), [])
    for reward in (0.0, 1.0):
        episode = Episode(WorkflowTask(task=Task()), calls=talk("solver", rng, 6))
        episode.reward = {"solver": reward}
        group.episodes.append(episode)
    experiences = to_experiences(compute_advantages([group], "group_std")[0], "0")
    assert len(experiences) == 2
    for experience, episode in zip(experiences, group.episodes, strict=True):
        assert experience.tokens.tolist() == episode.calls[-1].prompt_ids + episode.calls[-1].completion_ids
        assert experience.prompt_length == len(episode.calls[0].prompt_ids)
        assert experience.action_mask.sum() == sum(len(call.completion_ids) for call in episode.calls)


def test_a_branch_counts_what_it_shares_only_once() -> None:
    rng = random.Random(0)
    episode = Episode(WorkflowTask(task=Task()), calls=talk("solver", rng, 4, branch_at=2))
    other = Episode(WorkflowTask(task=Task()), calls=talk("solver", rng, 1))
    episode.reward, other.reward = {"solver": 1.0}, {"solver": 0.0}
    credit = compute_advantages([EpisodeGroup(Task(), [episode, other])], "group_std")[0][0]
    strands = strands_of(credit)
    assert len(strands) == 2
    assert sum(map(sum, (strand.sampled for strand in strands))) == sum(len(c.completion_ids) for c in episode.calls)


def settings_of_the_loss() -> AlgorithmConfig:
    return AlgorithmConfig(
        algorithm_type=f"{Grpo.__module__}.{Grpo.__name__}",
        loss_agg_mode="token-mean",  # by Trinity's checker
        policy_loss_fn=f"{SummedLoss.__module__}.{SummedLoss.__name__}",
        policy_loss_fn_args={"clip_low": 0.2, "clip_high": 0.3, "sequence_parallel": 1},
        kl_loss_fn="none",
        kl_loss_fn_args={},
        kl_penalty_fn="none",
        kl_penalty_fn_args={},
        entropy_loss_fn="none",
        entropy_loss_fn_args={"entropy_coef": 0.0},
    )


def summed_loss(experiences: list[Experience], said: list[torch.Tensor]) -> torch.Tensor:
    """Of what the model says of every token of every sequence: at each place, of the token that follows."""
    total = torch.zeros(())
    for experience, logprobs in zip(experiences, said, strict=True):
        new = logprobs[experience.prompt_length - 1 : -1]
        losses, _ = policy_loss(new, experience.logprobs, experience.advantages, 0.2, 0.3)
        total = total + losses[experience.action_mask.bool()].sum()
    return total


@pytest.mark.parametrize("cuts", [[], [1, 4], [2, 3, 20]])
def test_verls_loss_is_the_sum_over_all_tokens_however_a_step_is_cut(cuts: list[int]) -> None:
    experiences = padded(experiences_of(a_batch()), 40)
    batch = to_data_proto(experiences, 0, cast(Any, object()), logging.getLogger())
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    data = batch.to_tensordict()
    compute = TrinityPolicyLoss(settings_of_the_loss())
    torch.manual_seed(0)
    said = [-torch.rand(len(experience.tokens)) for experience in experiences]
    found = torch.zeros(())
    for start, end in pairwise([0, *cuts, len(experiences)]):
        part = index_select_tensor_dict(data, torch.arange(start, end))
        found = found + compute({"log_probs": torch.cat(said[start:end])}, part)[0]
    expected = summed_loss(experiences, said)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert expected.abs() > 0.01


def test_the_tinker_trainers_loss_is_that_sum_and_needs_no_reference() -> None:
    experiences = experiences_of(a_batch())
    without_reference(experiences)
    trainer = object.__new__(TinkerTrainerWrapper)
    algorithm, training = settings_of_the_loss(), TrainerConfig(fix_actor_microbatch_loss_scale=True)
    trainer.config = Config(algorithm=algorithm, trainer=training)
    trainer.logger = logging.getLogger()
    trainer._init_algorithm()
    assert not trainer.algorithm.use_reference, "it would ask for log-probabilities of every sequence"
    batch, _, trainer.model_inputs_list = to_tinker_input(experiences, trainer.logger)
    torch.manual_seed(0)
    said = [-torch.rand(len(experience.tokens)) for experience in experiences]
    found, _ = trainer._loss_func(batch, [logprobs[:-1] for logprobs in said])
    assert found.item() == pytest.approx(summed_loss(experiences, said).item(), rel=1e-5)


def test_a_step_that_is_too_large_is_told() -> None:
    with pytest.raises(ValueError, match="train_batch_size"):
        padded(experiences_of(a_batch()), 3)


def test_a_step_without_anything_to_learn_moves_nothing() -> None:
    experiences, _ = WeighedAdvantages().process([nothing_learned("0", 5), nothing_learned("1", 5)])
    assert all(not experience.advantages.any() for experience in experiences)
    assert [experience.info[STEP_SIZE] for experience in experiences] == [2, 2]
