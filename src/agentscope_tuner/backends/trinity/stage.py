"""A process that runs one stage of Trinity: `python -m ...stage` reads its configuration from standard input.

A process of its own, because Trinity may hang or report success on nothing: the run watches it, and can end it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import cloudpickle
from trinity.cli.launcher import run_stage
from trinity.common.config import Config

_FOR_WORKERS = ("PYTHONPATH", "OMP_NUM_THREADS")
_IMPORTED_LATER = ("trinity.explorer.explorer", "trinity.trainer.trainer")
"""By `run_stage`; here it is done by the time there is a configuration."""


class StageConfig(Config):  # type: ignore[misc]  # published without types
    """Trinity's configuration; its workers get this process's environment where Ray was not started with it."""

    def check_and_update(self) -> Config:
        """As Trinity does it; then, a step is cut evenly over the GPUs that train."""
        super().check_and_update()
        trainers = max(1, self.cluster.trainer_gpu_num)
        self.buffer.train_batch_size = math.ceil(self.buffer.train_batch_size / trainers) * trainers
        return self

    def get_envs(self) -> dict[str, str]:
        """What Ray sets in every worker."""
        ours = {name: os.environ[name] for name in _FOR_WORKERS if name in os.environ}
        return {**super().get_envs(), **(ours if "RAY_IS_ELSEWHERE" in os.environ else {})}


def main() -> None:
    """Check the configuration, run the stage, and write what Trinity says about it."""
    for name in _IMPORTED_LATER:
        with suppress(ImportError):  # which is told when Trinity imports it
            import_module(name)
    config, answer = cloudpickle.loads(sys.stdin.buffer.read())
    config.__class__ = StageConfig
    try:
        status = asdict(run_stage(config.check_and_update()))
    except Exception as exc:
        status = {"success": False, "error": {"type_name": type(exc).__name__, "message": str(exc)}}
    Path(answer).write_text(json.dumps(status))


if __name__ == "__main__":
    main()
