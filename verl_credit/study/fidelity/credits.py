"""The credit that turn modes give to the turns of sampled groups, and controls: credit that no mode gives.

    random            standard normal for every turn
    constant          1 for every turn: without correlation or order
    fewer turns       GRPO of the outcome less `PENALTY` per turn: good only because it favours fewer turns
    brought           1 where a search brings a needed article for the first time, else 0; less its mean over the prompt
    Monte Carlo, M    A* by M continuations of each context: the quality at that price
    halved            A* by half of them, at half weight where it is below 0
    shuffled          A* by half of them, dealt anew to the turns of the prompt: the value of knowing only the prompt

With the reference that all continuations make the last three would share its noise. They are made from the first half of
the continuations and compared with A* by the second half (``held_out``). Where M is more than that, one part of the credit
is made from each half, and each part is compared with the other half's A* (``halves``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch

from verl_credit.credit import MODES
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins.load import find_turn_mode, plugin_path
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import PreflightError, did_you_mean
from verl_credit.study.fidelity.true_values import Value, part_of, true_advantages
from verl_credit.study.fidelity.turn_tables import NotOffered, TurnTables, credit_of_turns
from verl_credit.worlds.rollouts.rollout import Groups

ALPHAS = (0.3, 1.0)
OUTCOMES = tuple(name for name, operator in OUTCOME_OPERATORS.items() if operator.scope != "batch")
"""The mode `none` is measured with each of them, and with the one that the configuration names."""
PENALTY = 0.1
CONTINUATIONS = (4, 8)
"""Monte Carlo credit is computed by these numbers of continuations, and by half of all."""
GOLD = "gold_ids"
"""This field of the data set's ``extra_info`` has the articles that the question needs."""
Advantages = list[list[list[float]]]
"""``[prompt][trajectory][turn]``, the ending turn last."""


@dataclass(frozen=True)
class Credit:
    """An advantage per turn, by a mode or another method; or the reason why there is none."""

    name: str
    advantages: Advantages | None
    reason: str = ""
    kind: str = "mode"
    """``run``: as the run gives it; ``mode``; ``control``."""
    held_out: bool = False
    """The credit is made from the first half of the continuations, and compared with A* by the second half."""
    halves: tuple[Advantages, Advantages] | None = None
    """The credit by the first and by the second half of the continuations; ``advantages`` is the mean of the two."""


_control = partial(Credit, kind="control")


def find_modes(names: Sequence[str] | None) -> list[TurnMode]:
    """Every registered mode, or the modes with these names; a user's mode has the name my_module:my_mode.

    Raises PreflightError for a name that is neither.
    """
    return [find_mode(name, "--modes") for name in (MODES if names is None else names)]


def find_mode(name: str, option: str) -> TurnMode:
    if name not in MODES and not plugin_path(name):
        accepted = f"expected my_module:my_mode, or one of {', '.join(MODES)}"
        raise PreflightError(f"{option} {name}{did_you_mean(name, MODES)}: {accepted}")
    try:
        return find_turn_mode(name, option)
    except ValueError as error:
        raise PreflightError(str(error)) from error


def mode_credits(
    tables: TurnTables, sizes: Sequence[int], modes: Sequence[TurnMode], batch_prompts: int
) -> list[Credit]:
    """Every mode with information gain as its turn reward, beside each other; ``sizes``: trajectories per prompt.

    Modes see ``batch_prompts`` prompts at a time, as in training; the last batch may be smaller.
    """
    parts, credits = batches(tables, batch_prompts), []
    for mode, changes in variants(tables.pipeline, modes):
        try:
            given = [credit_of_turns(part, mode, **changes).advantage_B_K1 for part in parts]
            advantages = nested(torch.cat(given), tables.n_tool_turns_B, sizes)
            credits.append(Credit(name_of(mode, changes), advantages))
        except NotOffered as error:
            credits.append(Credit(name_of(mode, changes), None, str(error)))
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
    part = {name: value[chosen_B] for name, value in vars(tables).items() if isinstance(value, torch.Tensor)}
    return replace(tables, **part)


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
    rows = iter(list(zip(advantage_B_K1.tolist(), n_tool_turns_B.tolist(), strict=True)))
    return [[row[: n + 1] for row, n in islice(rows, size)] for size in sizes]


