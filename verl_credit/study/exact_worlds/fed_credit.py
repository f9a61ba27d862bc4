"""Credit in an exact world: what a turn mode reads there follows from its declaration, and its signals can be shuffled.

turn rewards    what the world's signal earned, for a mode whose default signal is not "none"
anchors         the state before each turn, for a mode that reads anchors and for values by state
values          group, features, state: the ridge of `credit/turn/values.py`, as in a run; true: the exact V
turn tokens     1 a turn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl_credit.config.keys.algorithm import Algorithm
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.tables import return_to_go
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of
from verl_credit.credit.turn.values import States, crossfit, group_features, loo_mean, state_features
from verl_credit.errors import PreflightError

VALUES = ("group", "features", "state", "true")
_FIT = {name: Algorithm.model_fields[f"turn_values_{name}"].default for name in ("ridge", "folds", "replay")}


@dataclass(frozen=True)
class Rolled:
    """A step's trajectories of R runs: B rows, run by run and group by group; K1 = K + 1 turns at most, the last of a row's
    turns being its answer turn."""

    run_B: torch.Tensor
    group_B: torch.Tensor
    """Groups of different runs have different numbers."""
    task_B: torch.Tensor
    """The task in its run, the same in every step: no fit reads a task that it predicts."""
    outcome_B: torch.Tensor
    n_tool_turns_B: torch.Tensor
    signal_B_K: torch.Tensor
    """What each tool turn earned."""
    state_B_K1: torch.Tensor
    """The state before each turn; equal numbers in a group are equal states."""
    seen_B_K1_D: torch.Tensor
    """What the user's loop sees of the state before each turn."""
    true_B_K1: Callable[[], torch.Tensor]
    """Makes the exact value of the state before each turn; 0 after a row's last turn."""

    @property
    def turn_B_K1(self) -> torch.Tensor:
        return torch.arange(self.state_B_K1.shape[1]) <= self.n_tool_turns_B[:, None]

    @property
    def tool_turn_B_K(self) -> torch.Tensor:
        return self.turn_B_K1[:, 1:]

    def shuffled(self, random: torch.Generator) -> Rolled:
        """The same trajectories, whose signals, states and sights are dealt anew to the turns of their run's step."""
        return replace(
            self,
            signal_B_K=_dealt(self.signal_B_K, self.tool_turn_B_K, self.run_B, random),
            state_B_K1=_dealt(self.state_B_K1, self.turn_B_K1, self.run_B, random),
            seen_B_K1_D=_dealt(self.seen_B_K1_D, self.turn_B_K1, self.run_B, random),
        )


def _dealt(
    table_B_K: torch.Tensor, turn_B_K: torch.Tensor, run_B: torch.Tensor, random: torch.Generator
) -> torch.Tensor:
    """The entries of all turns of a run in a random order; rows stand run by run."""
    run_N = run_B[turn_B_K.nonzero()[:, 0]]
    order_N = (run_N + torch.rand(len(run_N), generator=random, dtype=torch.float64)).argsort()
    dealt_B_K = table_B_K.clone()
    dealt_B_K[turn_B_K] = table_B_K[turn_B_K][order_N]
    return dealt_B_K


