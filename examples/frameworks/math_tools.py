"""The tools of the math agent, and how they are shown to a model; the agents of this folder share them."""

from __future__ import annotations

import ast
import json
import operator
from typing import Any

SYSTEM_PROMPT = "You are a helpful math agent. Use the calculator, then give the final result."
MAX_CALLS = 5
"""An agent that has no final result after so many calls has none."""
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    try:
        return str(evaluate_expression(ast.parse(expression, mode="eval").body))[:40]
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as exc:
        return f"Error: {type(exc).__name__}"


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


def generate_response(result: str) -> str:
    """Generate required structured output by this function and return it."""
    return "Successfully generated response."


def run_tool(name: str, arguments: str) -> str:
    """What a tool answers; what a model got wrong is an answer, too."""
    try:
        return {"calculator": calculator, "generate_response": generate_response}[name](**json.loads(arguments))
    except (KeyError, TypeError) as exc:
        return f"Error: {type(exc).__name__}"


def final_result(name: str, arguments: str) -> str | None:
    """The result, where this call delivers it."""
    result = json.loads(arguments).get("result") if name == "generate_response" else None
    return None if result is None else str(result)


def _tool(name: str, parameters: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "description": description}}


# Letter for letter what AgentScope shows for the agent of examples/math_agent, which is what tiny-agent knows.
TOOLS = [
    _tool(
        "calculator",
        {
            "properties": {"expression": {"description": "The expression, for example 2 + 3.", "type": "string"}},
            "required": ["expression"],
            "type": "object",
        },
        "Evaluate an arithmetic expression.",
    ),
    _tool(
        "generate_response",
        {
            "properties": {"result": {"description": "The final numeric result of the problem.", "type": "string"}},
            "type": "object",
            "required": ["result"],
        },
        "Generate required structured output by this function and return it",
    ),
]
