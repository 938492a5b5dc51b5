"""`TunerConfig` to Trinity's `Config`, field by field. What Trinity cannot do as asked is an error."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
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

from agentscope_tuner.config import AlgorithmConfig as AlgorithmSettings
from agentscope_tuner.config import TunerConfig, TunerModelConfig
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.errors import ConfigError, ModelError
from agentscope_tuner.reporting import DECODINGS

_ADAPTER = "agentscope_tuner.backends.trinity.adapter.GroupWorkflow"
_ALGORITHM = "agentscope_tuner.backends.trinity.algorithm.Grpo"
_ADVANTAGES = "agentscope_tuner.backends.trinity.algorithm.WeighedAdvantages"
_LOSS = "agentscope_tuner.backends.trinity.algorithm.SummedLoss"
_STEPS = "agentscope_tuner.backends.trinity.algorithm.WholeSteps"
_MONITOR = "agentscope_tuner.backends.trinity.monitor.RunMonitor"
_OURS = (
    *("mode", "project", "name", "checkpoint_root_dir", "continue_from_checkpoint", "algorithm.", "cluster."),
    *("buffer.batch_size", "buffer.total_", "buffer.trainer_input", "buffer.explorer_input"),
    *("data_processor.experience_pipeline", "model.model_path", "model.trust_remote_code", "model.temperature"),
    *("model.max_", "model.enable_", "model.lora_configs", "model.tinker", "monitor.", "synchronizer."),
    *("explorer.runner_per_model", "explorer.max_", "explorer.concurrent_mode", "explorer.over_rollout"),
    *("explorer.eval_", "explorer.dynamic_timeout", "explorer.auxiliary_models"),
    *("explorer.rollout_model.engine_num", "explorer.rollout_model.tensor_parallel_size"),
    *("explorer.rollout_model.enable_openai_api", "explorer.rollout_model.seed"),
    *("trainer.trainer_type", "trainer.save_", "trainer.total_steps", "trainer.grad_clip", "trainer.max_checkpoints"),
)
"""Beginnings of the names in Trinity's `Config` that translation sets, or that the adapter counts on."""
_PER_EPISODE = 8
"""Experiences that an episode makes at most, in verl's mini-batches; unused ones cost two tokens."""


