"""Checkpoints: whole or not there, verified, and a killed run ends where an undisturbed one does."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_tools import load, play, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentscope_tuner import TuneResult, WorkflowOutput, tune
from agentscope_tuner.algorithms import Datum
from agentscope_tuner.config import AlgorithmConfig, EngineConfig, LoraConfig
from agentscope_tuner.engine.checkpoint import (
    TrainerState,
    checkpoints,
    latest_checkpoint,
    restore,
    save_checkpoint,
    verify_checkpoint,
)
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.errors import CheckpointError, ConfigError

STATE = TrainerState(step=3, updates=5, reader_position=17)

SCRIPT = """
import sys
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope_tuner import Workflow, WorkflowOutput, tune


class Vowels(Workflow):
    async def execute(self, task, model_tuner):
        agent = ReActAgent("a", "Say something.", model_tuner, OpenAIChatFormatter(), max_iters=2)
        first = await agent.reply(Msg("user", task.task.main_query, "user"))
        second = await agent.reply(Msg("user", "Again.", "user"))
        text = (first.get_text_content() or "") + (second.get_text_content() or "")
        return WorkflowOutput(reward=sum(map(text.count, "aeiou")) / (len(text) + 1))


if __name__ == "__main__":
    tune(Vowels, overrides=sys.argv[1:])
