"""Every setting reaches Trinity's configuration, and Trinity's own checker accepts what comes out."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from trinity.common.constants import SyncMethod, SyncStyle
from trinity_workflows import scored

from agentscope_tuner import doctor, tune
from agentscope_tuner.backends.trinity.cluster import with_route
from agentscope_tuner.backends.trinity.translate import check_settings, translate
from agentscope_tuner.config import TunerConfig, load_config
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.errors import ConfigError

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "math_agent" / "data" / "test.jsonl"
BASE = [
    "backend=trinity",
    "experiment_name=x",
    "model.model_path=tiny-agent",
    "model.max_model_len=512",
    "model.max_tokens=64",
    f"train_dataset.path={TASKS}",
]
ONE_NODE = [*BASE, "trinity.node_num=1", "trinity.gpu_per_node=8", "model.inference_engine_num=4"]


def configured(*settings: str, gpus: int = 8) -> TunerConfig:
    config = with_route(load_config(overrides=settings), gpus=gpus, vllm=True)
    check_settings(config)
    return config


def translated(config: TunerConfig, tmp_path: Path, base_url: str | None = None) -> Any:
    for name in ("train", "eval"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "train.jsonl").write_text('{"task": "{}"}\n')
    return translate(
        config,
        model_path=model_directory(config.model.model_path),
        context=config.model.max_model_len or 1024,
        tasks=tmp_path,
        steps=7,
        eval_tasks=3,
        checkpoints=tmp_path / "checkpoints",
        recorder="recorder",
        base_url=base_url,
    )


def test_each_setting_has_its_place(tmp_path: Path) -> None:
    config = configured(
        *ONE_NODE,
        "seed=3",
        "project_name=p",
        "algorithm.learning_rate=3e-5",
        "algorithm.group_size=5",
        "algorithm.batch_size=6",
        "algorithm.warmup_steps=2",
        "algorithm.lr_scheduler_type=cosine",
        "algorithm.weight_decay=0.1",
        "algorithm.adam_betas=[0.8,0.9]",
        "algorithm.max_grad_norm=0.5",
        "algorithm.save_interval_steps=4",
        "algorithm.loss_weighting=episode",
        "model.temperature=0.8",
        "model.tensor_parallel_size=2",
        "checkpoint.keep=3",
        "trinity.sync_style=dynamic_by_explorer",
        "trinity.sync_method=memory",
        "trinity.sync_interval=2",
        "trinity.sync_timeout_s=99",
        "trinity.runners=5",
    )
    got = translated(config, tmp_path)
    optimizer, algorithm = got.algorithm.optimizer, got.algorithm
    assert (optimizer.lr, optimizer.lr_warmup_steps, optimizer.lr_scheduler_type) == (3e-5, 2, "cosine")
    assert (optimizer.weight_decay, optimizer.betas, optimizer.min_lr_ratio) == (0.1, [0.8, 0.9], 0.0)
    assert (algorithm.repeat_times, got.buffer.batch_size, got.buffer.total_steps) == (5, 6, 7)
    assert algorithm.advantage_fn_args["loss_weighting"] == "episode"
    assert (got.trainer.grad_clip, got.trainer.save_interval, got.trainer.max_checkpoints_to_keep) == (0.5, 4, 3)
    assert (got.model.temperature, got.model.max_model_len, got.model.max_response_tokens) == (0.8, 512, 64)
    rollout = got.explorer.rollout_model
    assert (rollout.engine_num, rollout.tensor_parallel_size, rollout.seed) == (4, 2, 3)
    assert (got.synchronizer.sync_style, got.synchronizer.sync_method) == (
        SyncStyle.EXPLORER_DRIVEN,
        SyncMethod.MEMORY,
    )
    assert (got.synchronizer.sync_interval, got.synchronizer.sync_timeout, got.explorer.runner_per_model) == (2, 99, 5)
    assert (got.project, got.name, got.trainer.trainer_type) == ("p", "x", "verl")


@pytest.mark.parametrize(
    "settings",
    [
        ONE_NODE,
        [*ONE_NODE, "model.tensor_parallel_size=2", "model.inference_engine_num=2"],
        [*BASE, "trinity.node_num=4", "trinity.gpu_per_node=8", "model.inference_engine_num=16"],
        [*ONE_NODE, "trinity.sync_style=dynamic_by_explorer", "trinity.sync_method=memory"],
        [*ONE_NODE, "trinity.sync_method=checkpoint"],
    ],
)
def test_trinitys_checker_accepts_it(settings: list[str], tmp_path: Path) -> None:
    got = translated(configured(*settings), tmp_path)
    got.check_and_update()
    assert got.algorithm.policy_loss_fn.endswith("SummedLoss")


DOCUMENTED = re.findall(r"```yaml title=.*?\n(.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("text", DOCUMENTED)
def test_trinitys_checker_accepts_what_the_guide_shows(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = with_route(load_config(path), gpus=8, vllm=True)
    # No hub is reachable here; lengths beyond what the small model was built for are Trinity's to refuse.
    small = config.model.model_copy(update={"model_path": "tiny-agent", "max_model_len": 1024, "max_tokens": 128})
    config = config.model_copy(update={"model": small})
    check_settings(config)
    translated(config, tmp_path).check_and_update()


def test_the_guide_shows_configurations() -> None:
    assert len(DOCUMENTED) == 3


def test_further_settings_of_trinitys(tmp_path: Path) -> None:
    config = configured(*ONE_NODE)
    settings = {"trainer.param_offload": "true", "explorer.rollout_model.gpu_memory_utilization": 0.5}
    trinity = config.trinity.model_copy(update={"settings": settings})
    got = translated(config.model_copy(update={"trinity": trinity}), tmp_path)
    assert got.trainer.param_offload is True
    assert got.explorer.rollout_model.gpu_memory_utilization == 0.5
    trinity = config.trinity.model_copy(update={"settings": {"trainer.parm_offload": True}})
    with pytest.raises(ConfigError, match="parm_offload"):
        translated(config.model_copy(update={"trinity": trinity}), tmp_path)


@pytest.mark.parametrize(
    ("setting", "message", "gpus"),
    [
        ("algorithm.kl_coef=0.1", "`algorithm.kl_coef`", 8),
        ("algorithm.max_staleness=1", "`algorithm.max_staleness`: its schedule is `trinity.sync_style`", 8),
        ("algorithm.entropy_coef=0.1", "`algorithm.entropy_coef`", 8),
        ("algorithm.epochs_per_batch=2", "`algorithm.epochs_per_batch`", 8),
        ("algorithm.updates_per_epoch=2", "`algorithm.updates_per_epoch`", 8),
        ("algorithm.max_resampled_groups=2", "`algorithm.max_resampled_groups`", 8),
        ("algorithm.lr_scheduler_type=linear", "`algorithm.lr_scheduler_type`", 8),
        ("model.top_p=0.9", "`model.top_p`", 8),
        ("model.top_k=9", "`model.top_k`", 8),
        ("engine.dtype=bfloat16", "`engine.dtype`", 8),
        ("model.lora.rank=16", "not trained on GPUs", 8),
        ("model.tinker_config.rank=16", "model.tinker_config.rank", 8),
        ("model.tinker_config.api_key=secret", "unknown key `model.tinker_config.api_key`", 8),
        ("trinity.settings={synchronizer.sync_offset: 1}", "sets or relies on", 8),
        ("trinity.settings={trainer.param_offload: maybe}", "trainer.param_offload", 8),
        ("model.temperature=0.7", "temperature", 0),
        ("model.lora.alpha=16", "takes the rank of adapters only", 0),
        ("auxiliary_models.judge.model_path=tiny-agent", "auxiliary_models", 0),
        ("trinity.route=verl", "no GPU", 0),
    ],
)
def test_what_trinity_would_not_do_is_refused(setting: str, message: str, gpus: int) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*(ONE_NODE if gpus else BASE), setting, gpus=gpus)


def test_a_models_own_code_is_not_run_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_directory("tiny-agent"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="comes with Python code"):
        configured(*ONE_NODE, f"model.model_path={folder}")
    configured(*ONE_NODE, f"model.model_path={folder}", "model.trust_remote_code=true")


def test_a_configuration_for_gpus_can_be_tried_where_there_are_none(tmp_path: Path) -> None:
    settings = [*ONE_NODE, "model.tensor_parallel_size=2", "trinity.sync_method=nccl"]
    got = translated(configured(*settings, gpus=0), tmp_path, base_url="http://127.0.0.1:1")
    assert (got.cluster.node_num, got.cluster.gpu_per_node, got.synchronizer.sync_method) == (0, 0, SyncMethod.MEMORY)
    rollout = got.explorer.rollout_model
    assert (rollout.engine_num, rollout.tensor_parallel_size, got.trainer.trainer_type) == (1, 1, "tinker")


@pytest.mark.parametrize(
    ("route", "setting", "key"),
    [
        ("tinker", "model.tensor_parallel_size=2", "model.tensor_parallel_size"),
        ("tinker", "trinity.gpu_per_node=8", "trinity.gpu_per_node"),
        ("tinker", "trinity.sync_method=nccl", "trinity.sync_method: nccl"),
        ("verl", "model.tinker_config.base_url=http://127.0.0.1:1", "model.tinker_config"),
    ],
)
def test_what_a_route_has_no_use_for_is_refused(route: str, setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"`{re.escape(key)}` has no effect"):
        load_config(overrides=[*BASE, f"trinity.route={route}", setting])


def test_what_the_route_depends_on() -> None:
    config = load_config(overrides=BASE)
    for gpus, vllm, route in ((8, True, "verl"), (8, False, "tinker"), (0, True, "tinker")):
        assert with_route(config, gpus=gpus, vllm=vllm).trinity.route == route
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        with_route(load_config(overrides=[*BASE, "trinity.route=verl"]), gpus=8, vllm=False)


def shown_errors() -> list[tuple[str, ...]]:
    """The rows of the table in the page about errors, each with the settings that provoke it."""
    page = (
        (ROOT / "docs" / "errors.md").read_text().partition("\n## Settings for Trinity-RFT\n")[2].partition("\n## ")[0]
    )
    messages = [line.strip("| ").split(" | ")[0] for line in page.splitlines() if line.startswith("| ")][1:]
    provoking = ["algorithm.kl_coef=0.1", "trinity.route=verl", "trinity.ray_address=127.0.0.1:6390"]
    provoking.append("trinity.settings={trainer.nothing: 1}")
    return list(zip(messages, provoking, strict=True))


@pytest.mark.parametrize(("message", "setting"), shown_errors())
def test_errors_that_are_shown_are_the_real_ones(message: str, setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=".*".join(map(re.escape, message.split("...")))):
        tune(scored, overrides=[*BASE, f"output_dir={tmp_path}", setting])


def test_the_doctor_sees_what_the_backend_needs() -> None:
    checks = {check.name: check for check in doctor._check_trinity(quick=False)}
    assert all(check.status == "ok" for check in checks.values()), checks
    assert set(checks) == {"trinity-rft", "ray", "tinker", "pyarrow", "vllm", "GPUs for trinity"}
