"""Records of one trajectory: the turn of each token, the stop reason, and faults.

A turn is one call of the policy: its tokens up to a tool call (parallel calls are one turn) or up to the end. The agent
loop reports each turn; nothing is inferred from token values.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

STOP_REASONS = ("answer", "no_answer", "turn_length", "bad_call", "length", "max_turns", "tool_fault")
"""``turn_length``: search.max_new_tokens cut the last turn before its call or answer was complete; ``length``: the row is
full."""


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
    final_text: str = ""
    """The policy's own text of its last turn, the only place for an answer."""
    calls: list[dict] = field(default_factory=list)
    """Turn, name, arguments (the policy's text) and the tool's reward of each call, in order. The reward is None when the
    tool returned none, for a search, and for a call that failed or was refused."""
    searches: list[dict] = field(default_factory=list)
    """Turn, query and the ids of the pages that the policy read, in order, of each search."""
    scores: list[list] = field(default_factory=list)
    """[context, alias, mean log-prob of the gold tokens], if the rollout server scores (`gain_server`)."""
    score_span: list[float] = field(default_factory=list)
    """[begin, end] of that scoring in seconds since the epoch, by the clock of the agent loop's machine."""
    signals: dict[str, list] = field(default_factory=dict)
    """The user's turn signals that ran in the agent loop: name -> per tool turn a reward, None, or NaN (missing)."""
    signal_errors: dict[str, str] = field(default_factory=dict)
    """Why a turn signal's rewards are missing."""
    signals_not_asked: list[str] = field(default_factory=list)
    """Turn signals that were not called, because they had failed too often just before."""
    masked_observations: list[list[int]] = field(default_factory=list)
    """Token ids of each tool turn's tool messages with a placeholder for their contents, for the turn signal infopo. They
    reach from the end of the turn's own tokens to the next turn."""
    versions: list[list[int]] = field(default_factory=list)
    """First and last version of the weights that wrote each turn, in steps of the trainer. None when the engine reports
    none."""
    replayed: int = -1
    """Turns that were given when the rollout began (`verl-credit fidelity`). -1: the loop does not report it."""
    score_error: str = ""
    """The reason for the last NaN among the scores."""

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
        """Record an observation, whose tokens are not the policy's."""
        self.turn_ids += [-1] * (len(response_mask) - len(self.turn_ids))

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
