"""Running episodes, groups and batches. What goes wrong inside an episode becomes part of its record."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from pydantic import BaseModel, ValidationError

from agentscope_tuner.config import BranchingConfig, WorkflowConfig
from agentscope_tuner.endpoint import EndpointServer
from agentscope_tuner.errors import (
    EpisodeFailure,
    EpisodeTimeoutError,
    NoTrainedCallError,
    RewardError,
    TunerError,
)
from agentscope_tuner.many_agents import quiet_agents, relieve_agents
from agentscope_tuner.model_tuner import ModelTuner
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.recorder import PolicyModel, Recorder, check_targets
from agentscope_tuner.types import (
    DEFAULT_ROLE,
    Branch,
    Cast,
    Episode,
    EpisodeError,
    EpisodeGroup,
    JudgeOutput,
    ModelCall,
    Task,
    WorkflowOutput,
    WorkflowTask,
)
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

_GRACE_S = 2.0
"""How long a cancelled workflow may take to clean up before it is abandoned."""


@dataclass(slots=True)
class Rollout:
    """Runs a workflow with a policy."""

    workflow: WorkflowRunner
    judge: JudgeRunner | None
    model: PolicyModel
    config: WorkflowConfig
    seed: int
    auxiliary_models: Mapping[str, PolicyModel]
    on_episode: Callable[[Episode, str], None] | None = None
    """Called with each finished episode and its phase."""
    cast: Cast = field(default_factory=Cast)
    """Who plays the trained roles."""
    registered: set[str] = field(default_factory=set)
    """Roles that episodes registered or spoke as."""
    endpoints: EndpointServer = field(default_factory=EndpointServer)
    """Serves all episodes, from the first that asks for it until `aclose`."""

    async def aclose(self) -> None:
        """Stop what outlives an episode; where the event loop ends anyway, it does the same."""
        await self.endpoints.close()

    @property
    def trainable_targets(self) -> list[str] | None:
        """The roles whose turns are recorded; None: all of them."""
        return self.config.targets(self.workflow.trainable_targets)

    async def run(
        self,
        tasks: Sequence[Task],
        group_size: int,
        *,
        phase: str,
        first: int = 0,
        params: SamplingParams | None = None,
        branching: BranchingConfig | None = None,
        cast_of: Callable[[str], Cast] | None = None,
        refill: Callable[[int, EpisodeGroup], Task | None] | None = None,
        whole: bool = True,
    ) -> list[EpisodeGroup]:
        """Run every task `group_size` times, as many at once as `max_concurrency` allows.

        Args:
            tasks: one group each.
            group_size: episodes per task.
            phase: names the episodes; with `seed`, it fixes their random numbers.
            first: index of the first task within the phase.
            params: how to sample, where it differs from the model's own.
            branching: which episodes are continued anew from one of their turns.
            cast_of: who plays in a group, by the group's name, where that changes.
            refill: called with each finished group and its index; a task that it returns is run next, beside those that
                still run.
            whole: these are all groups of a batch, so a target that none of their episodes knows is a mistake.

        Raises:
            TunerError: something that is wrong with the run, not with an episode.
        """
        groups = await self.run_phases(
            tasks,
            group_size,
            {phase: params},
            first=first,
            branching=branching,
            cast_of=cast_of,
            refill=refill,
            whole=whole,
        )
        return groups[phase]

    async def run_phases(
        self,
        tasks: Sequence[Task],
        group_size: int,
        phases: Mapping[str, SamplingParams | None],
        *,
        first: int = 0,
        branching: BranchingConfig | None = None,
        cast_of: Callable[[str], Cast] | None = None,
        refill: Callable[[int, EpisodeGroup], Task | None] | None = None,
        whole: bool = True,
    ) -> dict[str, list[EpisodeGroup]]:
        """The same for several phases at once, each with its way to sample.

        A task's episodes of all phases begin together, so its prompt is read once, and there is one end to wait for in
        which few are left.
        """
        gate = asyncio.Semaphore(self.config.max_concurrency)

        async def run(phase: str, start: _Start) -> tuple[Episode, list[Any]]:
            async with gate:
                episode, answers = await self._run(start)
            if self.on_episode is not None:
                self.on_episode(episode, phase)
            return episode, answers

        async def one(phase: str, task: Task, index: int, member: int) -> Episode:
            episode_id = f"{phase}-{index}-{member}"
            seed = zlib.crc32(f"{self.seed}/{episode_id}".encode())
            workflow_task = WorkflowTask(task=task, episode_id=episode_id, group_index=member, seed=seed)
            cast = self.cast if cast_of is None else cast_of(f"{phase}-{index}")
            start = _Start(workflow_task, phases[phase], seed, cast)
            episode, answers = await run(phase, start)
            if branching is not None and member < branching.episodes:
                starts = _branch(start, episode, answers, branching)
                if starts:
                    continued = await asyncio.gather(*(run(phase, again) for again in starts))
                    episode.branch = Branch(continued[0][0].replayed, [other for other, _ in continued])
            return episode

        async def play(phase: str, task: Task, index: int) -> None:
            while True:
                members = [running.create_task(one(phase, task, index, member)) for member in range(group_size)]
                await asyncio.wait(members)
                group = groups[phase][index] = EpisodeGroup(task, [member.result() for member in members])
                if refill is None or (more := refill(index, group)) is None:
                    return
                task, index = more, next(indices)

        groups: dict[str, dict[int, EpisodeGroup]] = {phase: {} for phase in phases}
        indices = count(first)
        relieve_agents()
        try:
            with quiet_agents():
                async with asyncio.TaskGroup() as running:
                    for task, index in zip(tasks, indices, strict=False):
                        for phase in phases:
                            running.create_task(play(phase, task, index))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if whole and any(group.succeeded for found in groups.values() for group in found.values()):
            check_targets(self.trainable_targets, self.registered)
        return {phase: [group for _, group in sorted(found.items())] for phase, found in groups.items()}

    async def run_episode(self, task: WorkflowTask, params: SamplingParams | None = None) -> Episode:
        """Run one episode; a failure is recorded in it.

        Raises:
            TunerError: something that is wrong with the run, not with this episode.
        """
        episode, _ = await self._run(_Start(task, params, task.seed, self.cast))
        return episode

    async def _run(self, start: _Start) -> tuple[Episode, list[Any]]:
        """One episode, and everything that was answered in it."""
        task, seed = start.task, start.seed
        model = self.model if start.params is None else replace(self.model, params=start.params)
        recorder = Recorder(
            model,
            episode_id=task.episode_id,
            seed=seed,
            trainable_targets=self.trainable_targets,
            cast=start.cast.adapters,
            replay=start.replay,
        )
        auxiliary = {
            # Their random numbers are their own, or they would answer to the policy's. Where an episode is continued,
            # they say again what they said in it: the task's seed is the same.
            name: Recorder(
                helper,
                episode_id=f"{task.episode_id}/{name}",
                seed=zlib.crc32(f"{task.seed}/{name}".encode()),
                helps=recorder,
            )
            for name, helper in self.auxiliary_models.items()
        }
        episode = Episode(task, calls=recorder.calls, opponents=start.cast.opponents, replayed=start.replayed)
        begun = time.perf_counter()
        recorder.model.policy.open_episode(recorder.episode_id)
        try:
            helpers = {name: ModelTuner(helper, self.endpoints) for name, helper in auxiliary.items()}
            await self._perform(episode, recorder, helpers)
        except Exception as exc:
            cause = _cause(exc)
            if _ends_the_run(cause):
                raise cause from None
            trace = "" if isinstance(cause, EpisodeFailure) else "".join(traceback.format_exception(cause))
            episode.error = EpisodeError(type(cause).__name__, str(cause), trace)
            episode.reward = None
        finally:
            answers = recorder.answers
            for each in (recorder, *auxiliary.values()):
                each.close()
                each.model.policy.close_episode(each.episode_id)
                self.endpoints.expire(each)
            self.registered |= set(recorder.roles) | {call.role for call in episode.calls}
        episode.time_s = time.perf_counter() - begun
        return episode, answers

    async def _perform(self, episode: Episode, recorder: Recorder, auxiliary: Mapping[str, Any]) -> None:
        task = episode.workflow_task
        with _own_terms("workflow", WorkflowOutput):
            output = await self._within_time(
                self.workflow.run(task, ModelTuner(recorder, self.endpoints), auxiliary), "workflow"
            )
        if recorder.divergence is not None:
            raise recorder.divergence
        unknown = recorder.unknown_targets()
        if unknown and not recorder.calls:
            recorder.require(unknown[0])
        if not recorder.calls:
            raise NoTrainedCallError(
                f"the workflow called no trained role (registered: {', '.join(recorder.roles) or 'none'}; trained: "
                f"{', '.join(self.trainable_targets or ['every role'])}); give its agents `model=model_tuner`, or "
                "`model_tuner.get_model(role)` of a trained role"
            )
        reward, metrics = output.reward, {f"workflow/{k}": v for k, v in (output.metrics or {}).items()}
        if reward is None and self.judge is None and recorder.rewarded:
            reward = 0.0  # all there is was earned turn by turn
        if reward is None:
            if self.judge is None:
                raise RewardError(
                    "the workflow returned `reward=None` and there is no judge; return a reward, or pass `judge_func`"
                )
            if not auxiliary:  # nobody asks the policy for anything more, so it need not wait for the verdict
                recorder.model.policy.pause_episode(recorder.episode_id)
            with _own_terms("judge", JudgeOutput):
                judgement = await self._within_time(self.judge.run(task, output, auxiliary), "judge")
            reward = judgement.reward
            metrics |= {f"judge/{k}": v for k, v in (judgement.metrics or {}).items()}
        episode.metrics = metrics
        episode.is_success = output.is_success
        by_role = _reward_by_role(reward, recorder)
        for call in recorder.calls:
            by_role[call.role] += call.reward
        episode.reward = {role: total for role, total in by_role.items() if role not in episode.opponents}

    async def _within_time(self, work: Any, what: str) -> Any:
        """Await user code; cancel it when its time is up, and abandon it if it resists.

        Its own task, since agents answer a cancellation with an apology instead of passing it on.
        """
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self.config.timeout_s)
        finally:
            if not task.done():
                await _stop(task)
        if not done:
            raise EpisodeTimeoutError(
                f"the {what} did not return within {self.config.timeout_s:g} s; raise `workflow.timeout_s`, or look "
                "for a tool or loop that does not end"
            )
        if task.cancelled():
            raise EpisodeFailure(f"the {what} cancelled itself")
        return task.result()


async def _stop(task: asyncio.Future[Any]) -> None:
    """Cancel user code, give it time to clean up, and end it for good where it ignores that."""
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)
    if isinstance(task, asyncio.Task) and not task.done():
        # Otherwise it would keep the event loop from closing, and so the process from ending.
        with suppress(RuntimeError):
            task.get_coro().close()
        task.cancel()
    task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody else asks for it


def _ends_the_run(exc: Exception) -> bool:
    return isinstance(exc, TunerError) and not isinstance(exc, EpisodeFailure)


def _cause(exc: Exception) -> Exception:
    """What failed inside a workflow's own task groups: what ends the run where there is such, or else the first."""
    if not isinstance(exc, ExceptionGroup):
        return exc
    causes = [_cause(inner) for inner in exc.exceptions]
    return next((cause for cause in causes if _ends_the_run(cause)), causes[0])


