"""Training on episodes of many turns: `python benchmarks/multi_turn.py [--size S --size M] [--tasks 4] [--rounds 5]`.

The work is forward and backward over some tasks of 8 episodes each, of 5, 10 or 20 turns: a prompt of 100 tokens, and
in every turn 48 sampled tokens and 32 of the environment. Either every prompt is all that was said before
(`append-only`), or what an agent thought, 32 of the 48 tokens, is missing from its later prompts (`thinking stripped`).

`per call` has every call as a sequence of its own, `merged` has calls that extend each other in one sequence, and
`tree` is what the learner does: whatever is equal in an episode and its group is run once. All three are the learner; a
first token that differs is what keeps sequences apart. So no side gains by a better implementation. `tokens` is the
ratio of tokens, each counted once however many passes there are. That is more than there is to gain: a token attends to
as many others wherever it is run, and logits, and what follows the last layer's attention, are computed only where
tokens were sampled. `work` is the ratio of multiplications.

Before anything is timed, the gradient of a tree is compared with the sum of those of its calls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, product
from typing import Annotated, Any

import typer
from common import GROUP, compare, half_good, load, make_call, relative_error, tokens_and_work, write_results

from agentscope_tuner.algorithms import Datum
from agentscope_tuner.config import AlgorithmConfig
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.types import ModelCall

TASKS = 4
PROMPT, THOUGHT, ANSWER, OBSERVATION = 100, 32, 16, 32
HISTORIES = ("append-only", "thinking stripped")


def make_calls(tasks: int, turns: int, history: str) -> list[list[ModelCall]]:
    """The calls of each episode, of random tokens."""
    rng = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(300, 1000) for _ in range(n)]

    episodes = []
    for _ in range(tasks):
        start = tokens(PROMPT)
        for _ in range(GROUP):
            prompt, calls = start, []
            for _ in range(turns):
                thought, answer = tokens(THOUGHT), tokens(ANSWER)
                calls.append(make_call(prompt, thought + answer, []))
                kept = thought + answer if history == "append-only" else answer
                prompt = prompt + kept + tokens(OBSERVATION)
            episodes.append(calls)
    return episodes


def keep_apart(groups: Sequence[Sequence[ModelCall]]) -> list[ModelCall]:
    """The same calls, with a first token that differs between groups."""
    return [
        replace(call, prompt_ids=[first, *call.prompt_ids[1:]])
        for first, calls in zip(count(3), groups, strict=False)
        for call in calls
    ]


def to_datums(learner: Learner, calls: list[ModelCall]) -> list[Datum]:
    """With the log-probabilities of the model as it is."""
    known = learner.logprobs([replace(call, logprobs=[0.0] * len(call.completion_ids)) for call in calls])
    return half_good([replace(call, logprobs=one.tolist()) for call, one in zip(calls, known, strict=True)])


def gradient_error(learner: Learner, parameters: dict[str, Any], datums: list[Datum]) -> float:
    """Of all calls together, relative, against one after the other."""
    learner.optimizer.zero_grad()
    learner.accumulate(datums)
    together = {name: p.grad.clone() for name, p in parameters.items()}
    learner.optimizer.zero_grad()
    for datum in datums:
        learner.accumulate([datum])
    return relative_error(together, {name: p.grad for name, p in parameters.items()})


def measure(size: str, dtype: str, tasks: int, turns: int, history: str, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    loaded, settings = load(size, dtype, 4096)
    learner = Learner(loaded, AlgorithmConfig(), settings, THOUGHT + ANSWER)
    episodes = make_calls(tasks, turns, history)
    calls = [call for episode in episodes for call in episode]
    ways = {"tree": calls, "per call": keep_apart([[call] for call in calls])}
    if history == "append-only":
        ways["merged"] = keep_apart(episodes)
    if dtype == "float32":
        error = gradient_error(learner, loaded.trainable_parameters(), to_datums(learner, calls[: 2 * turns]))
        if error > 1e-5:
            raise SystemExit(f"{size} {history}: gradients differ by {error:.2g}")

    def side(datums: list[Datum]) -> Any:
        def run() -> None:
            learner.optimizer.zero_grad()
            learner.accumulate(datums)

        return run

    tokens, work = ({way: tokens_and_work(size, some)[i] for way, some in ways.items()} for i in (0, 1))
    times = compare({way: side(to_datums(learner, some)) for way, some in ways.items()}, rounds)
    row: dict[str, Any] = {"model": size, "dtype": dtype, "history": history, "turns": turns, "tasks": tasks}
    row["tree, s"] = times.seconds("tree")
    for way in ways:
        if way != "tree":
            row[f"{way} / tree, tokens"] = tokens[way] / tokens["tree"]
            row[f"{way} / tree, work"] = work[way] / work["tree"]
            row[f"{way} / tree, time"] = times.ratio(way, "tree")
    return row | times.counts


def main(
    size: Annotated[list[str] | None, typer.Option(help="S, M or L; several may be given.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16.")] = None,
    turns: Annotated[list[int] | None, typer.Option(help="Turns of an episode; several may be given.")] = None,
    tasks: Annotated[int, typer.Option(help="Tasks of 8 episodes.")] = TASKS,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
) -> None:
    """Measure, print and keep."""
    work = product(size or ["S"], dtype or ["float32"], HISTORIES, turns or [5, 10, 20])
    rows = (measure(one, precision, tasks, n, history, rounds) for one, precision, history, n in work)
    write_results("multi_turn", rows, ["model", "dtype", "history", "turns", "tasks"])


if __name__ == "__main__":
    typer.run(main)
