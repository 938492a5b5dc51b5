"""Loading a model and its tokenizer, and checking that this engine can run them exactly."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from agentscope_tuner.config import EngineConfig, LoraConfig, TunerModelConfig
from agentscope_tuner.engine.attention import ATTENTION_NAME, CausalLayout, attention
from agentscope_tuner.engine.reading import CONTEXT, TINY_AGENT, end_of_turn_ids, model_directory
from agentscope_tuner.errors import ConfigError, ModelError

SHARED_ADAPTER = "default"
"""The adapter of all roles, where they share one."""
ADAPTERS = "adapters"
"""Where a model's directory holds adapters, one folder each."""

AttentionInterface.register(ATTENTION_NAME, attention)


@dataclass(slots=True)
class LoadedModel:
    """A causal language model that this engine has taken charge of."""

    model: PreTrainedModel
    """With LoRA, its linear layers are peft's, in place."""
    tokenizer: PreTrainedTokenizerBase
    name: str
    """What the user asked for."""
    max_model_len: int
    end_of_turn_ids: frozenset[int]
    """Sampling one of these ends a completion."""
    lora: LoraConfig | None = None
    adapters: tuple[str, ...] = ()
    """Adapters over shared weights, one per role. Empty: all roles speak with the same weights."""
    versions: tuple[str, ...] = ()
    """Frozen copies of adapters."""
    was_adapted: bool = False
    """Whether adapters were read, so that before training the model is not what it is without them."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def unmerged(self) -> tuple[str, ...]:
        """Adapters whose updates are computed beside the weights, as the learner does.

        A shared one is merged into the weights that sample, but not in bfloat16, which would round most of a small
        update away.
        """
        if self.lora is None or self.adapters:
            return (*self.adapters, *self.versions)
        return () if self.model.dtype == torch.float32 else (SHARED_ADAPTER,)

    @property
    def voices(self) -> dict[str, int]:
        """Numbers of what it is sampled with: the weights that all share, and those of each adapter and version."""
        return {adapter: number for number, adapter in enumerate(("", *self.adapters, *self.versions))}

    @property
    def head(self) -> nn.Module:
        """Maps hidden states to logits."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    def hidden_states(self, ids: Tensor, position_ids: Tensor, layout: Any, rows: Tensor | None = None) -> Tensor:
        """Final hidden states (B, N, D) of `ids` (B, N), attending as `layout` says; or of some places, `rows` (n,)."""
        decoder = self.model.get_decoder()
        output = decoder(input_ids=ids, position_ids=position_ids, use_cache=False, layout=layout)
        hidden: Tensor = output.last_hidden_state
        return hidden if rows is None else hidden.index_select(1, rows)

    @contextmanager
    def speaking_as(self, adapter: str) -> Iterator[None]:
        """Inside, the modules compute with one adapter or version; with the bare weights if the name is empty."""
        layers = _lora_layers(self.model) if self.adapters else []
        # peft takes milliseconds to exchange them, and trees, which come by their adapters, are many.
        if not all(_speaks_as(layer, adapter) for layer in layers):
            with self.learning_kept():
                for layer in layers:
                    if adapter:
                        layer.set_adapter(adapter)
                    layer.enable_adapters(bool(adapter))
        yield

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the modules compute with the bare weights."""
        layers = _lora_layers(self.model)
        with self.learning_kept():
            for layer in layers:
                layer.enable_adapters(False)
            try:
                yield
            finally:
                for layer in layers:
                    layer.enable_adapters(True)

    @contextmanager
    def learning_kept(self) -> Iterator[None]:
        """After it, the same parameters learn as before: peft freezes what is not active, and thaws what is."""
        trainable = self.trainable_parameters()
        try:
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name in trainable)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name; tied weights once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def prepare_torch(seed: int, threads: int | None) -> None:
    """Seed PyTorch, which draws the first weights of adapters, and set its CPU threads; None leaves its own choice."""
    torch.manual_seed(seed)
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars for moments of loading and saving."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_model(config: TunerModelConfig, engine: EngineConfig, adapters: Sequence[str] = ()) -> LoadedModel:
    """Load weights (safetensors only) and tokenizer, add LoRA if asked, and check the architecture.

    With names in `adapters` there is one LoRA adapter for each; those that a checkpoint holds are read.

    Raises:
        ModelError: it cannot be loaded, or this engine would not compute what the model computes.
        ConfigError: `max_model_len` exceeds what the model was built for, or the device is not there.
    """
    directory = model_directory(config.model_path)
    device = _device(engine)
    dtype = getattr(torch, engine.dtype)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=config.trust_remote_code)
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, trust_remote_code=config.trust_remote_code, use_safetensors=True
            )
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise ModelError(
            f"model `{config.model_path}` cannot be loaded: {exc}\nGive a directory with safetensors weights and a "
            f"tokenizer, a hub name that is reachable from here, or `{TINY_AGENT}`"
        ) from exc
    # Dropout would make the learner's log-probabilities differ from the sampler's.
    nn.Module.to(model, device).eval()
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"`model.max_model_len` is {config.max_model_len}, but `{config.model_path}` was built for {limit} tokens"
        )
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=config.model_path,
        max_model_len=config.max_model_len or limit,
        end_of_turn_ids=end_of_turn_ids(model.generation_config, tokenizer),
    )
    _check_architecture(loaded)
    kept = Path(directory) / ADAPTERS
    if kept.is_dir() and config.lora is None:
        raise ModelError(
            f"`{config.model_path}` holds adapters of {', '.join(sorted(path.name for path in kept.iterdir()))}, which "
            "would not be used; set `model.lora` and `roles.adapters: per_role`, or give the model they were made for"
        )
    if config.lora is not None:
        add_lora(loaded, config.lora, adapters)
        for adapter in adapters:
            if (kept / adapter).is_dir():
                _load_adapter(loaded, adapter, kept / adapter)
                loaded.was_adapted = True
    return loaded


def add_lora(loaded: LoadedModel, lora: LoraConfig, adapters: Sequence[str] = ()) -> None:
    """Put trainable low-rank adapters into the model's linear layers, in place, and freeze the rest.

    Args:
        loaded: the model.
        lora: form of the adapters.
        adapters: a name for each; without names there is one, which all roles share.

    Raises:
        ConfigError: the form does not fit the model.
    """
    loaded.lora = lora
    for name in adapters or (SHARED_ADAPTER,):
        _inject(loaded, lora, name)
    if any("lora_embedding_" in name for name, _ in loaded.model.named_parameters()):
        raise ConfigError("`model.lora.target_modules` names an embedding; adapters are for linear layers, name these")
    tied = loaded.model.config.get_text_config().tie_word_embeddings
    if hasattr(loaded.head, "lora_A") and (adapters or tied):
        why = "is the embedding as well" if tied else "all roles share (`roles.adapters: per_role`)"
        raise ConfigError(f"`model.lora.target_modules` names the head, which {why}; leave it out")
    for name, parameter in loaded.model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    loaded.adapters = tuple(adapters)
    loaded.model.eval()


def _peft_config(lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float works, and is meant to
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )


def _inject(loaded: LoadedModel, lora: LoraConfig, adapter: str) -> None:
    from peft import inject_adapter_in_model

    try:
        with warnings.catch_warnings():
            # Several adapters in one model are what is wanted.
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            # What is tied is refused.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings")
            inject_adapter_in_model(_peft_config(lora), loaded.model, adapter_name=adapter)
    except (ValueError, KeyError) as exc:  # a name with a dot is no module's
        raise ConfigError(f"`model.lora` does not fit `{loaded.name}`: {exc}") from exc


def adapter_parameters(loaded: LoadedModel, adapter: str) -> dict[str, nn.Parameter]:
    """The low-rank matrices of one adapter, by their names without the adapter's."""
    mark = f".{adapter}.weight"
    return {
        name.removesuffix(mark): parameter
        for name, parameter in loaded.model.named_parameters()
        if "lora_" in name and name.endswith(mark)
    }


