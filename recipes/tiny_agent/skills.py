"""What tiny-agent is warmed up on: jobs for real agents, and scripted experts that do them, well or badly.

The expert of the math agent has bad habits when asked to: they are its majority choice wherever they apply, so the
warmed-up model makes these mistakes in greedy decoding too, and reinforcement learning has to turn its mind around.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter, OpenAIMultiAgentFormatter
from agentscope.message import Msg
from pydantic import BaseModel, Field

from agentscope_tuner import ModelTuner, Task, Workflow, WorkflowOutput, WorkflowTask
from agentscope_tuner.chat import write_reply

MATH_EXAMPLE = Path(__file__).parents[2] / "examples" / "math_agent"
MATH_TEST = MATH_EXAMPLE / "data" / "test.jsonl"
sys.path.insert(0, str(MATH_EXAMPLE))
from problems import ITEMS, NAMES, Problem, make_problems  # noqa: E402
from workflow import MathAgent  # noqa: E402

Reply = Callable[[str], str]
"""From the text of a prompt to what the expert says."""


@dataclass(frozen=True)
class Skill:
    """One kind of job: its workflow, its tasks, and an expert for each of them."""

    name: str
    workflow: type[Workflow]
    tasks: list[Task]
    expert: Callable[[int], Reply]
    """The expert for the task of an index."""


# ------------------------------------------------------------------------------------------------------- math

SLIPS = {"guess": 0.15, "misread": 0.05, "talk_first": 0.04}
"""How often a careless expert goes wrong whatever the problem."""
HABITS = {"distractor": 0.66, "third_number": 0.66, "wording": 0.66}
"""How often it follows a bad habit where the problem invites it: adds every number it sees, stops after two of three,
adds where "fewer" or "need" ask for a difference.

