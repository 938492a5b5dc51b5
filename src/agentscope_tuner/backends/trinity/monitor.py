"""What Trinity's trainer and explorer log to.

A module of its own: Trinity's, which it imports, takes seconds, and nobody else needs it.
"""

from __future__ import annotations

from typing import Any

import ray
from trinity.common.config import Config
from trinity.utils.monitor import Monitor


class RunMonitor(Monitor):  # type: ignore[misc]  # published without types
    """The trainer's numbers go to the run's recorder."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Config | None = None) -> None:
        assert config is not None
        self._trainer = config.trainer.name
        self.role = role
        self._recorder = config.monitor.monitor_args["recorder"]

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Metrics of a step."""
        if self.role == self._trainer:
            plain = {key: float(value) for key, value in data.items() if isinstance(value, int | float)}
            ray.get(ray.get_actor(self._recorder).trained.remote(step, plain))

    def close(self) -> None:
        """Nothing is open."""
