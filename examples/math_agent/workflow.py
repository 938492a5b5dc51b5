"""A ReAct agent with a calculator that gives a structured final result."""

from __future__ import annotations

import ast
import operator

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse
from pydantic import BaseModel, Field

from agentscope_tuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "You are a helpful math agent. Use the calculator, then give the final result."
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class FinalResult(BaseModel):
    """What the agent has to deliver."""

    result: str = Field(description="The final numeric result of the problem.")


def calculator(expression: str) -> ToolResponse:
    """Evaluate an arithmetic expression.

    Args:
        expression (str):
            The expression, for example 2 + 3.
    """
    try:
        text = str(evaluate_expression(ast.parse(expression, mode="eval").body))
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as exc:
        text = f"Error: {type(exc).__name__}"
    return ToolResponse(content=[TextBlock(type="text", text=text[:40])])


def evaluate_expression(node: ast.expr) -> float:
    """Numbers, + - * / and signs; nothing else, since a model wrote it."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate_expression(left), evaluate_expression(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -evaluate_expression(operand)
    raise ValueError("unsupported expression")


class MathAgent(Workflow):
    """Solves one word problem."""

    name: str = "math_agent"

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run the agent on the task; the judge compares its final answer."""
        toolkit = Toolkit()
        toolkit.register_tool_function(calculator)
        agent = ReActAgent(
            name="Friday",
            sys_prompt=SYSTEM_PROMPT,
            model=model_tuner,
            formatter=OpenAIChatFormatter(),
            toolkit=toolkit,
            memory=InMemoryMemory(),
            max_iters=5,
        )
        reply = await agent.reply(Msg("user", task.task.main_query, role="user"), structured_model=FinalResult)
        return WorkflowOutput(response=reply, metadata={"final_answer": (reply.metadata or {}).get("result")})
