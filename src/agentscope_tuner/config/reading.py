"""Settings from YAML, from code and from the command line, put together; every problem with its key and a remedy."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from agentscope_tuner.config.schema import TunerConfig
from agentscope_tuner.config.trinity_yaml import is_trinity, read_trinity
from agentscope_tuner.errors import ConfigError

_logger = logging.getLogger("agentscope_tuner")


def load_config(
    config_path: str | Path | None = None,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    blocks: Mapping[str, BaseModel | Mapping[str, Any] | str | None] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> TunerConfig:
    """Read a YAML file (OmegaConf: `${...}` interpolates), put `blocks` and then `overrides` on top, and check it all.

    Args:
        config_path: a YAML file of `TunerConfig`'s form; None starts empty.
        overrides: `"algorithm.learning_rate=1e-5"` strings, or a mapping from such dotted keys to values; texts
            and paths among them are read as on the command line.
        blocks: top-level values given in code; of a config object only the fields that were set count.
        defaults: top-level values that apply where nothing else sets them.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, wrong, or without effect.
    """
    merged: Any = OmegaConf.create(dict(defaults or {}))
    try:
        if config_path is not None:
            backend = _asked("backend", blocks or {}, overrides)
            merged = OmegaConf.merge(merged, _read_yaml(Path(config_path), backend))
        for key, value in (blocks or {}).items():
            if value is None:
                continue
            plain = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            if isinstance(value, Mapping):
                plain = {
                    k: v.model_dump(exclude_unset=True) if isinstance(v, BaseModel) else v for k, v in value.items()
                }
            merged = OmegaConf.merge(merged, {key: plain})
        if isinstance(overrides, Mapping):
            texts = {key: value for key, value in overrides.items() if isinstance(value, str | PathLike)}
            for key, value in overrides.items():
                if key not in texts:
                    OmegaConf.update(merged, key, value, force_add=True)
            overrides = [f"{key}={value}" for key, value in texts.items()]
        for item in overrides:
            if not item.partition("=")[0] or "=" not in item:
                raise ConfigError(f"override must have the form `key=value`, got `{item}`")
        merged = OmegaConf.merge(merged, OmegaConf.from_dotlist(list(overrides)))
        content = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError) as exc:
        raise ConfigError(f"configuration cannot be resolved: {exc}") from exc
    return parse_config(content, where=str(config_path) if config_path else "the configuration")


def parse_config(content: Any, *, where: str = "the configuration") -> TunerConfig:
    """Check a plain mapping.

    Raises:
        ConfigError: lists every problem, each with its key, what was got and what is expected.
    """
    try:
        return TunerConfig.model_validate(content)
    except ValidationError as exc:
        problems = "\n".join(f"  - {_explain(error)}" for error in exc.errors())
        raise ConfigError(f"{where} is not valid:\n{problems}") from exc


def _asked(key: str, blocks: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]) -> str | None:
    """What is given for a top-level setting beside the file."""
    dotted = (
        overrides if isinstance(overrides, Mapping) else dict(item.split("=", 1) for item in overrides if "=" in item)
    )
    value = dotted.get(key, blocks.get(key))
    return None if value is None else str(value)


def _read_yaml(path: Path, backend: str | None) -> Any:
    """A file of our form, or of Trinity-RFT's; `backend` is what is asked for beside the file."""
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError as exc:
        raise ConfigError(f"configuration file `{path}` does not exist") from exc
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"configuration file `{path}` cannot be read: {exc}") from exc
    if not OmegaConf.is_dict(loaded):
        raise ConfigError(f"configuration file `{path}` must hold a mapping of settings, got a list")
    keys: Any = loaded
    if not is_trinity(keys):
        return loaded
    content: Any = OmegaConf.to_container(loaded, resolve=True)
    reading = read_trinity(content, backend or "trinity")
    if reading.unused:
        _logger.warning(
            "`%s` is a Trinity-RFT configuration; these settings of it have no effect here: %s",
            path,
            ", ".join(reading.unused),
        )
    return OmegaConf.create(reading.settings)


def _explain(error: Any) -> str:
    """One pydantic error as what, got, remedy."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        known = list(_fields_at(location[:-1]))
        nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = (
            f"did you mean `{'.'.join([*location[:-1], nearest[0]])}`?"
            if nearest
            else f"known here: {', '.join(known)}"
        )
        return f"unknown key `{key}`; {hint}"
    if error["type"] == "missing":
        return f"`{key}` is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{'.'.join(location)}: {message}" if location else message
    return f"`{key}`: {message[0].lower()}{message[1:]}, got {error['input']!r}"


def _fields_at(location: Iterable[str]) -> Iterable[str]:
    """The field names of the config class that sits at a dotted location."""
    model: type[BaseModel] = TunerConfig
    for part in location:
        field = model.model_fields.get(part)
        if field is None:  # a free name, as in `auxiliary_models.<name>`
            continue
        stack = [field.annotation]
        while stack:
            kind = stack.pop()
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
            stack.extend(get_args(kind))
    return model.model_fields
