"""One training run on Trinity-RFT: what it needs is started, Trinity's own stage runs, and what it did is verified."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from trinity.common.config import Config

from agentscope_tuner.backends.evaluation import evaluate_policy
from agentscope_tuner.backends.trinity import HAS_VLLM
from agentscope_tuner.backends.trinity.cluster import (
    Service,
    check_workers,
    end_process,
    environment,
    last_error,
    running_ray,
    running_service,
    with_route,
)
from agentscope_tuner.backends.trinity.export import copy_model, download_model
from agentscope_tuner.backends.trinity.recording import Progress, RunRecorder
from agentscope_tuner.backends.trinity.spec import RunSpec
from agentscope_tuner.backends.trinity.translate import check_settings, group_timeout_s, translate
from agentscope_tuner.config import TunerConfig
from agentscope_tuner.engine.reading import load_reader, model_directory
from agentscope_tuner.errors import CheckpointError, ConfigError, TrainingStoppedError, TunerError
from agentscope_tuner.event_loop import run_to_end
from agentscope_tuner.readers import TaskStream, load_tasks, planned_steps
from agentscope_tuner.reporting import ProgressView, RunFolder, stored_evaluation
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.tinker_service.naming import checkpoint_folder
from agentscope_tuner.types import Episode, EvalResult, TuneResult
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

_POLL_S = 0.5


class TrinityRun:
    """Trains with Trinity."""

    def __init__(self, config: TunerConfig, workflow: WorkflowRunner, judge: JudgeRunner | None) -> None:
        """Check everything that can be checked without a cluster.

        Raises:
            ConfigError: settings are missing, or Trinity cannot honour them.
            DataError: a dataset is missing, empty or malformed.
            ModelError: a model path does not exist.
        """
        if config.train_dataset is None:
            raise ConfigError("`train_dataset` is required for training; pass it to `tune()` or set it in the YAML")
        self.dataset = config.train_dataset
        check_settings(config)
        self.config = config
        self.workflow = workflow
        self.judge = judge
        self.model_path = model_directory(config.model.model_path)
        self.tasks = load_tasks(self.dataset)
        self.steps = planned_steps(self.dataset, len(self.tasks), config.algorithm.batch_size)
        self.eval_tasks = load_tasks(config.eval_dataset) if config.eval_dataset else []
        self.folder = RunFolder((Path(config.output_dir).expanduser() / config.experiment_name).absolute())
        self.view = ProgressView(self.steps)
        self._name = f"{config.project_name}-{config.experiment_name}-{secrets.token_hex(4)}"
        """Of this attempt, for Ray."""
        self._shown = Progress(0, 0, 0, [], None)

    @property
    def _own(self) -> Path:
        """Where Trinity, and what serves it, keep what they need to go on."""
        return self.folder.path / "trinity"

    @property
    def _checkpoints(self) -> Path:
        return self._own / "checkpoints"

    @property
    def _job(self) -> Path:
        """Where Trinity keeps its state of this experiment."""
        return self._checkpoints / self.config.project_name / self.config.experiment_name

    def run(self) -> TuneResult:
        """Train from the beginning, or from where the run of this name stopped.

        Raises:
            TrainingStoppedError: Trinity did not do what was asked; says what it did.
        """
        with environment(self.config), running_ray(self.config.trinity.ray_address, self._name) as address:
            gpus = int(ray.cluster_resources().get("GPU", 0))
            self.config = with_route(self.config, gpus=gpus, vllm=HAS_VLLM)
            check_settings(self.config)
            check_workers(self.config)
            done = self._resume(self.folder.prepare(self.config))
            self._write_tasks()
            serving = running_service(self.config, self.model_path, self.folder.config_path, self._own)
            with serving as reach, self._recorder(done) as recorder, self.view:
                if done < self.steps:
                    self._train(address, reach, recorder)
                service = reach()
                weights = self._job / f"global_step_{self.steps}"
                results = self._evaluate(weights) if service is not None and self.eval_tasks else {}
                ray.get(recorder.finish.remote(results))
                self._show(recorder)
                checkpoint = self._export(service, weights)
        result = TuneResult(
            checkpoint=checkpoint,
            history=self.folder.read_metrics(),
            run_dir=self.folder.path,
            eval_before=stored_evaluation(self.folder, 0),
            eval_after=stored_evaluation(self.folder, self.steps),
        )
        self.view.summary(result)
        return result

    @contextmanager
    def _recorder(self, done: int) -> Iterator[Any]:
        """The actor that writes the run folder, from step `done` on; on this machine, where the folder is."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = (
            ray.remote(RunRecorder)
            .options(name=self._name, namespace=self._name, num_cpus=0, scheduling_strategy=here)
            .remote(
                self.config,
                self.config.workflow.targets(self.workflow.trainable_targets),
                str(self.folder.path),
                cloudpickle.dumps(RunSpec(self.config, self.workflow, self.judge)),
                done=done,
                steps=self.steps,
                eval_tasks=len(self.eval_tasks),
            )
        )
        try:
            yield actor
        finally:
            ray.kill(actor)
            # Trinity's own job made this one. Where that job has ended, Ray may know the actor no more, or know it and
            # have forgotten its class, which it tells by a failed assertion.
            with suppress(ValueError, AssertionError):
                ray.kill(ray.get_actor("synchronizer", namespace=self._name))

    def _resume(self, resumed: bool) -> int:
        """Go back to the trainer's last checkpoint; returns its step.

        The explorer notes every step, but after its evaluation; the trainer only those that it saves.
        """
        if not resumed:
            shutil.rmtree(self._own, ignore_errors=True)
            return 0
        step = _steps_done(self._job / "trainer_meta.json")
        if step == 0:
            shutil.rmtree(self._job, ignore_errors=True)
        else:
            taken = step * self.config.algorithm.batch_size
            state = {"latest_iteration": step, "taskset_states": [{"current_index": taken}]}
            (self._job / "explorer_meta.json").write_text(json.dumps(state))
        self.folder.rewind(step or -1)
        return step

    def _write_tasks(self) -> None:
        """All tasks of the run, in the order they are trained on, and the held-out ones."""
        stream = TaskStream(self.tasks, seed=self.config.seed, shuffle=self.dataset.shuffle)
        wanted = {"train": stream.take(self.steps * self.config.algorithm.batch_size), "eval": self.eval_tasks}
        for name, tasks in wanted.items():
            folder = self._own / "tasks" / name
            folder.mkdir(parents=True, exist_ok=True)
            lines = (json.dumps({"task": task.model_dump_json()}) for task in tasks)
            (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))

    # ----------------------------------------------------------------------------------------------------- stage

    def _stage(self, service: Service | None, address: str, context: int) -> Config:
        stage = translate(
            self.config,
            model_path=self.model_path if service is None else service.model,
            context=context,
            tasks=self._own / "tasks",
            steps=self.steps,
            eval_tasks=len(self.eval_tasks),
            checkpoints=self._checkpoints,
            recorder=self._name,
            base_url=None if service is None else service.base_url,
        )
        stage.cluster.ray_address = address
        stage.ray_namespace = self._name
        return stage

    def _train(self, address: str, reach: Callable[[], Service | None], recorder: Any) -> None:
        """Run Trinity's stage in a process of its own, and watch it.

        Raises:
            TrainingStoppedError: it failed, did less than was asked, or nothing is heard of it any more.
            TunerError: what a workflow runner found wrong with the run.
        """
        answer = self._own / "stage.json"
        answer.unlink(missing_ok=True)
        log_path = self._own / "trinity.log"
        environment = dict(os.environ)
        if self.config.trinity.ray_address != "local":
            environment["RAY_IS_ELSEWHERE"] = "1"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "agentscope_tuner.backends.trinity.stage"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert process.stdin is not None
        stop: TunerError | None = None
        try:
            with suppress(BrokenPipeError), process.stdin as pipe:  # that it has ended is found out below
                # The service, the stage and whoever reads a model import for seconds; all do so at once.
                context = load_reader(self.config.model)[2]
                service = reach()
                pipe.write(cloudpickle.dumps((self._stage(service, address, context), str(answer))))
            self.view.phase("rollout", 0)
            patience_s = self.config.trinity.sync_timeout_s + group_timeout_s(self.config)
            deadline = time.monotonic() + patience_s
            while process.poll() is None and stop is None:
                time.sleep(_POLL_S)
                before = self._shown
                stop = self._show(recorder)
                if self._shown.finished and service is not None:
                    self._prune(service)
                if self._shown != before:
                    deadline = time.monotonic() + patience_s
                if time.monotonic() > deadline:
                    raise TrainingStoppedError(
                        f"nothing was heard of Trinity for {patience_s:.0f} s, which is `trinity.sync_timeout_s` and "
                        f"the time a group may take; its log is `{log_path}`"
                    )
                if service is not None:
                    service.check()
        finally:
            end_process(process)
        stop = stop or self._show(recorder)
        if service is not None:
            self._prune(service)
        if stop is not None:
            raise stop
        self._verify(json.loads(answer.read_text()) if answer.is_file() else None, process.returncode, log_path)

    def _show(self, recorder: Any) -> TunerError | None:
        """Bring the display up to date; returns why the run should stop, if it should."""
        now: Progress = ray.get(recorder.progress.remote())
        for _ in range(now.episodes - now.failed - self._shown.episodes + self._shown.failed):
            self.view.episode_done(failed=False)
        for _ in range(now.failed - self._shown.failed):
            self.view.episode_done(failed=True)
        self.view.tokens(now.tokens - self._shown.tokens)
        self._shown = now
        for metrics in now.finished:
            self.view.step_done(metrics)
        return now.stop

    def _prune(self, service: Service) -> None:
        """Remove checkpoints beyond those to keep: Trinity's Tinker trainer removes none."""
        if service.folder is None:
            return
        saved = {_step_of(note.parent): note for note in self._job.glob("global_step_*/remote_checkpoint_path.txt")}
        try:
            needed = _steps_done(self._job / "trainer_meta.json")
        except CheckpointError:  # it is being written
            return
        for step in sorted(saved)[: -self.config.checkpoint.keep]:
            if step < needed:
                shutil.rmtree(checkpoint_folder(service.folder, saved[step].read_text().strip()), ignore_errors=True)
                saved[step].unlink()

    def _verify(self, status: dict[str, Any] | None, code: int, log: Path) -> None:
        """Compare Trinity's own records with what was asked; what it says about its success is not to be believed."""
        explored, trained = (_steps_done(self._job / f"{side}_meta.json") for side in ("explorer", "trainer"))
        if min(explored, trained) >= self.steps:
            return
        error = (status or {}).get("error") or {}
        cause = f"{error['type_name']}: {error['message'].strip().splitlines()[-1]}" if error else last_error(log)
        raise TrainingStoppedError(
            f"Trinity did {explored} explorer and {trained} trainer steps of {self.steps} and ended with {code}; "
            f"{cause or 'it named no error'}; its log is `{log}`. Run the same experiment again to go on from its last "
            "checkpoint"
        )

    # ----------------------------------------------------------------------------------------------- afterwards

    def _evaluate(self, weights: Path) -> dict[str, EvalResult]:
        """Evaluate the finished model, as the embedded engine does; Trinity ends without."""
        paths = (weights / f"remote_{kind}_path.txt" for kind in ("sampler", "checkpoint"))
        return run_to_end(self._evaluations(next(path for path in paths if path.is_file()).read_text().strip()))

    async def _evaluations(self, path: str) -> dict[str, EvalResult]:
        # Imports torch and much of Trinity, which this process needs here only.
        from agentscope_tuner.backends.trinity.policies import TinkerPolicy, policy_model

        model = policy_model(self.config.model, TinkerPolicy)
        policy: Any = model.policy
        await policy.use(path, self.steps)

        def done(episode: Episode, phase: str) -> None:
            self.folder.write_episode(episode, phase=phase, step=self.steps)

        rollout = Rollout(self.workflow, self.judge, model, self.config.workflow, self.config.seed, {}, on_episode=done)
        try:
            return await evaluate_policy(rollout, self.eval_tasks, self.view, self.config.algorithm.max_failed_fraction)
        finally:
            await rollout.aclose()
            policy.close()

    def _export(self, service: Service | None, weights: Path) -> Path:
        """The finished model as a Hugging Face directory in the run folder."""
        target = self.folder.checkpoints_dir / f"step_{self.steps}"
        if service is None:
            copy_model(weights / "actor" / "huggingface", target)
            return target
        path = (weights / "remote_checkpoint_path.txt").read_text().strip()
        if service.folder is None:
            download_model(service.base_url, path, self.config.model, target)
        else:
            copy_model(checkpoint_folder(service.folder, path), target)
        return target


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def _steps_done(meta: Path) -> int:
    """What a side of Trinity notes about itself.

    Raises:
        CheckpointError: the note is torn; Trinity writes it in place.
    """
    if not meta.is_file():
        return 0
    try:
        return int(json.loads(meta.read_text())["latest_iteration"])
    except ValueError as exc:
        raise CheckpointError(
            f'`{meta}`, which Trinity writes, is torn; put `{{"latest_iteration": N}}` there, where `global_step_N` is '
            "the last checkpoint beside it, and run this again"
        ) from exc
