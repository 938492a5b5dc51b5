"""The settings of a run: frozen, and checked as a whole before anything is loaded.

`TunerModelConfig`, `AlgorithmConfig` and `DatasetConfig` keep the names and fields of `agentscope.tuner`, and add
some. A key that is unknown, or that would have no effect under the other settings, is an error.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

BackendName = Literal["local", "trinity"]
AlgorithmName = Literal["multi_step_grpo", "grpo"]
MonitorName = Literal["tensorboard", "none"]


class _Config(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), validate_default=True
    )

    def sets(self, field: str) -> bool:
        """Whether `field` was given a value other than its default."""
        return bool(getattr(self, field) != type(self).model_fields[field].get_default(call_default_factory=True))


class LoraConfig(_Config):
    """Train low-rank adapters instead of all weights (arXiv:2106.09685)."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update of each adapted matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by `alpha / rank`."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers to adapt; `all-linear` takes every linear layer but the output head."""


class TunerModelConfig(_Config):
    """A model, and how it is sampled."""

    model_path: str = Field(min_length=1)
    """A directory, a hub name, or `tiny-agent`: the model that ships with this package."""
    max_model_len: int | None = Field(default=None, ge=8)
    """Longest context in tokens, prompt and completion together. None: what the model was built for."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Divides the logits of training rollouts."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many tokens; 0 keeps all."""
    max_tokens: int = Field(default=8192, ge=1)
    """Longest completion of one call, in tokens."""
    stop: list[str] = Field(default_factory=list)
    """A completion ends once it contains one of these strings."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it, such as Qwen3's. None: the template's own default."""
    tool_call_parser: Literal["hermes"] = "hermes"
    """How tool calls are written: `hermes` is `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""
    reasoning_parser: Literal["deepseek_r1", "qwen3"] = "deepseek_r1"
    """How thinking is written: both names mean `<think>...</think>`."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs per inference engine; only on clusters."""
    inference_engine_num: int = Field(default=1, ge=1)
    """Number of inference engines; only on clusters."""
    tinker_config: dict[str, Any] | None = None
    """A Tinker service to use, with backend `trinity`: its `base_url`, and the `rank` of its adapters."""
    lora: LoraConfig | None = None
    """Train adapters of this form. None: train all weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


class BranchingConfig(_Config):
    """Some episodes are run again from the beginning of one of their turns, which shows what that turn was worth.

    The episode is repeated up to the turn with what was recorded, so the workflow has to be deterministic: whatever it
    draws by itself has to come from `WorkflowTask.seed`.
    """

    episodes: int = Field(default=1, ge=1)
    """Episodes of each group to branch."""
    continuations: int = Field(default=4, ge=1)
    """How often each is continued; the episode itself is one more."""
    turns: Literal["random"] | list[int] = "random"
    """Where: at a random turn, or at one of these, the first being 0."""

    @field_validator("turns")
    @classmethod
    def _are_turns(cls, turns: str | list[int]) -> str | list[int]:
        if isinstance(turns, list) and min(turns, default=-1) < 0:
            raise ValueError(f"must be `random` or turns, the first being 0, got {turns}")
        return turns


class AlgorithmConfig(_Config):
    """GRPO (arXiv:2402.03300) and its usual variants."""

    algorithm_type: AlgorithmName = "multi_step_grpo"
    """Both names mean the same here: one advantage per episode and role, however many calls it made."""
    learning_rate: float = Field(default=1e-6, gt=0.0)
    """AdamW's, after warm-up."""
    group_size: int = 8
    """Episodes per task; advantages compare within them."""
    batch_size: int = Field(default=32, ge=1)
    """Tasks per step."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    eval_interval_steps: int = Field(default=100, ge=1)
    """Steps between evaluations. Step 0 and the last step are always evaluated."""
    advantage: Literal["group_std", "mean_only", "leave_one_out"] = "group_std"
    """Reward minus group mean, divided by the group's standard deviation (GRPO), or not (Dr. GRPO, arXiv:2503.20783),
    or minus the mean of the others (RLOO, arXiv:2402.14740)."""
    turn_discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """What a reward counts one turn earlier. Below 1, or where turns earn rewards, every turn has its own advantage."""
    branching: BranchingConfig | None = None
    """Continue some episodes several times from one of their turns. None: never."""
    loss_weighting: Literal["token", "episode", "constant"] = "token"
    """`token`: every token of the batch counts the same (DAPO, arXiv:2503.14476). `episode`: every episode and role
    counts the same (GRPO). `constant`: the sum over tokens divided by `episodes * max_tokens` (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped below at `1 - clip_low`."""
    clip_high: float = Field(default=0.28, gt=0.0)
    """The probability ratio is clipped above at `1 + clip_high`."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""
    updates_per_epoch: int = Field(default=1, ge=1)
    """Optimizer steps per pass; the batch's groups are dealt out among them."""
    max_staleness: int = Field(default=0, ge=0, le=1)
    """Steps that a batch may be older than the weights that learn from it. 1: the next batch is sampled while the
    gradient of this one is computed, which saves time where agents wait for tools or other services; probability ratios
    stay exact. A run that is continued has one batch of newer weights than it would have had. 0: sampling and training
    take turns."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of KL(policy || initial policy) in the loss: the k3 estimate times the probability ratio, which makes its
    gradient unbiased (arXiv:2512.02556)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the mean entropy of the trained tokens, in nats, is subtracted from the loss."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the run: not at all, along a line, or along half a cosine."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this Euclidean norm."""
    max_resampled_groups: int | None = Field(default=None, ge=0)
    """Groups whose episodes all earn the same teach nothing; up to this many of them per step are replaced by groups
    of further tasks. None: `batch_size`."""
    max_failed_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """Training stops when more than this share of a batch's episodes fails."""

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if self.group_size < 2:
            raise ValueError(
                f"`group_size` must be at least 2, got {self.group_size}; GRPO compares episodes within a group"
            )
        if self.branching is not None and self.branching.episodes > self.group_size:
            raise ValueError(
                f"`branching.episodes` ({self.branching.episodes}) must not exceed `group_size` ({self.group_size})"
            )
        if self.updates_per_epoch > self.batch_size:
            raise ValueError(
                f"`updates_per_epoch` ({self.updates_per_epoch}) must not exceed `batch_size` ({self.batch_size}); "
                "an update needs at least one group"
            )
        return self


class DatasetConfig(_Config):
    """Where tasks come from."""

    path: str = Field(min_length=1)
    """A `.jsonl` file, a folder that holds `<split>.jsonl`, or the name of a hub dataset."""
    name: str | None = None
    """The configuration of a hub dataset, such as `main`."""
    split: str | None = "train"
    """The split of a folder or hub dataset."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the dataset."""
    total_steps: int | None = Field(default=None, ge=1)
    """Training steps, instead of `total_epochs`."""
    query_column: str = "question"
    """The column that becomes `Task.main_query`."""
    answer_column: str = "answer"
    """The column that becomes `Task.metadata["answer"]`."""
    limit: int | None = Field(default=None, ge=1)
    """Take only this many tasks, from the beginning."""
    shuffle: bool = True
    """Draw training tasks in a new order each epoch, fixed by `seed`."""


class WorkflowConfig(_Config):
    """How episodes are run."""

    trainable_targets: list[str] | None = None
    """Roles to train, instead of the workflow's own `trainable_targets`."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds after which an episode counts as failed."""
    max_concurrency: int = Field(default=256, ge=1)
    """Episodes that run at the same time."""

    def targets(self, own: list[str] | None) -> list[str] | None:
        """The roles to train, of a workflow that itself names `own`; None: all of them."""
        return self.trainable_targets or own


class OpponentPoolConfig(_Config):
    """Past versions of adapters as opponents, so that hostile roles do not chase each other in circles.

    In some groups of episodes one team learns, and past versions play the others.
    """

    probability: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the groups that are played against past versions."""
    interval_steps: int = Field(default=5, ge=1)
    """Steps between two versions. The first is the state before any training."""
    size: int = Field(default=8, ge=1)
    """Versions to keep, spread evenly over the past."""
    teams: list[list[str]] | None = None
    """Roles that are on one side. None: each role for itself."""


class RolesConfig(_Config):
    """Who plays the trained roles."""

    adapters: Literal["shared", "per_role"] = "shared"
    """`shared`: one policy plays all of them. `per_role`: each has a LoRA adapter of its own over the same weights."""
    initial: list[str] = Field(default_factory=list)
    """Trained roles that the weights under the adapters play instead, without learning: the model before training."""
    opponent_pool: OpponentPoolConfig | None = None
    """Past versions as opponents. None: always the present ones."""


class EngineConfig(_Config):
    """The embedded engine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the first CUDA GPU, or else the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations. Where the processor multiplies faster in float32, `bfloat16` is that of the
    weights and of the key-value cache only: products of many rows are computed in float32."""
    fast_decoder: bool = True
    """Use the fused decoder for the families that have one, with compiled steps where the machine has a C++ compiler or
    a GPU; they are checked at start."""
    max_slots: int = Field(default=128, ge=1)
    """Sequences decoded, or kept for their next turn, at the same time. Where episodes come back to more of them than
    this, later ones wait for earlier ones."""
    kv_cache_gb: float = Field(default=4.0, gt=0.0)
    """Upper bound of the key-value cache, in GB; lowers `max_slots` when the context is long. On a processor, memory is
    taken as it is used."""
    prefill_tokens: int = Field(default=4096, ge=16)
    """Prompt tokens computed at once."""
    draft_tokens: int = Field(default=16, ge=0)
    """Most tokens guessed ahead of a completion, from what was said before, and verified together. Takes fewer steps
    and changes no token. 0: none. With many completions at once there are none either, nor on a GPU, nor without
    compiled steps."""
    micro_batch_tokens: int | None = Field(default=None, ge=16)
    """Tokens per forward and backward pass of the learner, beside those that a long beginning shared by several
    sequences has. None: on a CPU 8192 for a small model, whose layers have at most 4 MB each, and for others 1536,
    or 3072 where they compute in bfloat16: more take memory and save little time; on a GPU 6144."""
    step_memory_gb: float | None = Field(default=None, gt=0.0)
    """Upper bound of what training takes beside the weights, in GB: gradients, the optimizer's state, activations and
    logits; lowers `micro_batch_tokens`. None: no bound."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads. None: PyTorch's own choice."""
    patience_ms: int = Field(default=200, ge=0)
    """How long a batch waits for episodes that are between two calls. Within it, equal seeds give equal bits, unless
    the clock decides which of an episode's agents asks first."""


class TrinityConfig(_Config):
    """Backend `trinity`: Trinity-RFT on Ray."""

    route: Literal["auto", "verl", "tinker"] = "auto"
    """What computes: vLLM and verl on GPUs, or a Tinker service. `auto` takes GPUs where Ray has some."""
    ray_address: str = "local"
    """`local` starts Ray for this run; `auto` joins the one that runs here; or a cluster's address."""
    node_num: int = Field(default=0, ge=0)
    """Nodes to use. 0: all there are."""
    gpu_per_node: int = Field(default=0, ge=0)
    """GPUs per node. 0: all there are."""
    runners: int = Field(default=8, ge=1)
    """Processes that run workflows, per inference engine."""
    sync_method: Literal["nccl", "memory", "checkpoint"] | None = None
    """How weights come to the inference engines. None: `nccl`, and `memory` with a Tinker service."""
    sync_style: Literal[
        "fixed", "explorer_driven", "dynamic_by_explorer", "trainer_driven", "dynamic_by_trainer", "fully_async"
    ] = "fixed"
    """Who waits for whom. `fixed`: explorer and trainer for each other, so every step is on-policy."""
    sync_interval: int = Field(default=1, ge=1)
    """Steps between two synchronizations."""
    sync_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Seconds either side waits for the other."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further settings of Trinity's `Config`, by dotted name, such as `trainer.param_offload: true`."""


class CheckpointConfig(_Config):
    """What is kept of the weights."""

    keep: int = Field(default=2, ge=1)
    """Checkpoints to keep; older ones are removed after a newer one is safely on disk."""
    resume: Literal["auto", "never", "must"] = "auto"
    """When the run folder exists: continue it (`auto`, `must`), or move it aside and start anew (`never`)."""


class TunerConfig(_Config):
    """Everything a run needs."""

    project_name: str = "agentscope-tuner"
    """Groups experiments in TensorBoard."""
    experiment_name: str = Field(pattern=r"^[\w][\w.\-]*$")
    """Names the run folder `<output_dir>/<experiment_name>`. Running the same name again continues it."""
    output_dir: str = "runs"
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0)
    """Fixes task order and sampling."""
    backend: BackendName = "local"
    """`local` is the embedded engine: one process, CPU or one GPU. `trinity` is Trinity-RFT on Ray."""
    model: TunerModelConfig
    """The model to train."""
    auxiliary_models: dict[str, TunerModelConfig] = Field(default_factory=dict)
    """Frozen models that are handed to workflow and judge functions."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """How it learns."""
    train_dataset: DatasetConfig | None = None
    """Tasks to train on."""
    eval_dataset: DatasetConfig | None = None
    """Held-out tasks."""
    workflow: WorkflowConfig = Field(default_factory=WorkflowConfig)
    """How episodes are run."""
    roles: RolesConfig = Field(default_factory=RolesConfig)
    """Who plays the trained roles."""
    monitor_type: MonitorName = "tensorboard"
    """Where curves go besides `metrics.jsonl` and `reward.png`."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The embedded engine."""
    trinity: TrinityConfig = Field(default_factory=TrinityConfig)
    """Trinity-RFT."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """What is kept of the weights."""

    @model_validator(mode="after")
    def _no_key_without_effect(self) -> TunerConfig:
        def refuse(key: str, why: str) -> None:
            raise ValueError(f"`{key}` has no effect: {why}; remove it")

        if self.workflow.trainable_targets == []:
            raise ValueError(
                "`workflow.trainable_targets` is empty, so nothing would be trained; name a role, or remove it"
            )
        models = {"model": self.model} | {f"auxiliary_models.{k}": v for k, v in self.auxiliary_models.items()}
        for key in TrinityConfig.model_fields if self.backend == "local" else ():
            if self.trinity.sets(key):
                refuse(f"trinity.{key}", "backend `local` runs in this process")
        for where, model in models.items():
            for key in ("tensor_parallel_size", "inference_engine_num", "tinker_config"):
                if self.backend == "local" and model.sets(key):
                    refuse(f"{where}.{key}", "backend `local` runs one engine in this process")
            if where != "model" and model.lora is not None:
                refuse(f"{where}.lora", "auxiliary models are not trained")
        if self.trinity.route == "tinker":
            for block, name, keys in (
                (self.model, "model", ("tensor_parallel_size", "inference_engine_num")),
                (self.trinity, "trinity", ("node_num", "gpu_per_node")),
            ):
                for key in filter(block.sets, keys):
                    refuse(f"{name}.{key}", "`trinity.route` is `tinker`, which takes no GPUs of Ray's")
            if self.trinity.sync_method == "nccl":
                refuse("trinity.sync_method: nccl", "`trinity.route` is `tinker`, where no GPUs exchange weights")
        if self.trinity.route == "verl" and self.model.sets("tinker_config"):
            refuse("model.tinker_config", "`trinity.route` is `verl`")
        if self.roles.adapters == "shared":
            for key in ("initial", "opponent_pool"):
                if self.roles.sets(key):
                    refuse(f"roles.{key}", "without `roles.adapters: per_role` all roles share the weights that learn")
        elif self.model.lora is None:
            raise ValueError(
                "`roles.adapters: per_role` needs `model.lora`; set it (`model.lora.rank=16`), or let all roles share "
                "the weights"
            )
        fixed = self.trinity.sync_style == "fixed" and self.trinity.sync_interval == 1
        algorithm = self.algorithm
        updates = algorithm.epochs_per_batch * algorithm.updates_per_epoch
        if fixed and updates == 1 and algorithm.max_staleness == 0:
            for key in ("clip_low", "clip_high"):
                if algorithm.sets(key):
                    refuse(f"algorithm.{key}", "with one on-policy update per batch the probability ratio is 1")
        if self.eval_dataset is None:
            if self.algorithm.sets("eval_interval_steps"):
                refuse("algorithm.eval_interval_steps", "there is no `eval_dataset`")
        else:
            for key in ("total_epochs", "total_steps", "shuffle"):
                if self.eval_dataset.sets(key):
                    refuse(f"eval_dataset.{key}", "every evaluation runs each task once, in order")
        if self.train_dataset and self.train_dataset.total_steps and self.train_dataset.sets("total_epochs"):
            refuse("train_dataset.total_epochs", "`total_steps` is set")
        if self.model.temperature == 0 and self.train_dataset:
            raise ValueError("`model.temperature` must be above 0 for training, got 0; greedy episodes are all alike")
        return self
