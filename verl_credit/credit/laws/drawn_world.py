"""A small random batch with all inputs of operators, and ways to change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NAN = float("nan")
PER_TOKEN = {
    "turn_ids_B_T": -1,
    "mask_B_T": False,
    "log_prob_B_T": NAN,
    "entropy_B_T": NAN,
    "planning_B_T": True,
}
PER_TURN = {"gain_B_K": NAN, "has_gain_B_K": False, "anchor_B_K1": 1, "value_B_K1": NAN, "state_score_B_K1": 1e3,
            "turn_tokens_B_K1": -7}  # fmt: skip
"""Tables, and what stands outside the policy's tokens or past a row's last turn: garbage where it must not be read."""
VALUES = ("outcome_B", "gain_B_K", "log_prob_B_T", "entropy_B_T", "value_B_K1", "bootstrap_B", "state_score_B_K1",
          "initial_score_B")  # fmt: skip


@dataclass(frozen=True)
class World:
    """B rows, K tool turns, T response tokens, with garbage in all places that operators must not read."""

    outcome_B: torch.Tensor
    group_B: torch.Tensor
    valid_B: torch.Tensor
    gain_B_K: torch.Tensor
    has_gain_B_K: torch.Tensor
    turn_ids_B_T: torch.Tensor
    mask_B_T: torch.Tensor
    log_prob_B_T: torch.Tensor
    entropy_B_T: torch.Tensor
    planning_B_T: torch.Tensor
    anchor_B_K1: torch.Tensor
    value_B_K1: torch.Tensor
    bootstrap_B: torch.Tensor
    state_score_B_K1: torch.Tensor
    initial_score_B: torch.Tensor
    turn_tokens_B_K1: torch.Tensor
    result_turn_B: torch.Tensor

    @property
    def counted_B_T(self) -> torch.Tensor:
        return self.mask_B_T & self.valid_B[:, None]

    @property
    def n_tool_turns_B(self) -> torch.Tensor:
        """The number of each row's tool turns, counted from its turn ids, not from its rewards."""
        if not self.mask_B_T.numel():
            return torch.zeros_like(self.group_B)
        return torch.where(self.mask_B_T, self.turn_ids_B_T, 0).amax(dim=1)

    def but(self, **fields: Any) -> World:
        return dataclasses.replace(self, **fields)

    def map(self, change) -> World:
        return World(**{field.name: change(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def rows(self, index_N: torch.Tensor) -> World:
        return self.map(lambda tensor: tensor[index_N])

    def to(self, dtype: torch.dtype) -> World:
        return self.but(**{name: getattr(self, name).to(dtype) for name in VALUES})

    def without_gains(self) -> World:
        """No turn has a signal of its own: neither a reward nor a score of its state."""
        return self.but(
            has_gain_B_K=torch.zeros_like(self.has_gain_B_K),
            state_score_B_K1=torch.full_like(self.state_score_B_K1, NAN),
        )

    def spaced(self, places_B_T: torch.Tensor, width: int) -> World:
        """Column t of row b moves to places_B_T[b, t]; the places between become observations."""

        def move(tensor_B_T: torch.Tensor, fill: float | int | bool) -> torch.Tensor:
            out = tensor_B_T.new_full((len(tensor_B_T), width), fill)
            return out.scatter(1, places_B_T, tensor_B_T)

        return self.but(**{name: move(getattr(self, name), fill) for name, fill in PER_TOKEN.items()})

    def wider(self, turns: int, tokens: int) -> World:
        """The world with additional columns of padding."""
        places_T = torch.arange(self.mask_B_T.shape[1])
        wide = self.spaced(places_T.expand_as(self.mask_B_T), self.mask_B_T.shape[1] + tokens)
        more = {
            name: torch.nn.functional.pad(getattr(self, name), (0, turns), value=fill)
            for name, fill in PER_TURN.items()
        }
        return wide.but(**more)


def beside(first: World, second: World) -> World:
    """Both batches in one; prompts with the same number become one prompt."""
    turns = max(world.gain_B_K.shape[1] for world in (first, second))
    tokens = max(world.mask_B_T.shape[1] for world in (first, second))
    first, second = (
        world.wider(turns - world.gain_B_K.shape[1], tokens - world.mask_B_T.shape[1])
        for world in (first, second)
    )
    return World(*(torch.cat(pair) for pair in zip(vars(first).values(), vars(second).values(), strict=True)))


def make_world(
    seed: int, *, group_sizes: Sequence[int] = (4, 3, 1, 5), turns: int = 3, silent_rows: int = 0
) -> World:
    """A float64 world: rows in random order, outcomes 0, 0.5 or 1, up to ``turns`` tool turns a row.

    The first ``silent_rows`` rows have no policy tokens.
    """
    random = torch.Generator().manual_seed(seed)
    drawn: dict[str, Any] = {"generator": random, "dtype": torch.float64}
    group_B = torch.cat([torch.full((size,), 7 * number - 5) for number, size in enumerate(group_sizes)])
    group_B = group_B[torch.randperm(len(group_B), generator=random)]
    rows = len(group_B)
    n_tool_B = torch.randint(0, turns + 1, (rows,), generator=random)
    token_ids = [_row(int(n), row < silent_rows, random) for row, n in enumerate(n_tool_B)]
    width = max(len(ids) for ids in token_ids)
    turn_ids_B_T = torch.tensor([ids + [-1] * (width - len(ids)) for ids in token_ids])
    mask_B_T = turn_ids_B_T >= 0
    has_gain_B_K = torch.arange(turns) < torch.where(mask_B_T.any(dim=1), n_tool_B, 0)[:, None]
    log_prob_B_T = -torch.rand(rows, width, **drawn) * 3
    entropy_B_T = torch.rand(rows, width, **drawn) * 2 + 0.05
    return World(
        outcome_B=torch.randint(0, 3, (rows,), generator=random).double() / 2,
        group_B=group_B,
        valid_B=torch.ones(rows, dtype=torch.bool),
        gain_B_K=torch.where(has_gain_B_K, torch.randn(rows, turns, **drawn) * 0.2, NAN),
        has_gain_B_K=has_gain_B_K,
        turn_ids_B_T=turn_ids_B_T,
        mask_B_T=mask_B_T,
        log_prob_B_T=torch.where(mask_B_T, log_prob_B_T, NAN),
        entropy_B_T=torch.where(mask_B_T, entropy_B_T, NAN),
        planning_B_T=torch.rand(rows, width, generator=random) < 0.3,
        **_turn_tables(has_gain_B_K, torch.Generator().manual_seed(seed + 5000)),
    )


def _turn_tables(tool_B_K: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Optional tables, with garbage past each row's answer turn: anchors of few states, which prompts share by number."""
    rows, turns = tool_B_K.shape
    turn_B_K1 = torch.arange(turns + 1) <= tool_B_K.sum(dim=1, keepdim=True)
    shape = (rows, turns + 1)
    drawn: dict[str, Any] = {"generator": random, "dtype": torch.float64}
    score_B_K1 = torch.rand(shape, **drawn)
    score_B_K1[torch.rand(shape, generator=random) >= 0.8] = NAN
    per_turn = {
        "state_score_B_K1": score_B_K1,
        "anchor_B_K1": torch.randint(-1, 3, shape, generator=random),
        "turn_tokens_B_K1": torch.randint(1, 9, shape, generator=random),
        "value_B_K1": torch.rand(shape, **drawn),
    }
    return {
        **{name: torch.where(turn_B_K1, table, PER_TURN[name]) for name, table in per_turn.items()},
        "bootstrap_B": torch.rand(rows, **drawn),
        "initial_score_B": torch.rand(rows, **drawn),
        "result_turn_B": torch.randint(-1, turns + 1, (rows,), generator=random),
    }


def _row(n_tool: int, silent: bool, random: torch.Generator) -> list[int]:
    """Turn ids of a row: each turn's policy tokens followed by two observation tokens (-1), then the answer turn."""
    ids: list[int] = []
    for turn in range(n_tool + 1):
        n = int(torch.randint(2, 5, (), generator=random))
        ids += [-1 if silent else turn] * n + ([-1, -1] if turn < n_tool else [])
    return ids
