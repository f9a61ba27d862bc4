"""The operators that are compared: a name, a function from a batch to token advantages, and what it optimises.

`all_credits` is the table: every registered outcome operator and turn mode, some with other options, and two controls.
Objectives are differentiable functions of the policy, with exact gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from verl_credit.credit.laws.drawn_world import World
from verl_credit.credit.laws.subjects import Result, run_turn_mode
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.study.fidelity.exact.question import Trajectories


@dataclass(frozen=True)
class Expected:
    """Expectations over a question's trajectories: scalars with a gradient, if the probabilities have one."""

    trajectories: Trajectories
    probability_N: torch.Tensor

    @property
    def reward(self) -> torch.Tensor:
        return (self.probability_N * self.trajectories.outcome_N).sum()

    @property
    def turns(self) -> torch.Tensor:
        """The answer included."""
        return (self.probability_N * self.trajectories.n_turns_N).sum()

    def gain(self, gamma: float = 1.0) -> torch.Tensor:
        """E[sum over turns k = 0, 1, ... of gamma^k gain_k]."""
        gain_N_K = self.trajectories.gain_N_K
        return (self.probability_N * (gain_N_K @ gamma ** torch.arange(gain_N_K.shape[1]).double())).sum()


Objective = Callable[[Expected, int], torch.Tensor]
"""(expectations of a question, rollouts of a group) -> what is maximised there."""


def reward(expected: Expected, group_size: int) -> torch.Tensor:
    """J = E[r]."""
    return expected.reward


def with_gain(alpha: float, gamma: float = 1.0) -> Objective:
    """E[r + alpha sum of gamma^k gain_k]."""
    return lambda expected, _: expected.reward + alpha * expected.gain(gamma)


def with_turn_penalty(penalty: float) -> Objective:
    """E[r] - penalty E[turns]."""
    return lambda expected, _: expected.reward - penalty * expected.turns


def log_success(expected: Expected, group_size: int) -> torch.Tensor:
    """log p, expanded at p = 1 and cut after n - 1 terms: -sum over k = 1 .. n - 1 of (1 - p)^k / k.

    With 0/1 outcomes the expected gradient of `maxrl` is this one's, but for its eps. The paper's estimator has n terms;
    subtracting 1 from every advantage of a group, and nothing where the group has no success, takes the last one away.
    Source: 2602.02710; derived anew for the centred form.
    """
    k = torch.arange(1, group_size, dtype=torch.float64)
    return -((1 - expected.reward) ** k / k).sum()


def arcsine(expected: Expected, group_size: int) -> torch.Tensor:
    """2 arcsin(sqrt(p)), whose gradient is grad p / sqrt(p (1 - p)): what dividing by the std tends to in large groups."""
    return 2 * expected.reward.sqrt().asin()


