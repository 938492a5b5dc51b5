"""Trains the math agent: `python examples/math_agent/main.py [key=value ...]`, from any folder."""

from __future__ import annotations

import sys
from os.path import relpath
from pathlib import Path

from workflow import MathAgent

from agentscope_tuner import DatasetConfig, MathJudge, tune

HERE = Path(__file__).parent


def main() -> None:
    """Train with `config.yaml`; settings from the command line come on top."""
    tune(
        MathAgent,
        HERE / "config.yaml",
        judge_func=MathJudge(),
        # Paths in `config.yaml` start at the repository's root; these are the same files, from wherever this is run.
        train_dataset=DatasetConfig(path=relpath(HERE / "data" / "train.jsonl")),
        eval_dataset=DatasetConfig(path=relpath(HERE / "data" / "test.jsonl")),
        overrides=sys.argv[1:],
    )


if __name__ == "__main__":
    main()
