"""Training through Trinity's unmodified stage, on a machine without GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import trinity_workflows as flows
from transformers import AutoModelForCausalLM

from agentscope_tuner import DatasetConfig, TuneResult, tune
from agentscope_tuner.errors import ConfigError, ModelError, RoleError, TooManyFailuresError, TrainingStoppedError
from agentscope_tuner.reporting import read_episodes

ROOT = Path(__file__).parents[2]
MATH = ROOT / "examples" / "math_agent"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": f"Say {n}."}) + "\n" for n in range(8)))
    return path


def train(workflow: Any, tasks: Path, *settings: str, judge: Any = None, held_out: bool = False) -> TuneResult:
    dataset = DatasetConfig(path=str(tasks))
    return tune(
        workflow,
        judge_func=judge,
        train_dataset=dataset,
        eval_dataset=DatasetConfig(path=str(tasks), limit=4) if held_out else None,
        experiment_name="run",
        backend="trinity",
        overrides=[
            f"output_dir={tasks.parent}",
            "model.model_path=tiny-agent",
            "model.max_model_len=256",
            "model.max_tokens=16",
            "algorithm.batch_size=2",
            "algorithm.group_size=4",
            "algorithm.learning_rate=1e-3",
            "train_dataset.total_steps=2",
            "trinity.runners=1",
            "trinity.sync_timeout_s=120",
            *settings,
        ],
    )


def test_the_math_agent_learns(tmp_path: Path) -> None:
    begun = time.monotonic()
    command = [
        sys.executable,
        str(MATH / "main.py"),
        "backend=trinity",
        f"output_dir={tmp_path}",
        "train_dataset.total_steps=12",
        "eval_dataset.limit=64",
        "algorithm.eval_interval_steps=100",
        "trinity.runners=2",
    ]
    subprocess.run(command, check=True)
    minutes = (time.monotonic() - begun) / 60
    lines = [json.loads(line) for line in (tmp_path / "math_agent" / "metrics.jsonl").read_text().splitlines()]
    before, after = lines[0]["eval_reward_mean"], lines[-1]["eval_reward_mean"]
    print(f"held-out reward {before:.3f} -> {after:.3f} in {minutes:.1f} minutes")
    assert [line["step"] for line in lines] == list(range(13))
    assert after - before >= 0.2
    assert minutes < 8


def test_a_function_with_a_reward_and_resuming(tasks: Path) -> None:
    slowly = "algorithm.learning_rate=1e-4"  # at 1e-3 all answers may be alike by step 4, and nothing is trained
    first = train(flows.scored, tasks, slowly, held_out=True)
    assert [metrics.step for metrics in first.history] == [0, 1, 2]
    assert all(abs(metrics.kl_to_sampler or 0) < 1e-6 for metrics in first.history[1:2]), "on-policy to the last bit"
    assert set(first.eval_before) == set(first.eval_after) == {"greedy", "sampled"}
    AutoModelForCausalLM.from_pretrained(first.checkpoint)
    again = train(flows.scored, tasks, slowly, "train_dataset.total_steps=4", held_out=True)
    assert [metrics.step for metrics in again.history] == [0, 1, 2, 3, 4]
    for side in ("explorer", "trainer"):
        (meta,) = (tasks.parent / "run" / "trinity" / "checkpoints").rglob(f"{side}_meta.json")
        assert json.loads(meta.read_text())["latest_iteration"] == 4
    played = [read_episodes(tasks.parent / "run" / "episodes" / f"train_{step:06d}.jsonl") for step in (1, 2, 3, 4)]
    assert [len(episodes) for episodes in played] == [8, 8, 8, 8]
    for metrics, episodes in zip(again.history[1:], played, strict=True):
        (calls,) = zip(*(episode["calls"] for episode in episodes), strict=True)
        assert metrics.tokens_sampled == sum(len(call["completion_ids"]) for call in calls)
        rewards = defaultdict(set)
        for episode in episodes:
            rewards[episode["task"]["id"]].add(episode["reward"]["default"])
        teaching = [len(rewards[episode["task"]["id"]]) > 1 for episode in episodes]
        assert metrics.tokens_trained == sum(
            len(call["completion_ids"]) for call, teaches in zip(calls, teaching, strict=True) if teaches
        )
        assert metrics.tokens_trained > 0
        rows = [len(call["prompt_ids"]) + len(call["completion_ids"]) for call in calls]
        assert 0 < metrics.tokens_packed <= sum(rows) - len(rows), "the last token of each is not run"
    assert played[2][0]["calls"][0]["policy_version"] == 2


def test_evaluations_between_steps_and_at_the_last(tasks: Path) -> None:
    settings = ("train_dataset.total_steps=4", "algorithm.eval_interval_steps=2")
    result = train(flows.scored, tasks, *settings, held_out=True)
    assert [metrics.step for metrics in result.history] == [0, 1, 2, 3, 4]
    # Trinity evaluates in steps 2 and 4, before it synchronizes their updates; the finished model is evaluated by us.
    evaluated = [metrics.step for metrics in result.history if metrics.eval_reward_mean is not None]
    assert evaluated == [0, 1, 3, 4]
    for step in evaluated:
        for decoding in ("greedy", "sampled"):
            episodes = read_episodes(result.run_dir / "episodes" / f"eval_{decoding}_{step:06d}.jsonl")
            assert len(episodes) == 4
            assert {call["policy_version"] for episode in episodes for call in episode["calls"]} == {step}


def test_a_function_with_a_judge(tasks: Path) -> None:
    result = train(flows.answered, tasks, judge=flows.judged)
    assert result.history[-1].extra["judge/length"] > 0


def test_only_the_trained_role_is_trained(tasks: Path) -> None:
    result = train(flows.Pair, tasks)
    assert result.history[-1].extra["workflow/advice"] == 1
    for step in (1, 2):
        for episode in read_episodes(result.run_dir / "episodes" / f"train_{step:06d}.jsonl"):
            assert {call["role"] for call in episode["calls"]} == {"writer"}
            assert set(episode["reward"]) == {"writer"}


def test_adapters_and_a_workflow_of_the_main_script(tasks: Path) -> None:
    script = tasks.parent / "script.py"
    script.write_text(
        f"""
