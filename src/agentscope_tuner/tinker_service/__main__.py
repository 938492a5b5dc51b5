"""The service of a Trinity run: `python -m agentscope_tuner.tinker_service CONFIG FOLDER`, with TINKER_API_KEY set."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

from agentscope_tuner.config import load_config
from agentscope_tuner.engine.models import prepare_torch
from agentscope_tuner.tinker_service.server import TinkerServer
from agentscope_tuner.tinker_service.service import Service


def main(config_path: str, folder: str) -> None:
    """Serve a run's model on a free port, which is written to `FOLDER/address.json`."""
    config = load_config(config_path)
    prepare_torch(config.seed, config.engine.threads)
    # Copies are sampled and trained at the same time; adapters come with the requests.
    service = Service(config.model, config.engine, Path(folder), full_weights=config.model.lora is None)
    listener = socket.create_server(("127.0.0.1", 0))
    address = {"base_url": f"http://127.0.0.1:{listener.getsockname()[1]}", "model": service.directory}
    draft = Path(folder) / ".address.json"
    draft.write_text(json.dumps(address))
    draft.rename(draft.with_name("address.json"))
    asyncio.run(TinkerServer(service, os.environ["TINKER_API_KEY"]).serve(listener))


if __name__ == "__main__":
    main(*sys.argv[1:])
