"""The credit that turn modes give to the turns of sampled groups, and controls: credit that no mode gives.

    random            standard normal for every turn
    constant          1 for every turn: without correlation or order
    fewer turns       GRPO of the outcome less `PENALTY` per turn: good only because it favours fewer turns
    brought           1 where a search brings a needed article for the first time, else 0; less its mean over the prompt
    Monte Carlo, M    A* by M continuations of each context: the quality at that price
    halved            A* by half of them, at half weight where it is below 0
    shuffled          A* by half of them, dealt anew to the turns of the prompt: the value of knowing only the prompt

With the reference that all continuations make the last three would share its noise. They are made from the first half of
the continuations and compared with A* by the second half (``held_out``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from verl_credit.credit import MODES
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins.load import find_turn_mode, plugin_path
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import PreflightError, did_you_mean
from verl_credit.study.fidelity.true_values import Value, part_of, true_advantages, turns_of
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


@dataclass(frozen=True)
class Credit:
    """An advantage per turn, by a mode or another method; or the reason why there is none."""

    name: str
    advantage_N: np.ndarray | None
    """Of all turns, in the order of `turns_of`."""
    reason: str = ""
    kind: str = "mode"
    """``run``: as the run gives it; ``mode``; ``control``."""
    held_out: bool = False
    """The credit is made from the first half of the continuations, and compared with A* by the second half."""


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


def mode_credits(tables: TurnTables, modes: Sequence[TurnMode], batch_prompts: int) -> list[Credit]:
    """Every mode with information gain as its turn reward, beside each other.

    Modes see ``batch_prompts`` prompts at a time, as in training; the last batch may be smaller.
    """
    parts, credits = tables.batches(batch_prompts), []
    for mode, changes in variants(tables.pipeline, modes):
        try:
            given = [credit_of_turns(part, mode, **changes).advantage_B_K1 for part in parts]
            credits.append(Credit(name_of(mode, changes), tables.per_turn(torch.cat(given))))
        except NotOffered as error:
            credits.append(Credit(name_of(mode, changes), None, str(error)))
    return credits


def name_of(mode: TurnMode, changes: Mapping) -> str:
    """``turn-group-v1d, alpha 0.3``; ``none, rloo``."""
    whole = ", ".join([mode.name, *(f"{key} {value}" for key, value in changes.items())])
    return whole.replace("outcome_operator ", "")


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


def controls(
    tables: TurnTables, groups: Groups, values: Mapping[str, Value], data: Sequence[Mapping], seed: int = 0
) -> list[Credit]:
    """``data[question]``: the data set's row."""
    drawn, turns = np.random.default_rng(seed), sum(1 for _ in turns_of(groups))
    batch, name = tables.batch, "brought a needed article"
    fewer = replace(batch, outcome_B=batch.outcome_B - PENALTY * (batch.n_tool_turns_B + 1))
    given = credit_of_turns(replace(tables, batch=fewer), MODES["none"], outcome_operator="grpo")
    if (brought_N := first_brought(groups, data)) is None:
        brought = _control(name, None, f"the data set names no needed articles (extra_info.{GOLD})")
    else:
        of_prompts = np.split(np.array(brought_N, dtype=float), _ends(groups))
        brought = _control(name, np.concatenate([one - one.mean() for one in of_prompts]))
    return [
        _control("random", drawn.standard_normal(turns)),
        _control("constant", np.ones(turns)),
        _control(f"none, {PENALTY:g} less per turn", tables.per_turn(given.advantage_B_K1)),
        brought,
        *monte_carlo(groups, values, drawn),
    ]


def _ends(groups: Groups) -> np.ndarray:
    """The places of all turns at which they are split by their prompts."""
    return np.cumsum([sum(len(path.steps) for path in group) for group in groups])[:-1]


def first_brought(groups: Groups, data: Sequence[Mapping]) -> list[bool] | None:
    """Does a turn bring a needed article, the first of its trajectory? None where the data set does not name them."""
    brought = []
    for trajectory in chain(*groups):
        needed = (data[trajectory.steps[0].state.question].get("extra_info") or {}).get(GOLD)
        if needed is None:
            return None
        missing = set(needed)
        for pages in (set(chain(*step.pages)) for step in trajectory.steps):
            brought.append(bool(missing & pages))
            missing -= pages
    return brought


def monte_carlo(groups: Groups, values: Mapping[str, Value], drawn: np.random.Generator) -> list[Credit]:
    """A* by 4, by 8 and by half of the continuations, and the last one halved below 0, and shuffled."""
    half = next(iter(values.values())).continuations // 2

    def by(part: slice) -> np.ndarray:
        return np.array(true_advantages(groups, part_of(values, part)))

    credits = []
    for n in sorted({*CONTINUATIONS, half}):
        name = f"Monte Carlo, {n}"
        if n <= half:
            credits.append(_control(name, by(slice(n)), held_out=True))
        else:
            credits.append(_control(name, None, f"expected --continuations {2 * n} at least"))
    by_half = by(slice(half))
    dealt = np.concatenate([drawn.permutation(one) for one in np.split(by_half, _ends(groups))])
    changed = {"halved": np.maximum(by_half, by_half / 2), "shuffled": dealt}
    return credits + [
        _control(f"Monte Carlo, {half}, {how}", credit_N, held_out=True) for how, credit_N in changed.items()
    ]
