"""The embedded engine's training loop: tasks, episodes, advantages, update; again.

One process and one event loop. Agents and sampler take turns on it, the learner runs between two batches, and both
work on the same weights, so there is nothing to ship from one to the other.

With `algorithm.max_staleness` the next batch is sampled while the gradient of this one is computed, in a thread. The
weights change only when both are done: so one batch is sampled with one set of weights, the one before those that learn
from it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from agentscope_tuner.algorithms import Credit, Datum, build_datums, compute_advantages
from agentscope_tuner.backends.evaluation import evaluate_policy
from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.config import TunerConfig, TunerModelConfig
from agentscope_tuner.engine.checkpoint import (
    TrainerState,
    checkpoints,
    latest_checkpoint,
    restore,
    save_checkpoint,
)
from agentscope_tuner.engine.learner import Learner, UpdateMetrics
from agentscope_tuner.engine.memory import give_back
from agentscope_tuner.engine.models import (
    LoadedModel,
    drop_version,
    keep_version,
    load_model,
    prepare_torch,
)
from agentscope_tuner.engine.products import onednn_products
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.errors import ConfigError, RoleError
from agentscope_tuner.garbage import keep_what_is_loaded
from agentscope_tuner.opponents import OpponentPool, plain_cast
from agentscope_tuner.readers import TaskStream, load_tasks, planned_steps
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.reporting import (
    ProgressView,
    RunFolder,
    TensorBoardWriter,
    check_failures,
    describe,
    describe_evaluation,
    draw_reward,
    stored_evaluation,
    with_continuations,
)
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.types import (
    Cast,
    Episode,
    EpisodeGroup,
    EvalResult,
    StepMetrics,
    Task,
    TuneResult,
    version_of,
)
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner


@dataclass(slots=True)
class Engine:
    """A loaded model with its sampler."""

    loaded: LoadedModel
    sampler: Sampler
    model: PolicyModel

    @classmethod
    def start(cls, config: TunerModelConfig, run: TunerConfig, adapters: Sequence[str] = ()) -> Engine:
        """Load a model, with an adapter of each of these names.

        Raises:
            ModelError: it cannot be loaded, or is not supported.
            ConfigError: a setting does not fit it.
        """
        loaded = load_model(config, run.engine, adapters)
        renderer = ChatRenderer(loaded.tokenizer, enable_thinking=config.enable_thinking)
        sampler = Sampler(loaded, run.engine)
        model = PolicyModel(sampler, renderer, loaded.end_of_turn_ids, config.model_path, PolicyModel.params_of(config))
        return cls(loaded, sampler, model)


def start_engines(config: TunerConfig, cast: Cast | None = None) -> tuple[Engine, dict[str, PolicyModel]]:
    """The model to train, with the adapters of a cast, and the frozen ones.

    Raises:
        ModelError: one cannot be loaded, or is not supported.
        ConfigError: a setting does not fit.
    """
    for model in (config.model, *config.auxiliary_models.values()):
        model_directory(model.model_path)
    prepare_torch(config.seed, config.engine.threads)
    adapters = [role for role, name in cast.adapters.items() if name] if cast is not None else []
    engine = Engine.start(config.model, config, adapters)
    helpers = {name: Engine.start(model, config).model for name, model in config.auxiliary_models.items()}
    keep_what_is_loaded()
    return engine, helpers


def choose_cast(config: TunerConfig, workflow: WorkflowRunner) -> Cast:
    """Who plays the trained roles.

    Raises:
        RoleError: adapters per role need to know the roles, or `roles.initial` does not fit them.
    """
    if config.roles.adapters == "shared":
        return Cast()
    roles = config.workflow.targets(workflow.trainable_targets)
    if roles is None:
        raise RoleError(
            "`roles.adapters: per_role` makes an adapter for each role before any episode is run; name them in "
            "`trainable_targets`"
        )
    return plain_cast(config.roles, roles)


@dataclass(slots=True)
class _Batch:
    """What a step learns from."""

    groups: list[EpisodeGroup]
    credits: list[list[Credit]]
    metrics: StepMetrics
    reader_position: int
    """After its tasks were taken."""
    on_policy: bool
    """Sampled with the weights that learn from it."""


class LocalRun:
    """One training run on the embedded engine."""

    def __init__(self, config: TunerConfig, workflow: WorkflowRunner, judge: JudgeRunner | None) -> None:
        """Check everything that can be checked without a model, and prepare the run folder.

        Raises:
            ConfigError: settings are missing, or differ from those of the run that would be continued.
            DataError: a dataset is missing, empty or malformed.
            ModelError: a model path does not exist.
        """
        if config.train_dataset is None:
            raise ConfigError("`train_dataset` is required for training; pass it to `tune()` or set it in the YAML")
        self.config = config
        self.dataset = config.train_dataset
        self.workflow = workflow
        self.judge = judge
        model_directory(config.model.model_path)
        tasks = load_tasks(self.dataset)
        self.stream = TaskStream(tasks, seed=config.seed, shuffle=self.dataset.shuffle)
        self.steps = planned_steps(self.dataset, len(tasks), config.algorithm.batch_size)
        self.eval_tasks = load_tasks(config.eval_dataset) if config.eval_dataset else []
        self.cast = choose_cast(config, workflow)
        pool = config.roles.opponent_pool
        self.pool = None if pool is None else OpponentPool(pool, self.cast, config.seed)
        self.folder = RunFolder(Path(config.output_dir).expanduser() / config.experiment_name)
        self.view = ProgressView(self.steps)
        self._evaluated_step = 0
        self._ahead: asyncio.Task[_Batch] | None = None
        """The batch of the next step, where it is sampled already."""

    async def run(self) -> TuneResult:
        """Train from the beginning or from the newest checkpoint.

        Raises:
            TrainingStoppedError: training cannot go on; finished episodes and checkpoints are on disk.
            CheckpointError: a checkpoint is damaged or cannot be written.
        """
        resumed = self.folder.prepare(self.config)
        newest = latest_checkpoint(self.folder.checkpoints_dir) if resumed else None
        self.engine, helpers = start_engines(self.config, self.cast)
        algorithm = self.config.algorithm
        if algorithm.max_staleness and self.engine.loaded.lora is not None and self.engine.sampler.runs_modules:
            raise ConfigError(
                "`algorithm.max_staleness` does not go with `model.lora` here: sampler and learner share this model's "
                "modules, which hold one adapter at a time; remove it"
            )
        self.learner = Learner(
            self.engine.loaded,
            algorithm,
            self.config.engine,
            self.config.model.max_tokens,
            self.steps * algorithm.epochs_per_batch * algorithm.updates_per_epoch,
        )
        state = TrainerState(0, 0, 0)
        if newest is not None:
            state = restore(newest, self.engine.loaded, self.learner.optimizer)
            if self.pool is not None:
                self.pool.steps = list(state.versions)
            self.engine.sampler.weights_changed(state.updates)
            self.stream = TaskStream(
                self.stream.tasks,
                seed=self.config.seed,
                shuffle=self.dataset.shuffle,
                position=state.reader_position,
            )
        if resumed:
            self.folder.rewind(state.step if newest is not None else -1)
        self.rollout = Rollout(
            self.workflow,
            self.judge,
            self.engine.model,
            self.config.workflow,
            self.config.seed,
            helpers,
            self._episode_done,
            self.cast,
        )
        self.history = self.folder.read_metrics()
        self.evaluations: dict[int, dict[str, EvalResult]] = {}
        # Where both work at once, products are done in one way all the time: the switch is the whole process's.
        products = onednn_products() if algorithm.max_staleness else nullcontext()
        async with aclosing(self.rollout):
            with products, self.folder, self._tensorboard() as self.board, self.view:
                if newest is None:
                    await self._begin()
                try:
                    for step in range(state.step + 1, self.steps + 1):
                        await self._step(step)
                finally:
                    if self._ahead is not None:
                        self._ahead.cancel()
                        await asyncio.gather(self._ahead, return_exceptions=True)
                    give_back()
        result = self._result()
        self.view.summary(result)
        return result

    # ------------------------------------------------------------------------------------------------ a step

    async def _begin(self) -> None:
        metrics = StepMetrics(step=0)
        self._publish(0)
        if self.eval_tasks:
            await self._evaluate(metrics)
            self._record(metrics)

    async def _step(self, step: int) -> None:
        batch = await (self._ahead or self._collect(step, on_policy=True))
        self._ahead = None
        if self.config.algorithm.max_staleness and step < self.steps:
            self._ahead = asyncio.create_task(self._collect(step + 1, on_policy=False))
        metrics = batch.metrics
        begun = time.perf_counter()
        updates = build_datums(batch.credits, self.config.algorithm.updates_per_epoch)
        if updates:
            done = await self._train(updates, batch)
            for name in ("loss", "grad_norm", "kl_to_sampler", "clip_fraction", "entropy", "learning_rate"):
                setattr(metrics, name, getattr(done, name))
            metrics.tokens_trained, metrics.tokens_packed = done.tokens_trained, done.tokens_packed
        else:
            why = "every group earned the same reward throughout"
            if any(batch.credits):
                why = "every call that made a difference was at temperature 0, where nothing is drawn"
            self.view.message(f"step {step}: {why}, so nothing was learned")
        if self._ahead is not None:
            await asyncio.wait({self._ahead})  # what it raises is the next step's affair
        self._publish(step)
        metrics.time_train_s = time.perf_counter() - begun
        describe(batch.groups, metrics)
        last = step == self.steps
        if self.eval_tasks and (last or step % self.config.algorithm.eval_interval_steps == 0):
            await self._evaluate(metrics)
        self._record(metrics)
        if last or step % self.config.algorithm.save_interval_steps == 0:
            versions = tuple(self.pool.steps) if self.pool is not None else ()
            state = TrainerState(step, self.learner.optimizer.updates, batch.reader_position, versions)
            save_checkpoint(
                self.folder.checkpoints_dir,
                self.engine.loaded,
                self.learner.optimizer,
                state,
                keep=self.config.checkpoint.keep,
            )

    async def _train(self, updates: list[list[Datum]], batch: _Batch) -> UpdateMetrics:
        if self._ahead is None:
            self.view.phase("train", 0)
            return self.learner.train(updates, lambda tokens: self.view.advance(), on_policy=batch.on_policy)
        sampled = threading.Event()
        self._ahead.add_done_callback(lambda _: sampled.set())
        return await asyncio.to_thread(
            self.learner.train, updates, on_policy=batch.on_policy, before_update=sampled.wait
        )

    def _publish(self, step: int) -> None:
        """Sample with the new weights from now on; let what the adapters are now be met in later steps, where due."""
        loaded = self.engine.loaded
        if self.pool is not None and self.pool.due(step):
            dropped = self.pool.keep(step)
            for adapter in loaded.adapters:
                keep_version(loaded, adapter, version_of(adapter, step))
                if dropped is not None:
                    drop_version(loaded, version_of(adapter, dropped))
        self.engine.sampler.weights_changed(self.learner.optimizer.updates)

    async def _collect(self, step: int, *, on_policy: bool) -> _Batch:
        """A batch of groups; those that teach nothing are replaced as soon as that is known, up to the bound."""
        metrics = StepMetrics(step=step)
        algorithm = self.config.algorithm
        bound = algorithm.batch_size if algorithm.max_resampled_groups is None else algorithm.max_resampled_groups
        begun = time.perf_counter()
        branching = algorithm.branching
        more = branching.episodes * branching.continuations if branching is not None else 0
        credits: dict[int, list[Credit]] = {}
        first: list[EpisodeGroup] = []

        def check(groups: list[EpisodeGroup]) -> None:
            episodes = with_continuations([episode for group in groups for episode in group.episodes])
            check_failures(episodes, algorithm.max_failed_fraction, self.folder.episodes_dir)

        def refill(index: int, group: EpisodeGroup) -> Task | None:
            (credits[index],) = compute_advantages([group], algorithm.advantage, algorithm.turn_discount)
            if index < algorithm.batch_size:  # of the others, those that fail may be over long before
                first.append(group)
                if len(first) == algorithm.batch_size:
                    check(first)
            if credits[index] or metrics.resampled_groups == bound:
                return None
            metrics.resampled_groups += 1
            self.view.expect(algorithm.group_size + more)
            return self.stream.take(1)[0]

        self.view.phase("rollout", algorithm.batch_size * (algorithm.group_size + more))
        groups = await self.rollout.run(
            self.stream.take(algorithm.batch_size),
            algorithm.group_size,
            phase=f"train{step}",
            branching=branching,
            cast_of=None if self.pool is None else self.pool.cast_of,
            refill=refill,
        )
        check(groups)
        metrics.groups = len(groups)
        metrics.zero_variance_groups = sum(not one for one in credits.values())
        metrics.time_rollout_s = time.perf_counter() - begun
        in_order = [credits[index] for index in range(len(groups))]
        return _Batch(groups, in_order, metrics, self.stream.position, on_policy)

    async def _evaluate(self, metrics: StepMetrics) -> None:
        self._evaluated_step = metrics.step
        results = await evaluate_policy(
            self.rollout, self.eval_tasks, self.view, self.config.algorithm.max_failed_fraction
        )
        # What it left in the cache would be missing where a run goes on from a checkpoint.
        self.engine.sampler.weights_changed(self.engine.sampler.policy_version)
        self.evaluations[metrics.step] = results
        describe_evaluation(results, metrics)

    # --------------------------------------------------------------------------------------------- reporting

    def _episode_done(self, episode: Episode, phase: str) -> None:
        if phase.startswith("eval"):
            self.folder.write_episode(episode, phase=phase, step=self._evaluated_step)
        else:
            self.folder.write_episode(episode, phase="train", step=int(phase.removeprefix("train")))
        self.view.tokens(episode.tokens_sampled)
        self.view.episode_done(failed=episode.error is not None)

    def _record(self, metrics: StepMetrics) -> None:
        self.history.append(metrics)
        self.folder.append_metrics(metrics)
        if self.board is not None:
            self.board.write(metrics)
        self.view.step_done(metrics)
        if metrics.eval_reward_mean is not None or metrics.step == self.steps:
            draw_reward(self.history, self.folder.reward_png, self.config.experiment_name)

    @contextmanager
    def _tensorboard(self) -> Iterator[TensorBoardWriter | None]:
        if self.config.monitor_type == "none":
            yield None
            return
        board = TensorBoardWriter(self.folder.tensorboard_dir)
        try:
            yield board
        finally:
            board.close()

    def _result(self) -> TuneResult:
        return TuneResult(
            checkpoint=checkpoints(self.folder.checkpoints_dir)[-1],
            history=self.history,
            run_dir=self.folder.path,
            eval_before=self._evaluation(0),
            eval_after=self._evaluation(self.steps),
        )

    def _evaluation(self, step: int) -> dict[str, EvalResult]:
        """An evaluation of this run, or of the earlier part that it continues."""
        if not self.eval_tasks:
            return {}
        return self.evaluations.get(step) or stored_evaluation(self.folder, step)
