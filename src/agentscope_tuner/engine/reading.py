"""Where a model is, and what reads and writes its text: without what holds weights, which takes seconds to import."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from agentscope_tuner.config import TunerModelConfig
from agentscope_tuner.errors import ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

TINY_AGENT = "tiny-agent"
CONTEXT = 2048
"""Tokens, for models that do not say."""


def model_directory(model_path: str) -> str:
    """What `from_pretrained` should be given for a `model_path`.

    Raises:
        ModelError: a local path that does not exist.
    """
    if model_path == TINY_AGENT:
        return str(files("agentscope_tuner") / "assets" / TINY_AGENT)
    looks_local = model_path.startswith((".", "/", "~")) or model_path.count("/") > 1
    path = Path(model_path).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"`{model_path}` has no config.json; `model_path` must be a directory saved by transformers"
            )
        return str(path)
    if looks_local:
        raise ModelError(
            f"model path `{model_path}` does not exist; give a directory, a hub name, or `{TINY_AGENT}` for the model "
            "that ships with this package"
        )
    return model_path


def load_reader(config: TunerModelConfig) -> tuple[PreTrainedTokenizerBase, frozenset[int], int]:
    """What reads and writes a model's text, where its weights are elsewhere: tokenizer, end of turn, longest context.

    Raises:
        ModelError: it cannot be loaded.
    """
    # Whoever only asks where a model is does not wait for these.
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    directory = model_directory(config.model_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
        form = AutoConfig.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise ModelError(f"tokenizer of `{config.model_path}` cannot be loaded: {exc}") from exc
    try:
        generation = GenerationConfig.from_pretrained(directory)
    except OSError:  # not every model has one
        generation = GenerationConfig.from_model_config(form)
    limit = getattr(form.get_text_config(), "max_position_embeddings", None) or CONTEXT
    return tokenizer, end_of_turn_ids(generation, tokenizer), config.max_model_len or limit


def end_of_turn_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """What ends a completion.

    Raises:
        ModelError: nothing would.
    """
    configured = generation.eos_token_id if generation is not None else None
    ids = set(configured if isinstance(configured, list) else [configured])
    ids.add(tokenizer.eos_token_id)
    ids.discard(None)
    if not ids:
        raise ModelError(
            f"`{tokenizer.name_or_path}` names no end-of-sequence token, so its completions would never end"
        )
    return frozenset(ids)
