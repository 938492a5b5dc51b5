"""The math agent on nothing but the `openai` package."""

from __future__ import annotations

from typing import Any

from math_tools import MAX_CALLS, SYSTEM_PROMPT, TOOLS, final_result, run_tool
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from agentscope_tuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class OpenAIAgent(Workflow):
    """Solves one word problem."""

    name: str = "openai_agent"

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Call the model until it delivers a result; the judge compares it."""
        endpoint = model_tuner.endpoint()
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.task.main_query},
        ]
        # Nothing leaves this machine, so there are no certificates to load, which would take longer than a call.
        transport = DefaultAsyncHttpxClient(verify=False)
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=transport) as client:
            for _ in range(MAX_CALLS):
                completion = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS)
                message = completion.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return WorkflowOutput(response=message.content, metadata={"final_answer": None})
                for call in message.tool_calls:
                    name, arguments = call.function.name, call.function.arguments
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": run_tool(name, arguments)})
                    if result := final_result(name, arguments):
                        return WorkflowOutput(metadata={"final_answer": result})
        return WorkflowOutput(metadata={"final_answer": None})
