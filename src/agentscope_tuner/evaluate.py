"""`evaluate()`: how good is a model at a workflow?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentscope_tuner.config import DatasetConfig, TunerConfig, TunerModelConfig, load_config
from agentscope_tuner.errors import ConfigError
from agentscope_tuner.event_loop import run_to_end
from agentscope_tuner.garbage import rare_collections
from agentscope_tuner.types import EvalResult

if TYPE_CHECKING:
    from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner


@rare_collections()
def evaluate(
    workflow_func: Any,
    config_path: str | Path | None = None,
    *,
    judge_func: Any = None,
    eval_dataset: DatasetConfig | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> dict[str, EvalResult]:
    """Measure held-out reward, greedy and sampled; nothing is trained, and no run folder is written.

    The arguments are those of `tune()`; a configuration made for training can be used as it is, with
    `model.model_path` set to a checkpoint.

    Returns:
        `{"greedy": ..., "sampled": ...}`, each with its 95% confidence interval.

    Raises:
        ConfigError: a setting is unknown or wrong, or there is no `eval_dataset`.
        DataError: the dataset is missing, empty or malformed.
        ModelError: the model cannot be loaded, or is not supported.
    """
    # Imported here for the same reasons as in `tune`.
    from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner, check_auxiliary_models

    workflow = WorkflowRunner(workflow_func)
    judge = JudgeRunner(judge_func) if judge_func is not None else None
    config = load_config(
        config_path,
        overrides=overrides,
        blocks={"eval_dataset": eval_dataset, "model": model, "auxiliary_models": auxiliary_models},
        defaults={"experiment_name": "evaluation"},
    )
    check_auxiliary_models(config.auxiliary_models, workflow, judge)
    if config.eval_dataset is None:
        raise ConfigError("`eval_dataset` is required for evaluation; pass it to `evaluate()` or set it in the YAML")
    return run_to_end(_evaluate(config, config.eval_dataset, workflow, judge))


async def _evaluate(
    config: TunerConfig, dataset: DatasetConfig, workflow: WorkflowRunner, judge: JudgeRunner | None
) -> dict[str, EvalResult]:
    from agentscope_tuner.backends.evaluation import evaluate_policy
    from agentscope_tuner.backends.local import choose_cast, start_engines
    from agentscope_tuner.readers import load_tasks
    from agentscope_tuner.reporting import ProgressView
    from agentscope_tuner.rollout import Rollout

    tasks = load_tasks(dataset)
    cast = choose_cast(config, workflow)
    engine, helpers = start_engines(config, cast)
    view = ProgressView(0)
    rollout = Rollout(
        workflow,
        judge,
        engine.model,
        config.workflow,
        config.seed,
        helpers,
        lambda episode, _: view.episode_done(failed=episode.error is not None),
        cast,
    )
    async with aclosing(rollout):
        with view:
            return await evaluate_policy(rollout, tasks, view, config.algorithm.max_failed_fraction)
