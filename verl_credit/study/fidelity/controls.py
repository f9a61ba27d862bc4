"""Controls: credit that no mode gives, for comparison with the modes' numbers.

    random            standard normal for every turn
    constant          1 for every turn: without correlation or order
    fewer turns       GRPO of the outcome less `PENALTY` per turn: good only because it favours fewer turns
    brought           1 where a search brings a needed article for the first time, else 0; less its mean over the prompt
    Monte Carlo, M    A* by M continuations of each context: the quality at that price
    shuffled          A* by half of them, dealt anew to the turns of the prompt: the value of knowing only the prompt

The last two are made from the first half of the continuations and compared with A* by the second half (``held_out``):
with the reference that all continuations make they would share its noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from verl_credit.records.report.again import TurnTables, credit_of_turns
from verl_credit.study.fidelity.mode_credit import Advantages, Credit, nested, per_turn
from verl_credit.study.fidelity.scored import true_advantages
from verl_credit.study.fidelity.values import Value, part_of
from verl_credit.worlds.rollouts.rollout import Groups, Trajectory

PENALTY = 0.1
CONTINUATIONS = (4, 8)
"""Monte Carlo credit is computed by these numbers of continuations, and by half of all."""
GOLD = "gold_ids"
"""This field of the data set's ``extra_info`` has the articles that the question needs."""


def controls(
    tables: TurnTables, groups: Groups, values: Mapping[str, Value], data: Sequence[Mapping], seed: int = 0
) -> list[Credit]:
    """``data[question]``: the data set's row."""
    drawn = np.random.default_rng(seed)
    turns = sum(len(trajectory.steps) for group in groups for trajectory in group)
    return [
        _control("random", per_turn(groups, drawn.standard_normal(turns))),
        _control("constant", per_turn(groups, np.ones(turns))),
        fewer_turns(tables, [len(group) for group in groups]),
        brought(groups, data),
        *monte_carlo(groups, values, drawn),
    ]


def fewer_turns(tables: TurnTables, sizes: Sequence[int]) -> Credit:
    penalised = replace(tables, outcome_B=tables.outcome_B - PENALTY * (tables.n_tool_turns_B + 1))
    credit = credit_of_turns(penalised, "none", outcome_operator="grpo")
    advantages = nested(credit.advantage_B_K1, tables.n_tool_turns_B, sizes)
    return _control(f"none, {PENALTY:g} less per turn", advantages)


def brought(groups: Groups, data: Sequence[Mapping]) -> Credit:
    name = "brought a needed article"
    brought_of = first_brought(groups, data)
    if brought_of is None:
        return Credit(name, None, f"the data set names no needed articles (extra_info.{GOLD})", "control")
    credit = []
    for of_prompt in brought_of:
        mean = float(np.mean([one for turns in of_prompt for one in turns]))
        credit.append([[one - mean for one in turns] for turns in of_prompt])
    return _control(name, credit)


def first_brought(groups: Groups, data: Sequence[Mapping]) -> list[list[list[bool]]] | None:
    """Does a turn bring a needed article, the first of its trajectory? None where the data set does not name them."""
    credit = []
    for group in groups:
        needed = (data[group[0].steps[0].state.question].get("extra_info") or {}).get(GOLD)
        if needed is None:
            return None
        credit.append([_first_brought(trajectory, set(needed)) for trajectory in group])
    return credit


def _first_brought(trajectory: Trajectory, missing: set[str]) -> list[bool]:
    brought = []
    for step in trajectory.steps:
        pages = {page for some in step.pages for page in some}
        brought.append(bool(missing & pages))
        missing -= pages
    return brought


def monte_carlo(groups: Groups, values: Mapping[str, Value], drawn: np.random.Generator) -> list[Credit]:
    """A* by 4, by 8 and by half of the continuations, and the last one shuffled."""
    half = next(iter(values.values())).continuations // 2
    credit_of = {
        f"Monte Carlo, {n}": (n, per_turn(groups, true_advantages(groups, part_of(values, slice(n)))))
        for n in sorted({*CONTINUATIONS, half})
    }
    by_half = credit_of[f"Monte Carlo, {half}"][1]
    credit_of[f"Monte Carlo, {half}, shuffled"] = half, _shuffled(groups, by_half, drawn)
    credits = []
    for name, (n, credit) in credit_of.items():
        if n <= half:
            credits.append(_control(name, credit, held_out=True))
        else:
            reason = f"as many again are its reference; expected --continuations {2 * n} at least"
            credits.append(Credit(name, None, reason, "control", held_out=True))
    return credits


def _shuffled(groups: Groups, credit: Advantages, drawn: np.random.Generator) -> Advantages:
    """Deals the credit anew within each prompt."""
    flat = [[one for turns in group for one in turns] for group in credit]
    return per_turn(groups, [one for group in flat for one in drawn.permutation(group)])


def _control(name: str, advantages: Advantages, held_out: bool = False) -> Credit:
    return Credit(name, advantages, kind="control", held_out=held_out)
