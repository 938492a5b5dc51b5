"""The finished model, from wherever Trinity left it, as a Hugging Face directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx

from agentscope_tuner.config import TunerModelConfig
from agentscope_tuner.engine.reading import model_directory
from agentscope_tuner.errors import TrainingStoppedError

_EXPORT_KEPT_S = 3600
_DOWNLOAD_S = 60.0
"""How long a service may send nothing."""


def copy_model(source: Path, target: Path) -> None:
    """Bring a Hugging Face directory into the run folder; `target` is whole or not there at all.

    Raises:
        TrainingStoppedError: `source` holds no model.
    """
    if not (source / "config.json").is_file():
        raise TrainingStoppedError(f"Trinity left no Hugging Face model in `{source}`")
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def download_model(base_url: str, path: str, model: TunerModelConfig, target: Path) -> None:
    """Fetch a checkpoint of a Tinker service; where it gives an adapter, that is merged into its base model.

    Args:
        base_url: of the service.
        path: of a training checkpoint, as the service names it.
        model: the base model, and how to load it.
        target: the directory to write.

    Raises:
        TrainingStoppedError: the service does not give the weights away; says where they are.
    """
    import tinker  # imports torch; here, because a run on a service of its own fetches nothing

    fetched = target.with_name(f".{target.name}.fetched")
    shutil.rmtree(fetched, ignore_errors=True)
    try:
        _fetch(base_url, path, fetched)
    except (tinker.TinkerError, httpx.HTTPError) as exc:
        raise TrainingStoppedError(
            f"training is done, but the Tinker service at {base_url} did not export `{path}`: {exc}; fetch it with "
            f"`tinker checkpoint download {path}`"
        ) from exc
    if (fetched / "adapter_config.json").is_file():
        merge_adapter(fetched, model, fetched / "merged")
        copy_model(fetched / "merged", target)
    else:
        copy_model(fetched, target)
    shutil.rmtree(fetched)


def _fetch(base_url: str, path: str, folder: Path) -> None:
    import tinker

    client = tinker.ServiceClient(base_url=base_url)
    try:
        training = client.create_training_client_from_state(path).result()
        exported = training.save_weights_external("export", ttl_seconds=_EXPORT_KEPT_S).result().path
        rest = tinker.RestClient(base_url=base_url)
        for name, url in rest.get_external_weights_urls(exported).result().urls.items():
            file = (folder / name).resolve()
            if not file.is_relative_to(folder.resolve()):
                raise TrainingStoppedError(f"the Tinker service names a file outside of the checkpoint: `{name}`")
            file.parent.mkdir(parents=True, exist_ok=True)
            with httpx.stream("GET", url, timeout=_DOWNLOAD_S) as answer, file.open("wb") as out:
                answer.raise_for_status()
                for chunk in answer.iter_bytes():
                    out.write(chunk)
        rest.delete_checkpoint_from_tinker_path(exported).result()
    finally:
        client.close("success").result()


def merge_adapter(adapter: Path, model: TunerModelConfig, target: Path) -> None:
    """Write the base model with a LoRA adapter merged in, and its tokenizer."""
    # The only place where a run's own process loads weights; all of this takes seconds.
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentscope_tuner.engine.models import quiet_transformers

    source, code = model_directory(model.model_path), model.trust_remote_code
    with quiet_transformers():
        base = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True, trust_remote_code=code)
        adapted: Any = PeftModel.from_pretrained(base, str(adapter), use_safetensors=True)
        adapted.merge_and_unload().save_pretrained(target)
        AutoTokenizer.from_pretrained(source, trust_remote_code=code).save_pretrained(target)