def gradient(
    objective: Objective, trajectories: Trajectories, logits_D: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Exact gradient of the objective by autograd over all trajectories, [D]."""
    leaf_D = logits_D.clone().requires_grad_()
    expected = Expected(trajectories, trajectories.probability_N(leaf_D))
    return torch.autograd.grad(objective(expected, group_size), leaf_D)[0]


@dataclass(frozen=True)
class Credit:
    """A row of the comparison."""

    name: str
    run: Callable[[World], Result]
    scope: str = "group"
    """The operator's scope: row, group or batch. With batch, every group is a separate batch here."""
    reads_policy: bool = False
    """It reads values, log-probs or entropies: its advantages change with the policy."""
    own: Objective | None = None
    """The objective whose gradient the operator claims to follow; None: no claim, or E[r] itself."""
    own_name: str = ""


def turn_credit_of(
    mode: str | TurnMode, label: str | None = None, *, gains: bool | None = None, own: str = "", **options
) -> Credit:
    """A turn mode with these options; constants are the mode's own, and gamma is 1 unless given. ``own``: the name of its
    objective in `OBJECTIVES`. ``gains``: turns earn information gain (None: as the mode's default).
    """
    declared = find_turn_mode(mode) if isinstance(mode, str) else mode
    options = {"gamma": 1.0, **options} if "gamma" in declared.options else options
    gains = declared.default_signal != "none" if gains is None else gains
    run = partial(run_turn_mode, mode=declared, **options)
    return Credit(
        label or declared.name,
        run if gains else lambda world: run(world.without_gains()),
        scope=declared.scope_with(options),
        reads_policy="values" in declared.reads,
        own=OBJECTIVES[own],
        own_name=own,
    )


def outcome_credit_of(operator: str, label: str | None = None, *, own: str = "", **options) -> Credit:
    """A registered outcome operator, the same advantage for every turn (turn mode ``none``)."""
    run = partial(run_turn_mode, mode=MODES["none"], outcome_operator=operator, **options)
    scope = OUTCOME_OPERATORS[operator].scope
    return Credit(label or operator, run, scope=scope, own=OBJECTIVES[own], own_name=own)


def turn_penalty(penalty: float) -> Credit:
    """Control: RLOO on r - penalty x turns, the answer's included. It ignores the effect of a turn."""
    operator = partial(run_turn_mode, mode=MODES["none"], outcome_operator="rloo")

    def run(world: World) -> Result:
        turns_B = world.n_tool_turns_B.double() + 1  # integers times a float would be float32
        return operator(world.but(outcome_B=world.outcome_B - penalty * turns_B))

    own = {"own": with_turn_penalty(penalty), "own_name": f"r - {penalty:g} turns"}
    return Credit(f"turn penalty {penalty:g}", run, **own)


def constant_credit() -> Credit:
    """Control: advantage 1 everywhere. Its expected gradient is 0."""
    return Credit(
        "constant", lambda world: Result(world.mask_B_T.double(), world.mask_B_T.double()), scope="row"
    )


def policy_free(world: World) -> World:
    """The world without what depends on the policy: NaN, so that an operator that reads it all the same is noticed."""
    fields = ("value_B_K1", "log_prob_B_T", "entropy_B_T")
    return world.but(**{name: torch.full_like(getattr(world, name), torch.nan) for name in fields})


PENALTY = 0.1
OBJECTIVES = {
    "": None,
    "r": reward,
    "log p, n - 1 terms": log_success,
    "2 arcsin sqrt(p), large groups": arcsine,
}
"""An outcome operator may name these as its `objective`."""


def _adds_gain(mode: str, label: str, weight: float = 1.0, **options) -> Credit:
    gamma = options.get("gamma", 1.0)
    gain = "gain" if gamma == 1 else f"discounted gain (gamma {gamma:g})"
    own_name = f"r + {gain}" if weight == 1 else f"r + {weight:g} {gain}"
    credit = turn_credit_of(mode, label, gains=True, **options)
    return replace(credit, own=with_gain(weight, gamma), own_name=own_name)


def all_credits() -> list[Credit]:
    """Outcome operators, turn modes, controls. Token operators are left out: one token a turn cannot be weighed.

    ``own``: the objective that the mode's documentation names, or that follows from its equation with 0/1 outcomes.
    """
    return [
        *(outcome_credit_of(name, own=operator.objective) for name, operator in OUTCOME_OPERATORS.items()),
        outcome_credit_of("grpo", "grpo, no std", norm_by_std=False, own="r"),
        turn_credit_of("joint"),
        turn_credit_of("joint", "joint, no std", norm_by_std=False),
        turn_credit_of("separate"),
        turn_credit_of("separate", "separate, gamma 0, gains .2", gamma=0.0, gain_scale=0.2),
        turn_credit_of("turn-group"),
        turn_credit_of("turn-group-v1d", "turn-group-v1d, alpha .3", alpha=0.3),
        turn_credit_of("turn-group-v1d", "turn-group-v1d, alpha 1", alpha=1.0),
        turn_credit_of("turn-group-v1d", "turn-group-v1d, alpha 1, no std", alpha=1.0, norm_by_std=False),
        _adds_gain("turn-group-unbiased", "turn-group-unbiased, alpha .3", 0.3, alpha=0.3),
        _adds_gain("turn-group-unbiased", "turn-group-unbiased, alpha 1", alpha=1.0),
        _adds_gain("turn-group-unbiased", "turn-group-unbiased, alpha 1, gamma .9", alpha=1.0, gamma=0.9),
        _adds_gain("leave_one_out", "leave_one_out"),
        _adds_gain("leave_one_out", "leave_one_out, present_only", baseline="present_only"),
        turn_credit_of("mt_grpo"),
        turn_credit_of("gigpo", own="r"),
        turn_credit_of("hgpo", own="r"),
        turn_credit_of("g2po", own="r"),
        turn_credit_of("gagpo", own="r"),
        turn_credit_of("gagpo", "gagpo, lam 1", own="r", lam=1.0),
        turn_credit_of("calibadv"),
        turn_credit_of("calibadv", "calibadv, sigmoid, upper limit", evidence="sigmoid", upper_limit=True),
        turn_credit_of("trace"),
        turn_credit_of("progress"),
        _adds_gain("turn_gae", "turn_gae"),
        _adds_gain("turn_gae", "turn_gae, lam .9", lam=0.9),
        turn_credit_of("turn_gae", "turn_gae, lam .9, no gains", gains=False, lam=0.9, own="r"),
        turn_penalty(PENALTY),
        constant_credit(),
    ]
