"""The embedded engine as a service that speaks the Tinker protocol."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentscope_tuner.tinker_service.server import TinkerServer
    from agentscope_tuner.tinker_service.service import Service
else:

    def __getattr__(name: str) -> object:
        # Imported when they are asked for: a run needs its service's names only, and these need all that computes.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = {"Service": "service", "TinkerServer": "server"}[name]
        return getattr(import_module(f"{__name__}.{home}"), name)


__all__ = ["Service", "TinkerServer"]
