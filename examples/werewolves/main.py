"""Trains the werewolves: `python examples/werewolves/main.py [key=value ...]`, from any folder.

The other roles are scripted. With `DASHSCOPE_API_KEY` set they are played by models behind that service instead.
"""

from __future__ import annotations

import os
import sys
from os.path import relpath
from pathlib import Path

from agentscope.model import ChatModelBase, OpenAIChatModel
from game import WEREWOLF
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


def main() -> None:
    """Train with `config.yaml`; settings from the command line come on top."""
    tune(
        Werewolves(default_model=service_model if os.environ.get("DASHSCOPE_API_KEY") else scripted_model),
        HERE / "config.yaml",
        # Paths in `config.yaml` start at the repository's root; these are the same files, from wherever this is run.
        train_dataset=DatasetConfig(path=relpath(HERE / "data" / "train.jsonl")),
        eval_dataset=DatasetConfig(path=relpath(HERE / "data" / "test.jsonl")),
        overrides=sys.argv[1:],
    )


if __name__ == "__main__":
    main()
