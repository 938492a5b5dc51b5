"""The records that flow through a run. They hold data; the functions live in the rooms above.

Shapes: `T` is the number of tokens of one completion, `S` of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

DEFAULT_ROLE = "default"
"""The role of a `ModelTuner` that is used as a model itself."""


# --------------------------------------------------------------------------------------------- what users touch


class Task(BaseModel):
    """One thing to do: a row of a dataset."""

    model_config = ConfigDict(extra="forbid")

    main_query: str = ""
    """What the user asks for."""
    init_messages: list[dict[str, Any]] = Field(default_factory=list)
    """Messages to start from, for tasks that continue a conversation."""
    task_id: str = ""
    """Unique within its dataset. Evaluation and resume rely on it."""
    env_type: str = "no_env"
    """Names the environment, for workflows that serve several."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Everything else the row holds; the reference answer is in `metadata["answer"]`."""


class WorkflowTask(BaseModel):
    """A task as one episode sees it."""

    model_config = ConfigDict(extra="forbid")

    task: Task
    episode_id: str = ""
    """Unique within a run, for example `step3-task17-2`."""
    group_index: int = 0
    """Which of the `group_size` episodes of this task this is."""
    seed: int = 0
    """Derived from the run's seed; use it where the workflow itself draws random numbers."""


def _finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value}")
    return value


class WorkflowOutput(BaseModel):
    """What a workflow returns."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    reward: float | dict[str, float] | None = None
    """One reward for all trained roles, one per role, or None to leave it to the judge."""
    response: Any = None
    """What the agent said, for the judge."""
    is_success: bool | None = None
    """Whether the task was solved, where that is known."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Anything the judge needs, for example `{"final_answer": "42"}`."""
    metrics: dict[str, float] | None = None
    """Numbers to average over the batch and show as `workflow/<name>`."""

    @field_validator("reward")
    @classmethod
    def _reward_is_finite(cls, value: float | dict[str, float] | None) -> float | dict[str, float] | None:
        for role, reward in (value or {}).items() if isinstance(value, dict) else [("", value)]:
            if reward is not None:
                _finite(reward, f"`reward` of role `{role}`" if role else "`reward`")
        return value


class JudgeOutput(BaseModel):
    """What a judge returns."""

    model_config = ConfigDict(extra="forbid")

    reward: float | dict[str, float]
    """One reward for all trained roles, or one per role."""
    metrics: dict[str, float] | None = None
    """Numbers to average over the batch and show as `judge/<name>`."""

    @field_validator("reward")
    @classmethod
    def _reward_is_finite(cls, value: float | dict[str, float]) -> float | dict[str, float]:
        for role, reward in value.items() if isinstance(value, dict) else [("", value)]:
            _finite(reward, f"`reward` of role `{role}`" if role else "`reward`")
        return value


# ------------------------------------------------------------------------------------------ what a run records


@dataclass(slots=True)
class ModelCall:
    """One call of a trained role, token for token as it was sampled."""

    role: str
    messages: list[dict[str, Any]]
    """What the agent sent, in the chat template's form."""
    tools: list[dict[str, Any]] | None
    prompt_ids: list[int]
    """(S,) what the model read."""
    completion_ids: list[int]
    """(T,) what the model wrote, end-of-turn token included when it was sampled."""
    logprobs: list[float]
    """(T,) natural log-probability of each written token under the distribution it was drawn from."""
    temperature: float
    top_p: float
    top_k: int
    finish_reason: str
    """`stop` (end of turn or a stop string) or `length`."""
    text: str
    """The completion, decoded, without its end-of-turn token."""
    policy_version: int
    """How many updates the weights had seen."""
    extends: int | None = None
    """Index of the call of this episode whose recorded ids this prompt starts with; None: rendered from text."""
    agent: str = ""
    """Which of the role's players spoke."""
    adapter: str = ""
    """Which of the policy's adapters it spoke with; empty: the weights all roles share."""
    reward: float = 0.0
    """What this turn earned by itself, by `model_tuner.reward(...)`."""

    @property
    def trainable(self) -> bool:
        """Greedy calls were not drawn from a distribution, so there is nothing to learn from them."""
        return self.temperature > 0 and bool(self.completion_ids)


@dataclass(slots=True)
class Trajectory:
    """What one role did in one episode, and what it earned."""

    role: str
    calls: list[ModelCall]
    reward: float
    """All of it: the rewards of its turns and the one at the end."""

    def returns(self, discount: float) -> list[float]:
        """What each call led to: its own reward and all later ones, each turn's distance discounted once more.

        The reward at the end belongs to the last call.
        """
        following = self.reward - sum(call.reward for call in self.calls)
        result: list[float] = []
        for call in reversed(self.calls):
            following = call.reward + (discount * following if result else following)
            result.append(following)
        return result[::-1]


