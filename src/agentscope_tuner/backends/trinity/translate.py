"""`TunerConfig` to Trinity's `Config`, field by field. What Trinity cannot do as asked is an error."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from trinity.common.config import (
    AlgorithmConfig,
    BufferConfig,
    ClusterConfig,
    Config,
    DataProcessorConfig,
    ExperienceBufferConfig,
    ExperiencePipelineConfig,
    ExplorerConfig,
    ExplorerInput,
    GenerationConfig,
    InferenceModelConfig,
    LoRAConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    SynchronizerConfig,
    TasksetConfig,
    TinkerConfig,
    TrainerConfig,
    TrainerInput,
)
from trinity.common.constants import SyncMethod, SyncStyle

from agentscope_tuner.config import TunerConfig
from agentscope_tuner.errors import ConfigError
from agentscope_tuner.reporting import DECODINGS

_ADAPTER = "agentscope_tuner.backends.trinity.adapter.GroupWorkflow"
_ALGORITHM = "agentscope_tuner.backends.trinity.algorithm.Grpo"
_ADVANTAGES = "agentscope_tuner.backends.trinity.algorithm.WeighedAdvantages"
_STEPS = "agentscope_tuner.backends.trinity.algorithm.WholeSteps"
_MONITOR = "agentscope_tuner.backends.trinity.recording.RunMonitor"
_UNBOUND = 1e9
"""Of the second clip that Trinity's loss has and ours has not."""


def check_settings(config: TunerConfig) -> None:
    """Refuse what this backend would not honour; with `trinity.route: auto`, whatever the route will be.

    Raises:
        ConfigError: names the setting, why, and what to do.
    """
    model, algorithm = config.model, config.algorithm
    refusals = [
        (config.roles.adapters != "shared", "roles.adapters", "Trinity trains one model, which all roles share"),
        (algorithm.kl_coef != 0, "algorithm.kl_coef", "Trinity weighs the divergence otherwise than the loss"),
        (algorithm.entropy_coef != 0, "algorithm.entropy_coef", "Trinity's Tinker trainer only estimates the entropy"),
        (algorithm.epochs_per_batch > 1, "algorithm.epochs_per_batch", "Trinity passes over a batch once"),
        (algorithm.updates_per_epoch > 1, "algorithm.updates_per_epoch", "Trinity makes one update per batch"),
        (bool(algorithm.max_resampled_groups), "algorithm.max_resampled_groups", "Trinity draws no further tasks"),
        (
            algorithm.lr_scheduler_type == "linear",
            "algorithm.lr_scheduler_type",
            "Trinity knows `constant` and `cosine`",
        ),
        (model.top_p < 1, "model.top_p", "Trinity's trainer does not truncate, so its ratio would be wrong"),
        (model.top_k > 0, "model.top_k", "Trinity's trainer does not truncate, so its ratio would be wrong"),
    ]
    if not uses_own_service(config):
        unused = [key for key in type(config.engine).model_fields if config.engine.sets(key)]
        refusals += [(True, f"engine.{key}", "Trinity's own engines compute") for key in unused]
    for wrong, key, why in refusals:
        if wrong:
            raise ConfigError(f"backend `trinity` does not honour `{key}`: {why}; remove it, or use `backend: local`")
    for key, value in config.trinity.settings.items():
        _set(Config(), key, value)
    if config.trinity.route == "tinker":
        if model.lora is not None and (model.lora.alpha != 32 or model.lora.target_modules != "all-linear"):
            raise ConfigError("a Tinker service takes the rank of adapters only; set nothing else in `model.lora`")
        if model.temperature != 1:
            raise ConfigError(
                f"`model.temperature` must be 1 with Trinity's Tinker trainer, got {model.temperature:g}: it compares "
                "untempered probabilities"
            )
        if config.auxiliary_models:
            raise ConfigError("`auxiliary_models` need inference engines of their own; a Tinker service has one model")


def uses_own_service(config: TunerConfig) -> bool:
    """Whether the embedded engine computes, as a Tinker service that this run starts."""
    return config.trinity.route != "verl" and not (config.model.tinker_config or {}).get("base_url")


def group_timeout_s(config: TunerConfig) -> float:
    """How long a group may take: its episodes have time limits of their own, and judges and continuations take more."""
    return config.workflow.timeout_s * (2 if config.algorithm.branching is None else 4) + 60


