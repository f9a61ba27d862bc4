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
    """What the trainer reads about a row; it is sent as a plain dict."""

    stop_reason: str = "no_answer"
    n_searches: int = 0
    n_retries: int = 0
    """Requests of its searches after the first of each, including a failed search's."""
    bad_calls: int = 0
    """Calls with a mistake of the policy: broken JSON, unknown tool, missing query."""
    n_other_calls: int = 0
    """Calls of other tools than the search."""
    other_errors: int = 0
    """Calls of other tools that raised."""
    tool_fault: str = ""
    """Code of a fault that the policy did not cause (server down, deadline): the row is not trained on."""
    final_text: str = ""
    """The policy's own text of its last turn, the only place for an answer."""
    calls: list[dict] = field(default_factory=list)
    """Per call, in order: turn, name, arguments (the policy's text), and the reward that the tool returned; None where it
    returned none, for a search, and for a call that failed or was refused."""
    searches: list[dict] = field(default_factory=list)
    """Per search: turn, query, and the ids of the pages shown, in order."""
    scores: list[list] = field(default_factory=list)
    """[context, alias, mean log-prob of the gold tokens], if the rollout server scores (`gain_server`)."""
    score_span: list[float] = field(default_factory=list)
    """[begin, end] of that scoring in seconds since the epoch, by the clock of the agent loop's machine."""
    signals: dict[str, list] = field(default_factory=dict)
    """Turn signals of the user's that ran in the agent loop: name -> a reward per tool turn, None or NaN (lost)."""
    signal_errors: dict[str, str] = field(default_factory=dict)
    """Why a turn signal's rewards were lost."""
    signals_not_asked: list[str] = field(default_factory=list)
    """Those whose rewards were lost at once, because they had failed too often just before."""
    masked_observations: list[list[int]] = field(default_factory=list)
    """Per tool turn, for the turn signal infopo: the token ids of its tool messages with a placeholder for their contents,
    from the end of the turn's own tokens to the next turn."""
    versions: list[list[int]] = field(default_factory=list)
    """Per turn: the first and the last version of the weights that wrote it, in steps of the trainer. None where the engine
    does not say."""
    replayed: int = -1
    """In `verl-credit fidelity`: turns that stood already when the rollout began. -1: the loop knows nothing of that."""
    score_error: str = ""
    """Why the last NaN among the scores has no value."""

    def as_dict(self) -> dict:
        return asdict(self)


class TurnBook:
    """Turn ids of a growing response, aligned with verl's ``response_mask``."""

    def __init__(self) -> None:
        self.turn_ids: list[int] = []
        self.n_turns = 0

    def wrote_turn(self, response_mask: list[int]) -> None:
        """Record a turn of the policy: the new tokens with mask 1 are its tokens."""
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
    """The reward of a call or a turn. Raises ValueError for what is neither a finite number nor None."""
    if reward is None:
        return None
    number = as_number(reward)
    if not math.isfinite(number):
        raise ValueError(f"{where} is {shown(reward)}; expected a finite number, or None where there is none")
    return number


def as_number(value) -> float:
    """Infinite for what is no number: text, bytes, and a whole number beyond the range of floats too."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return math.inf
    try:
        return float(value)
    except Exception:  # a class of the user's raises what it likes
        return math.inf


def shown(value) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # Python writes no whole number of more than 4300 digits
        return f"a {type(value).__name__} that cannot be shown"


def rewards_of_turns(calls: list[dict], n_turns: int) -> list[float | None]:
    """The sum of the rewards of each turn's calls; None for a turn none of whose calls has one."""
    earned: list[list[float]] = [[] for _ in range(n_turns)]
    for call in calls:
        if call["reward"] is not None and call["turn"] < n_turns:
            earned[call["turn"]].append(call["reward"])
    return [sum(rewards) if rewards else None for rewards in earned]