def version_of(adapter: str, step: int) -> str:
    """The name of an adapter as it was after a step."""
    return f"{adapter}@{step}"


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays the trained roles."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """Adapter of each role; a role that is not named speaks with the weights all roles share."""
    opponents: dict[str, str] = field(default_factory=dict)
    """The roles among them that a past version plays."""


@dataclass(slots=True)
class Branch:
    """Episodes that share their beginning with another one, and were sampled anew from one of its turns on."""

    call: int
    """Index of the first call that differs, in the episode and in its continuations."""
    continuations: list[Episode]


@dataclass(slots=True)
class EpisodeError:
    """Why an episode failed."""

    kind: str
    """The exception's class name."""
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(slots=True)
class Episode:
    """One run of a workflow on one task."""

    workflow_task: WorkflowTask
    calls: list[ModelCall] = field(default_factory=list)
    reward: dict[str, float] | None = None
    """Reward of each role that learns; None when the episode failed."""
    opponents: dict[str, str] = field(default_factory=dict)
    """Roles that a past version of their adapter played, and its name; they learn nothing here."""
    branch: Branch | None = None
    replayed: int = 0
    """How many of its first calls are those of the episode it continues."""
    metrics: dict[str, float] = field(default_factory=dict)
    is_success: bool | None = None
    error: EpisodeError | None = None
    time_s: float = 0.0

    @property
    def reward_mean(self) -> float | None:
        """Mean over the roles that learn and acted; None when the episode failed."""
        return sum(self.reward.values()) / len(self.reward) if self.reward else None

    @property
    def tokens_sampled(self) -> int:
        """Tokens that trained roles wrote."""
        return sum(len(call.completion_ids) for call in self.calls[self.replayed :])

    def trajectories(self) -> Iterator[Trajectory]:
        """One per role that learns and spoke; none when the episode failed."""
        for role, reward in (self.reward or {}).items():
            calls = [call for call in self.calls if call.role == role]
            if calls:
                yield Trajectory(role, calls, reward)


@dataclass(slots=True)
class EpisodeGroup:
    """The episodes of one task; advantages compare within it."""

    task: Task
    episodes: list[Episode]

    @property
    def succeeded(self) -> list[Episode]:
        """The episodes that ended without an error."""
        return [episode for episode in self.episodes if episode.error is None]


@dataclass(slots=True)
class StepMetrics:
    """One line of `metrics.jsonl`. Step 0 is the state before any training. Times are in seconds."""

    step: int
    reward_mean: float | None = None
    reward_std: float | None = None
    eval_reward_mean: float | None = None
    """Held-out reward, greedy decoding."""
    eval_reward_sampled_mean: float | None = None
    """Held-out reward, sampled as in training."""
    episodes: int = 0
    episodes_failed: int = 0
    groups: int = 0
    zero_variance_groups: int = 0
    resampled_groups: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    tokens_packed: int = 0
    """Tokens the learner ran forward; what prefix sharing leaves of prompts and completions."""
    time_rollout_s: float = 0.0
    time_train_s: float = 0.0
    """With `algorithm.max_staleness` the next step's rollout goes on meanwhile, and is waited for."""
    time_eval_s: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    kl_to_sampler: float | None = None
    """Mean k3 estimate of KL(sampler || learner) over the trained tokens."""
    clip_fraction: float | None = None
    entropy: float | None = None
    learning_rate: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    """Workflow and judge metrics, and per-role figures such as `reward_mean/<role>`; those of held-out tasks begin with
    `eval_greedy/` or `eval_sampled/`."""


@dataclass(slots=True)
class EvalResult:
    """Held-out reward under one way of decoding."""

    reward_mean: float
    ci_low: float
    ci_high: float
    """A 95% confidence interval of the mean: Wilson's for 0/1 rewards, normal otherwise."""
    episodes: int
    episodes_failed: int
    metrics: dict[str, float] = field(default_factory=dict)
    time_s: float = 0.0
    """Seconds that the evaluation took; all ways of decoding run at the same time."""

    def __str__(self) -> str:
        return f"{self.reward_mean:.3f} [{self.ci_low:.3f}, {self.ci_high:.3f}]"


@dataclass(slots=True)
class TuneResult:
    """What `tune()` returns."""

    checkpoint: Path
    """A directory that `transformers.AutoModelForCausalLM.from_pretrained` loads."""
    history: list[StepMetrics]
    run_dir: Path
    eval_before: dict[str, EvalResult] = field(default_factory=dict)
    """Keys `greedy` and `sampled`; empty without an `eval_dataset`."""
    eval_after: dict[str, EvalResult] = field(default_factory=dict)
