"""`tune()`: train a workflow's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from agentscope_tuner.config import AlgorithmConfig, DatasetConfig, TunerModelConfig, load_config
from agentscope_tuner.errors import MissingDependencyError
from agentscope_tuner.event_loop import run_to_end
from agentscope_tuner.garbage import rare_collections
from agentscope_tuner.types import TuneResult


@rare_collections()
def tune(
    workflow_func: Any,
    config_path: str | Path | None = None,
    *,
    judge_func: Any = None,
    train_dataset: DatasetConfig | None = None,
    eval_dataset: DatasetConfig | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    backend: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> TuneResult:
    """Make a model better at a workflow by reinforcement learning.

    Arguments given here are put on top of `config_path`, and `overrides` on top of both. Running the same
    `experiment_name` again continues it.

    Args:
        workflow_func: a `Workflow` class or instance, or an async function in one of AgentScope's two forms.
        config_path: a YAML file of `TunerConfig`'s form, or of Trinity-RFT's.
        judge_func: a `Judge`, or an async function `(task, response) -> JudgeOutput`; asked where the workflow gives no
            reward.
        train_dataset: tasks to train on.
        eval_dataset: held-out tasks; evaluated before, during and after training.
        model: the model to train.
        auxiliary_models: frozen models for workflow and judge functions.
        algorithm: how it learns.
        project_name: groups experiments.
        experiment_name: names the run folder; a time stamp when not given.
        monitor_type: `tensorboard` or `none`.
        backend: `local`, the embedded engine; or `trinity`, Trinity-RFT on Ray.
        overrides: `"key=value"` strings or a mapping, as on the command line.

    Raises:
        ConfigError: a setting is unknown, wrong or without effect; `SignatureError` where the workflow or judge is not
            of an accepted form.
        DataError: a dataset is missing, empty or malformed.
        ModelError: the model cannot be loaded, or is not supported.
        TrainingStoppedError: training cannot go on; finished episodes and checkpoints are on disk.
        CheckpointError: a checkpoint is damaged or cannot be written.
        MissingDependencyError: backend `trinity` is not installed.
    """
    # Not with this module, which everybody imports with the package: it needs AgentScope.
    from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner, check_auxiliary_models

    workflow = WorkflowRunner(workflow_func)
    judge = JudgeRunner(judge_func) if judge_func is not None else None
    config = load_config(
        config_path,
        overrides=overrides,
        blocks={
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "model": model,
            "auxiliary_models": auxiliary_models,
            "algorithm": algorithm,
            "project_name": project_name,
            "experiment_name": experiment_name,
            "monitor_type": monitor_type,
            "backend": backend,
        },
        defaults={"experiment_name": f"Experiment-{datetime.now():%Y%m%d%H%M%S}"},
    )
    check_auxiliary_models(config.auxiliary_models, workflow, judge)
    # Engines are imported only now: signatures and settings are checked before torch is loaded.
    if config.backend == "trinity":
        try:
            from agentscope_tuner.backends.trinity.run import TrinityRun
        except ImportError as exc:
            raise MissingDependencyError(
                f"backend `trinity` needs `{exc.name}`; install it with `pip install 'agentscope-tuner[trinity]'`"
            ) from exc
        return TrinityRun(config, workflow, judge).run()
    from agentscope_tuner.backends.local import LocalRun

    return run_to_end(LocalRun(config, workflow, judge).run())