@contextmanager
def _own_terms(who: str, kind: type[BaseModel]) -> Iterator[None]:
    """An output checks itself when user code makes it; other validation errors are the user's own."""
    try:
        yield
    except ValidationError as exc:
        if exc.title != kind.__name__:
            raise
        problem = exc.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        raise RewardError(f"the {who}'s `{problem['loc'][0]}` is not valid: {message}") from exc


@dataclass(frozen=True, slots=True)
class _Start:
    """What an episode begins with."""

    task: WorkflowTask
    params: SamplingParams | None
    seed: int
    """Of the policy's completions; the workflow's own is the task's."""
    cast: Cast
    replay: Sequence[Any] = ()
    """Answers of the episode that is continued, up to the one that is sampled anew ..."""
    replayed: int = 0
    """... and how many before that are calls of trained roles."""


def _branch(start: _Start, episode: Episode, answers: list[Any], branching: BranchingConfig) -> list[_Start]:
    """Where to begin anew; nothing where the episode failed or ended before every turn that was named."""
    if episode.error is not None:
        return []
    places = []
    for place, answer in enumerate(answers):
        if isinstance(answer, ModelCall):
            before = [other for other in answers[:place] if isinstance(other, ModelCall)]
            # Agents that speak at the same time have no beginning in common.
            if all(a is b for a, b in zip([*before, answer], episode.calls, strict=False)):
                places.append((place, len(before)))
    if branching.turns != "random":
        places = [(place, turn) for place, turn in places if turn in branching.turns]
    if not places:
        return []
    place, turn = random.Random(f"{start.seed}/branch").choice(places)
    return [
        replace(
            start,
            task=start.task.model_copy(update={"episode_id": f"{start.task.episode_id}-again{number}"}),
            seed=zlib.crc32(f"{start.seed}/again/{number}".encode()),
            replay=answers[: place + 1],
            replayed=turn,
        )
        for number in range(branching.continuations)
    ]


def _reward_by_role(reward: float | dict[str, float], recorder: Recorder) -> dict[str, float]:
    """The reward of every trained role that spoke.

    Raises:
        RewardError: a role without a reward, or a reward for a role that does not exist.
    """
    spoke = list(dict.fromkeys(call.role for call in recorder.calls))
    if not isinstance(reward, dict):
        return dict.fromkeys(spoke, float(reward))
    unknown = sorted(set(reward) - set(recorder.roles) - {DEFAULT_ROLE})
    if unknown:
        raise RewardError(f"there is a reward for role `{unknown[0]}`, which is not registered")
    missing = [role for role in spoke if role not in reward]
    if missing:
        raise RewardError(f"role `{missing[0]}` is trained and spoke, but the reward names only {sorted(reward)}")
    return {role: float(reward[role]) for role in spoke}