@torch.no_grad()
def keep_version(loaded: LoadedModel, adapter: str, version: str) -> None:
    """Add a frozen copy of an adapter under another name."""
    assert loaded.lora is not None
    with loaded.learning_kept():
        _inject(loaded, loaded.lora, version)
    originals = adapter_parameters(loaded, adapter)
    for name, parameter in adapter_parameters(loaded, version).items():
        parameter.copy_(originals[name])
    loaded.versions = (*loaded.versions, version)


def drop_version(loaded: LoadedModel, version: str) -> None:
    """Remove what `keep_version` added."""
    loaded.versions = tuple(name for name in loaded.versions if name != version)
    with loaded.speaking_as(loaded.adapters[0]):
        for layer in _lora_layers(loaded.model):
            layer.delete_adapter(version)


def save_adapter(loaded: LoadedModel, adapter: str, folder: Path) -> None:
    """Write one adapter as `peft.PeftModel.from_pretrained` loads it."""
    assert loaded.lora is not None
    folder.mkdir(parents=True)
    tensors = {
        f"base_model.model.{name}.weight": parameter.detach().cpu().contiguous()
        for name, parameter in adapter_parameters(loaded, adapter).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = _peft_config(loaded.lora)
    config.base_model_name_or_path = loaded.name
    config.inference_mode = True
    config.save_pretrained(str(folder))


@torch.no_grad()
def _load_adapter(loaded: LoadedModel, adapter: str, folder: Path) -> None:
    """Read what `save_adapter` wrote."""
    assert loaded.lora is not None
    try:
        alpha = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"]
        if alpha != loaded.lora.alpha:
            raise ModelError(
                f"adapter `{folder}` has an alpha of {alpha:g}, but `model.lora.alpha` is {loaded.lora.alpha:g}"
            )
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, parameter in adapter_parameters(loaded, adapter).items():
            parameter.copy_(tensors.pop(f"base_model.model.{name}.weight"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as exc:
        raise ModelError(f"adapter `{folder}` does not fit `model.lora`: {exc}") from exc
    if tensors:
        raise ModelError(f"adapter `{folder}` does not fit `model.lora`: it also holds `{next(iter(tensors))}`")


def _lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _speaks_as(layer: Any, adapter: str) -> bool:
    if layer.disable_adapters:
        return not adapter
    return bool(layer.active_adapters == [adapter])


def low_rank_update(linear: Any, adapter: str) -> tuple[Tensor, Tensor] | None:
    """An adapter's matrices for a layer (detached), or None: A (R, in), and B (out, R) times its scale."""
    if adapter not in getattr(linear, "lora_A", ()):
        return None
    return linear.lora_A[adapter].weight.detach(), linear.lora_B[adapter].weight.detach() * linear.scaling[adapter]


def layer_weight(linear: Any, *, merged: bool) -> Tensor:
    """The weight of a linear layer (detached), its active LoRA update merged in or not."""
    if not hasattr(linear, "get_delta_weight"):
        plain: Tensor = linear.weight.detach()
        return plain
    weight: Tensor = linear.get_base_layer().weight.detach()
    for adapter in linear.active_adapters if merged and not linear.disable_adapters else ():
        weight = weight + linear.get_delta_weight(adapter).detach().to(weight.dtype)
    return weight


def merged_state_dict(loaded: LoadedModel) -> dict[str, Tensor]:
    """The model's weights under their original names, a LoRA update that all roles share merged in."""
    if loaded.lora is None:
        return loaded.model.state_dict()
    state: dict[str, Tensor] = {}
    for name, module in loaded.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            state[f"{name}.weight"] = layer_weight(module, merged=not loaded.adapters)
    for name, tensor in loaded.model.state_dict().items():
        if "lora_" not in name:
            state.setdefault(name.replace(".base_layer.", "."), tensor)
    return state


def _device(engine: EngineConfig) -> torch.device:
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("`engine.device` is `cuda`, but PyTorch sees no GPU; use `auto` or `cpu`")
    if engine.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


@torch.no_grad()
def _check_architecture(loaded: LoadedModel) -> None:
    """Run a few tokens through transformers and through our attention; both must say the same."""
    model = loaded.model
    ids = (torch.arange(1, 13, device=model.device) * 7919 % loaded.vocabulary)[None]
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    unsupported = (
        f"architecture `{model.config.model_type}` of `{loaded.name}` is not supported by the embedded engine: "
    )
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(unsupported + "its attention cannot be replaced")
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        hidden = loaded.hidden_states(ids, positions, CausalLayout())
        got = loaded.head(hidden).float()
    except (TypeError, AttributeError, RuntimeError, ModelError) as exc:
        raise ModelError(unsupported + str(exc)) from exc
    if not agree(got, expected, model.dtype, tolerance=1e-3):
        difference = (torch.log_softmax(got, -1) - torch.log_softmax(expected, -1)).abs().max().item()
        raise ModelError(unsupported + f"log-probabilities differ from transformers' by {difference:.2g}")


def agree(got: Tensor, expected: Tensor, dtype: torch.dtype, *, tolerance: float = 1e-4) -> bool:
    """Whether two passes in `dtype` compute the same logits (..., V), but for rounding.

    In float32 no log-probability may differ by more than `tolerance`. In bfloat16 what is unlikely may be far off, so
    the difference that counts is the one expected under the model.
    """
    theirs = torch.log_softmax(expected.float(), -1)
    differences = (torch.log_softmax(got.float(), -1) - theirs).abs()
    if dtype == torch.float32:
        return bool(differences.max() < tolerance)
    return bool((differences * theirs.exp()).sum(-1).mean() < 1e-1)
