"""A whole GRPO step, against TRL's: `python benchmarks/grpo_step.py [--size S --size M] [--rounds 5]`.

The work is one step on 16 prompts of 64 to 128 tokens with 8 completions of 48 tokens each: sampling, the gradient of
the whole batch, and AdamW's update. Both sides have the same prompts, token for token, and every completion has its
full length. In bfloat16 ours has its weights in it, with a copy in float32 for the optimizer, and computes products in
float32 where the processor is faster at that; TRL's has float32 weights that are rounded for products (autocast). It
samples by transformers' `generate`. Its passes have 8 completions each, TRL's own default; with `--trl-pass 128` all
are together, which takes it longer and far more memory on a processor. Rewards cost nothing. Each side has a process of
its own, which waits between two steps; its peak memory is given less what it had with the libraries imported and
nothing loaded. On a GPU there are 32 prompts, and memory is the GPU's. Before anything is timed, our gradient is
compared with that of transformers' forward pass over every completion by itself.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Annotated, Any

import torch
import typer
from common import (
    DEVICE,
    GROUP,
    NEW_TOKENS,
    TASKS,
    Beside,
    begin_answering,
    bytes_of_sampling,
    compare,
    copy_rate,
    half_good,
    load,
    make_call,
    matmul_rate,
    peak_memory,
    random_model,
    relative_error,
    text_prompts,
    tokens_and_work,
    wait_for_device,
    write_results,
)
from datasets import Dataset
from rollout import complete
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentscope_tuner.algorithms import Datum
from agentscope_tuner.config import AlgorithmConfig
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.event_loop import run_to_end

CONTEXT = 256
TRL_PASS = 8
"""Completions of a forward and backward pass of TRL's: its own default."""


class Ours:
    """The sampler and the learner of the local backend."""

    def __init__(self, size: str, dtype: str) -> None:
        self.loaded, settings = load(size, dtype, CONTEXT, max_slots=TASKS * GROUP)
        self.sampler = Sampler(self.loaded, settings)
        self.learner = Learner(self.loaded, AlgorithmConfig(learning_rate=1e-6), settings, NEW_TOKENS)
        self.prompts = [ids for ids, _ in text_prompts() for _ in range(GROUP)]
        self.steps = 0

    def __call__(self) -> None:
        """One step."""
        self.learner.train([self.rollout()])
        self.steps += 1
        self.sampler.weights_changed(self.steps)
        wait_for_device()

    def rollout(self) -> list[Datum]:
        """A batch, half of it good."""
        samples = run_to_end(complete(self.sampler, [(ids, NEW_TOKENS) for ids in self.prompts]))
        drawn = zip(self.prompts, samples, strict=True)
        return half_good([make_call(ids, sample.token_ids, sample.logprobs) for ids, sample in drawn])


Answer = Callable[[str], None]


def run_ours(size: str, dtype: str, answer: Answer) -> None:
    """Steps, as long as they are asked for."""
    step = Ours(size, dtype)
    for _ in sys.stdin:
        step()
        answer("done")


def run_trl(size: str, dtype: str, steps: int, together: int, answer: Answer) -> None:
    """The same by TRL, `steps` of them at most, with so many completions together in a pass."""
    directory = str(random_model(size))
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=together, num_generations=GROUP,
        gradient_accumulation_steps=TASKS * GROUP // together, steps_per_generation=TASKS * GROUP // together,
        max_completion_length=NEW_TOKENS, temperature=1.0, max_steps=steps, report_to="none", save_strategy="no",
        use_cpu=DEVICE.type == "cpu", learning_rate=1e-6, bf16=dtype == "bfloat16", gradient_checkpointing=False,
        generation_kwargs={"min_new_tokens": NEW_TOKENS}, disable_tqdm=True, dataloader_pin_memory=False, beta=0.0,
        shuffle_dataset=False, logging_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [text for _, text in text_prompts()] * steps}),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not sys.stdin.readline():
                raise EOFError

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wait_for_device()
            answer("done")

    trainer.add_callback(Turns())
    with suppress(EOFError):
        trainer.train()


