"""Every operator by level and name: what it reads, its equation, what is known of it, which laws it is exempt from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from verl_credit.credit.outcome.maxrl import maxrl
from verl_credit.credit.outcome.outcome import grpo
from verl_credit.credit.outcome.reinforce_pp import reinforce_pp
from verl_credit.credit.token.grpo_s import grpo_s
from verl_credit.credit.token.gtpo_canonical import gtpo_canonical
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.turn.modes import MODES

LEVELS = ("outcome", "turn", "token", "canonical")


@dataclass(frozen=True)
class Operator:
    """One entry of the registry."""

    name: str
    level: str
    function: Callable
    reads: tuple[str, ...]
    """Inputs by name: rewards, groups, gains, uncertainty, planning mask, sepa lambda, entropy."""
    equation: str
    reduces_to: str
    bias: str
    departures: str
    source: str
    scope: str = "group"
    """What other rows can matter: row, group (of one prompt) or batch."""
    properties: frozenset[str] = frozenset()
    """Of `laws.properties`: centred, normalised, weighs, conserves; what is not named does not hold."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Law -> why it does not hold here."""
    without_gains: WithoutGains | None = None
    """Turn level: what the mode is when no turn has a gain."""


def _over_population_std(n: int) -> float:
    """`none` divides by the std with n - 1, the turn modes by the one with n."""
    return math.sqrt(n / (n - 1)) if n > 1 else 1.0


def _leave_one_out(n: int) -> float:
    """r - mean of the others = n / (n - 1) (r - mean of all)."""
    return n / (n - 1) if n > 1 else 1.0


def _one(n: int) -> float:
    return 1.0


@dataclass(frozen=True)
class WithoutGains:
    """`none`, with or without std, times a factor of the group's size."""

    factor: Callable[[int], float] = _over_population_std
    norm_by_std: bool = True


CENTRED, NORMALISED = frozenset({"centred"}), frozenset({"normalised"})
WEIGHS, CONSERVES = frozenset({"weighs"}), frozenset({"conserves"})


OUTCOME = (
    Operator(
        "grpo", "outcome", grpo, ("rewards", "groups"),
        "A_i = (r_i - mean(r)) / (std(r) + 1e-6); without the division if not norm_adv_by_std_in_grpo",
        "verl's GRPO; without std Dr. GRPO's advantage",
        "own sample in mean and std: the gradient is shrunk by (n-1)/n, and easy and hard prompts are weighed up",
        "equal outcomes give exactly 0 (verl leaves a rounding residue); groups of one give 0",
        "2402.03300",
        properties=CENTRED | NORMALISED,
    ),
    Operator(
        "maxrl", "outcome", maxrl, ("rewards", "groups"),
        "A_i = (r_i - mean(r)) / (mean(r) + 1e-6); 0 where the mean is not positive",
        "centred GRPO divided by the prompt's success rate",
        "own sample in the mean",
        "guarded where the mean is not positive (the official code divides all the same); groups of one give 0",
        "2602.02710",
        properties=NORMALISED,
    ),
    Operator(
        "reinforce_pp", "outcome", reinforce_pp, ("rewards", "groups"),
        "a_i = r_i - mean(r of the prompt); A_i = (a_i - mean(a)) / (std(a) + 1e-8) over the batch",
        "centred GRPO when the batch's std is 1",
        "own sample in both means",
        "a real mask instead of 'is not 0.0'; each trajectory counts once",
        "2501.03262",
        scope="batch",
        properties=CENTRED | NORMALISED,
    ),
)  # fmt: skip

TURN = (
    Operator(
        "none", "turn", MODES["none"], ("rewards", "groups"),
        "A_k = R for every turn", "the outcome operator alone", "that of the outcome operator", "none", "2402.03300",
        properties=CENTRED | NORMALISED,
        without_gains=WithoutGains(_one),
    ),
    Operator(
        "joint", "turn", MODES["joint"], ("rewards", "groups", "gains"),
        "z over outcomes and gains of a prompt together; A_k = z(gain_k) + gamma A_(k+1), A_answer = z(outcome)",
        "none, when there are no gains", "gains and outcomes share a mean: long trajectories shift it", "none",
        "2510.14967",
        without_gains=WithoutGains(),
    ),
    Operator(
        "separate", "turn", MODES["separate"], ("rewards", "groups", "gains"),
        "A_k = z(gain_k) + gamma A_(k+1) with z over all gains of the prompt; A_answer = R",
        "none, when there are no gains", "all turns share one mean", "none", "2510.14967",
        properties=CENTRED | NORMALISED,
        without_gains=WithoutGains(),
    ),
    Operator(
        "turn-group", "turn", MODES["turn-group"], ("rewards", "groups", "gains"),
        "acc_k = (sigma_out / sigma_gain) gain_k + gamma acc_(k+1), acc after the last gain = gamma r; "
        "A_k = z(acc_k per prompt and turn) + 1.5 R",
        "none, when there are no gains",
        "the members of a turn's group are those that came so far: biased when the policy decides how many turns to take",
        "none", "2605.06200, released code", scope="batch",
        properties=NORMALISED,
        without_gains=WithoutGains(),
    ),
    Operator(
        "turn-group-v1d", "turn", MODES["turn-group-v1d"], ("rewards", "groups", "gains"),
        "D_k = sum over j >= k of gamma^(j-k) z(gain_j per prompt and turn), n_k terms; "
        "A_k = alpha D_k / sqrt(n_k) + R; clip scale 1 + beta (2 sigmoid(z_k) - 1)",
        "none, when there are no gains or alpha is 0", "as turn-group",
        "turns come from turn ids, not from rewards that differ from 0; groups of one give 0", "2605.06200",
        properties=CENTRED | NORMALISED,
        without_gains=WithoutGains(),
    ),
    Operator(
        "turn-group-unbiased", "turn", MODES["turn-group-unbiased"], ("rewards", "groups", "gains"),
        "G_k = sum over j >= k of gamma^(j-k) gain_j, absent turns 0; A_k = alpha (G_k - mean of the others' G_k) + R, "
        "R = r - mean of the others' r",
        "leave-one-out REINFORCE, when there are no gains",
        "none: own sample excluded, no std, every trajectory is a member of every turn", "ours", "this project",
        properties=CENTRED,
        without_gains=WithoutGains(_leave_one_out, norm_by_std=False),
    ),
)  # fmt: skip


