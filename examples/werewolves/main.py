"""Trains a side: `python examples/werewolves/main.py [--train werewolf] [key=value ...]`, from any folder.

The other roles are scripted. With `DASHSCOPE_API_KEY` set they are played by models behind that service instead.
"""

from __future__ import annotations

import argparse
import os
from os.path import relpath
from pathlib import Path

from agentscope.model import ChatModelBase, OpenAIChatModel
from game import ROLES, WEREWOLF
from players import scripted_model
from workflow import Werewolves

from agentscope_tuner import DatasetConfig, tune

HERE = Path(__file__).parent
BASE_URL = "https://dashscope.aliyuncs.com/compatible-mode/v1"


def service_model(role: str, seed: int) -> ChatModelBase:
    """The model behind an API that plays an untrained role: a better one for the village."""
    return OpenAIChatModel(
        model_name="qwen-plus" if role == WEREWOLF else "qwen-max",
        api_key=os.environ["DASHSCOPE_API_KEY"],
        stream=False,
        client_kwargs={"base_url": BASE_URL},
    )


def settings_for(train: str) -> list[str]:
    """The settings that train these roles; hostile ones need weights of their own, and past opponents."""
    name = "experiment_name=werewolves-" + train.replace(",", "-")
    if train != "all":
        return [name, f"workflow.trainable_targets=[{train}]"]
    village = ",".join(role for role in dict.fromkeys(ROLES) if role != WEREWOLF)
    return [
        name,
        f"workflow.trainable_targets=[{WEREWOLF},{village}]",
        "roles.adapters=per_role",
        f"roles.opponent_pool.teams=[[{WEREWOLF}],[{village}]]",
        # Most games are against what the other side was at first, or after ten steps.
        "roles.opponent_pool.probability=0.8",
        "roles.opponent_pool.interval_steps=10",
        # Nine players of each game have a context of their own; there is no room for those of more games.
        "workflow.max_concurrency=64",
        "model.lora.rank=16",
        # Adapters start at zero and are few weights, so they take longer steps.
        "algorithm.learning_rate=2e-3",
        "train_dataset.total_steps=20",
    ]


def main() -> None:
    """Train with `config.yaml`; settings from the command line come on top."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", default=WEREWOLF, help="roles, separated by commas; or `all`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings on top of config.yaml")
    given = parser.parse_args()
    tune(
        Werewolves(default_model=service_model if os.environ.get("DASHSCOPE_API_KEY") else scripted_model),
        HERE / "config.yaml",
        # Paths in `config.yaml` start at the repository's root; these are the same files, from wherever this is run.
        train_dataset=DatasetConfig(path=relpath(HERE / "data" / "train.jsonl")),
        eval_dataset=DatasetConfig(path=relpath(HERE / "data" / "test.jsonl")),
        overrides=[*settings_for(given.train), *given.overrides],
    )


if __name__ == "__main__":
    main()
