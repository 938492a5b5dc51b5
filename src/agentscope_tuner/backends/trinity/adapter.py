"""What Trinity's workflow runners run: one task's whole group of episodes, by our own rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task as TrinityTask
from trinity.common.workflows.workflow import Workflow as TrinityWorkflow

from agentscope_tuner.algorithms import Credit, compute_advantages
from agentscope_tuner.backends.trinity.algorithm import nothing_learned, to_experiences
from agentscope_tuner.config import AlgorithmConfig, TunerConfig
from agentscope_tuner.errors import EpisodeFailure, TrainingStoppedError, TunerError
from agentscope_tuner.types import EpisodeGroup, Task

if TYPE_CHECKING:
    from agentscope_tuner.backends.trinity.spec import RunSpec
    from agentscope_tuner.rollout import Rollout


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
        self.recorder: str = task.workflow_args["recorder"]
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
        recorder = ray.get_actor(self.recorder)
        try:
            room = await _room_of(self.recorder, recorder, self.model, self.helpers)
            await room.refresh(step, (self.model, *self.helpers))
            group = await self._play(room, step)
            version = room.policies[0].version
            known = room.rollout.registered
            await recorder.record.remote(group, known, phase=self._phase, batch=step, version=version)
        except Exception as exc:
            wrong = exc if isinstance(exc, TunerError) else _unforeseen(exc)
            await recorder.fail.remote(wrong)
            raise wrong from exc
        if not self.decoding:
            return _experiences(group, str(self.task.task_id), room.config.algorithm)
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
            branching=None if self.decoding else room.config.algorithm.branching,
            whole=False,
        )
        return groups[0]


def _experiences(group: EpisodeGroup, name: str, algorithm: AlgorithmConfig) -> list[Experience]:
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

    config: TunerConfig
    rollout: Rollout
    policies: list[Any]
    end_of_turn: int
    refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refresh(self, step: int, engines: Sequence[ModelWrapper]) -> None:
        """Take the weights that a step is to be played with."""
        async with self.refreshing:
            for policy, engine in zip(self.policies, engines, strict=True):
                await policy.refresh(engine, _updates_before(step, self.config), self.config.trinity.sync_timeout_s)


_rooms: dict[str, _Room] = {}
_entering = asyncio.Lock()


def _updates_before(step: int, config: TunerConfig) -> int:
    """How many updates the weights have to have seen for a step; where neither side waits, any will do."""
    if config.trinity.sync_style != "fixed":
        return 0
    return max(0, step - 1) // config.trinity.sync_interval * config.trinity.sync_interval


async def _room_of(name: str, recorder: Any, model: ModelWrapper, helpers: list[ModelWrapper]) -> _Room:
    """The room of this process in the run of a recorder, made at the first call."""
    async with _entering:
        if name not in _rooms:
            spec: RunSpec = cloudpickle.loads(await recorder.spec.remote())
            _rooms[name] = _enter(spec, model, helpers)
    return _rooms[name]


def _enter(spec: RunSpec, model: ModelWrapper, helpers: list[ModelWrapper]) -> _Room:
    # Only runners enter; Trinity's explorer imports this module too, and has no use for AgentScope.
    from agentscope_tuner.backends.trinity.policies import kind_of, policy_model
    from agentscope_tuner.rollout import Rollout

    config = spec.config
    trained = policy_model(config.model, kind_of(model))
    auxiliary = {
        name: policy_model(settings, kind_of(helper))
        for (name, settings), helper in zip(config.auxiliary_models.items(), helpers, strict=True)
    }
    rollout = Rollout(spec.workflow, spec.judge, trained, config.workflow, config.seed, auxiliary)
    policies = [one.policy for one in (trained, *auxiliary.values())]
    return _Room(config, rollout, policies, min(trained.end_of_turn_ids))


def _unforeseen(exc: Exception) -> TrainingStoppedError:
    return TrainingStoppedError(f"a workflow runner of Trinity's failed with {type(exc).__name__}: {exc}")
