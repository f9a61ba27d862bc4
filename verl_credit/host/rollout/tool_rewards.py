"""What a call of one of verl's tools earned: verl writes 0 for tools without a reward and for calls that failed."""

from __future__ import annotations

from verl.tools.function_tool import FunctionTool, normalize_function_tool_return

from verl_credit.recipe.agent_loops import BAD_JSON, FAILED
from verl_credit.turns.book import known_reward

GIVEN = "verl_credit_reward"  # among the metrics of a call


class _RewardKept(FunctionTool):
    """A function tool whose metrics also say whether the function returned a reward."""

    async def call(self, parameters):
        raw, given = await super().call(parameters), None
        if isinstance(raw, tuple) and len(raw) > 1:
            # verl would take a reward that is no number for a fault of the call
            given, raw = raw[1], (raw[0], 0.0, *raw[2:])
        response, reward, metrics = normalize_function_tool_return(raw)
        return response, reward, {**metrics, GIVEN: given}


def offered_tool(tool):
    """The tool as the agent loop calls it."""
    return _RewardKept(**vars(tool)) if isinstance(tool, FunctionTool) else tool


def reward_of(call: dict, text: str, reward, metrics: dict | None) -> float | None:
    """The reward that the tool itself returned; None where it returned none. Raises ValueError for what is no number.

    ``text``: the observation, from which alone one can tell that verl did not come to run the tool, or that it raised.
    """
    name = f"'{call['name']}'"  # quoted as verl does
    if text.startswith((f"{FAILED} {name}", f"{BAD_JSON} {name}")):
        return None
    return known_reward(
        (metrics or {}).get(GIVEN, reward), f"turn {call['turn']}: the reward that tool {name} returned"
    )