@dataclass
class FedCredit:
    """A turn mode with its options and, where it reads values, their provider. Its replay holds the last steps' states.

    Raises PreflightError for a mode that reads a table which no exact world has, and for values that nothing reads.
    """

    mode: TurnMode
    options: Mapping[str, Any] = field(default_factory=dict)
    values: str | None = None
    """One of `VALUES`; None: "group" where the mode reads values."""

    def __post_init__(self) -> None:
        lacking = [
            name for name in self.mode.needs if name not in ("anchor_B_K1", "value_B_K1", "turn_tokens_B_K1")
        ]
        if lacking:
            has = "an exact world has anchors, values and turn tokens"
            raise PreflightError(f"{self.mode.name} needs {', '.join(lacking)}; {has}")
        if "values" in self.mode.reads:
            self.values = self.values or VALUES[0]
        elif self.values is not None:
            raise PreflightError(f"--values {self.values}: {self.mode.name} reads no values; leave it out")
        if self.values not in (None, *VALUES):
            raise PreflightError(f"--values {self.values}: expected one of {', '.join(VALUES)}")
        self._replay: deque[list[States]] = deque(maxlen=_FIT["replay"])
        self.value_B_K1: torch.Tensor | None = None  # of the last step

    @property
    def reads_rewards(self) -> bool:
        return self.mode.reads_turn_rewards and self.mode.default_signal != "none"

    @property
    def signals(self) -> tuple[str, ...]:
        """What it reads beside outcomes, groups, turns and true values: the shuffled control deals these anew."""
        reads = {
            "turn rewards": self.reads_rewards,
            "anchors": "anchors" in self.mode.reads or self.values == "state",
            "features": self.values == "features",
        }
        return tuple(name for name, read in reads.items() if read)

    def advantages(self, rolled: Rolled) -> torch.Tensor:
        """The advantage of every turn, [B, K1]. A credit whose scope is the batch is made run by run."""
        optional = {"turn_tokens_B_K1": rolled.turn_B_K1.long(), "anchor_B_K1": rolled.state_B_K1}
        has_reward_B_K = rolled.tool_turn_B_K & self.reads_rewards
        reward_B_K = torch.where(has_reward_B_K, rolled.signal_B_K, 0.0)
        if self.values is not None:
            self.value_B_K1 = optional["value_B_K1"] = self._values(rolled, reward_B_K)
        valid_B = torch.ones(len(rolled.outcome_B), dtype=torch.bool)
        tables = (
            rolled.outcome_B,
            reward_B_K,
            has_reward_B_K,
            rolled.group_B,
            valid_B,
            rolled.n_tool_turns_B,
        )
        found_B_K1 = torch.zeros(rolled.state_B_K1.shape, dtype=torch.float64)
        for rows_b in self._calls(rolled.run_B):
            of_rows = {name: table[rows_b] for name, table in optional.items()}
            batch = BatchTables(*(table[rows_b] for table in tables), of_rows)
            found_B_K1[rows_b] = credit_of(self.mode, batch, self.options).advantage_B_K1.double()
        return torch.where(rolled.turn_B_K1, found_B_K1, 0.0)

    def _calls(self, run_B: torch.Tensor) -> list[torch.Tensor]:
        whole = self.mode.scope_with(self.options) != "batch"
        return (
            [torch.arange(len(run_B))]
            if whole
            else [(run_B == run).nonzero()[:, 0] for run in run_B.unique()]
        )

    def _values(self, rolled: Rolled, reward_B_K: torch.Tensor) -> torch.Tensor:
        """V before each turn, [B, K1], by a ridge for each run; 0 after a row's last turn."""
        if self.values == "true":
            return rolled.true_B_K1()
        turn_B_K1 = rolled.turn_B_K1
        at_end_B_K1 = torch.arange(turn_B_K1.shape[1]) == rolled.n_tool_turns_B[:, None]
        reward_B_K1 = torch.nn.functional.pad(reward_B_K, (0, 1)) + at_end_B_K1 * rolled.outcome_B[:, None]
        gamma = self.options.get("gamma", self.mode.options.get("gamma", 1.0))
        return_B_K1 = return_to_go(reward_B_K1, gamma)
        mean_B = loo_mean(
            return_B_K1[:, 0], rolled.group_B, torch.ones_like(rolled.group_B, dtype=torch.bool)
        )
        parts = [group_features(mean_B, turn_B_K1.shape[1])]
        if self.values == "features":
            parts.append(rolled.seen_B_K1_D)
        if self.values == "state":
            parts.append(state_features(rolled.state_B_K1, return_B_K1, turn_B_K1, rolled.group_B, mean_B))
        x_B_K1_D = torch.cat(parts, dim=2)
        value_B_K1, kept = torch.zeros(turn_B_K1.shape, dtype=torch.float64), []
        for place, run in enumerate(rolled.run_B.unique()):
            here_B_K1 = turn_B_K1 & (rolled.run_B == run)[:, None]
            row_N = here_B_K1.nonzero()[:, 0]
            states = States(x_B_K1_D[here_B_K1], return_B_K1[here_B_K1], rolled.task_B[row_N])
            before = [step[place] for step in self._replay]
            replay = States.joined(before) if before else None
            how = {"shrink": _FIT["ridge"], "folds": _FIT["folds"]}
            value_B_K1[here_B_K1], _ = crossfit(states, replay, mean_B[row_N], **how)
            kept.append(states)
        self._replay.append(kept)
        return value_B_K1
