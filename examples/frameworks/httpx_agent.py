"""The math agent on plain HTTP: what any language and framework can do."""

from __future__ import annotations

from typing import Any

import httpx
from math_tools import MAX_CALLS, SYSTEM_PROMPT, TOOLS, final_result, run_tool

from agentscope_tuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class HttpxAgent(Workflow):
    """Solves one word problem."""

    name: str = "httpx_agent"

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Call the model until it delivers a result; the judge compares it."""
        endpoint = model_tuner.endpoint()
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.task.main_query},
        ]
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        # A completion takes as long as it takes; the run's own time limit ends what hangs. Nothing leaves this
        # machine, so there are no certificates to load, which would take longer than a call.
        async with httpx.AsyncClient(headers=headers, timeout=None, verify=False) as client:
            for _ in range(MAX_CALLS):
                response = await client.post(
                    f"{endpoint.base_url}/chat/completions",
                    json={"model": endpoint.model, "messages": messages, "tools": TOOLS},
                )
                response.raise_for_status()
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if "tool_calls" not in message:
                    return WorkflowOutput(response=message["content"], metadata={"final_answer": None})
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": run_tool(name, arguments)})
                    if result := final_result(name, arguments):
                        return WorkflowOutput(metadata={"final_answer": result})
        return WorkflowOutput(metadata={"final_answer": None})
