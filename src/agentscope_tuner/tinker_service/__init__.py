"""The embedded engine as a service that speaks the Tinker protocol."""

from agentscope_tuner.tinker_service.server import TinkerServer
from agentscope_tuner.tinker_service.service import Service

__all__ = ["Service", "TinkerServer"]
