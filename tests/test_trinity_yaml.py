"""Configuration files written for Trinity-RFT run here, on either backend."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agentscope_tuner.config import load_config
from agentscope_tuner.errors import ConfigError

REACT = """\
# The settings that AgentScope's ReAct example ships.
project: AgentScope
name: GSM8K-Qwen3-0.6B
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 8
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen3-0.6B}
  max_response_tokens: 16384
  max_model_len: 24576
  temperature: 1.0
cluster:
  node_num: 1
  gpu_per_node: 8
buffer:
  total_epochs: 1
  batch_size: 32
  train_batch_size: 256
  explorer_input:
    taskset:
      name: gsm8k
      path: openai/gsm8k
      subset_name: main
      split: train
explorer:
  runner_per_model: 16
  max_timeout: 600
  rollout_model:
    engine_num: 4
    tensor_parallel_size: 1
    enable_openai_api: true
    enable_history: true
    enable_auto_tool_choice: true
    tool_call_parser: hermes
    reasoning_parser: deepseek_r1
synchronizer:
  sync_style: dynamic_by_explorer
  sync_method: nccl
  sync_interval: 1
  sync_timeout: 1800
trainer:
  save_interval: 100
  use_dynamic_bsz: true
  ulysses_sequence_parallel_size: 1
monitor:
  monitor_type: tensorboard
"""


@pytest.fixture
def react(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(REACT)
    return path


def test_what_both_backends_use(react: Path) -> None:
    for backend in ("trinity", "local"):
        config = load_config(react, blocks={"backend": backend})
        assert config.backend == backend
        assert (config.project_name, config.experiment_name) == ("AgentScope", "GSM8K-Qwen3-0.6B")
        assert (config.algorithm.group_size, config.algorithm.batch_size) == (8, 32)
        assert config.algorithm.save_interval_steps == 100
        assert (config.model.max_tokens, config.model.max_model_len) == (16384, 24576)
        assert config.train_dataset is not None
        assert (config.train_dataset.path, config.train_dataset.name) == ("openai/gsm8k", "main")
        assert config.workflow.timeout_s == 600


def test_a_trinity_file_runs_on_trinity_unless_told_otherwise(react: Path) -> None:
    config = load_config(react)
    assert config.backend == "trinity"
    assert (config.trinity.node_num, config.trinity.gpu_per_node, config.trinity.runners) == (1, 8, 16)
    assert (config.trinity.sync_style, config.trinity.sync_method) == ("dynamic_by_explorer", "nccl")
    assert config.model.inference_engine_num == 4
    assert config.trinity.settings == {
        "trainer.use_dynamic_bsz": True,
        "trainer.ulysses_sequence_parallel_size": 1,
    }


def test_what_has_no_effect_is_listed_once(react: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(react, blocks={"backend": "local"})
    (record,) = caplog.records
    for key in ("cluster.gpu_per_node", "synchronizer.sync_style", "explorer.runner_per_model", "monitor.monitor_type"):
        assert key in record.getMessage()
    assert "enable_history" not in record.getMessage(), "what is the case anyway need not be told"


def test_code_comes_on_top_of_the_file(react: Path) -> None:
    config = load_config(react, overrides=["algorithm.batch_size=3", "model.model_path=other"])
    assert (config.algorithm.batch_size, config.model.model_path) == (3, "other")


def test_evaluation_helpers_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(
        """
name: x
model: {model_path: m}
explorer:
  eval_interval: 7
  auxiliary_models: [{name: judge, model_path: j, engine_num: 2, enable_thinking: false, max_model_len: 512, dtype: x}]
buffer:
  total_steps: 9
  total_epochs: 3
  explorer_input:
    taskset: {path: tasks, format: {prompt_key: query, response_key: truth}}
    eval_tasksets: [{name: held out, path: tests, split: test}]
"""
    )
    config = load_config(path)
    assert config.train_dataset is not None
    assert config.eval_dataset is not None
    assert (config.train_dataset.total_steps, config.train_dataset.query_column) == (9, "query")
    assert config.train_dataset.answer_column == "truth"
    assert (config.eval_dataset.path, config.eval_dataset.split) == ("tests", "test")
    assert config.algorithm.eval_interval_steps == 7
    judge = config.auxiliary_models["judge"]
    assert (judge.model_path, judge.inference_engine_num) == ("j", 2)
    assert (judge.enable_thinking, judge.max_model_len) == (False, 512)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("algorithm: {kl_loss_fn_args: {kl_coef: 0.1}}", "algorithm.kl_coef"),
        ("algorithm: {entropy_loss_fn_args: {entropy_coef: 0.1}}", "algorithm.entropy_coef"),
        ("algorithm: {advantage_fn_args: {step_norm: true}}", "loss_weighting: episode"),
        ("algorithm: {advantage_fn_args: {std_cal_level: batch}}", "std_cal_level"),
        ("mode: bench", "mode"),
        ("stages: [{stage_name: sft}]", "stages"),
        ("model: {model_path: m, lora_configs: [{lora_rank: 4}]}", "model.lora"),
        ("explorer: {runner_per_model: 1}\nbuffer: {explorer_input: {taskset: {workflow_args: {side: a}}}}", "side"),
        ("buffer: {explorer_input: {eval_tasksets: [{path: a}, {path: b}]}}", "keep one"),
        ("algorithm: {algorithm_type: ppo}", "algorithm_type"),
    ],
)
def test_what_would_change_results_is_an_error(tmp_path: Path, more: str, message: str) -> None:
    blocks = {"name": "name: x", "model": "model: {model_path: m}", "buffer": "buffer: {batch_size: 4}"}
    given = {line.split(":")[0] for line in more.splitlines()}
    path = tmp_path / "file.yaml"
    path.write_text("\n".join([*(line for key, line in blocks.items() if key not in given), more]))
    with pytest.raises(ConfigError, match=message):
        load_config(path, overrides=["backend=local"])
