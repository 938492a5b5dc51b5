"""The math agent as a graph of LangGraph; needs `langgraph` and `langchain-openai`."""

from __future__ import annotations

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from math_tools import MAX_CALLS, SYSTEM_PROMPT, TOOLS, calculator, generate_response
from openai import DefaultAsyncHttpxClient

from agentscope_tuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


def after_tools(state: MessagesState) -> str:
    """The graph ends with the final result."""
    return END if state["messages"][-1].name == "generate_response" else "model"


def final_answer(messages: list[Any]) -> str | None:
    """The result that the last tool call delivered."""
    calls = [call for message in messages for call in getattr(message, "tool_calls", [])]
    result = calls[-1]["args"].get("result") if calls else None
    return None if result is None else str(result)


class LangGraphAgent(Workflow):
    """Solves one word problem."""

    name: str = "langgraph_agent"

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Let the graph run until it delivers a result; the judge compares it."""
        endpoint = model_tuner.endpoint()
        # Nothing leaves this machine, so there are no certificates to load, which would take longer than a call.
        async with DefaultAsyncHttpxClient(verify=False) as transport:
            model = ChatOpenAI(
                base_url=endpoint.base_url,
                api_key=endpoint.api_key,
                model=endpoint.model,
                http_async_client=transport,
            ).bind_tools(TOOLS)

            async def call_model(state: MessagesState) -> dict[str, Any]:
                return {"messages": [await model.ainvoke(state["messages"])]}

            graph = StateGraph(MessagesState)
            graph.add_node("model", call_model)
            graph.add_node("tools", ToolNode([calculator, generate_response]))
            graph.add_edge(START, "model")
            graph.add_conditional_edges("model", tools_condition)
            graph.add_conditional_edges("tools", after_tools)
            start = {"messages": [("system", SYSTEM_PROMPT), ("user", task.task.main_query)]}
            try:
                end = await graph.compile().ainvoke(start, {"recursion_limit": 2 * MAX_CALLS})
            except GraphRecursionError:
                return WorkflowOutput(metadata={"final_answer": None})
        return WorkflowOutput(metadata={"final_answer": final_answer(end["messages"])})
