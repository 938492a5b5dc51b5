"""What a model call costs besides the model: `python benchmarks/overhead.py [--rounds 5]`.

128 episodes of the math agent at once, tiny-agent in float32. The transformer's forward passes, its head, the drawing
of tokens and copies of keys and values that prompts share are computed by all threads of the processor, while agents
act on one of them. `transformer` is the processor time that they take, shared among the threads: as long as a rollout
would take if there were nothing else. `overhead` is what it takes longer: rendering, tokenizing and parsing, recording,
scheduling, and the agents themselves, as far as they are not done while something else is computed on the other
threads. `apart` is what that would be if they were not done at the same time: the processor time of everything but the
transformer. Where `apart` is missing, agents and transformer took turns when that was measured.

Three ways to write the same agent:

- `model`: plain calls of the model, so this is what we cost;
- `ReActAgent`: AgentScope's agent and toolkit on top;
- `openai`: the official client over HTTP, with its server in the same process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Annotated, Any

import torch
import typer
from common import GROUP, ROOT, TASKS, Stopwatch, write_results

sys.path[:0] = [str(ROOT / "examples" / "math_agent"), str(ROOT / "examples" / "frameworks")]

from math_tools import MAX_CALLS, SYSTEM_PROMPT, TOOLS, final_result, run_tool  # noqa: E402
from openai_agent import OpenAIAgent  # noqa: E402
from workflow import MathAgent  # noqa: E402

from agentscope_tuner import MathJudge, ModelTuner, Workflow, WorkflowOutput, WorkflowTask  # noqa: E402
from agentscope_tuner.backends.local import start_engines  # noqa: E402
from agentscope_tuner.config import load_config  # noqa: E402
from agentscope_tuner.engine.decoder import WholeDecoder  # noqa: E402
from agentscope_tuner.engine.native import Job  # noqa: E402
from agentscope_tuner.event_loop import run_to_end  # noqa: E402
from agentscope_tuner.garbage import rare_collections  # noqa: E402
from agentscope_tuner.readers import load_tasks  # noqa: E402
from agentscope_tuner.rollout import Rollout  # noqa: E402
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner  # noqa: E402


class PlainAgent(Workflow):
    """The math agent on nothing but calls of the model."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Call the model until it delivers a result."""
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.task.main_query},
        ]
        for _ in range(MAX_CALLS):
            response = await model_tuner(messages, tools=TOOLS)
            calls = [
                {"id": block["id"], "name": block["name"], "arguments": json.dumps(block["input"])}
                for block in response.content
                if block["type"] == "tool_use"
            ]
            if not calls:
                break
            asked = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": asked})
            for call in calls:
                answer = run_tool(call["name"], call["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
                if result := final_result(call["name"], call["arguments"]):
                    return WorkflowOutput(metadata={"final_answer": result})
        return WorkflowOutput(metadata={"final_answer": None})


def main(rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5) -> None:
    """Measure, print and keep."""
    os.chdir(ROOT)
    config = load_config("examples/math_agent/config.yaml")
    engine, _ = start_engines(config)
    if not isinstance(engine.sampler._runner.decoder, WholeDecoder):
        raise SystemExit("without a C++ compiler agents and transformer take turns: there is nothing to measure here")
    watch = Stopwatch(time.thread_time)
    watch.time(Job, "finish", "transformer")
    tasks = load_tasks(config.train_dataset)
    judge = JudgeRunner(MathJudge())
    ways = {"model": PlainAgent, "ReActAgent": MathAgent, "openai": OpenAIAgent}
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in ways}

    async def once(way: str, number: int) -> dict[str, float]:
        rollout = Rollout(WorkflowRunner(ways[way]), judge, engine.model, config.workflow, config.seed, {})
        watch.seconds.clear()
        begun, own, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
        batch = tasks[number * TASKS : (number + 1) * TASKS]
        groups = await rollout.run(batch, GROUP, phase=f"round{number}")
        seconds, own, all_threads = (
            clock() - before
            for clock, before in ((time.perf_counter, begun), (time.thread_time, own), (time.process_time, all_threads))
        )
        await rollout.aclose()
        calls = [call for group in groups for episode in group.episodes for call in episode.calls]
        apart = own - watch.seconds["transformer"]
        transformer = (all_threads - apart) / torch.get_num_threads()
        return {
            "calls": len(calls),
            "tokens per call": statistics.mean(len(call.completion_ids) for call in calls),
            "overhead per call, us": (seconds - transformer) / len(calls) * 1e6,
            "apart, us": apart / len(calls) * 1e6,
            "transformer per call, us": transformer / len(calls) * 1e6,
        }

    with rare_collections():  # as while `tune` runs
        for number in range(rounds + 1):
            for way in ways:
                engine.sampler.weights_changed(number)  # an empty cache, as after every update
                found = run_to_end(once(way, number))
                if number > 0:
                    measured[way].append(found)
    rows = [
        {"agent": way, **{key: statistics.median(one[key] for one in found) for key in found[0]}}
        for way, found in measured.items()
    ]
    write_results("overhead", rows)


if __name__ == "__main__":
    typer.run(main)