def translate(
    config: TunerConfig,
    *,
    model_path: str,
    context: int,
    tasks: Path,
    steps: int,
    eval_tasks: int,
    checkpoints: Path,
    spec: Any,
    recorder: str,
    base_url: str | None,
) -> Config:
    """Trinity's configuration of a run.

    Args:
        config: ours.
        model_path: a directory or hub name, as every node can load it.
        context: the longest sequence, in tokens.
        tasks: holds the folders `train` and `eval`.
        steps: training steps.
        eval_tasks: how many held-out tasks there are.
        checkpoints: where Trinity keeps its own state.
        spec: what the adapter has to know.
        recorder: name of the actor that hears of everything.
        base_url: of the Tinker service, if one is used.
    """
    model, algorithm, trinity = config.model, config.algorithm, config.trinity
    tinker = base_url is not None
    largest = max(algorithm.batch_size, eval_tasks * len(DECODINGS))
    rounds = math.ceil(largest / (trinity.runners * model.inference_engine_num))
    # Elsewhere the explorer does not wait for an evaluation, nor does the trainer.
    waits = eval_tasks > 0 and trinity.sync_style == "fixed" and trinity.sync_interval == 1
    evaluation_s = group_timeout_s(config) * rounds
    result = Config(
        mode="both",
        project=config.project_name,
        name=config.experiment_name,
        checkpoint_root_dir=str(checkpoints),
        continue_from_checkpoint=True,
        algorithm=AlgorithmConfig(
            # Trinity's Tinker trainer hands the reference's log-probabilities on even where nothing reads them.
            algorithm_type="multi_step_grpo" if tinker else _ALGORITHM,
            repeat_times=algorithm.group_size,
            optimizer=OptimizerConfig(
                lr=algorithm.learning_rate,
                lr_warmup_steps=algorithm.warmup_steps,
                min_lr_ratio=0.0,
                lr_scheduler_type=algorithm.lr_scheduler_type,
                betas=list(algorithm.adam_betas),
                weight_decay=algorithm.weight_decay,
                clip_grad=algorithm.max_grad_norm,
            ),
            sample_strategy=_STEPS,
            sample_strategy_args={
                "recorder": recorder,
                "eval_interval": algorithm.eval_interval_steps if waits else 0,
                "patience_s": evaluation_s,
            },
            advantage_fn=_ADVANTAGES,
            advantage_fn_args={"loss_weighting": algorithm.loss_weighting, "max_tokens": model.max_tokens},
            policy_loss_fn="ppo",
            policy_loss_fn_args={
                "clip_range_low": algorithm.clip_low,
                "clip_range_high": algorithm.clip_high,
                "clip_ratio_c": _UNBOUND,
                "loss_agg_mode": "seq-mean-token-sum",
            },
            kl_loss_fn="none",
            kl_penalty_fn="none",
            entropy_loss_fn="none",
            loss_agg_mode="seq-mean-token-sum",
        ),
        data_processor=DataProcessorConfig(experience_pipeline=ExperiencePipelineConfig(save_input=False)),
        model=ModelConfig(
            model_path=model_path,
            trust_remote_code=model.trust_remote_code,
            temperature=model.temperature,
            max_model_len=context,
            max_response_tokens=model.max_tokens,
            enable_prompt_truncation=False,
            enable_thinking=model.enable_thinking,
            lora_configs=None
            if tinker or model.lora is None
            else [
                LoRAConfig(
                    lora_rank=model.lora.rank,
                    lora_alpha=int(model.lora.alpha),
                    target_modules=str(model.lora.target_modules),
                )
            ],
            tinker=TinkerConfig(
                enable=tinker,
                base_url=base_url,
                rank=(model.tinker_config or {}).get("rank", model.lora.rank if model.lora else 16),
                seed=config.seed,
            ),
        ),
        cluster=ClusterConfig(
            ray_address=trinity.ray_address, node_num=trinity.node_num, gpu_per_node=trinity.gpu_per_node
        ),
        buffer=BufferConfig(
            batch_size=algorithm.batch_size,
            total_epochs=1,
            total_steps=steps,
            trainer_input=TrainerInput(
                experience_buffer=ExperienceBufferConfig(
                    name="experience_buffer", max_read_timeout=trinity.sync_timeout_s + evaluation_s
                )
            ),
            explorer_input=ExplorerInput(
                taskset=_taskset("train", tasks / "train", spec),
                eval_tasksets=[
                    _taskset(f"eval_{decoding}", tasks / "eval", spec, decoding)
                    for decoding in (DECODINGS if eval_tasks else ())
                ],
            ),
        ),
        explorer=ExplorerConfig(
            runner_per_model=trinity.runners,
            # Trinity's scheduler gives a whole batch no longer than this.
            max_timeout=math.ceil(group_timeout_s(config) * rounds),
            max_retry_times=0,
            concurrent_mode="sequential",
            rollout_model=InferenceModelConfig(
                engine_num=model.inference_engine_num,
                tensor_parallel_size=model.tensor_parallel_size,
                enable_openai_api=not tinker,
                seed=config.seed,
            ),
            auxiliary_models=[
                InferenceModelConfig(
                    name=name,
                    model_path=helper.model_path,
                    engine_num=helper.inference_engine_num,
                    tensor_parallel_size=helper.tensor_parallel_size,
                    enable_openai_api=True,
                )
                for name, helper in config.auxiliary_models.items()
            ],
            eval_interval=algorithm.eval_interval_steps,
            eval_on_startup=eval_tasks > 0,
        ),
        trainer=TrainerConfig(
            trainer_type="tinker" if tinker else "verl",
            save_interval=algorithm.save_interval_steps,
            total_steps=steps,
            save_hf_checkpoint="last",
            grad_clip=algorithm.max_grad_norm,
            max_checkpoints_to_keep=config.checkpoint.keep,
        ),
        monitor=MonitorConfig(monitor_type=_MONITOR, monitor_args={"recorder": recorder}),
        synchronizer=SynchronizerConfig(
            sync_method=SyncMethod(trinity.sync_method or ("memory" if tinker else "nccl")),
            sync_style=SyncStyle(trinity.sync_style),
            sync_interval=trinity.sync_interval,
            sync_timeout=int(trinity.sync_timeout_s),
        ),
    )
    for key, value in trinity.settings.items():
        _set(result, key, value)
    return result


def _taskset(name: str, path: Path, spec: Any, decoding: str = "") -> TasksetConfig:
    return TasksetConfig(
        name=name,
        path=str(path),
        split="train",
        default_workflow_type=_ADAPTER,
        workflow_args={"run": spec, "decoding": decoding},
        rollout_args=GenerationConfig(),
    )


def _set(config: Any, key: str, value: Any) -> None:
    """Set a field of Trinity's by its dotted name."""
    *blocks, name = key.split(".")
    for block in blocks:
        config = getattr(config, block, None)
    if not is_dataclass(config) or name not in {one.name for one in fields(config)}:
        raise ConfigError(f"`trinity.settings` names `{key}`, which is not a setting of Trinity's; see its `Config`")
    setattr(config, name, value)