"""


def arguments(model: Path, tmp_path: Path, name: str, steps: int = 10) -> list[str]:
    data = tmp_path / "tasks.jsonl"
    if not data.exists():
        data.write_text("\n".join(json.dumps({"question": f"Say {i}"}) for i in range(23)))
    return [
        f"model.model_path={model}", "model.max_tokens=10", "model.max_model_len=400", f"experiment_name={name}",
        f"output_dir={tmp_path / 'runs'}", f"train_dataset.path={data}", f"train_dataset.total_steps={steps}",
        "algorithm.batch_size=3", "algorithm.group_size=4", "algorithm.learning_rate=0.001",
        "algorithm.save_interval_steps=2", "engine.threads=1", "seed=11",
    ]  # fmt: skip


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "trainer.safetensors")


def test_killed_three_times_and_resumed_ends_bit_for_bit_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "vowels.py"
    script.write_text(SCRIPT)

    def launch(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), *arguments(tiny_model_dir, tmp_path, name)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    assert launch("undisturbed").wait(300) == 0
    rng = random.Random()
    metrics = tmp_path / "runs" / "killed" / "metrics.jsonl"
    for kill_after in (1, 4, 7):  # steps on record; then a random moment later
        process = launch("killed")
        deadline = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < kill_after:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    assert launch("killed").wait(300) == 0

    ends = [weights_of(tmp_path / "runs" / name / "checkpoints" / "step_10") for name in ("undisturbed", "killed")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    rows = [
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("undisturbed", "killed")
    ]
    assert [row["step"] for row in rows[1]] == list(range(1, 11))
    assert [row["reward_mean"] for row in rows[0]] == [row["reward_mean"] for row in rows[1]]


async def echo(task: dict, model: object) -> float:
    response = await model([{"role": "user", "content": task["question"]}])
    return float(len(str(response.content)) % 3)


def run(model: Path, tmp_path: Path, *more: str, steps: int = 2) -> TuneResult:
    return tune(echo, overrides=[*arguments(model, tmp_path, "run", steps), *more])


def test_the_same_name_again_continues_and_a_finished_run_is_just_reported(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    first = run(tiny_model_dir, tmp_path)
    again = run(tiny_model_dir, tmp_path)
    assert again.checkpoint == first.checkpoint
    assert [m.step for m in again.history] == [1, 2]
    longer = run(tiny_model_dir, tmp_path, steps=4)
    assert [m.step for m in longer.history] == [1, 2, 3, 4]
    assert longer.checkpoint.name == "step_4"
    with pytest.raises(ConfigError, match=r"algorithm\.learning_rate"):
        run(tiny_model_dir, tmp_path, "algorithm.learning_rate=0.5")
    anew = run(tiny_model_dir, tmp_path, "checkpoint.resume=never")
    assert [m.step for m in anew.history] == [1, 2]
    assert (tmp_path / "runs" / "run.1" / "checkpoints" / "step_4").is_dir()


def test_an_evaluation_before_the_checkpoint_leaves_nothing_behind(tiny_model_dir: Path, tmp_path: Path) -> None:
    def run_in(folder: str, steps: int) -> TuneResult:
        (tmp_path / folder).mkdir(exist_ok=True)
        more = (f"eval_dataset.path={tmp_path / folder / 'tasks.jsonl'}", "algorithm.eval_interval_steps=1")
        return run(tiny_model_dir, tmp_path / folder, *more, "engine.fast_decoder=false", steps=steps)

    run_in("stopped", 2)
    ends = [weights_of(run_in(folder, 4).checkpoint) for folder in ("undisturbed", "stopped")]
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_the_checkpoint_loads_in_transformers(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = run(tiny_model_dir, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    assert tokenizer.chat_template
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def a_learner(directory: Path, lora: LoraConfig | None = None):
    loaded = load(directory, lora=lora)
    learner = Learner(loaded, AlgorithmConfig(learning_rate=0.01), EngineConfig(device="cpu"), 12)
    return loaded, learner


def teach(loaded, learner: Learner, seed: int) -> None:
    calls = play(loaded, start(loaded), episodes=4, turns=2, mixed_params=False, seed=seed)
    learner.train([[Datum(call, 1.0 - 2 * (i % 2), 0.0, i) for i, call in enumerate(calls)]])


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_what_is_restored_goes_on_as_if_nothing_had_happened(
    tiny_model_dir: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    torch.manual_seed(0)
    loaded, learner = a_learner(tiny_model_dir, lora)
    teach(loaded, learner, 1)
    path = save_checkpoint(tmp_path, loaded, learner.optimizer, STATE, keep=1)
    learner.optimizer.updates = STATE.updates
    other, other_learner = a_learner(tiny_model_dir, lora)
    assert restore(path, other, other_learner.optimizer) == STATE
    teach(loaded, learner, 2)
    teach(other, other_learner, 2)
    for name, parameter in learner.optimizer.parameters.items():
        assert torch.equal(parameter, other_learner.optimizer.parameters[name]), name
    merged = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(5, 25)[None]
    reloaded, _ = a_learner(tiny_model_dir, lora)
    restore(path, reloaded, a_learner_of(reloaded).optimizer)
    reloaded.model.set_attn_implementation("sdpa")
    assert torch.allclose(merged(ids).logits, reloaded.model(ids).logits, atol=1e-4)


def a_learner_of(loaded) -> Learner:
    return Learner(loaded, AlgorithmConfig(), EngineConfig(device="cpu"), 12)


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.safetensors", "trainer.json"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tiny_model_dir: Path, tmp_path: Path, file: str) -> None:
    loaded, learner = a_learner(tiny_model_dir)
    save_checkpoint(tmp_path, loaded, learner.optimizer, TrainerState(2, 2, 2), keep=2)
    newest = save_checkpoint(tmp_path, loaded, learner.optimizer, STATE, keep=2)
    verify_checkpoint(newest)
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"`{file}` is not what was written.*continue from `step_2`"):
        latest_checkpoint(tmp_path)
    shutil.rmtree(newest)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_2"


def test_a_missing_file_or_manifest_is_noticed(tiny_model_dir: Path, tmp_path: Path) -> None:
    loaded, learner = a_learner(tiny_model_dir)
    path = save_checkpoint(tmp_path, loaded, learner.optimizer, STATE, keep=2)
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*start anew"):
        latest_checkpoint(tmp_path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        latest_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_old_checkpoints_are_removed_after_the_new_one_is_safe(tiny_model_dir: Path, tmp_path: Path) -> None:
    loaded, learner = a_learner(tiny_model_dir)
    for step in (9, 10, 11):
        save_checkpoint(tmp_path, loaded, learner.optimizer, TrainerState(step, 1, 1), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_10", "step_11"]


def test_a_full_disk_loses_nothing_that_was_there(tiny_model_dir: Path, tmp_path: Path) -> None:
    loaded, learner = a_learner(tiny_model_dir)
    save_checkpoint(tmp_path, loaded, learner.optimizer, TrainerState(1, 1, 1), keep=2)
    # The kernel refuses to let any file grow beyond this, as it would on a full disk.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written.*intact \(step_1\); free some space"):
            save_checkpoint(tmp_path, loaded, learner.optimizer, TrainerState(2, 2, 2), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == ["step_1"]
    verify_checkpoint(tmp_path / "step_1")


def test_a_checkpoint_of_another_model_does_not_fit(tiny_model_dir: Path, tmp_path: Path) -> None:
    loaded, learner = a_learner(tiny_model_dir)
    path = save_checkpoint(tmp_path, loaded, learner.optimizer, STATE, keep=1)
    other, other_learner = a_learner(tiny_model_dir, LoraConfig(rank=4))
    with pytest.raises(CheckpointError, match="does not fit model"):
        restore(path, other, other_learner.optimizer)


async def constant(task: dict, model: object) -> WorkflowOutput:
    await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(reward=1.0)


def test_a_batch_without_variance_changes_nothing_and_is_counted(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = [*arguments(tiny_model_dir, tmp_path, "same", 1), "algorithm.max_resampled_groups=2"]
    result = tune(constant, overrides=options)
    (metrics,) = result.history
    assert (metrics.groups, metrics.zero_variance_groups, metrics.resampled_groups) == (5, 5, 2)
    assert metrics.loss is None
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    after = AutoModelForCausalLM.from_pretrained(result.checkpoint).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
