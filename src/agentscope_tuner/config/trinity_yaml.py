"""A configuration file written for Trinity-RFT, as AgentScope's examples ship them, read as ours.

Every setting of it is used, or listed as one that is not, or refused where leaving it out would change results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentscope_tuner.errors import ConfigError

_USED = {
    "project": "project_name",
    "name": "experiment_name",
    "checkpoint_root_dir": "output_dir",
    "algorithm.algorithm_type": "algorithm.algorithm_type",
    "algorithm.repeat_times": "algorithm.group_size",
    "algorithm.optimizer.lr": "algorithm.learning_rate",
    "algorithm.optimizer.lr_scheduler_type": "algorithm.lr_scheduler_type",
    "algorithm.optimizer.lr_warmup_steps": "algorithm.warmup_steps",
    "algorithm.optimizer.weight_decay": "algorithm.weight_decay",
    "algorithm.optimizer.betas": "algorithm.adam_betas",
    "model.model_path": "model.model_path",
    "model.max_model_len": "model.max_model_len",
    "model.max_response_tokens": "model.max_tokens",
    "model.temperature": "model.temperature",
    "model.top_p": "model.top_p",
    "model.enable_thinking": "model.enable_thinking",
    "model.trust_remote_code": "model.trust_remote_code",
    "buffer.batch_size": "algorithm.batch_size",
    "buffer.total_epochs": "train_dataset.total_epochs",
    "buffer.total_steps": "train_dataset.total_steps",
    "explorer.max_timeout": "workflow.timeout_s",
    "explorer.eval_interval": "algorithm.eval_interval_steps",
    "explorer.rollout_model.tool_call_parser": "model.tool_call_parser",
    "explorer.rollout_model.reasoning_parser": "model.reasoning_parser",
    "trainer.save_interval": "algorithm.save_interval_steps",
    "trainer.grad_clip": "algorithm.max_grad_norm",
}
"""Trinity's name and ours, on every backend."""
_USED_ON_CLUSTERS = {
    "cluster.ray_address": "trinity.ray_address",
    "cluster.node_num": "trinity.node_num",
    "cluster.gpu_per_node": "trinity.gpu_per_node",
    "explorer.runner_per_model": "trinity.runners",
    "explorer.rollout_model.engine_num": "model.inference_engine_num",
    "explorer.rollout_model.tensor_parallel_size": "model.tensor_parallel_size",
    "synchronizer.sync_method": "trinity.sync_method",
    "synchronizer.sync_style": "trinity.sync_style",
    "synchronizer.sync_interval": "trinity.sync_interval",
    "synchronizer.sync_timeout": "trinity.sync_timeout_s",
}
_TASKSET = {
    "path": "path",
    "subset_name": "name",
    "split": "split",
    "format.prompt_key": "query_column",
    "format.response_key": "answer_column",
}
_WITHOUT_EFFECT = {
    # What these say, this package does in any case, or has no use for.
    "mode": "both",
    "explorer.rollout_model.enable_openai_api": None,
    "explorer.rollout_model.enable_history": None,
    "explorer.rollout_model.enable_auto_tool_choice": None,
    "buffer.explorer_input.default_workflow_type": None,
    "buffer.explorer_input.default_eval_workflow_type": None,
}
_OURS_ALONE = (
    "algorithm.sample_strategy",
    "algorithm.advantage_fn",
    "algorithm.policy_loss_fn",
    "algorithm.kl_",
    "algorithm.entropy_loss_fn",
    "algorithm.loss_agg_mode",
    "buffer.train_batch_size",
    "buffer.trainer_input",
    "data_processor",
    "monitor",
    "stages",
)
"""Parts that this package sets on Trinity itself."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a Trinity file says in our words."""

    settings: dict[str, Any]
    """A configuration of ours, nested."""
    unused: list[str] = field(default_factory=list)
    """Settings that have no effect."""


def is_trinity(content: Mapping[str, Any]) -> bool:
    """Whether a file's top-level keys are Trinity's."""
    return bool({"buffer", "explorer", "synchronizer"} & set(content))


