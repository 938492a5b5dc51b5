"""Starting the service."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from agentscope_tuner.config import TunerConfig
from agentscope_tuner.engine.models import prepare_torch
from agentscope_tuner.errors import ConfigError
from agentscope_tuner.event_loop import run_to_end
from agentscope_tuner.tinker_service.server import TinkerServer
from agentscope_tuner.tinker_service.service import Service


def serve(
    config: TunerConfig,
    folder: Path,
    key: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    full_weights: bool,
    on_ready: Callable[[str, str], None],
) -> None:
    """Serve a model until interrupted.

    Args:
        config: its `model` and `engine` are used.
        folder: where checkpoints go.
        key: what clients have to send.
        host: the interface to listen on.
        port: 0 takes a free one.
        full_weights: train all weights, whatever adapter a client asks for.
        on_ready: told the base URL and what the model is called, once connections are taken.

    Raises:
        ModelError: there is no such model.
        ConfigError: nothing can listen there.
    """
    prepare_torch(config.seed, config.engine.threads)
    service = Service(config.model, config.engine, folder, full_weights=full_weights)
    try:
        listener = socket.create_server((host, port))
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc}; choose another `--port`") from exc
    on_ready(f"http://{host}:{listener.getsockname()[1]}", service.directory)
    run_to_end(TinkerServer(service, key).serve(listener))
