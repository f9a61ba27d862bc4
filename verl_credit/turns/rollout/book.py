"""The record of a trajectory (the turn of each token, the stop reason, faults), and the rows of a step as tensors.

A turn is one call of the policy: its tokens up to a tool call (parallel calls are one turn) or up to the end. The agent
loop reports each turn; nothing is inferred from token values. Agent loops of other authors write verl's ``extra_fields``,
which are checked here. ``credit``: a `RowRecord` as a dict. ``turn_ids``: the turn of each response token, -1 for a token
that the policy did not write. ``turn_rewards``: a number or None per turn (docs/agent-loops.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any

from verl_credit.credit.turn.session_map import Sessions
from verl_credit.lazy import torch
from verl_credit.names import ROW_RECORD, TURN_IDS, TURN_REWARDS

IN_ENVIRONMENT = ("done", "truncated")
STOP_REASONS = (
    *("answer", "no_answer", "turn_length", "bad_call", "length", "max_turns", "tool_fault"),
    *IN_ENVIRONMENT,
)
"""``turn_length``: search.max_new_tokens cut the last turn before its call or answer was complete; ``length``: the row is
full; ``done``: the environment's task has ended; ``truncated``: its limit or environment.max_steps has ended the rollout."""
NO_TOKEN = "engine_no_token"
"""The ``tool_fault`` of a row whose engine returned no token for a turn after the first."""


@dataclass
class RowRecord:
    """The agent loop's record of a row for the trainer; it is sent as a plain dict."""

    stop_reason: str = "no_answer"
    n_searches: int = 0
    n_retries: int = 0
    """Retries of the row's searches, including retries of failed searches."""
    bad_calls: int = 0
    """Calls that the policy wrote wrongly: broken JSON, unknown tool, missing query."""
    n_other_calls: int = 0
    """Calls of other tools than the search."""
    other_errors: int = 0
    """Calls of other tools that raised."""
    tool_fault: str = ""
    """The code of a fault that the policy did not cause (server down, deadline); such a row is not trained on."""
    fault_detail: str = ""
    """What the tool or its server said of it."""
    final_text: str = ""
    """The policy's own text of its last turn, the only place for an answer."""
    calls: list[dict] = field(default_factory=list)
    """Turn, name, arguments (the policy's text) and the tool's reward of each call, in order. The reward is None when the
    tool returned none, for a search, and for a call that failed or was refused."""
    searches: list[dict] = field(default_factory=list)
    """Turn, query and the ids of the pages that the policy read, in order, of each search."""
    signals: dict[str, list] = field(default_factory=dict)
    """The user's turn signals that ran in the agent loop: name -> per tool turn a reward, None, or NaN (missing)."""
    signal_errors: dict[str, str] = field(default_factory=dict)
    """Why a turn signal's rewards are missing."""
    signals_not_asked: list[str] = field(default_factory=list)
    """Turn signals that were not called, because they had failed too often just before."""
    environment: dict = field(default_factory=dict)
    """The row's environment: score, success, return, last, steps, cut; empty without one."""
    states: list = field(default_factory=list)
    """The name of the state before each turn, None where it has none; empty where none is named."""
    versions: list[list[int]] = field(default_factory=list)
    """First and last version of the weights that wrote each turn, in steps of the trainer. None when the engine reports
    none."""
    replayed: int = -1
    """Turns that were given when the rollout began (`verl-credit fidelity`). -1: the loop does not report it."""

    def as_dict(self) -> dict:
        return asdict(self)


class TurnBook:
    """Turn ids of a growing response, aligned with verl's ``response_mask``."""

    def __init__(self) -> None:
        self.turn_ids: list[int] = []
        self.n_turns = 0

    def wrote_turn(self, response_mask: list[int]) -> None:
        """Record a turn, whose tokens are the new tokens with mask 1."""
        new = response_mask[len(self.turn_ids) :]
        self.turn_ids += [self.n_turns if m else -1 for m in new]
        self.n_turns += 1

    def observed(self, response_mask: list[int]) -> None:
        """Record an observation, whose tokens are not the policy's. GLM's begins with the token at which the policy stopped
        (``<|observation|>``); verl takes it out of the mask, and so it leaves the turn."""
        kept = [turn if own else -1 for turn, own in zip(self.turn_ids, response_mask, strict=False)]
        self.turn_ids = kept + [-1] * (len(response_mask) - len(kept))

    def close(self, length: int) -> list[int]:
        """Turn ids of the ``length`` tokens that are kept."""
        if len(self.turn_ids) < length:
            raise ValueError(f"turn ids for {len(self.turn_ids)} tokens, but the response has {length}")
        return self.turn_ids[:length]


def known_reward(reward, where: str) -> float | None:
    """The reward of a call or a turn. Raises ValueError unless it is a finite number or None."""
    if reward is None:
        return None
    number = as_number(reward)
    if not math.isfinite(number):
        raise ValueError(f"{where} is {shown(reward)}; expected a finite number, or None where there is none")
    return number


