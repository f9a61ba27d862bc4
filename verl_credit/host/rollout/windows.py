"""Windows (``environment.window``): every turn of a rollout is an output of its own, whose prompt has the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_credit.names import ROW_RECORD, TURN_REWARDS
from verl_credit.turns.rollout.sessions import COUNTS

PARTS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "routed_experts")
"""The fields of verl's output in which the outputs of a rollout differ."""


def windowed(messages: Sequence[dict], begun: int, window: int) -> list[dict]:
    """The first ``begun`` messages, then the last ``window`` pairs of an action and the observation after it. The last of
    the first messages also says how many steps are left out between them, and the observation after these."""
    left_out = (len(messages) - begun) // 2 - window
    if left_out <= 0:
        return [*messages]
    place = begun + 2 * left_out
    task, seen = messages[begun - 1], messages[place - 1]["content"]
    text = f"{task['content']}\n\n[Steps left out here: {left_out}]\n\n{seen}"
    return [*messages[: begun - 1], {**task, "content": text}, *messages[place:]]


def written(agent_data) -> dict[str, Any]:
    """The `PARTS` of the turn that was just written."""
    ids, mask = agent_data.prompt_ids, agent_data.response_mask
    begin, of_engine = len(ids) - len(mask), (agent_data.response_logprobs or None, agent_data.routed_experts)
    return dict(zip(PARTS, (ids[:begin], ids[begin:], mask, *of_engine), strict=True))


def together(output, windows: Sequence[dict]) -> tuple[Any, list[int]]:
    """(the output of the whole rollout, its turn ids). The prompt of a window is the observation of the turn before it, as
    `sessions.joined` has it."""
    ids: list[int] = []
    turn_ids: list[int] = []
    for turn, window in enumerate(windows):
        seen = window["prompt_ids"] if turn else []
        ids += [*seen, *window["response_ids"]]
        turn_ids += [-1] * len(seen) + [turn if own else -1 for own in window["response_mask"]]
    whole = {"prompt_ids": windows[0]["prompt_ids"], "response_ids": ids, "response_logprobs": None}
    return output.model_copy(
        update={**whole, "response_mask": [int(turn >= 0) for turn in turn_ids]}
    ), turn_ids


def apart(output, windows: Sequence[dict]) -> list:
    """The outputs of the rollout: `together` undone. Each record has its own turn, and what counts over a rollout stands in
    the last one."""
    record, rewards = output.extra_fields[ROW_RECORD], output.extra_fields[TURN_REWARDS]
    last = len(windows) - 1
    outputs = []
    for turn, window in enumerate(windows):
        one = slice(turn, turn + 1)
        of_turn = {
            "calls": [call | {"turn": 0} for call in record["calls"] if call["turn"] == turn],
            "states": record["states"][one],
            "versions": record["versions"][one],
            "signals": {name: values[one] for name, values in record["signals"].items()},
        }
        counts = {} if turn == last else dict.fromkeys(COUNTS, 0)
        extra = {ROW_RECORD: record | of_turn | counts, TURN_REWARDS: rewards[one]}
        turn_ids = [0 if own else -1 for own in window["response_mask"]]
        changed = {**window, "turn_ids": turn_ids, "extra_fields": output.extra_fields | extra}
        outputs.append(output.model_copy(update=changed))
    return outputs
