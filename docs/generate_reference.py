"""Writes `docs/configuration.md` from the settings' own types: `python docs/generate_reference.py`.

A setting is documented once, beneath its field in `config/schema.py`. A test fails when the page is another one.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import agentscope_tuner
from agentscope_tuner.config import TunerConfig
from agentscope_tuner.reporting.run_folder import FREE_ON_RESUME

PAGE = Path(__file__).parent / "configuration.md"

HEAD = """\
# Configuration

<!-- By docs/generate_reference.py from src/agentscope_tuner/config/schema.py; edit that file, then `make docs`. -->

A run is described by one mapping of settings. They come from a YAML file, from arguments of `tune()`, and from
`key=value` overrides; what comes later wins:

```yaml title="config.yaml"
experiment_name: first-try
model:
  model_path: tiny-agent
  max_tokens: 64
algorithm:
  learning_rate: 5.0e-4
  batch_size: 8
train_dataset:
  path: data/train.jsonl
  total_steps: 20
eval_dataset:
  path: data/test.jsonl
```

```bash
astuner train --workflow examples/math_agent/workflow.py:MathAgent --judge agentscope_tuner:MathJudge \\
    --config config.yaml algorithm.batch_size=16 seed=1
```

```python
from agentscope_tuner import AlgorithmConfig, tune


def train(workflow):
    return tune(
        workflow,
        "config.yaml",
        algorithm=AlgorithmConfig(batch_size=16),  # only the fields that are given here replace the file's
        overrides=["seed=1"],
    )
```

- Files are read by [OmegaConf](https://omegaconf.readthedocs.io): `${seed}` stands for another setting, and
  `${oc.env:HOME}` for an environment variable. `null` is Python's `None`; tables of keys below say `null`, their texts
  None.
- Paths are relative to the working directory. `experiment_name` may be left out of what `tune()` and `astuner train`
  are given: a time stamp takes its place.
- A key that is unknown, has a wrong value, or would have no effect under the other settings is an error, before
  anything is loaded. [Errors](errors.md#settings) shows every message and its remedy.
- Each run stores what it used in `<output_dir>/<experiment_name>/config.yaml`; that file can be given to `--config`.
"""

FOOT = """\
## What may change when a run continues

Running an `experiment_name` again continues that run. Settings that would change what it computes must then be the
same as before. These settings, and whole blocks, may differ:

"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for config, keys in sections(TunerConfig).items():
        parts.append("\n".join(section(config, keys)) + "\n")
    free = ", ".join(f"`{key}`" for key in FREE_ON_RESUME)
    return "\n".join([*parts, FOOT + _wrapped(f"{free}.") + "\n"])


def sections(config: type[BaseModel], prefix: str = "") -> dict[type[BaseModel], list[str]]:
    """Every type of settings, with the dotted keys under which it stands, in the order of the fields."""
    found: dict[type[BaseModel], list[str]] = {config: [prefix]}
    for name, field in config.model_fields.items():
        for block in _blocks(field.annotation):
            key = f"{prefix}.{name}".lstrip(".") + (".<name>" if get_origin(field.annotation) is dict else "")
            # What stands in a block that is known already need not be told again.
            for inner, keys in ({block: [key]} if block in found else sections(block, key)).items():
                found.setdefault(inner, []).extend(keys)
    return found


def section(config: type[BaseModel], keys: list[str]) -> Iterator[str]:
    """A heading, what the block is about, and a table of its settings."""
    shown = [key for key in keys if key]
    yield f"## {', '.join(f'`{key}`' for key in shown) or 'The run'}\n"
    where = f" In Python: `{config.__name__}`." if config.__name__ in agentscope_tuner.__all__ else ""
    yield f"{' '.join((config.__doc__ or '').split())}{where}\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in config.model_fields.items():
        cells = (f"`{name}`", type_of(field), default_of(field), " ".join((field.description or "").split()))
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def type_of(field: FieldInfo) -> str:
    """The type of a setting, and the values that are allowed."""
    return ", ".join([_type(field.annotation), *_constraints(field)])


def default_of(field: FieldInfo) -> str:
    """The default as YAML writes it; of a block, where its defaults are."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return "see there"
    return f"`{json.dumps(default)}`"


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        kinds = [_type(kind) for kind in get_args(annotation) if kind is not types.NoneType]
        return " or ".join([*kinds, "`null`"] if types.NoneType in get_args(annotation) else kinds)
    blocks = list(_blocks(annotation))
    if blocks:
        return f"names, each with a block of `{blocks[0].__name__}`" if origin is dict else "block"
    return f"`{getattr(annotation, '__name__', annotation) if origin is None else annotation}`".replace("typing.", "")


def _constraints(field: FieldInfo) -> Iterator[str]:
    signs = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "not empty", "pattern": "`{}`"}
    for constraint in field.metadata:
        known = [key for key in signs if hasattr(constraint, key)]
        if not known:
            raise NotImplementedError(f"how to show {constraint!r}?")
        yield from (signs[key].format(_plain(getattr(constraint, key))) for key in known)


def _plain(value: Any) -> str:
    """0 rather than 0.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _blocks(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _blocks(part)


def _wrapped(text: str, width: int = 119) -> str:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
