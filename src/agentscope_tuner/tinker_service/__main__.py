"""The service of a Trinity run: `python -m agentscope_tuner.tinker_service CONFIG FOLDER`, with TINKER_API_KEY set."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from agentscope_tuner.config import load_config
from agentscope_tuner.tinker_service.serve import serve


def main(config_path: str, folder: str) -> None:
    """Serve a run's model on a free port; `FOLDER/address.json` says where."""
    config = load_config(config_path)

    def ready(base_url: str, model: str) -> None:
        draft = Path(folder) / ".address.json"
        draft.write_text(json.dumps({"base_url": base_url, "model": model}))
        draft.rename(draft.with_name("address.json"))

    full_weights = config.model.lora is None
    serve(config, Path(folder), os.environ["TINKER_API_KEY"], full_weights=full_weights, on_ready=ready)


if __name__ == "__main__":
    main(*sys.argv[1:])