def _token(
    name: str,
    equation: str,
    reduces_to: str,
    departures: str = "none",
    source: str = "the SEPA paper and its code, retrain",
    conserves: bool = True,
    **more,
) -> Operator:
    transform = TRANSFORMS[name]
    reads = ("uncertainty",) if transform.weighted else ()
    reads += ("planning mask",) if transform.needs_planning else ()
    reads += ("sepa lambda",) if transform.uses_sepa_controller else ()
    reads += ("groups",) if transform.masked else ()
    bias = (
        "weights move credit between the tokens of a trajectory; with surprisal they also push on the entropy"
    )
    # their turns' advantages come from grpo here, whence the first two
    properties = CENTRED | NORMALISED | WEIGHS | (CONSERVES if conserves else frozenset())
    return Operator(
        name,
        "token",
        transform,
        reads,
        equation,
        reduces_to,
        bias,
        departures,
        source,
        properties=properties,
        **more,
    )


GTPO = "w_t = max(0, 1 + beta (h_t / mean(h) - 1)), h at most 50"
SEPA = "execution tokens: h = lambda mean(h of execution) + (1 - lambda) h"
HICRA = "then A + alpha |A| on planning tokens"
TOKEN = (
    _token("none", "w_t = 1", "the turns' advantages", scope="row"),
    _token("gtpo", GTPO, "none at beta 0", "policy tokens of the row only", scope="row"),
    _token("gtpo_hicra", f"{GTPO}; {HICRA}", "gtpo at alpha 0", source="2509.03646", scope="row", conserves=False),
    _token("gtpo_sepa", f"{SEPA}; {GTPO}", "gtpo at lambda 0", scope="row"),
    _token("gtpo_sepa_hicra", f"{SEPA}; {GTPO}; {HICRA}", "gtpo_sepa at alpha 0", scope="row", conserves=False),
    _token(
        "gtpo_sepa_amp", f"execution tokens: h = (1 + lambda) h - lambda mean; {GTPO}", "gtpo at lambda 0", scope="row",
        conserves=False,
    ),
    _token(
        "gtpo_sepa_amp_c", f"as gtpo_sepa_amp with h floored at 0; {GTPO}", "gtpo at lambda 0", scope="row",
    ),
    _token(
        "entropy_mask", f"{GTPO}; tokens below the prompt's top rho of uncertainty get 0", "gtpo at rho 1",
        source="retrain's proxy for Yue et al.",
        conserves=False,
    ),
)  # fmt: skip

CANONICAL = (
    Operator(
        "gtpo_canonical", "canonical", gtpo_canonical, ("rewards", "groups", "entropy"),
        "r+_(i,t) = alpha_1 + alpha_2 d_t H_(i,t) / sum of H at t over the rewarded; r- likewise with 1/H and a minus; "
        "z-scored over own polarity's tokens (population=polarity) or over all tokens with zeros (all)",
        "normalised +1 / -1 rewards at alpha_2 0",
        "population=polarity: the mean advantage of correct tokens is 0",
        "groups that are all rewarded or all not give 0", "2508.04349",
    ),
    Operator(
        "grpo_s", "canonical", grpo_s, ("rewards", "groups", "entropy"),
        "r_i = beta_1 + beta_2 n H_i / sum of H over the rewarded (H the row's mean entropy); r- likewise with 1/H; "
        "z-scored over the prompt",
        "normalised +1 / -1 rewards at beta_2 0", "own sample in mean and std",
        "groups that are all rewarded or all not give 0", "2508.04349",
    ),
)  # fmt: skip

REGISTRY: Mapping[tuple[str, str], Operator] = MappingProxyType(
    {(operator.level, operator.name): operator for operator in (*OUTCOME, *TURN, *TOKEN, *CANONICAL)}
)
