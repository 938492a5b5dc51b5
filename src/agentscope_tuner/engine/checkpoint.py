"""Checkpoints: a Hugging Face directory with the trainer's state beside it, whole or not there at all.

`step_N/` holds the model (LoRA merged in) and tokenizer as transformers loads them, in `adapters/` those of the roles
that have one as peft loads them, `trainer.safetensors` (optimizer
moments, master weights, adapters, random state), `trainer.json` (plain values) and `manifest.json` (size and SHA-256 of
every other file). It is written under another name, flushed, and renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentscope_tuner.engine.models import (
    ADAPTERS,
    LoadedModel,
    adapter_parameters,
    keep_version,
    merged_state_dict,
    quiet_transformers,
    save_adapter,
)
from agentscope_tuner.engine.optimizer import Optimizer
from agentscope_tuner.errors import CheckpointError
from agentscope_tuner.types import version_of

_NAME = re.compile(r"step_(\d+)")
_TENSORS, _VALUES, _MANIFEST = "trainer.safetensors", "trainer.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The plain values of a checkpoint."""

    step: int
    """Training steps done."""
    updates: int
    """Optimizer steps done."""
    reader_position: int
    """Tasks taken from the training dataset."""
    versions: tuple[int, ...] = ()
    """Steps whose versions of the adapters are kept."""
    lora: dict[str, Any] | None = None
    """The form of the adapters, where nothing but the checkpoint knows it."""


def save_checkpoint(folder: Path, loaded: LoadedModel, optimizer: Optimizer, state: TrainerState, *, keep: int) -> Path:
    """Write `folder/step_N` and then remove all but the newest `keep`.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    target = folder / f"step_{state.step}"
    try:
        write_checkpoint(target, loaded, optimizer, state)
    except CheckpointError as exc:
        kept = ", ".join(path.name for path in checkpoints(folder)) or "none"
        raise CheckpointError(
            f"{exc}. Earlier checkpoints are intact ({kept}); free some space and run the same experiment again to "
            "continue from there"
        ) from exc.__cause__
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def write_checkpoint(target: Path, loaded: LoadedModel, optimizer: Optimizer | None, state: TrainerState) -> None:
    """Write a folder, which takes the place of what is there; without an optimizer, one to sample from only.

    Raises:
        CheckpointError: it could not be written; what was there is untouched.
    """
    draft = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        with quiet_transformers():
            loaded.model.save_pretrained(draft, state_dict=merged_state_dict(loaded))
            loaded.tokenizer.save_pretrained(draft)
        for adapter in loaded.adapters:
            save_adapter(loaded, adapter, draft / ADAPTERS / adapter)
        if optimizer is not None:
            save_file(_trainer_tensors(loaded, optimizer), draft / _TENSORS)
        (draft / _VALUES).write_text(json.dumps(asdict(state), indent=1))
        files = sorted(path for path in draft.rglob("*") if path.is_file())
        manifest = {path.relative_to(draft).as_posix(): _fingerprint(path) for path in files}
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*draft.rglob("*"), draft]:
            _flush(path)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as exc:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"checkpoint `{target}` could not be written: {exc}") from exc


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def verify_checkpoint(path: Path) -> None:
    """Compare every file with what was written.

    Raises:
        CheckpointError: names the file that is missing or damaged.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        for name, expected in manifest.items():
            if _fingerprint(path / name) != expected:
                raise CheckpointError(f"checkpoint `{path}` is damaged: `{name}` is not what was written")
    except (OSError, ValueError, AttributeError) as exc:
        raise CheckpointError(f"checkpoint `{path}` is damaged: {exc}") from exc


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint, verified; None when there is none.

    Raises:
        CheckpointError: the newest is damaged; names what to remove, and where training would go on then.
    """
    found = checkpoints(folder)
    if not found:
        return None
    try:
        verify_checkpoint(found[-1])
    except CheckpointError as exc:
        before = f"continue from `{found[-2].name}`" if len(found) > 1 else "start anew"
        raise CheckpointError(f"{exc}. Remove that folder to {before}") from exc
    return found[-1]


def read_state(path: Path) -> TrainerState:
    """The plain values of a verified checkpoint."""
    values = json.loads((path / _VALUES).read_text())
    return TrainerState(**values | {"versions": tuple(values["versions"])})


@torch.no_grad()
def load_weights(path: Path, loaded: LoadedModel) -> None:
    """Put the weights of a model's directory into a model without adapters, in place.

    Raises:
        CheckpointError: it does not fit this model.
    """
    weights = _model_weights(path)
    parameters = dict(loaded.model.named_parameters())
    missing = sorted(set(parameters) - set(weights))
    try:
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    except (KeyError, RuntimeError) as exc:
        lacking = f"it has no `{missing[0]}`" if missing else str(exc)
        raise CheckpointError(f"checkpoint `{path}` does not fit model `{loaded.name}`: {lacking}") from exc


def restore(path: Path, loaded: LoadedModel, optimizer: Optimizer) -> TrainerState:
    """Bring model, optimizer and random state back to a verified checkpoint.

    Raises:
        CheckpointError: it does not fit this model.
    """
    state = read_state(path)
    try:
        tensors = load_file(path / _TENSORS)
        for adapter, step in product(loaded.adapters, state.versions):
            version = version_of(adapter, step)
            keep_version(loaded, adapter, version)
            with torch.no_grad():
                for name, parameter in adapter_parameters(loaded, version).items():
                    parameter.copy_(tensors[f"version.{version}.{name}"])
        weights = {} if loaded.lora is not None else _model_weights(path)
        with torch.no_grad():
            for name, parameter in optimizer.parameters.items():
                parameter.copy_(tensors[f"weight.{name}"] if loaded.lora is not None else weights[name])
            for name, master in optimizer.masters.items():
                if master is not optimizer.parameters[name]:
                    master.copy_(tensors[f"master.{name}"])
                optimizer.adamw.state[master] = {
                    # Fused AdamW wants all of its state where the parameter is.
                    "step": tensors[f"step.{name}"].to(master.device),
                    "exp_avg": tensors[f"exp_avg.{name}"].to(master.device),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(master.device),
                }
    except (OSError, KeyError, RuntimeError) as exc:
        raise CheckpointError(f"checkpoint `{path}` does not fit model `{loaded.name}`: {exc}") from exc
    optimizer.updates = state.updates
    torch.set_rng_state(tensors["rng.cpu"])
    return state


def _trainer_tensors(loaded: LoadedModel, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {"rng.cpu": torch.get_rng_state()}
    for name, parameter in optimizer.parameters.items():
        master = optimizer.masters[name]
        if loaded.lora is not None:
            tensors[f"weight.{name}"] = parameter.detach()
        if master is not parameter:
            tensors[f"master.{name}"] = master.detach()
        moments = optimizer.adamw.state.get(master, {})
        # An adapter whose role did not play is not updated, so parameters may have seen fewer steps than the run.
        tensors[f"step.{name}"] = moments.get("step", torch.tensor(0.0))
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{key}.{name}"] = moments.get(key, torch.zeros_like(master))
    for version in loaded.versions:
        for name, parameter in adapter_parameters(loaded, version).items():
            tensors[f"version.{version}.{name}"] = parameter
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _model_weights(path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        weights |= load_file(file)
    return weights


def _fingerprint(path: Path) -> list[int | str]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _flush(path: Path) -> None:
    """Force a file, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
