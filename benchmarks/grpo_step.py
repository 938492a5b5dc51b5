"""A whole GRPO step, against TRL's: `python benchmarks/grpo_step.py [--size S --size M] [--rounds 5]`.

The work is one step on 16 prompts of 64 to 128 tokens with 8 completions of 48 tokens each: sampling, the gradient of
the whole batch, and AdamW's update. Both sides have the same prompts, token for token, and every completion has its
full length. In bfloat16 ours has its weights in it, with a copy in float32 for the optimizer, and TRL's has float32
weights that are rounded for products (autocast). Rewards cost nothing. TRL's trainer runs on a thread of its own, and
stops between two steps.

Peak memory is that of a process that does nothing but three steps of one side, less what it had with the libraries
imported and nothing loaded. Before anything is timed, our gradient is compared with that of transformers' forward pass
over every completion by itself.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
from itertools import product
from typing import Annotated, Any

import torch
import typer
from common import (
    GROUP,
    NEW_TOKENS,
    TASKS,
    compare,
    half_good,
    load,
    make_call,
    peak_memory,
    random_model,
    relative_error,
    text_prompts,
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

CONTEXT = 256


class Ours:
    """The sampler and the learner of the local backend."""

    def __init__(self, size: str, dtype: str) -> None:
        self.loaded, settings = load(size, dtype, CONTEXT)
        self.sampler = Sampler(self.loaded, settings)
        self.learner = Learner(self.loaded, AlgorithmConfig(learning_rate=1e-6), settings, NEW_TOKENS)
        self.prompts = [ids for ids, _ in text_prompts() for _ in range(GROUP)]
        self.steps = 0

    def __call__(self) -> None:
        """One step."""
        self.learner.train([self.rollout()])
        self.steps += 1
        self.sampler.weights_changed(self.steps)

    def rollout(self) -> list[Datum]:
        """A batch, half of it good."""
        samples = asyncio.run(complete(self.sampler, [(ids, NEW_TOKENS) for ids in self.prompts]))
        drawn = zip(self.prompts, samples, strict=True)
        return half_good([make_call(ids, sample.token_ids, sample.logprobs) for ids, sample in drawn])


class Theirs:
    """TRL's trainer, step by step."""

    def __init__(self, size: str, dtype: str, steps: int) -> None:
        directory = str(random_model(size))
        settings = GRPOConfig(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=TASKS * GROUP, num_generations=GROUP,
            max_completion_length=NEW_TOKENS, temperature=1.0, max_steps=steps, use_cpu=True, report_to="none",
            save_strategy="no", learning_rate=1e-6, bf16=dtype == "bfloat16", gradient_checkpointing=False, beta=0.0,
            generation_kwargs={"min_new_tokens": NEW_TOKENS}, disable_tqdm=True, dataloader_pin_memory=False,
            shuffle_dataset=False, logging_strategy="no",
        )  # fmt: skip
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [float(len(text) % 7) for text in completions],
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": [text for _, text in text_prompts()] * steps}),
            processing_class=AutoTokenizer.from_pretrained(directory),
        )
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        gate = self

        class Gate(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                gate.go.acquire()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                gate.done.release()

        self.trainer.add_callback(Gate())
        threading.Thread(target=self.trainer.train, daemon=True).start()

    def __call__(self) -> None:
        """One step."""
        self.go.release()
        self.done.acquire()


def gradient_error(size: str) -> float:
    """Of our gradient in float32, relative, against transformers' over one completion at a time."""
    ours = Ours(size, "float32")
    datums = ours.rollout()[: 2 * GROUP]
    ours.learner.optimizer.zero_grad()
    ours.learner.accumulate(datums)
    reference = AutoModelForCausalLM.from_pretrained(random_model(size), dtype=torch.float32)
    for datum in datums:
        call = datum.call
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        logits = reference(ids).logits[0, len(call.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, len(call.prompt_ids) :, None])
        (-(logprobs.sum() * datum.advantage * datum.weight)).backward()
    found = {name: p.grad for name, p in ours.loaded.trainable_parameters().items()}
    return relative_error(found, {name: p.grad for name, p in reference.named_parameters()})


def peak_memory_of(side: str, size: str, dtype: str) -> float:
    """GB that three steps of one side take, in a process of their own."""
    command = [sys.executable, __file__, "--size", size, "--dtype", dtype, "--only", side]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (figure,) = [line for line in done.stdout.splitlines() if line.startswith("peak ")]  # TRL prints, too
    return float(figure.removeprefix("peak "))


def measure(size: str, dtype: str, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    error = gradient_error(size)
    if error > 1e-5:
        raise SystemExit(f"{size}: gradients differ by {error:.2g}")
    # The trainer needs to know how many steps there will be: the warm-up, and at most twice the rounds.
    steps = 2 * rounds + 1
    sides = {"ours": Ours(size, dtype), "TRL": Theirs(size, dtype, steps)}
    single = "TRL" if dtype == "float32" else "TRL float32"
    if single not in sides:
        sides[single] = Theirs(size, "float32", steps)
    times = compare(sides, rounds)
    return {
        "model": size,
        "dtype": dtype,
        "ours, s": times.seconds("ours"),
        "TRL, s": times.seconds("TRL"),
        "TRL / ours": times.ratio("TRL", "ours"),
        "TRL float32 / ours": times.ratio(single, "ours"),
        "ours, GB": peak_memory_of("ours", size, dtype),
        "TRL, GB": peak_memory_of("TRL", size, dtype),
        "gradient error": error,
        "rounds": len(times.rounds),
    }


def main(
    size: Annotated[list[str] | None, typer.Option(help="S, M or L; several may be given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
    only: Annotated[str | None, typer.Option(help="Three steps of this side, and its peak memory in GB.")] = None,
) -> None:
    """Measure, print and keep."""
    sizes, dtypes = size or ["S", "M"], dtype or ["float32", "bfloat16"]
    if only is not None:
        before = peak_memory()
        step = Ours(sizes[0], dtypes[0]) if only == "ours" else Theirs(sizes[0], dtypes[0], 3)
        for _ in range(3):
            step()
        print(f"\npeak {peak_memory() - before}", flush=True)
        return
    write_results("grpo_step", (measure(one, precision, rounds) for one, precision in product(sizes, dtypes)))


if __name__ == "__main__":
    typer.run(main)