from agentscope_tuner import DatasetConfig, Workflow, WorkflowOutput, tune

BONUS = 0.5

class Here(Workflow):
    async def execute(self, task, model_tuner):
        said = await model_tuner([{{"role": "user", "content": task.task.main_query}}])
        text = "".join(block.get("text", "") for block in said.content)
        return WorkflowOutput(reward=len(text) % 3 + BONUS)

if __name__ == "__main__":
    result = tune(Here, train_dataset=DatasetConfig(path={str(tasks)!r}), experiment_name="run", backend="trinity",
        overrides=["output_dir={tasks.parent}", "model.model_path=tiny-agent", "model.max_tokens=16",
            "model.lora.rank=4", "algorithm.batch_size=2", "algorithm.group_size=4", "trinity.runners=1",
            "train_dataset.total_steps=1"])
    print("REWARD", result.history[-1].reward_mean)
"""
    )
    done = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    assert float(done.stdout.rpartition("REWARD")[2]) >= 0.5


# --------------------------------------------------------------------------------------------------------- faults


def test_training_goes_on_when_half_of_the_episodes_fail(tasks: Path) -> None:
    result = train(flows.HalfBroken, tasks)
    assert [metrics.episodes_failed for metrics in result.history] == [4, 4]


def test_it_ends_when_all_episodes_fail(tasks: Path) -> None:
    with pytest.raises(TooManyFailuresError, match="broken on purpose"):
        train(flows.Broken, tasks)
    assert read_episodes(tasks.parent / "run" / "episodes" / "train_000001.jsonl")


def test_a_target_that_no_episode_knows_ends_the_run(tasks: Path) -> None:
    with pytest.raises(RoleError, match="`riter`, which no episode registered"):
        train(flows.Pair, tasks, "workflow.trainable_targets=[writer,riter]")


def once(happened: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do something to a run when something has happened in it."""

    def wait() -> None:
        deadline = time.monotonic() + 300
        while not happened():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.2)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def steps_written(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
    return [json.loads(line)["step"] for line in lines]


def kill_explorer() -> None:
    actors = ray.util.list_named_actors(all_namespaces=True)
    namespace = next(actor["namespace"] for actor in actors if actor["name"] == "explorer")
    ray.kill(ray.get_actor("explorer", namespace=namespace))


def pid_of(pattern: str) -> int:
    return int(subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()[0])


def test_a_killed_explorer_ends_the_run_and_the_same_command_goes_on(tasks: Path) -> None:
    run = tasks.parent / "run"
    settings = ("train_dataset.total_steps=6", "algorithm.save_interval_steps=2")
    killer = once(lambda: 3 in steps_written(run), kill_explorer)
    begun = time.monotonic()
    with pytest.raises(TrainingStoppedError, match="trainer steps of 6"):
        train(flows.Slow, tasks, *settings)
    killer.join()
    assert time.monotonic() - begun < 180
    result = train(flows.Slow, tasks, *settings)
    assert [metrics.step for metrics in result.history] == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        episodes = read_episodes(run / "episodes" / f"train_{step:06d}.jsonl")
        assert sorted({episode["episode_id"] for episode in episodes}) == sorted(e["episode_id"] for e in episodes)
        assert len(episodes) == 8
        assert {call["policy_version"] for episode in episodes for call in episode["calls"]} == {step - 1}
    assert all(abs(metrics.kl_to_sampler or 0) < 1e-6 for metrics in result.history)
    kept = (run / "trinity" / "checkpoints").rglob("remote_checkpoint_path.txt")
    assert sorted(path.parent.name for path in kept) == ["global_step_4", "global_step_6"], "`checkpoint.keep` is 2"


def test_a_killed_service_ends_the_run(tasks: Path) -> None:
    run = tasks.parent / "run"
    killer = once(
        lambda: any((run / "episodes").glob("train_*")),
        lambda: os.kill(pid_of(f"tinker_service {tasks.parent}"), signal.SIGKILL),
    )
    with pytest.raises(TrainingStoppedError, match="the Tinker service ended with status -9"):
        train(flows.Slow, tasks, "train_dataset.total_steps=50")
    killer.join()
    assert read_episodes(run / "episodes" / "train_000001.jsonl")


def test_a_service_that_does_not_start_ends_the_run_and_the_stage_that_waits_for_it(tasks: Path) -> None:
    stage = ["pgrep", "-P", str(os.getpid()), "-f", "agentscope_tuner.backends.trinity.stage"]
    killer = once(
        lambda: subprocess.run(stage).returncode == 0,
        lambda: os.kill(pid_of(f"tinker_service {tasks.parent}"), signal.SIGKILL),
    )
    with pytest.raises(TrainingStoppedError, match="the Tinker service ended with status -9"):
        train(flows.scored, tasks)
    killer.join()
    assert subprocess.run(stage).returncode == 1


def test_a_trainer_that_hangs_ends_the_run_at_its_time_limit(tasks: Path) -> None:
    run = tasks.parent / "run"
    stopper = once(lambda: 1 in steps_written(run), lambda: os.kill(pid_of("^ray::Train"), signal.SIGSTOP))
    begun = time.monotonic()
    limits = ("workflow.timeout_s=5", "trinity.sync_timeout_s=20")
    with pytest.raises(TrainingStoppedError):
        train(flows.Slow, tasks, "train_dataset.total_steps=50", *limits)
    stopper.join()
    assert time.monotonic() - begun < 180
    assert read_episodes(run / "episodes" / "train_000001.jsonl")


def test_a_service_that_runs_elsewhere_gives_the_model_back(tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-a-key-of-this-test")
    command = [str(Path(sys.executable).with_name("astuner")), "serve-tinker", "-m", "tiny-agent", "--port", "0"]
    command += ["--folder", str(tasks.parent / "elsewhere")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            url = next(line for line in service.stdout if "TINKER_BASE_URL" in line).strip().partition("=")[2]
            result = train(flows.scored, tasks, f"model.tinker_config={{base_url: '{url}'}}", held_out=True)
        finally:
            service.terminate()
    assert result.checkpoint == result.run_dir / "checkpoints" / "step_2"
    AutoModelForCausalLM.from_pretrained(result.checkpoint)
    assert set(result.eval_after) == {"greedy", "sampled"}


def test_a_wrong_model_path_is_told_before_anything_starts(tasks: Path) -> None:
    with pytest.raises(ModelError, match="no/such/model"):
        train(flows.scored, tasks, "model.model_path=/no/such/model")


def test_a_ray_that_is_not_there(tasks: Path) -> None:
    with pytest.raises(ConfigError, match="ray start --head"):
        train(flows.scored, tasks, "trinity.ray_address=127.0.0.1:6390")


def test_a_ray_that_runs_already_is_joined_and_left_running(tasks: Path) -> None:
    # `ray start` asks for a token by default, and who joins has to be told so; a process decides that once.
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "TINKER_API_KEY": "tml-a-key-of-this-test"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)

    def join(key: str) -> subprocess.CompletedProcess[str]:
        code = f"""
from pathlib import Path
import test_runs
address = "trinity.ray_address=127.0.0.1:6391"
test_runs.train(test_runs.flows.scored, Path({str(tasks)!r}), address, "train_dataset.total_steps=1")
"""
        changed = {**environment, "TINKER_API_KEY": key}
        return subprocess.run([sys.executable, "-c", code], env=changed, capture_output=True, text=True)

    command = str(Path(sys.executable).with_name("ray"))
    start = [command, "start", "--head", "--port=6391", "--include-dashboard=false"]
    subprocess.run(start, check=True, env=environment)
    try:
        first = join(environment["TINKER_API_KEY"])
        assert first.returncode == 0, first.stderr
        assert steps_written(tasks.parent / "run") == [1]
        second = join("tml-another-key")
        assert "does not have this TINKER_API_KEY" in second.stderr
    finally:
        subprocess.run([command, "stop", "--force"], check=True)
