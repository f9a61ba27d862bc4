"""The credit that turn modes give to the turns of sampled groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from verl_credit.credit import MODES
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import PreflightError, did_you_mean
from verl_credit.records.report.again import NotOffered, TurnTables, credit_of_turns
from verl_credit.worlds.rollouts.rollout import Groups

ALPHAS = (0.3, 1.0)
OUTCOMES = tuple(name for name, operator in OUTCOME_OPERATORS.items() if operator.scope != "batch")
"""The mode `none` is measured with each of them, and with the one that the configuration names."""
Advantages = list[list[list[float]]]
"""``[prompt][trajectory][turn]``, the ending turn last."""


@dataclass(frozen=True)
class Credit:
    """An advantage per turn, by a mode or another method; or the reason why there is none."""

    name: str
    advantages: Advantages | np.ndarray | None
    """A swap has only the advantages of its decision's turn, [alternatives, completions]."""
    reason: str = ""
    kind: str = "mode"
    """``run``: as the run gives it; ``mode``; ``control``."""
    held_out: bool = False
    """The credit is made from the first half of the continuations, and compared with A* by the second half."""


def find_modes(names: Sequence[str] | None) -> list[TurnMode]:
    """Every registered mode, or the modes with these names; a user's mode has the name my_module:my_mode.

    Raises PreflightError for a name that is neither.
    """
    modes = []
    for name in MODES if names is None else names:
        if name not in MODES and not {".", ":"} & set(name):
            raise PreflightError(
                f"--modes {name}{did_you_mean(name, MODES)}: accepted are {', '.join(MODES)}, or my_module:my_mode"
            )
        try:
            modes.append(find_turn_mode(name, "--modes"))
        except ValueError as error:
            raise PreflightError(str(error)) from error
    return modes


def mode_credits(
    tables: TurnTables, sizes: Sequence[int], modes: Sequence[TurnMode], batch_prompts: int
) -> list[Credit]:
    """Every mode with information gain as its turn reward, beside each other; ``sizes``: trajectories per prompt.

    Modes see ``batch_prompts`` prompts at a time, as in training; the last batch may be smaller.
    """
    parts = batches(tables, batch_prompts)
    return credits_of_parts(
        tables.pipeline,
        modes,
        lambda mode, changes: parts,
        lambda advantages: nested(torch.cat(advantages), tables.n_tool_turns_B, sizes),
    )


def credits_of_parts(
    pipeline: Mapping,
    modes: Sequence[TurnMode],
    parts: Callable[[TurnMode, Mapping], list[TurnTables]],
    read: Callable[[list[torch.Tensor]], Advantages | np.ndarray],
) -> list[Credit]:
    """Every variant of the modes. Each of its ``parts`` is credited as a batch, ``read`` takes the parts' advantages."""
    credits = []
    for mode, changes in variants(pipeline, modes):
        try:
            of_parts = [
                credit_of_turns(part, mode, **changes).advantage_B_K1 for part in parts(mode, changes)
            ]
        except NotOffered as error:
            credits.append(Credit(name_of(mode, changes), None, str(error)))
        else:
            credits.append(Credit(name_of(mode, changes), read(of_parts)))
    return credits


def name_of(mode: TurnMode, changes: Mapping) -> str:
    """``turn-group-v1d, alpha 0.3``; ``none, rloo``."""
    whole = ", ".join([mode.name, *(f"{key} {value}" for key, value in changes.items())])
    return whole.replace("outcome_operator ", "")


def batches(tables: TurnTables, prompts: int) -> list[TurnTables]:
    """Splits the rows into batches of neighbouring prompts, which are numbered from 0 in the order of the rows."""
    parts = []
    for start in range(0, int(tables.group_B.max()) + 1, prompts):
        part = rows_of(tables, (tables.group_B >= start) & (tables.group_B < start + prompts))
        parts.append(replace(part, group_B=part.group_B - start))
    return parts


def rows_of(tables: TurnTables, chosen_B: torch.Tensor) -> TurnTables:
    """Returns only these rows, with unchanged group numbers."""
    part = {
        field.name: value[chosen_B] if isinstance(value, torch.Tensor) else value
        for field in fields(tables)
        for value in [getattr(tables, field.name)]
    }
    places = chosen_B.nonzero()[:, 0].tolist()
    return TurnTables(**part | {name: [part[name][i] for i in places] for name in ("rows", "uids")})


def variants(pipeline: Mapping, modes: Sequence[TurnMode]) -> list[tuple[TurnMode, dict]]:
    """Modes with the options in which each variant departs from the run's."""
    pairs: list[tuple[TurnMode, dict]] = []
    for mode in modes:
        if mode.name == "none":
            operators = dict.fromkeys((*OUTCOMES, pipeline["outcome_operator"]))
            pairs += [(mode, {"outcome_operator": operator}) for operator in operators]
        elif "alpha" in mode.options:
            pairs += [(mode, {"alpha": alpha}) for alpha in ALPHAS]
        else:
            pairs.append((mode, {}))
    return pairs


def per_turn(groups: Groups, credit: Iterable[float]) -> Advantages:
    """Numbers in the order of prompts, trajectories and turns, nested. Raises ValueError when their number differs."""
    steps = (step for group in groups for trajectory in group for step in trajectory.steps)
    numbers = iter([float(one) for one, _ in zip(credit, steps, strict=True)])
    return [[[next(numbers) for _ in t.steps] for t in group] for group in groups]


def nested(advantage_B_K1: torch.Tensor, n_tool_turns_B: torch.Tensor, sizes: Sequence[int]) -> Advantages:
    """Rows of a step as prompts' trajectories, without the columns after a row's ending turn."""
    rows = iter(
        [row[: n + 1] for row, n in zip(advantage_B_K1.tolist(), n_tool_turns_B.tolist(), strict=True)]
    )
    return [[next(rows) for _ in range(size)] for size in sizes]