def read_trinity(content: Mapping[str, Any], backend: str) -> Reading:
    """Translate a Trinity file.

    Args:
        content: the file, nested.
        backend: for which backend of ours.

    Raises:
        ConfigError: names settings that are neither used nor without consequence.
    """
    settings: dict[str, Any] = {}
    unused: list[str] = []
    on_cluster = backend == "trinity"
    used = _USED | (_USED_ON_CLUSTERS if on_cluster else {})
    for key, value in _leaves(content):
        if key in used:
            _put(settings, used[key], value)
        elif key.startswith("buffer.explorer_input.taskset."):
            _read_taskset(key.removeprefix("buffer.explorer_input.taskset."), value, settings, "train_dataset", unused)
        elif key == "buffer.explorer_input.eval_tasksets":
            _read_eval(value, settings, unused)
        elif key == "explorer.auxiliary_models":
            _read_helpers(value, settings, used, unused)
        elif key in _WITHOUT_EFFECT:
            expected = _WITHOUT_EFFECT[key]
            if expected is not None and value != expected:
                raise ConfigError(f"Trinity's `{key}: {value}` cannot be read; only `{expected}` trains a workflow")
        else:
            _refuse_if_it_matters(key, value)
            if on_cluster and not key.startswith(_OURS_ALONE):
                settings.setdefault("trinity", {}).setdefault("settings", {})[key] = value
            else:
                unused.append(key)
    if settings.get("train_dataset", {}).get("total_steps") is not None:
        settings["train_dataset"].pop("total_epochs", None)
    settings["backend"] = backend
    return Reading(settings, unused)


def _refuse_if_it_matters(key: str, value: Any) -> None:
    consequences = {
        "algorithm.kl_loss_fn_args.kl_coef": (bool(value), "set `algorithm.kl_coef` (backend `local`)"),
        "algorithm.kl_penalty_fn_args.kl_coef": (bool(value), "set `algorithm.kl_coef` (backend `local`)"),
        "algorithm.entropy_loss_fn_args.entropy_coef": (bool(value), "set `algorithm.entropy_coef` (backend `local`)"),
        "algorithm.advantage_fn_args.step_norm": (bool(value), "set `algorithm.loss_weighting: episode`"),
        "algorithm.advantage_fn_args.enable_step_norm": (bool(value), "set `algorithm.loss_weighting: episode`"),
        "algorithm.advantage_fn_args.std_cal_level": (value == "batch", "only groups are compared"),
        "model.lora_configs": (bool(value), "set `model.lora`"),
        "model.tinker.enable": (bool(value), "set `model.tinker_config`"),
        "data_processor.experience_pipeline.operators": (bool(value), "operators on experiences are not run"),
        "stages": (bool(value), "run one configuration per stage"),
    }
    matters, remedy = consequences.get(key, (False, ""))
    if matters:
        raise ConfigError(f"Trinity's `{key}: {value}` would change results and is not read; {remedy}, or remove it")


def _read_taskset(key: str, value: Any, settings: dict[str, Any], block: str, unused: list[str]) -> None:
    if key in _TASKSET:
        _put(settings, f"{block}.{_TASKSET[key]}", value)
    elif key in ("rollout_args.temperature", "rollout_args.max_tokens") and block == "train_dataset":
        _put(settings, f"model.{key.rpartition('.')[2]}", value)
    elif key.startswith("workflow_args.") and value is not None:
        raise ConfigError(
            f"Trinity's `{key}: {value}` is not handed to workflows; give it to the workflow itself, or set "
            "`workflow.trainable_targets`"
        )
    elif key == "storage_type" and value != "file":
        raise ConfigError(f"Trinity's `storage_type: {value}` is not read; tasks come from files and hub datasets")
    elif key not in ("name", "storage_type"):
        unused.append(f"{block}: {key}")


def _read_eval(tasksets: Any, settings: dict[str, Any], unused: list[str]) -> None:
    if len(tasksets or ()) > 1:
        raise ConfigError(f"there is one `eval_dataset`, and `eval_tasksets` names {len(tasksets)}; keep one")
    for key, value in _leaves((tasksets or [{}])[0]):
        _read_taskset(key, value, settings, "eval_dataset", unused)


def _read_helpers(models: Any, settings: dict[str, Any], used: Mapping[str, str], unused: list[str]) -> None:
    for number, model in enumerate(models or ()):
        name = model.get("name") or str(number)
        target = settings.setdefault("auxiliary_models", {}).setdefault(name, {})
        for key, value in _leaves(model):
            ours = used.get(f"model.{key}") or used.get(f"explorer.rollout_model.{key}")
            if ours is None:
                unused += [f"explorer.auxiliary_models: {key}"] if key != "name" else []
            elif value is not None:
                target[ours.removeprefix("model.")] = value


def _leaves(content: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; lists count as values."""
    for key, value in content.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        return
    *blocks, name = key.split(".")
    for block in blocks:
        settings = settings.setdefault(block, {})
    settings[name] = value
