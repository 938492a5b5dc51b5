"""The math agent as it was before training: its model is a service. `python examples/math_agent/api_agent.py`.

What `workflow.py` changes for training is the agent's `model`. Everything else is the same code.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agentscope.agent import ReActAgent
from agentscope.formatter import DashScopeChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg
from agentscope.model import DashScopeChatModel
from agentscope.tool import Toolkit
from workflow import SYSTEM_PROMPT, FinalResult, calculator

QUESTION = "Liam is 5 years old. Liam has 3 trays with 3 cards in each. How many cards does Liam have?"


async def main() -> None:
    """Ask the agent one question, or the one on the command line."""
    if not os.environ.get("DASHSCOPE_API_KEY"):
        sys.exit("`DASHSCOPE_API_KEY` is not set; get a key from DashScope, and `export DASHSCOPE_API_KEY=...`")
    toolkit = Toolkit()
    toolkit.register_tool_function(calculator)
    agent = ReActAgent(
        name="Friday",
        sys_prompt=SYSTEM_PROMPT,
        model=DashScopeChatModel(model_name="qwen-max", api_key=os.environ["DASHSCOPE_API_KEY"], stream=False),
        formatter=DashScopeChatFormatter(),
        toolkit=toolkit,
        memory=InMemoryMemory(),
        max_iters=5,
    )
    question = " ".join(sys.argv[1:]) or QUESTION
    reply = await agent.reply(Msg("user", question, role="user"), structured_model=FinalResult)
    print((reply.metadata or {}).get("result"))


if __name__ == "__main__":
    asyncio.run(main())
