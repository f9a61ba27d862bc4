"""The turns of a step's rows as tensors, and the check of what agent loops of other authors write about a row.

Such a loop writes verl's ``extra_fields``. ``credit``: a `RowRecord` as a dict. ``turn_ids``: the turn of each response
token, -1 for a token that the policy did not write. ``turn_rewards``: a number or None per turn (docs/agent-loops.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index

import torch

from verl_credit.names import AGENTS, ROW_RECORD, TURN_IDS, TURN_REWARDS
from verl_credit.turns.book import STOP_REASONS, RowRecord, known_reward, shown


@dataclass(frozen=True)
class TurnBatch:
    """B rows (padding rows included), T response tokens of the longest row."""

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    turn_ids_B_T: torch.Tensor
    response_mask_B_T: torch.Tensor
    records: list[dict]
    scores: list[dict]
    """The reward function's other values (em, f1, format_ok)."""
    ground_truths: list
    extra_infos: list[dict]
    """The row's extra_info in the data set (question, index, ...)."""
    columns: list[dict]
    """The data file's other columns that a turn signal reads."""
    is_padding: list[bool]
    row_valid_B: torch.Tensor
    """False for padding rows (copies of real rows) and for rows with a tool fault."""
    n_turns_B: torch.Tensor
    turn_rewards: list[list[float | None]]
    """The reward of the calls of each row's tool turns, None without a reward; [] for a padding row."""


CALL = "a mapping with the call's turn, name, arguments and reward"


def no_turn_ids(row: int) -> str:
    """The message for a row without turn ids."""
    return (
        f"row {row}: rollouts carry no {TURN_IDS!r}: set the rows' agent_name (or rollout.agent.default_agent_loop) to "
        f"{' or '.join(map(repr, AGENTS))}; an agent loop of your own puts extra_fields[{TURN_IDS!r}] into its "
        "AgentLoopOutput, a whole number per response token (docs/agent-loops.md)"
    )


def record_of(extra_fields: Mapping, row: int) -> dict:
    """Every field of `RowRecord`, missing fields with their defaults. Raises ValueError for a value that is no record."""
    given, record = extra_fields.get(ROW_RECORD), RowRecord().as_dict()
    if given is None:
        return record
    where = f"row {row}: extra_fields[{ROW_RECORD!r}]"
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is a {type(given).__name__}; expected RowRecord(...).as_dict()")
    if unknown := given.keys() - record.keys():
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}; expected some of {', '.join(record)}")
    record |= {name: _as_declared(value, record[name], f"{where}: {name}") for name, value in given.items()}
    record["calls"] = [_call(call, f"{where}: calls[{place}]") for place, call in enumerate(record["calls"])]
    if record["stop_reason"] not in STOP_REASONS:
        accepted = ", ".join(STOP_REASONS)
        raise ValueError(f"{where}: stop_reason={record['stop_reason']!r:.80}; expected one of {accepted}")
    return record


def _as_declared(value, default, where: str):
    """``value``, if it has the type of the field's default. Raises ValueError."""
    if isinstance(default, list):
        return _listed(value, where, "a list")
    if isinstance(default, int):
        return _whole(value, f"{where}=", "a whole number")
    kind, expected = (str, "a text") if isinstance(default, str) else (Mapping, "a mapping")
    if not isinstance(value, kind):
        raise ValueError(f"{where}={shown(value)}; expected {expected}")
    return value


def _call(call, where: str) -> dict:
    """A call of the record; without a reward it gets None."""
    if not isinstance(call, Mapping) or "turn" not in call:
        raise ValueError(f"{where}={shown(call)}; expected {CALL}")
    turn = _whole(call["turn"], f"{where}: turn=", "the number of the turn that made it")
    reward = known_reward(call.get("reward"), f"{where}: reward")
    return {"name": "", "arguments": "", **call, "turn": turn, "reward": reward}


def _whole(value, where: str, expected: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{where}{shown(value)}; expected {expected}") from None


def turn_ids_of(extra_fields: Mapping, row: int, length: int) -> list[int]:
    """A number per response token. Raises ValueError for another length and for other values."""
    where = f"row {row}: extra_fields[{TURN_IDS!r}]"
    given = _listed(extra_fields[TURN_IDS], where, "a list of whole numbers")
    if len(given) != length:
        raise ValueError(f"{where} has {len(given)} entries; expected one per response token: {length}")
    expected = "the number of its turn, -1 where it is not the policy's"
    return [_whole(turn, f"{where}, token {place}: ", expected) for place, turn in enumerate(given)]


def turn_rewards_of(extra_fields: Mapping, row: int, n_turns: int) -> list[float | None]:
    """Returns a reward per tool turn; None when the loop gave none. An entry of the answer turn is checked and dropped.

    Raises ValueError for another length, and for an entry that is neither a finite number nor None.
    """
    tool_turns = max(n_turns - 1, 0)
    if extra_fields.get(TURN_REWARDS) is None:
        return [None] * tool_turns
    where = f"row {row}: extra_fields[{TURN_REWARDS!r}]"
    given = _listed(extra_fields[TURN_REWARDS], where, "a list with a number or None per turn")
    if len(given) not in (n_turns, tool_turns):
        raise ValueError(
            f"{where} has {len(given)} entries; the row has {n_turns} turns: expected {n_turns}, or {tool_turns} without "
            "the last one, which answers"
        )
    return [known_reward(value, f"{where}, turn {turn}") for turn, value in enumerate(given)][:tool_turns]


def _listed(given, where: str, expected: str) -> list:
    if (
        isinstance(given, str | bytes | Mapping)
        or not hasattr(given, "__len__")
        or not hasattr(given, "__iter__")
    ):
        raise ValueError(f"{where}={shown(given)}; expected {expected}")
    return list(given)