def as_number(value) -> float:
    """The value as a float; infinite for text, bytes, other objects, and whole numbers beyond the range of floats."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return math.inf
    try:
        return float(value)
    except Exception:  # a user's class may raise anything
        return math.inf


def shown(value) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # for example a whole number of more than 4300 digits
        return f"a {type(value).__name__} that cannot be printed"


def rewards_of_turns(calls: list[dict], n_turns: int) -> list[float | None]:
    """The sum of the rewards of each turn's calls; None for a turn without a reward."""
    earned: list[list[float]] = [[] for _ in range(n_turns)]
    for call in calls:
        if call["reward"] is not None and call["turn"] < n_turns:
            earned[call["turn"]].append(call["reward"])
    return [sum(rewards) if rewards else None for rewards in earned]


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
    ids_stored: bool = False
    """The rows were read with these turn ids, one per response token: nothing has to be written."""
    ids_from_mask: int = 0
    """Rows whose turns are runs of the response mask, because their agent loop gave no turn ids."""
    keys: list[str] = field(default_factory=list)
    """verl's key of each row, PROMPT_SESSION_OUTPUT; empty where every row is a rollout."""
    links: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list)
    """The chain and the parent of each row (`sessions.link_of`)."""
    sessions: Sessions | None = None
    """The places of ``outputs`` in these rows, where `sessions.joined` has made one row of each rollout's outputs."""
    outputs: TurnBatch | None = None

    @property
    def valid_rows(self) -> list[int]:
        return self.row_valid_B.nonzero().flatten().tolist()


def record_of(extra_fields: Mapping, row: int) -> dict:
    """Every field of `RowRecord`, missing fields with their defaults. Raises ValueError for a value that is no record."""
    given, record = extra_fields.get(ROW_RECORD), vars(RowRecord())
    where = f"row {row}: extra_fields[{ROW_RECORD!r}]"
    given = {} if given is None else _as(dict, given, where, "RowRecord(...).as_dict()")
    if unknown := given.keys() - record.keys():
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}; expected some of {', '.join(record)}")
    record |= {name: _as(type(record[name]), value, f"{where}: {name}") for name, value in given.items()}
    for place, call in enumerate(record["calls"]):
        at, expected = (
            f"{where}: calls[{place}]",
            "a mapping with the call's turn, name, arguments and reward",
        )
        call = {"turn": None, "name": "", "arguments": "", "reward": None} | _as(dict, call, at, expected)
        turn = _as(int, call["turn"], f"{at}: turn", "the number of the turn that made it")
        record["calls"][place] = call | {
            "turn": turn,
            "reward": known_reward(call["reward"], f"{at}: reward"),
        }
    if record["stop_reason"] not in STOP_REASONS:
        accepted = ", ".join(STOP_REASONS)
        raise ValueError(f"{where}: stop_reason={record['stop_reason']!r:.80}; expected one of {accepted}")
    return record


_EXPECTED = {list: "a list", int: "a whole number", str: "a text", dict: "a mapping"}


def _as(kind: type, value: Any, where: str, expected: str = "") -> Any:
    """The value, if it is of the kind: a whole number, a text, a mapping, or entries in order. Raises ValueError."""
    try:
        if kind is int:
            return index(value)
        if kind is list and not isinstance(value, str | bytes | Mapping):
            return list(value)
    except TypeError:
        pass
    if kind in (str, dict) and isinstance(value, str if kind is str else Mapping):
        return value
    raise ValueError(f"{where}={shown(value)}; expected {expected or _EXPECTED[kind]}")


def turn_ids_of(extra_fields: Mapping, row: int, length: int) -> list[int]:
    """A number per response token. Raises ValueError for another length and for other values."""
    where = f"row {row}: extra_fields[{TURN_IDS!r}]"
    given = _as(list, extra_fields[TURN_IDS], where, "a list of whole numbers")
    if len(given) != length:
        raise ValueError(f"{where} has {len(given)} entries; expected one per response token: {length}")
    expected = "the number of its turn, -1 where it is not the policy's"
    return [_as(int, turn, f"{where}[{place}]", expected) for place, turn in enumerate(given)]


def turns_of_mask(mask_T: torch.Tensor) -> torch.Tensor:
    """turn_ids_T: the number of each run of policy tokens (mask 1), -1 elsewhere. Two turns without an observation between
    them are one run."""
    begins_T = mask_T.bool() & ~torch.nn.functional.pad(mask_T.bool(), (1, 0))[:-1]
    return torch.where(mask_T.bool(), begins_T.cumsum(0) - 1, -1)


def turn_rewards_of(
    extra_fields: Mapping, row: int, n_turns: int, *, last: bool = True
) -> list[float | None]:
    """Returns a reward per tool turn; None when the loop gave none. An entry of the answer turn is checked and dropped.

    ``last`` False: the rollout has other outputs, so that the row's last turn may be a tool turn, whose entry is kept.

    Raises ValueError for another length, and for an entry that is neither a finite number nor None.
    """
    tool_turns = max(n_turns - last, 0)
    if extra_fields.get(TURN_REWARDS) is None:
        return [None] * tool_turns
    where = f"row {row}: extra_fields[{TURN_REWARDS!r}]"
    given = _as(list, extra_fields[TURN_REWARDS], where, "a list with a number or None per turn")
    if len(given) not in (n_turns, max(n_turns - 1, 0)):
        expected = f"{n_turns}, one per turn, or {n_turns - 1} without the last one's"
        raise ValueError(
            f"{where} has {len(given)} entries; expected {expected if n_turns else '0: the row has no turn'}"
        )
    return [known_reward(value, f"{where}, turn {turn}") for turn, value in enumerate(given)][:tool_turns]
