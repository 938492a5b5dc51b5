"""What Trinity's workflow runners run: one task's whole group of episodes, by our own rollout."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import ray
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task as TrinityTask
from trinity.common.workflows.workflow import Workflow as TrinityWorkflow

from agentscope_tuner.algorithms import Credit, compute_advantages
from agentscope_tuner.backends.trinity.algorithm import nothing_learned, to_experiences
from agentscope_tuner.backends.trinity.policies import EnginePolicy, TinkerPolicy, VllmPolicy, policy_model
from agentscope_tuner.config import TunerConfig
from agentscope_tuner.errors import EpisodeFailure, TrainingStoppedError, TunerError
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import EpisodeGroup, Task
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner


@dataclass(slots=True)
class RunSpec:
    """What every runner has to know about the run. Its text shows no settings: Trinity prints its configuration."""

    config: TunerConfig = field(repr=False)
    workflow: WorkflowRunner = field(repr=False)
    judge: JudgeRunner | None = field(repr=False)
    recorder: str
    """The name of the actor that episodes are sent to."""


class GroupWorkflow(TrinityWorkflow):  # type: ignore[misc]  # published without types
    """A Trinity workflow that runs a task `repeat_times` times at once, and records what happened."""

    is_async: bool = True
    can_repeat: bool = True

    def __init__(
        self, *, task: TrinityTask, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None
    ) -> None:
        self.task = task
        self.model = model
        self.helpers = auxiliary_models or []
        self.spec: RunSpec = task.workflow_args["run"]
        self.decoding: str = task.workflow_args.get("decoding", "")
        self.repeat_times = 1

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """How many episodes to run."""
        self.repeat_times = repeat_times

    async def run_async(self) -> list[Experience]:
        """The group's experiences; of an evaluation, one that holds nothing but its reward.

        Raises:
            EpisodeFailure: the episode of an evaluation failed.
            TunerError: something is wrong with the run; the recorder knows of it, since Trinity goes on.
        """
        step = int(str(self.task.batch_id).partition("/")[0])
        recorder = ray.get_actor(self.spec.recorder)
        try:
            room = await _room_of(self.spec, self.model, self.helpers, _updates_before(step, self.spec.config))
            group = await self._play(room, step)
            version = room.policies[0].version
            known = room.rollout.registered
            await recorder.record.remote(group, known, phase=self._phase, batch=step, version=version)
        except Exception as exc:
            wrong = exc if isinstance(exc, TunerError) else _unforeseen(exc)
            await recorder.fail.remote(wrong)
            raise wrong from exc
        if not self.decoding:
            return self._experiences(group)
        episode = group.episodes[0]
        if episode.error is not None:
            raise EpisodeFailure(str(episode.error))
        experience = nothing_learned(str(self.task.task_id), room.end_of_turn)
        experience.reward = float(episode.reward_mean or 0.0)
        experience.metrics = {"reward": experience.reward, **episode.metrics}
        return [experience]

    @property
    def _phase(self) -> str:
        return f"eval_{self.decoding}" if self.decoding else "train"

    async def _play(self, room: _Room, step: int) -> EpisodeGroup:
        phase = self._phase if self.decoding else f"train{step}"
        params = room.rollout.model.params
        if self.decoding == "greedy":
            params = params.greedy()
        groups = await room.rollout.run(
            [Task.model_validate_json(self.task.raw_task["task"])],
            self.repeat_times,
            phase=phase,
            first=int(self.task.task_id),
            params=params,
            branching=None if self.decoding else self.spec.config.algorithm.branching,
            whole=False,
        )
        return groups[0]

    def _experiences(self, group: EpisodeGroup) -> list[Experience]:
        algorithm = self.spec.config.algorithm
        name = str(self.task.task_id)
        credits = compute_advantages([group], algorithm.advantage, algorithm.turn_discount)[0]
        if not credits:  # all earned the same; they are what the step consists of nevertheless
            credits = [
                Credit(trajectory, [None] * len(trajectory.calls))
                for episode in group.succeeded
                for trajectory in episode.trajectories()
            ]
        return to_experiences(credits, name) or [nothing_learned(name, 0)]


@dataclass(slots=True)
class _Room:
    """What the episodes of one runner process share."""

    rollout: Rollout
    policies: list[Any]
    end_of_turn: int


_rooms: dict[str, _Room] = {}
_entering = asyncio.Lock()


def _updates_before(step: int, config: TunerConfig) -> int:
    """How many updates the weights have to have seen for a step; where neither side waits, any will do."""
    if config.trinity.sync_style != "fixed":
        return 0
    return max(0, step - 1) // config.trinity.sync_interval * config.trinity.sync_interval


async def _room_of(spec: RunSpec, model: ModelWrapper, helpers: list[ModelWrapper], seen: int) -> _Room:
    """The room of this process, made at the first call; its policies look for new weights at every one."""
    async with _entering:
        room = _rooms.get(spec.recorder)
        if room is None:
            room = _rooms[spec.recorder] = _enter(spec, model, helpers)
        for policy, engine in zip(room.policies, (model, *helpers), strict=True):
            await policy.refresh(engine, seen, spec.config.trinity.sync_timeout_s)
    return room


def _enter(spec: RunSpec, model: ModelWrapper, helpers: list[ModelWrapper]) -> _Room:
    config = spec.config
    trained = policy_model(config.model, _kind_of(model))
    auxiliary = {
        name: policy_model(settings, _kind_of(helper))
        for (name, settings), helper in zip(config.auxiliary_models.items(), helpers, strict=True)
    }
    rollout = Rollout(spec.workflow, spec.judge, trained, config.workflow, config.seed, auxiliary)
    return _Room(rollout, [one.policy for one in (trained, *auxiliary.values())], min(trained.end_of_turn_ids))


def _unforeseen(exc: Exception) -> TrainingStoppedError:
    return TrainingStoppedError(f"a workflow runner of Trinity's failed with {type(exc).__name__}: {exc}")


def _kind_of(model: ModelWrapper) -> type[EnginePolicy]:
    return TinkerPolicy if model.config.engine_type == "tinker" else VllmPolicy