def check_settings(config: TunerConfig) -> None:
    """Refuse what this backend would not honour; with `trinity.route: auto`, whatever the route will be.

    Raises:
        ConfigError: names the setting, why, and what to do.
        ModelError: on GPUs, a model's configuration cannot be loaded.
    """
    model, algorithm = config.model, config.algorithm
    refusals = [
        (config.roles.adapters != "shared", "roles.adapters", "Trinity trains one model, which all roles share"),
        (algorithm.kl_coef != 0, "algorithm.kl_coef", "Trinity weighs the divergence otherwise than the loss"),
        (algorithm.entropy_coef != 0, "algorithm.entropy_coef", "Trinity's Tinker trainer only estimates the entropy"),
        (algorithm.epochs_per_batch > 1, "algorithm.epochs_per_batch", "Trinity passes over a batch once"),
        (algorithm.updates_per_epoch > 1, "algorithm.updates_per_epoch", "Trinity makes one update per batch"),
        (algorithm.max_staleness > 0, "algorithm.max_staleness", "its schedule is `trinity.sync_style`"),
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
    if config.trinity.sync_style == "fully_async" and config.eval_dataset is not None:
        raise ConfigError("`trinity.sync_style: fully_async` makes no evaluations; remove `eval_dataset`")
    for name, helper in config.auxiliary_models.items():
        if helper.sets("tinker_config"):
            raise ConfigError(f"`auxiliary_models.{name}.tinker_config` has no effect: helpers run on vLLM; remove it")
    _check_service(config)
    if config.trinity.route == "verl":
        _check_verl(config)
    if config.trinity.route == "tinker":
        _check_tinker(config)


def _check_service(config: TunerConfig) -> None:
    given = config.model.tinker_config or {}
    unknown = sorted(set(given) - {"base_url", "rank"})
    if unknown:
        raise ConfigError(
            f"unknown key `model.tinker_config.{unknown[0]}`; there are `base_url` and `rank`, and the key is "
            "TINKER_API_KEY in the environment"
        )
    if "rank" in given and (config.model.lora is not None or not given.get("base_url")):
        raise ConfigError("`model.tinker_config.rank` is for a service elsewhere; here, set `model.lora.rank`")


def _check_verl(config: TunerConfig) -> None:
    if config.model.lora is not None:
        # Trinity asks vLLM for the base model by name, and verl's checkpoints keep adapters apart.
        raise ConfigError(
            "`model.lora` is not trained on GPUs by backend `trinity`: its engines would go on sampling the base "
            "model; remove it, or use `trinity.route: tinker`"
        )
    for one in (config.model, *config.auxiliary_models.values()):
        _check_code(one)


def _check_tinker(config: TunerConfig) -> None:
    lora, temperature = config.model.lora, config.model.temperature
    if lora is not None and (lora.sets("alpha") or lora.sets("target_modules")):
        raise ConfigError("a Tinker service takes the rank of adapters only; set nothing else in `model.lora`")
    if temperature != 1:
        raise ConfigError(
            f"`model.temperature` must be 1 with Trinity's Tinker trainer, got {temperature:g}: it compares untempered "
            "probabilities"
        )
    if config.auxiliary_models:
        raise ConfigError("`auxiliary_models` need inference engines of their own; a Tinker service has one model")


def _check_code(model: TunerModelConfig) -> None:
    """Trinity lets vLLM run a model's own code whatever `trust_remote_code` says."""
    if not model.trust_remote_code:
        from transformers import PretrainedConfig  # imports torch, which a run's own process does not need at first

        try:
            form = PretrainedConfig.get_config_dict(model_directory(model.model_path))[0]
        except OSError as exc:
            raise ModelError(f"the configuration of `{model.model_path}` cannot be loaded: {exc}") from exc
        if "auto_map" in form:
            raise ConfigError(
                f"`{model.model_path}` comes with Python code, which vLLM would run; read it, and set "
                "`trust_remote_code: true`, or take another model"
            )


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
        recorder: name of the actor that knows the run, and hears of everything.
        base_url: of the Tinker service, if one is used.
    """
    model, algorithm, trinity = config.model, config.algorithm, config.trinity
    tinker = base_url is not None
    largest = max(algorithm.batch_size, eval_tasks * len(DECODINGS))
    # What says how to use GPUs says nothing where there are none.
    engines = 1 if tinker else model.inference_engine_num
    rounds = math.ceil(largest / (trinity.runners * engines))
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
            algorithm_type=_ALGORITHM,
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
                "padded": not tinker,
            },
            advantage_fn=_ADVANTAGES,
            advantage_fn_args={"loss_weighting": algorithm.loss_weighting, "max_tokens": model.max_tokens},
            policy_loss_fn=_LOSS,
            policy_loss_fn_args={"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high},
            kl_loss_fn="none",
            kl_penalty_fn="none",
            entropy_loss_fn="none",
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
            tinker=TinkerConfig(
                enable=tinker,
                base_url=base_url,
                rank=(model.tinker_config or {}).get("rank", model.lora.rank if model.lora else 16),
                seed=config.seed,
            ),
        ),
        cluster=ClusterConfig(
            ray_address=trinity.ray_address,
            node_num=0 if tinker else trinity.node_num,
            gpu_per_node=0 if tinker else trinity.gpu_per_node,
        ),
        buffer=BufferConfig(
            batch_size=algorithm.batch_size,
            train_batch_size=_most_experiences(algorithm),
            total_epochs=1,
            total_steps=steps,
            trainer_input=TrainerInput(
                experience_buffer=ExperienceBufferConfig(
                    name="experience_buffer", max_read_timeout=trinity.sync_timeout_s + evaluation_s
                )
            ),
            explorer_input=ExplorerInput(
                taskset=_taskset("train", tasks / "train", recorder),
                eval_tasksets=[
                    _taskset(f"eval_{decoding}", tasks / "eval", recorder, decoding)
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
                engine_num=engines,
                tensor_parallel_size=1 if tinker else model.tensor_parallel_size,
                enable_openai_api=not tinker,
                seed=config.seed,
            ),
            auxiliary_models=[
                InferenceModelConfig(
                    name=name,
                    model_path=helper.model_path,
                    max_model_len=helper.max_model_len,
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
            fix_actor_microbatch_loss_scale=True,  # the Tinker trainer's: no mean over experiences
            max_checkpoints_to_keep=config.checkpoint.keep,
        ),
        monitor=MonitorConfig(monitor_type=_MONITOR, monitor_args={"recorder": recorder}),
        synchronizer=SynchronizerConfig(
            sync_method=_sync_method(trinity.sync_method, tinker=tinker),
            sync_style=SyncStyle(trinity.sync_style),
            sync_interval=trinity.sync_interval,
            sync_timeout=int(trinity.sync_timeout_s),
        ),
    )
    for key, value in trinity.settings.items():
        _set(result, key, value)
    result.algorithm.policy_loss_fn_args["sequence_parallel"] = result.trainer.ulysses_sequence_parallel_size
    return result


def _sync_method(asked: str | None, *, tinker: bool) -> SyncMethod:
    if tinker:
        return SyncMethod.CHECKPOINT if asked == "checkpoint" else SyncMethod.MEMORY
    return SyncMethod(asked or "nccl")


def _most_experiences(algorithm: AlgorithmSettings) -> int:
    """That a step is expected to have: episodes have few roles, and few calls that do not extend another."""
    continued = 0 if algorithm.branching is None else algorithm.branching.episodes * algorithm.branching.continuations
    return algorithm.batch_size * (algorithm.group_size + continued) * _PER_EPISODE


def _taskset(name: str, path: Path, recorder: str, decoding: str = "") -> TasksetConfig:
    return TasksetConfig(
        name=name,
        path=str(path),
        split="train",
        default_workflow_type=_ADAPTER,
        workflow_args={"recorder": recorder, "decoding": decoding},
        rollout_args=GenerationConfig(),
    )


def _set(config: Any, key: str, value: Any) -> None:
    """Set a field of Trinity's by its dotted name."""
    *blocks, name = key.split(".")
    for block in blocks:
        config = getattr(config, block, None)
    if not is_dataclass(config) or name not in {one.name for one in fields(config)}:
        raise ConfigError(f"`trinity.settings` names `{key}`, which is not a setting of Trinity's; see its `Config`")
    kind: Any = type(config)
    plain = kind()
    try:
        typed = getattr(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(plain), {name: value})), name)
    except OmegaConfBaseException as exc:
        raise ConfigError(f"`trinity.settings`, `{key}`: {str(exc).splitlines()[0]}") from exc
    if key.startswith(_OURS) and typed != getattr(plain, name):
        raise ConfigError(f"`trinity.settings` names `{key}`, which this package sets or relies on; remove it")
    setattr(config, name, typed)
