"""The policy behind OpenAI's chat completions, for agents of every other framework."""

from agentscope_tuner.endpoint.server import Endpoint, EndpointServer

__all__ = ["Endpoint", "EndpointServer"]
