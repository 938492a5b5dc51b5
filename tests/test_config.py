"""Settings: read, put on top of each other, and refused with what, got and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentscope_tuner import AlgorithmConfig, DatasetConfig, TunerModelConfig
from agentscope_tuner.config import TunerConfig, load_config
from agentscope_tuner.errors import ConfigError

ROOT = Path(__file__).parents[1]
MINIMAL = ("model.model_path=tiny-agent", "experiment_name=x")


def refuse(*overrides: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(overrides=[*MINIMAL, *overrides])


@pytest.mark.parametrize(
    "path", [*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")], ids=lambda path: path.stem
)
def test_shipped_configurations_are_valid_and_say_their_command(path: Path) -> None:
    assert isinstance(load_config(path), TunerConfig)
    header = path.read_text().splitlines()[0]
    assert header.startswith("# ")


def test_the_defaults_of_agentscope_are_kept() -> None:
    config = load_config(overrides=MINIMAL)
    assert (config.algorithm.algorithm_type, config.algorithm.learning_rate) == ("multi_step_grpo", 1e-6)
    assert (config.algorithm.group_size, config.algorithm.batch_size) == (8, 32)
    assert (config.model.temperature, config.model.top_p, config.model.max_tokens) == (1.0, 1.0, 8192)
    assert DatasetConfig(path="x").split == "train"


def test_file_then_code_then_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "experiment_name: from-file\nseed: 3\nmodel: {model_path: a, max_tokens: 10, temperature: 0.5}\n"
        "algorithm:\n  learning_rate: 0.1\n  batch_size: ${seed}\n"
    )
    config = load_config(
        file,
        blocks={"model": TunerModelConfig(model_path="b"), "algorithm": AlgorithmConfig(learning_rate=0.2)},
        overrides={"algorithm.learning_rate": 0.3},
        defaults={"experiment_name": "default", "project_name": "p"},
    )
    assert (config.experiment_name, config.project_name) == ("from-file", "p")
    assert (config.model.model_path, config.model.max_tokens, config.model.temperature) == ("b", 10, 0.5)
    assert (config.algorithm.learning_rate, config.algorithm.batch_size) == (0.3, 3)


@pytest.mark.parametrize("turns", ["[]", "[-1]", "[1,-2]"])
def test_branches_need_turns_that_there_can_be(turns: str) -> None:
    refuse(f"algorithm.branching.turns={turns}", match="algorithm.branching.turns")


def test_values_of_a_mapping_are_taken_as_they_are_and_texts_are_read() -> None:
    values = {
        "model.model_path": "a", "experiment_name": "e", "model.stop": ["\n", "a=b"], "model.lora": None,
        "algorithm.adam_betas": "[0.5, 0.6]",
    }  # fmt: skip
    config = load_config(overrides=values)
    assert (config.model.stop, config.model.lora) == (["\n", "a=b"], None)
    assert config.algorithm.adam_betas == (0.5, 0.6)


def test_unknown_keys_name_the_nearest_known_one() -> None:
    refuse(
        "algorithm.lerning_rate=1", match="unknown key `algorithm.lerning_rate`; did you mean `algorithm.learning_rate`"
    )
    refuse("engin.device=cpu", match="unknown key `engin`; did you mean `engine`")
    refuse("model.lora.rnak=4", match=r"`model\.lora\.rnak`; did you mean `model\.lora\.rank`")
    refuse(
        "auxiliary_models.judge.model_path=a",
        "auxiliary_models.judge.topp=1",
        match="did you mean `auxiliary_models.judge.top_p`",
    )
    refuse("workflow.zzzzzz=1", match="known here: trainable_targets, timeout_s, max_concurrency")


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["model.model_pth=a", "engine.device=tpu", "experiment_name=a/b"])
    message = str(caught.value)
    for part in (
        "`model.model_path` is required",
        "did you mean `model.model_path`",
        "`engine.device`",
        "'tpu'",
        "'a/b'",
    ):
        assert part in message


EVAL = "eval_dataset.path=e.jsonl"
TOO_LONG = ["train_dataset.path=t", "train_dataset.total_steps=5", "train_dataset.total_epochs=2"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.clip_low=0.1"], "`algorithm.clip_low`"),
        (["algorithm.clip_high=0.5"], "`algorithm.clip_high`"),
        (["algorithm.eval_interval_steps=5"], "`algorithm.eval_interval_steps`"),
        ([EVAL, "eval_dataset.total_steps=5"], "`eval_dataset.total_steps`"),
        ([EVAL, "eval_dataset.total_epochs=2"], "`eval_dataset.total_epochs`"),
        ([EVAL, "eval_dataset.shuffle=false"], "`eval_dataset.shuffle`"),
        (TOO_LONG, "`train_dataset.total_epochs`"),
        (["model.tensor_parallel_size=2"], "`model.tensor_parallel_size`"),
        (["model.inference_engine_num=4"], "`model.inference_engine_num`"),
        (["model.tinker_config.rank=8"], "`model.tinker_config`"),
        (["auxiliary_models.j.model_path=a", "auxiliary_models.j.lora.rank=8"], "`auxiliary_models.j.lora`"),
    ],
)  # fmt: skip
def test_keys_without_effect_are_refused(overrides: list[str], key: str) -> None:
    refuse(*overrides, match=rf"{key} has no effect: .*remove it")


def test_the_same_keys_are_fine_where_they_have_an_effect() -> None:
    load_config(overrides=[*MINIMAL, "algorithm.clip_low=0.1", "algorithm.epochs_per_batch=2"])
    load_config(overrides=[*MINIMAL, "algorithm.clip_low=0.1", "algorithm.max_staleness=1"])
    load_config(overrides=[*MINIMAL, EVAL, "algorithm.eval_interval_steps=5"])


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("algorithm.group_size=1", "`group_size` must be at least 2, got 1; GRPO compares"),
        ("algorithm.updates_per_epoch=99", r"`updates_per_epoch` \(99\) must not exceed `batch_size` \(32\)"),
        ("workflow.trainable_targets=[]", "`workflow.trainable_targets` is empty"),
        ("backend=mars", "`backend`: input should be 'local' or 'trinity', got 'mars'"),
        ("algorithm.algorithm_type=ppo", "got 'ppo'"),
        ("monitor_type=wandb", "got 'wandb'"),
        ("model.tool_call_parser=llama", "got 'llama'"),
        ("model.temperature=-1", "greater than or equal to 0, got -1"),
        ("algorithm.learning_rate=fast", "`algorithm.learning_rate`: input should be a valid number"),
        ("algorithm.learning_rate=[", "cannot be resolved"),
        ("learning_rate", "must have the form `key=value`, got `learning_rate`"),
        ("=5", "must have the form `key=value`"),
        ("output_dir=${nowhere}", "cannot be resolved: Interpolation key 'nowhere' not found"),
    ],
)
def test_bad_values(override: str, match: str) -> None:
    refuse(override, match=match)


def test_greedy_training_is_refused() -> None:
    refuse("model.temperature=0", "train_dataset.path=t.jsonl", match="must be above 0 for training")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "no.yaml")
    file = tmp_path / "c.yaml"
    for content, match in {
        "a: [1": "cannot be read",
        "- 1\n- 2": "must hold a mapping of settings, got a list",
    }.items():
        file.write_text(content)
        with pytest.raises(ConfigError, match=match):
            load_config(file)


def test_configs_are_frozen() -> None:
    config = load_config(overrides=MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 5
