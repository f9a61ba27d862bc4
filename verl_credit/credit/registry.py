"""Every operator by level and name. Turn modes declare themselves (`turn/modes/`); the others stand here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verl_credit.credit.operator import CENTRED, CONSERVES, NORMALISED, WEIGHS, Operator
from verl_credit.credit.outcome.half_negative import half_negative
from verl_credit.credit.outcome.low_baseline import low_baseline
from verl_credit.credit.outcome.maxrl import maxrl
from verl_credit.credit.outcome.outcome import grpo
from verl_credit.credit.outcome.reinforce_pp import reinforce_pp
from verl_credit.credit.outcome.rloo import rloo
from verl_credit.credit.token.grpo_s import grpo_s
from verl_credit.credit.token.gtpo_canonical import gtpo_canonical
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.turn.modes import MODES

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
        "rloo", "outcome", rloo, ("rewards", "groups"),
        "A_i = r_i - mean of the others' r = n / (n - 1) (r_i - mean(r))",
        "REINFORCE with a leave-one-out baseline; centred GRPO times n / (n - 1)",
        "none: own sample excluded, no std",
        "groups of one give 0 (verl: their plain outcome)",
        "2402.14740",
        properties=CENTRED,
    ),
    Operator(
        "low_baseline", "outcome", low_baseline, ("rewards", "groups"),
        "A_i = r_i - 1/2 mean of the others' r",
        "rloo with half of its baseline",
        "none: own sample excluded, no std; the mean advantage of a prompt is not 0",
        "equal outcomes r give r / 2; outcomes count from 0, the value of a failure; groups of one give 0",
        "evidence/fidelity/README.md",
        exempt={"ties": "its baseline is half of the mean"},
    ),
    Operator(
        "half_negative", "outcome", half_negative, ("rewards", "groups"),
        "z_i = (r_i - mean(r)) / (std(r) + 1e-6); A_i = z_i if z_i > 0, else z_i / 2",
        "grpo where no outcome is below the mean",
        "own sample in mean and std; a baseline below the mean, and hard prompts weigh more than with grpo",
        "equal outcomes and groups of one give 0; the mean advantage of a prompt is not 0",
        "evidence/fidelity/README.md",
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
        exempt={"signed": "it divides by the mean outcome, and refuses outcomes below 0"},
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
    bias = "that of the turns' advantages"
    if transform.weighted:
        bias = "weights move credit between the tokens of a trajectory; with surprisal they also push on the entropy"
    elif transform.amplified:
        bias = "planning tokens gain credit whatever the outcome: advantages no longer have the mean 0"
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
    _token(
        "hicra", "w_t = 1, then A + alpha |A| on planning tokens", "none at alpha 0", source="2509.03646", scope="row",
        conserves=False,
    ),
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
        "r+_(i,t) = alpha_1 + alpha_2 d_t H_(i,t) / sum of H at t over the rewarded, d_t of whom have a token t (t counts "
        "a row's own policy tokens, so observations shift nothing); r- likewise with 1/H and a minus; "
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
    {
        (operator.level, operator.name): operator
        for operator in (*OUTCOME, *MODES.values(), *TOKEN, *CANONICAL)
    }
)
