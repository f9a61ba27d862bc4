"""The headroom of turn credit: what `turn_gae` with the true values of the contexts wins over GRPO.

    A_k = delta_k + lam A_{k+1}        delta_k = V(after turn k) - V(before it), or outcome - V before the turn that ends

lam 0 is A*; lam 1 is the outcome less V: the values are baselines alone. V is of the first half of the continuations, so
the credit is compared with A* by the second half. "halved" is negative=0.5, half the weight for what is below 0. Turns earn
nothing else, because V is the chance of the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import chain, product

import torch

from verl_credit.credit import MODES
from verl_credit.credit.turn.turn_credit import credit_of
from verl_credit.study.fidelity.alignment import GradientAgreement
from verl_credit.study.fidelity.credits import Credit
from verl_credit.study.fidelity.true_values import Value, part_of
from verl_credit.study.fidelity.turn_tables import TurnTables
from verl_credit.study.stats import Measure, prompts_for
from verl_credit.worlds.rollouts.rollout import Groups
from verl_credit.worlds.rollouts.sampler import digest

MODE = "turn_gae"
LAMS = (0.0, 0.5, 0.8, 1.0)
DECIDES = 0.5
"""The answer is that of this lam, so that it is not the best of four."""
FEWEST = 32
"""V by half of fewer continuations is so noisy that its credit may point worse than GRPO, where true values do not."""


def name_of(lam: float) -> str:
    return f"{MODE}, true values, lam {lam:g}"


def true_values(tables: TurnTables, groups: Groups, values: Mapping[str, Value]) -> list[Credit]:
    """`turn_gae` with V before each turn, with every lam, whole and halved."""
    half, batch = next(iter(values.values())).continuations // 2, tables.batch
    value_B_K1 = torch.zeros(batch.reward_B_K.shape[0], batch.reward_B_K.shape[1] + 1, dtype=torch.float64)
    of_half = part_of(values, slice(half))
    for row, trajectory in enumerate(chain(*groups)):
        for turn, step in enumerate(trajectory.steps):
            value_B_K1[row, turn] = of_half[digest(step.state.ids)].value
    valued = replace(
        batch,
        reward_B_K=torch.zeros_like(batch.reward_B_K),
        has_reward_B_K=torch.zeros_like(batch.has_reward_B_K),
        optional={"value_B_K1": value_B_K1},
    )
    credits = []
    for lam, (how, negative) in product(LAMS, {"": 1.0, ", halved": 0.5}.items()):
        given = credit_of(MODES[MODE], valued, {"lam": lam, "negative": negative})
        credit_N = tables.per_turn(given.advantage_B_K1)
        credits.append(Credit(f"{name_of(lam)}{how}", credit_N, kind="control", held_out=True))
    return credits


def headroom(gradients: Mapping[str, GradientAgreement], batch_prompts: int, continuations: int) -> dict:
    """``lam``: own cosine less GRPO's with true values; ``says``: the answer in one sentence. Empty without gradients."""
    if not gradients:
        return {}
    won = {lam: gradients[name_of(lam)].own_difference for lam in LAMS}
    listed = ", ".join(f"{_signed(measure)} at lam {lam:g}" for lam, measure in won.items())
    says = f"Is turn credit worth it here? {_answer(won[DECIDES], batch_prompts, continuations)}"
    if won[DECIDES].value is not None:
        says += f": true values (by {continuations // 2} continuations) win {listed} of own cosine over GRPO"
    return {"lam": {f"{lam:g}": asdict(measure) for lam, measure in won.items()}, "says": f"{says}."}


def _answer(won: Measure, batch_prompts: int, continuations: int) -> str:
    if won.value is None:
        return f"Not known, own cosine needs at least {batch_prompts + 2} questions and credit that differs"
    if continuations < FEWEST:
        return f"Not known, values are too noisy, take --continuations {FEWEST} at least"
    if won.low is None:
        return "Not resolved, there is no interval"
    if won.low > 0:
        return "Yes, as far as its values are good"
    if won.high < 0:
        return "No, true values point worse than GRPO"
    return f"Not resolved by {won.n} questions ({prompts_for(won)} give +-.05 at lam {DECIDES:g})"


def _signed(measure: Measure) -> str:
    if measure.value is None or measure.low is None:
        return "undefined" if measure.value is None else f"{measure.value:+.2f}"
    return f"{measure.value:+.2f} [{measure.low:+.2f}, {measure.high:+.2f}]"
