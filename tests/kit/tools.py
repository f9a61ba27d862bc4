"""A tool of verl's that earns what a test says, and turns of a policy that call it."""

from __future__ import annotations

import asyncio
import json

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_credit.worlds.lab.protocol import TURN_END


def schema(name):
    parameters = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "a"}},
        "required": [],
    }
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}


class Tool(BaseTool):
    """Returns ``answers[answer]``: a reward, or an exception that it raises. The answer "slow" is awaited."""

    def __init__(self, name="judge", **answers):
        self.name, self.tool_schema = name, OpenAIFunctionToolSchema.model_validate(schema(name))
        self.answers = answers

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["answer"] == "slow":
            await asyncio.sleep(0.01)
        if isinstance(reward := self.answers[parameters["answer"]], Exception):
            raise reward
        return ToolResponse(text="seen"), reward, {}


def call(answer, name="judge"):
    arguments = json.dumps({"name": name, "arguments": {"answer": answer}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def turn(*answers, name="judge"):
    return "\n".join(call(answer, name) for answer in answers) + TURN_END
