"""Sampling, against transformers' `generate`: `python benchmarks/rollout.py [--size S --size M] [--rounds 5]`.

The work is one training batch: 16 prompts of 64 to 128 tokens, 8 completions of each, 48 new tokens, temperature 1,
with log-probabilities. `ours` is the sampler as a rollout uses it, and `eager` is the same without compiled or packed
parts. `generate` is transformers' method, all rows in one left-padded batch. `staggered` is ours again, for requests
that arrive one after the other and have 8 to 256 new tokens: real continuous batching, to be held against its own
static figure.

Log-probabilities are compared with transformers' before any speed is printed.
"""

from __future__ import annotations

import asyncio
import random
from typing import Annotated, Any

import torch
import typer
from common import (
    GROUP,
    NEW_TOKENS,
    SIZES,
    compare,
    generate,
    load,
    matmul_rate,
    random_model,
    random_prompts,
    write_results,
)
from transformers import AutoModelForCausalLM

from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.policy import Sample, SamplingParams

CONTEXT = 512


async def complete(sampler: Sampler, requests: list[tuple[list[int], int]], *, staggered: bool = False) -> list[Sample]:
    """Completions of prompts, each with so many new tokens."""

    async def one(number: int, ids: list[int], tokens: int) -> Sample:
        name = f"{number}"
        if staggered:  # arrivals are spread over the others' steps
            for _ in range(number):
                await asyncio.sleep(0)
        sampler.open_episode(name)
        try:
            return await sampler.sample(ids, SamplingParams(max_tokens=tokens, seed=number), episode_id=name)
        finally:
            sampler.close_episode(name)

    return list(await asyncio.gather(*[one(i, ids, tokens) for i, (ids, tokens) in enumerate(requests)]))


@torch.inference_mode()
def largest_error(model: Any, prompts: list[list[int]], samples: list[Sample]) -> float:
    """Of our log-probabilities, against transformers' in float32."""
    errors = []
    for ids, sample in list(zip(prompts, samples, strict=True))[::37]:
        logits = model(torch.tensor([ids + sample.token_ids])).logits[0, len(ids) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        errors.append((expected - torch.tensor(sample.logprobs)).abs().max().item())
    return max(errors)


def measure(size: str, dtype: str, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    prompts = [prompt for prompt in random_prompts() for _ in range(GROUP)]
    reference = AutoModelForCausalLM.from_pretrained(random_model(size), dtype=torch.float32).eval()
    samplers = {}
    for name, fast in (("ours", True), ("eager", False)):
        loaded, settings = load(size, dtype, CONTEXT, fast_decoder=fast)
        samplers[name] = Sampler(loaded, settings)
    version = 0

    def rollout(name: str, requests: list[tuple[list[int], int]], *, staggered: bool = False) -> list[Sample]:
        nonlocal version
        version += 1
        samplers[name].weights_changed(version)  # an empty cache, as after every update
        return asyncio.run(complete(samplers[name], requests, staggered=staggered))

    static = [(prompt, NEW_TOKENS) for prompt in prompts]
    rng = random.Random(1)
    varied = [(prompt, rng.randint(8, 256)) for prompt in prompts]
    error = largest_error(reference, prompts, rollout("ours", static))
    if error > (1e-4 if dtype == "float32" else 0.2):
        raise SystemExit(f"{size} {dtype}: log-probabilities differ by {error:.2g}")
    theirs = reference.to(getattr(torch, dtype))
    sides = {
        "ours": lambda: rollout("ours", static),
        "eager": lambda: rollout("eager", static),
        "staggered": lambda: rollout("ours", varied, staggered=True),
        "generate": lambda: generate(theirs, prompts, NEW_TOKENS),
    }
    times = compare(sides, rounds)
    tokens, varied_tokens = len(prompts) * NEW_TOKENS, sum(n for _, n in varied)
    ours, staggered = tokens / times.seconds("ours"), varied_tokens / times.seconds("staggered")
    weights = sum(p.numel() for name, p in reference.named_parameters() if "embed" not in name)
    weights += reference.get_output_embeddings().weight.numel()
    flops = 2 * weights * tokens + 2 * weights * sum(map(len, random_prompts()))
    return {
        "model": size,
        "dtype": dtype,
        "ours, tokens/s": ours,
        "ours / generate": times.ratio("generate", "ours"),
        "eager / generate": times.ratio("generate", "eager"),
        "staggered / static": staggered / ours,
        "share of the matmul rate": flops / times.seconds("ours") / 1e9 / matmul_rate(dtype),
        "largest error": error,
        "rounds": len(times.rounds),
    }


def main(
    size: Annotated[list[str] | None, typer.Option(help="S, M or L; several may be given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
) -> None:
    """Measure, print and keep."""
    rows = []
    for one in size or SIZES:
        for precision in dtype or ["float32", "bfloat16"]:
            rows.append(measure(one, precision, rounds))
            print(rows[-1], flush=True)
    write_results("rollout", rows)


if __name__ == "__main__":
    typer.run(main)