def gradient_error(size: str) -> float:
    """Of our gradient in float32, relative, against transformers' over one completion at a time."""
    ours = Ours(size, "float32")
    datums = ours.rollout()[: 2 * GROUP]
    ours.learner.optimizer.zero_grad()
    ours.learner.accumulate(datums)
    reference = AutoModelForCausalLM.from_pretrained(random_model(size), dtype=torch.float32).to(DEVICE)
    for datum in datums:
        call = datum.call
        ids = torch.tensor([call.prompt_ids + call.completion_ids], device=DEVICE)
        logits = reference(ids).logits[0, len(call.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, len(call.prompt_ids) :, None])
        (-(logprobs.sum() * datum.advantage * datum.weight)).backward()
    found = {name: p.grad for name, p in ours.loaded.trainable_parameters().items()}
    return relative_error(found, {name: p.grad for name, p in reference.named_parameters()})


def shares(size: str, dtype: str, seconds: float) -> dict[str, float]:
    """Of the rates at which a GPU multiplies matrices and copies memory, what a step needs at least.

    Everything is run once to sample and three times to learn, a shared beginning once each. Weights and what is
    attended to are read to sample; of every parameter AdamW reads and writes a gradient, two moments and a weight in
    float32, and writes one in bfloat16.
    """
    prompts = [ids for ids, _ in text_prompts() for _ in range(GROUP)]
    calls = [make_call(ids, [i] * NEW_TOKENS, []) for i, ids in enumerate(prompts)]
    flops = 2 * 4 * tokens_and_work(size, calls)[1]
    weights, sampling = bytes_of_sampling(size, dtype, prompts)
    moved = sampling + weights // getattr(torch, dtype).itemsize * (4 * 2 * 4 + 2)
    return {
        "share of the matmul rate": flops / seconds / 1e9 / matmul_rate(dtype),
        "share of the copy rate": moved / seconds / 1e9 / copy_rate(),
    }


def start(side: str, size: str, dtype: str, steps: int, together: int) -> Beside:
    """A process with one side."""
    options = ("--only", side, "--size", size, "--dtype", dtype, "--steps", f"{steps}", "--trl-pass", f"{together}")
    return Beside(sys.executable, __file__, *options)


def measure(size: str, dtype: str, rounds: int, trl_pass: int = TRL_PASS) -> dict[str, Any]:
    """A row of the table. The gradient is compared in float32."""
    error = gradient_error(size)
    if error > 1e-5:
        raise SystemExit(f"{size}: gradients differ by {error:.2g}")
    torch.cuda.empty_cache()  # both sides need the GPU's memory
    # The trainer needs to know how many steps there will be: the warm-up, and at most two in twice the rounds.
    steps = 4 * rounds + 1
    single = "TRL" if dtype == "float32" else "TRL float32"
    kinds = {"ours": ("ours", dtype), "TRL": ("TRL", dtype)}
    if trl_pass == TRL_PASS:  # larger passes leave no memory for two of these
        kinds[single] = ("TRL", "float32")
    sides = {name: start(side, size, precision, steps, trl_pass) for name, (side, precision) in kinds.items()}
    times = compare(sides, rounds)
    memory = {name: float(side.close()) for name, side in sides.items()}
    return {
        "model": size,
        "dtype": dtype,
        "TRL's pass": trl_pass,
        "ours, s": times.seconds("ours"),
        "TRL, s": times.seconds("TRL"),
        "TRL / ours": times.ratio("TRL", "ours"),
        "TRL float32 / ours": times.ratio(single, "ours") if single in kinds else None,
        "ours, GB": memory["ours"],
        "TRL, GB": memory["TRL"],
        "gradient error": error,
        **(shares(size, dtype, times.seconds("ours")) if DEVICE.type == "cuda" else {}),
        **times.counts,
    }


def main(
    size: Annotated[list[str] | None, typer.Option(help="S, M or L; several may be given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
    only: Annotated[
        str | None, typer.Option(help="Be this side: take a step for every line, then tell the memory.")
    ] = None,
    trl_pass: Annotated[int, typer.Option(help="Completions of a pass of TRL's.")] = TRL_PASS,
    steps: Annotated[int, typer.Option(help="With `--only`: how many steps there will be at most.")] = 1,
) -> None:
    """Measure, print and keep."""
    sizes, dtypes = size or ["S", "M"], dtype or ["float32", "bfloat16"]
    if only is None:
        work = product(sizes, dtypes)
        rows = (measure(one, precision, rounds, trl_pass) for one, precision in work)
        write_results("grpo_step", rows, ["model", "dtype", "TRL's pass"])
        return
    answer = begin_answering()
    before = peak_memory()
    if only == "ours":
        run_ours(sizes[0], dtypes[0], answer)
    else:
        run_trl(sizes[0], dtypes[0], steps, trl_pass, answer)
    answer(f"{peak_memory() - before}")


if __name__ == "__main__":
    typer.run(main)
