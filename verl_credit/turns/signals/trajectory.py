"""What a signal of one's own is given: the turns of a trajectory as text, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_credit.turns.reward.qa import gold_answers


@dataclass(frozen=True)
class Turn:
    """One response of the policy and what it was shown next."""

    text: str
    calls: list[dict] = field(default_factory=list)
    """Executed calls: {"turn", "name", "arguments", "reward"}; reward is None where the tool gave none."""
    observation: str = ""
    """"" for the answer turn."""
    reward: float | None = None
    """The sum of its tools' rewards, or what the agent loop reported; None: no reward."""


@dataclass(frozen=True)
class Trajectory:
    """One rollout. The last turn is the answer turn, which gets no turn reward."""

    turns: list[Turn]
    golds: list[str]
    stop_reason: str
    outcome: float | None = None
    """None in a signal that runs in the agent loop: the reward is not known there yet."""
    extra_info: dict = field(default_factory=dict)
    """The row's extra_info (question, index, ...)."""
    scores: dict = field(default_factory=dict)
    """The reward function's other values (em, f1, ...)."""

    @property
    def tool_turns(self) -> list[Turn]:
        """Those that a signal rewards: all but the last."""
        return self.turns[:-1]


@dataclass(frozen=True)
class Group:
    """The rollouts of one prompt, for a signal that compares them."""

    trajectories: list[Trajectory]


def turn_texts(
    ids: Sequence[int], turn_ids: Sequence[int], n_turns: int, decode: Callable[[list[int]], str]
) -> list[tuple[str, str]]:
    """(what the policy wrote, what it was shown next) per turn; tokens before the first turn are dropped."""
    written: list[list[int]] = [[] for _ in range(n_turns)]
    observed: list[list[int]] = [[] for _ in range(n_turns)]
    current = -1
    for token, turn in zip(ids, turn_ids, strict=False):
        current = turn if turn >= 0 else current
        if current >= 0:
            (written if turn >= 0 else observed)[current].append(token)
    return [(decode(w), decode(o)) for w, o in zip(written, observed, strict=True)]


def make_trajectory(
    texts: Sequence[tuple[str, str]],
    record: dict,
    rewards: Sequence[float | None],
    truth: Any,
    *,
    outcome: float | None = None,
    extra_info: dict | None = None,
    scores: dict | None = None,
) -> Trajectory:
    turns = [
        Turn(
            text,
            [call for call in record.get("calls", []) if call["turn"] == number],
            observation,
            rewards[number] if number < len(rewards) else None,
        )
        for number, (text, observation) in enumerate(texts)
    ]
    return Trajectory(
        turns, gold_answers(truth), record["stop_reason"], outcome, dict(extra_info or {}), dict(scores or {})
    )
