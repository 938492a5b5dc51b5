"""Small real things for the engine's tests: episodes through the real sampler, and plain reference computations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentscope_tuner.algorithms.distributions import truncate
from agentscope_tuner.config import EngineConfig, LoraConfig, TunerModelConfig
from agentscope_tuner.engine.attention import ATTENTION_NAME
from agentscope_tuner.engine.models import LoadedModel, load_model
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.policy import Sample, SamplingParams
from agentscope_tuner.types import ModelCall


def load(
    directory: Path | str, *, lora: LoraConfig | None = None, max_model_len: int = 512, adapters: Sequence[str] = ()
) -> LoadedModel:
    """A model in float32 on the CPU."""
    config = TunerModelConfig(model_path=str(directory), max_model_len=max_model_len, lora=lora)
    return load_model(config, EngineConfig(device="cpu"), adapters)


def start(loaded: LoadedModel, **engine: object) -> Sampler:
    """A sampler on the CPU."""
    return Sampler(loaded, EngineConfig(device="cpu", **engine))


def greedy(sampler: Sampler, prompts: list[list[int]], tokens: int = 16) -> list[Sample]:
    """What follows prompts, all at once."""

    async def everything() -> list[Sample]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        return await asyncio.gather(
            *(sampler.sample(prompt, params, episode_id=f"e{i}") for i, prompt in enumerate(prompts))
        )

    return asyncio.run(everything())


def play(
    loaded: LoadedModel,
    sampler: Sampler,
    *,
    episodes: int = 24,
    turns: int = 4,
    tokens: int = 12,
    shared: int = 90,
    mixed_params: bool = True,
    adapters: Mapping[str, str] | None = None,
    seed: int = 0,
) -> list[ModelCall]:
    """Multi-turn, multi-role, branching episodes in groups of four that share a prompt, arriving staggered."""
    rng = random.Random(seed)
    vocabulary = loaded.head.weight.shape[0]

    def text(n: int, source: random.Random = rng) -> list[int]:
        return [source.randrange(3, vocabulary) for _ in range(n)]

    systems = {role: text(shared) for role in ("solver", "critic")}
    questions = [text(rng.randrange(5, 30)) for _ in range(episodes // 4 + 1)]

    async def episode(index: int) -> list[ModelCall]:
        own = random.Random(f"{seed}-{index}")
        name = f"episode-{index}"
        calls: list[ModelCall] = []
        histories = {role: systems[role] + questions[index // 4] for role in systems}
        sampler.open_episode(name)
        for turn in range(turns):
            role = "critic" if turn % 3 == 2 else "solver"
            ids = histories[role]
            if turn == 3 and index % 3 == 0:
                ids = ids[:-6] + text(2, own)  # history was rewritten: a branch
            params = SamplingParams(max_tokens=tokens, seed=1000 * index + turn)
            if mixed_params:
                params = SamplingParams(
                    temperature=(1.0, 0.7, 1.3)[index % 3],
                    top_p=0.8 if index % 4 == 1 else 1.0,
                    top_k=7 if index % 5 == 2 else 0,
                    max_tokens=tokens,
                    seed=1000 * index + turn,
                )
            adapter = (adapters or {}).get(role, "")
            sample = await sampler.sample(list(ids), params, episode_id=name, adapter=adapter)
            calls.append(
                ModelCall(
                    role, [], None, list(ids), sample.token_ids, sample.logprobs, params.temperature, params.top_p,
                    params.top_k, sample.finish_reason, "", sample.policy_version, adapter=adapter,
                )
            )  # fmt: skip
            histories[role] = ids + sample.token_ids + text(own.randrange(1, 9), own)
            if own.random() < 0.3:
                await asyncio.sleep(0.001)
        sampler.close_episode(name)
        return calls

    async def everything() -> list[list[ModelCall]]:
        return await asyncio.gather(*(episode(i) for i in range(episodes)))

    return [call for calls in asyncio.run(everything()) for call in calls]


def plain_logprobs(loaded: LoadedModel, call: ModelCall) -> Tensor:
    """Log-probabilities (T,) of a call's tokens by transformers' own forward pass over that one call."""
    loaded.model.set_attn_implementation("sdpa")
    try:
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        logits = loaded.model(ids, use_cache=False).logits[0].float()[len(call.prompt_ids) - 1 : -1]
    finally:
        loaded.model.set_attn_implementation(ATTENTION_NAME)
    tokens = torch.tensor(call.completion_ids)
    n = len(tokens)
    logits = truncate(
        logits / (call.temperature or 1.0), torch.full((n,), call.top_k), torch.full((n,), call.top_p), keep=tokens
    )
    return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]


def gradients(loaded: LoadedModel) -> dict[str, Tensor]:
    """Copies of the gradients, which are then cleared."""
    found = {}
    for name, parameter in loaded.trainable_parameters().items():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    return found


def relative_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of `b`, all tensors together."""
    difference = sum(((a[name] - b[name]).double() ** 2).sum() for name in b)
    return float((difference / sum((b[name].double() ** 2).sum() for name in b)).sqrt())