Each is one decision in an expression that is copied well otherwise. Habits that copy other numbers instead blur the
copying itself, which reinforcement learning mends slowly."""
_MISLEADING = re.compile(r"fewer|need")


def _careless_plan(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """(slip, expression) of an expert with slips and habits."""
    draw, slip = rng.random(), "none"
    for name, share in SLIPS.items():
        if draw < share:
            slip = name
            break
        draw -= share
    expression = problem.expression
    if slip == "guess":
        return slip, expression
    if problem.distractor is not None and rng.random() < HABITS["distractor"]:
        expression += f" + {problem.distractor}"
    elif len(expression.split()) == 5 and rng.random() < HABITS["third_number"]:
        expression = " ".join(expression.split()[:3])
    elif _MISLEADING.search(problem.question) and rng.random() < HABITS["wording"]:
        expression = expression.replace("-", "+")
    return slip, expression


def math_expert(problem: Problem, seed: int, careless: bool) -> Reply:
    """Calculator, then the final result, then a sentence."""
    rng = random.Random(f"math-{seed}")
    slip, expression = _careless_plan(problem, rng) if careless else ("none", problem.expression)
    said: dict[str, str] = {}

    def reply(prompt: str) -> str:
        if "Now generate a text response" in prompt[-200:]:
            return f"The answer is {said['result']}."
        results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt)
        if slip == "guess":
            said["result"] = str(max(1, problem.answer + rng.choice([-20, -10, -3, -1, 1, 2, 9, 10, 11])))
        elif slip == "talk_first" and not said:
            said["result"] = ""
            return "I will solve this problem."
        elif not results:
            return write_reply("", [("calculator", {"expression": expression})])
        else:
            value = results[-1]
            if slip == "misread":
                at = rng.randrange(len(value))
                value = value[:at] + rng.choice("123456789") + value[at + 1 :]
            said["result"] = value
        return write_reply("", [("generate_response", {"result": said["result"]})])

    return reply


def math_skill(count: int, seed: int, *, careless: bool) -> Skill:
    """Word problems for the math agent of the examples."""
    problems = make_problems(count, seed, held_out=False)
    tasks = [Task(main_query=p.question, task_id=str(i)) for i, p in enumerate(problems)]
    return Skill("math", MathAgent, tasks, lambda i: math_expert(problems[i], seed * 1_000_003 + i, careless))


# ------------------------------------------------------------------------------- talk without tools, plans as JSON

_SMALL_TALK = [
    ("Hello, I am {n}.", "Hello {n}, how can I help you?"),
    ("My name is {n}. What is my name?", "Your name is {n}."),
    ("{n} has {a} {i}. Who has the {i}?", "{n} has the {i}."),
    ("Say {i} twice.", "{i} {i}"),
    ("Thank you, {n} is happy now.", "You are welcome. I am glad that {n} is happy."),
]
_JOBS = [
    ("Write code that counts {i} and test it.", "centralized", ["coder", "tester"]),
    ("What is a good name for {i}?", "single", ["writer"]),
    ("Compare {i} with {j} and discuss which is better.", "decentralized", ["analyst", "critic"]),
    ("Analyze the data about {i} and draw a chart.", "centralized", ["analyst", "painter"]),
    ("Translate {i} for {n}.", "single", ["translator"]),
]


class SmallTalk(Workflow):
    """A reply without tools."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """One reply."""
        prompt = task.task.metadata["system_prompt"]
        agent = ReActAgent(name="Friday", sys_prompt=prompt, model=model_tuner, formatter=OpenAIChatFormatter())
        await agent.reply(Msg("user", task.task.main_query, role="user"))
        return WorkflowOutput(reward=1.0)


def talk_skill(count: int, seed: int) -> Skill:
    """Greetings, facts from the last sentence, and small plans as JSON."""
    rng = random.Random(f"talk-{seed}")
    tasks, answers = [], []
    for i in range(count):
        n, (item, other) = rng.choice(NAMES), rng.sample(ITEMS, 2)
        words = dict(n=n, i=item, j=other, a=rng.randint(2, 99))
        if rng.random() < 0.5:
            query, answer = rng.choice(_SMALL_TALK)
            system, answer = "You are a helpful assistant.", answer.format(**words)
        else:
            query, topology, workers = rng.choice(_JOBS)
            system = "You are a planner. Answer with a plan as JSON."
            answer = json.dumps({"topology": topology, "workers": workers})
        tasks.append(Task(main_query=query.format(**words), task_id=f"talk-{i}", metadata={"system_prompt": system}))
        answers.append(answer)
    return Skill("talk", SmallTalk, tasks, lambda i: lambda _: answers[i])


# -------------------------------------------------------------------------------------- many agents, names, votes

_ROLES = ["werewolf", "villager", "seer", "witch", "hunter"]


class Vote(BaseModel):
    """Whom a player votes for."""

    vote: str = Field(description="The name of the player.")


class Discussion(Workflow):
    """A player hears the others, says something, and votes."""

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """One statement, one vote."""
        info = task.task.metadata
        agent = ReActAgent(
            name=info["player"],
            sys_prompt=f"You are {info['player']}, a {info['role']} in a game of werewolves.",
            model=model_tuner,
            formatter=OpenAIMultiAgentFormatter(),
            max_iters=2,
        )
        await agent.observe([Msg(name, text, "assistant") for name, text in info["said"]])
        await agent.reply(Msg("Moderator", f"{info['player']}, what do you say?", "user"))
        await agent.reply(Msg("Moderator", "Vote now.", "user"), structured_model=Vote)
        return WorkflowOutput(reward=1.0)


def discussion_skill(count: int, seed: int) -> Skill:
    """Agree with the majority, in words and in the vote."""
    rng = random.Random(f"discussion-{seed}")
    tasks, suspects = [], []
    for i in range(count):
        players = [f"Player{k}" for k in rng.sample(range(1, 10), 5)]
        me, accused, *others = players
        said = [(other, f"I think {accused} is a werewolf.") for other in others[:2]]
        said.append((others[2], rng.choice(["I am a villager.", "I know nothing.", f"I trust {others[0]}."])))
        rng.shuffle(said)
        metadata = {"player": me, "role": rng.choice(_ROLES), "said": said}
        tasks.append(Task(main_query="", task_id=f"discussion-{i}", metadata=metadata))
        suspects.append(accused)

    def expert(i: int) -> Reply:
        def reply(prompt: str) -> str:
            if "Now generate a text response" in prompt[-200:]:
                return f"I vote for {suspects[i]}."
            if "Vote now." in prompt[-600:]:
                return write_reply("", [("generate_response", {"vote": suspects[i]})])
            return f"I agree, {suspects[i]} is a werewolf."

        return reply

    return Skill("discussion", Discussion, tasks, expert)


Stage = Literal["clean", "careless"]


def skills(math: int, others: int, seed: int, stage: Stage) -> Sequence[Skill]:
    """The mix of one stage of the warm-up."""
    return [
        math_skill(math, seed, careless=stage == "careless"),
        talk_skill(others, seed),
        discussion_skill(others, seed),
    ]