def controls(
    tables: TurnTables, groups: Groups, values: Mapping[str, Value], data: Sequence[Mapping], seed: int = 0
) -> list[Credit]:
    """``data[question]``: the data set's row."""
    drawn = np.random.default_rng(seed)
    turns = sum(len(trajectory.steps) for trajectory in chain(*groups))
    return [
        _control("random", per_turn(groups, drawn.standard_normal(turns))),
        _control("constant", per_turn(groups, np.ones(turns))),
        fewer_turns(tables, [len(group) for group in groups]),
        brought(groups, data),
        *monte_carlo(groups, values, drawn),
    ]


def fewer_turns(tables: TurnTables, sizes: Sequence[int]) -> Credit:
    penalised = replace(tables, outcome_B=tables.outcome_B - PENALTY * (tables.n_tool_turns_B + 1))
    credit = credit_of_turns(penalised, MODES["none"], outcome_operator="grpo")
    advantages = nested(credit.advantage_B_K1, tables.n_tool_turns_B, sizes)
    return _control(f"none, {PENALTY:g} less per turn", advantages)


def brought(groups: Groups, data: Sequence[Mapping]) -> Credit:
    name = "brought a needed article"
    credit = first_brought(groups, data)
    if credit is None:
        return _control(name, None, f"the data set names no needed articles (extra_info.{GOLD})")
    means = [float(np.mean([one for turns in of_prompt for one in turns])) for of_prompt in credit]
    less = [[[one - m for one in t] for t in of_prompt] for of_prompt, m in zip(credit, means, strict=True)]
    return _control(name, less)


def first_brought(groups: Groups, data: Sequence[Mapping]) -> list[list[list[bool]]] | None:
    """Does a turn bring a needed article, the first of its trajectory? None where the data set does not name them."""
    credit = []
    for group in groups:
        needed = (data[group[0].steps[0].state.question].get("extra_info") or {}).get(GOLD)
        if needed is None:
            return None
        credit.append([])
        for trajectory in group:
            missing, brought = set(needed), []
            for pages in (set(chain(*step.pages)) for step in trajectory.steps):
                brought.append(bool(missing & pages))
                missing -= pages
            credit[-1].append(brought)
    return credit


def monte_carlo(groups: Groups, values: Mapping[str, Value], drawn: np.random.Generator) -> list[Credit]:
    """A* by 4, by 8 and by half of the continuations, and the last one halved below 0, and shuffled."""
    whole = next(iter(values.values())).continuations
    half = whole // 2

    def by(part: slice) -> Advantages:
        return per_turn(groups, true_advantages(groups, part_of(values, part)))

    credits = []
    for n in sorted({*CONTINUATIONS, half}):
        name = f"Monte Carlo, {n}"
        if n <= half:
            credits.append(_control(name, by(slice(n)), held_out=True))
        elif n <= whole:
            parts = by(slice(n // 2)), by(slice(half, half + n // 2))
            mean = (flat(parts[0]) + flat(parts[1])) / 2
            credits.append(_control(name, per_turn(groups, mean), halves=parts))
        else:
            credits.append(_control(name, None, f"expected --continuations {n} at least"))
    by_half = by(slice(half))
    dealt = [one for of_prompt in by_half for one in drawn.permutation([*chain(*of_prompt)])]
    changed = {"halved": halved(by_half), "shuffled": per_turn(groups, dealt)}
    return credits + [
        _control(f"Monte Carlo, {half}, {how}", credit, held_out=True) for how, credit in changed.items()
    ]


def halved(credit: Advantages) -> Advantages:
    """Half the weight for what is below 0."""
    return [[[max(one, one / 2) for one in turns] for turns in of_prompt] for of_prompt in credit]


def flat(credit: Advantages) -> np.ndarray:
    return np.array([one for of_prompt in credit for turns in of_prompt for one in turns])
