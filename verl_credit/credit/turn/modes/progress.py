"""progress and turn_gae: how far a trajectory came by the scores, or by the values, of its turns' states."""

from typing import Literal

from verl_credit.credit.arguments import given
from verl_credit.credit.groups import group_stats
from verl_credit.credit.operator import CENTRED, SUB_AGENTS, AtLeastZero, Share, WithoutGains, refuse_unread
from verl_credit.credit.turn.mode import ModeOutput, turn_mode
from verl_credit.credit.turn.tables import Tables
from verl_credit.lazy import torch

NO_GROUP = "its baseline is the values, not the prompt's other trajectories"


@turn_mode(
    name="progress",
    reads=("rewards", "groups", "gains", "state scores", "turn tokens"),
    needs=("turn_tokens_B_K1",),
    reduces_to="centred GRPO (none without std), when nothing is scored, or at beta 0 and progress_weight 0",
    bias="own sample in the means; a score is taken at its word",
    departures=(
        "an initial score lets the first turn earn; trajectories without a score are not compared with others' progress (a "
        "missing turn reward is a state that was not scored); parity=released: as released"
    ),
    source="PrimeIntellect-ai/prime-rl, pull request 3282 (turn_credit)",
    properties=CENTRED,
    without_gains=WithoutGains(lambda n: 1.0, norm_by_std=False),
)
def progress(
    tables: Tables,
    *,
    gamma: Share = 0.9,
    beta: AtLeastZero = 1.0,
    progress_weight: AtLeastZero = 1.0,
    parity: Literal["none", "released"] = "none",
) -> ModeOutput:
    """Spreads the changes of a state's score over the turns that led to them.

        A_k = L + beta (c_k - mean of c over the row's tokens), L = R - mean R + progress_weight (sum d - mean of sum d)
        c_k = sum over j >= k of d_j gamma^(j-k) / (1 + gamma + ... + gamma^j)
        d_k = score_k - score before it (the last one that was measured, or the initial score), 0 if not scored

    The sum of c is the sum of d, which is what the row gained in all.
    gamma 0 credits the turn itself, 1 spreads a gain evenly over the turns before it. No std. The token-weighted mean of A
    over a row is L. Group of one: L = 0, and the shape remains. beta and progress_weight 0: centred GRPO.
    Scores: state_score_B_K1 after each turn (NaN: not scored) and initial_score_B. Without them the turn rewards are the
    progress: the score is their running sum, 0 at the start. Scores add to the outcome as they are: bring both to a scale.
    The prompt's mean of sum d is over trajectories with a score, and one without (or with a lost turn reward) has neither
    progress term. A turn without a reward, beside others of its row that have one, is a state that was not scored: d is 0.
    Subtract a length penalty from the outcome before the call.
    Released defects that are not here: the first turn can never earn, because there is no initial score; a trajectory
    without scores is compared with others' progress; the level keeps the progress at beta 0. parity="released" brings
    back the first two (initial scores are refused); progress_weight=0 answers the third.
    """
    released = parity == "released"
    given_B = tables.initial_score_B
    if released and given_B is not None and given_B[tables.valid_B].isfinite().any():
        raise ValueError(
            f"initial_score_B with parity={parity!r}: released code has no score before the first turn"
        )
    score_B_K1, initial_B = _scores(tables)
    gained_B_K1 = _differences(score_B_K1, torch.full_like(initial_B, torch.nan) if released else initial_B)
    total_B = gained_B_K1.sum(dim=1)
    if released:
        sum_B = tables.outcome_B + progress_weight * total_B
        level_B = group_stats(sum_B, tables.group_B, member_N=tables.valid_B).deviation_N
    else:
        scored_B = score_B_K1.isfinite().any(dim=1)
        further_B = group_stats(total_B, tables.group_B, member_N=scored_B).deviation_N
        outcome_B = group_stats(tables.outcome_B, tables.group_B, member_N=tables.valid_B).deviation_N
        level_B = outcome_B + progress_weight * further_B
    columns_K1 = torch.arange(score_B_K1.shape[1], device=level_B.device, dtype=level_B.dtype)
    share_K1 = (gamma**columns_K1).cumsum(0)
    credit_B_K1 = tables.return_to_go(gained_B_K1 / share_K1, gamma)
    tokens_B_K1 = torch.where(tables.turn_B_K1, given("turn_tokens_B_K1", tables.turn_tokens_B_K1), 0.0)
    n_tokens_B_1 = tokens_B_K1.sum(1, keepdim=True).clamp(min=1)
    mean_B_1 = (tokens_B_K1 * credit_B_K1).sum(1, keepdim=True) / n_tokens_B_1
    return *tables.split(level_B[:, None] + beta * (credit_B_K1 - mean_B_1)), tables.ones()


def _scores(tables: Tables) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(score after each turn, score before the first); NaN where a state has none."""
    if tables.state_score_B_K1 is not None:
        initial_B = tables.initial_score_B
        initial_B = torch.full_like(tables.outcome_B, torch.nan) if initial_B is None else initial_B
        return torch.where(tables.turn_B_K1, tables.state_score_B_K1, torch.nan), initial_B
    if tables.initial_score_B is not None:
        raise ValueError("initial_score_B without state_score_B_K1: turn rewards start from 0")
    nothing_B = torch.zeros_like(tables.outcome_B)
    answer_B = tables.has_reward_B_K.any(dim=1) | (tables.n_tool_turns_B == 0)
    measured_B_K1 = torch.nn.functional.pad(tables.has_reward_B_K, (0, 1))
    measured_B_K1 = measured_B_K1 | (tables.is_answer_B_K1 & answer_B[:, None])
    known_B = tables.valid_B & ~tables.lost_reward_B_K.any(dim=1)
    running_B_K1 = tables.reward_B_K1(nothing_B).cumsum(dim=1)
    return torch.where(measured_B_K1 & known_B[:, None], running_B_K1, torch.nan), nothing_B


def _differences(score_B_K1: "torch.Tensor", before_B: "torch.Tensor") -> "torch.Tensor":
    """Each score minus the last one before it; 0 where either is missing."""
    columns = []
    for score_B in score_B_K1.unbind(dim=1):
        columns.append(torch.where(score_B.isfinite() & before_B.isfinite(), score_B - before_B, 0.0))
        before_B = torch.where(score_B.isfinite(), score_B, before_B)
    return torch.stack(columns, dim=1)


@turn_mode(
    name="turn_gae",
    reads=("rewards", "gains", "values"),
    needs=("value_B_K1",),
    reduces_to="G_k - V_k at lam 1, the turn's own delta at lam 0",
    bias="that of the values, at lam below 1; at gamma below 1 that of a discounted return",
    departures=(
        "turns with a reward of 0 are turns; a last turn with a reward of 0 is no error; a turn without a reward earns 0; "
        "no whitening (RAGEN, VAGEN and verl whiten over tokens); a row that was cut ends with the value 0 (AReaL takes the "
        "value at its last token); one lam for all rows; a critic learns G_k (released code: A_k + V_k)"
    ),
    source="1506.02438; RAGEN (mll-lab-nu/RAGEN) for turns",
    scope="row",
    default_signal="none",
    exempt={"ties": NO_GROUP, "no_gains": NO_GROUP},
    outputs=SUB_AGENTS,
)
def turn_gae(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    scale: Literal["none", "rms"] = "none",
    rms_floor: AtLeastZero = 0.1,
    negative: AtLeastZero = 1.0,
) -> ModeOutput:
    """Estimates advantages over turns from the values of their states.

        A_k = delta_k + gamma lam A_(k+1)
        delta_k = r_k + gamma V_(k+1) - V_k, the answer turn's r is the outcome

    V_k is the value of the state before turn k's response, V after the answer turn is bootstrap_B (0, if not given: a real
    end). Raw by default: no whitening. A_k + V_k is the return G_k, which a critic learns, at lam 1 alone.
    scale="rms": A is divided by the root of its mean square over all turns of the batch, or by ``rms_floor`` where that is
    larger, so that a step's size does not follow the values; other prompts then change it. The floor has the unit of
    outcomes (0.1: the std where one outcome of a hundred differs): where hardly any differs, A is noise and stays small.
    negative: the weight of what is below 0, after that (1: as it is).
    A turn is one because the tables say so: a reward of exactly 0 is a reward (released code skips such turns).
    A turn that lost its reward and the turns before it get 0, because what they led to is not known. A turn that has none
    earns 0: rewards of different rows are not compared here, and the values expect what is earned.
    """
    if scale == "none":
        refuse_unread("scale='none'", "nothing is divided", rms_floor=(rms_floor, 0.1))
    bootstrap_B = torch.zeros_like(tables.outcome_B) if tables.bootstrap_B is None else tables.bootstrap_B
    value_B_K1 = torch.where(tables.turn_B_K1, given("value_B_K1", tables.value_B_K1), 0.0)
    delta_B_K1 = tables.reward_B_K1() + gamma * tables.next_value(value_B_K1, bootstrap_B) - value_B_K1
    delta_B_K1 = torch.where(tables.turn_B_K1, delta_B_K1, 0.0)
    advantage_B_K1 = tables.return_to_go(delta_B_K1, gamma * lam)
    lost_B_K1 = torch.nn.functional.pad(tables.lost_reward_B_K.long(), (0, 1))
    unknown_B_K1 = lost_B_K1.flip(1).cumsum(1).flip(1) > 0
    known_B_K1 = tables.turn_B_K1 & ~unknown_B_K1
    advantage_B_K1 = torch.where(known_B_K1, advantage_B_K1, 0.0)
    if scale == "rms":
        rms = (advantage_B_K1.square().sum() / known_B_K1.sum().clamp(min=1)).sqrt().clamp(min=rms_floor)
        advantage_B_K1 = advantage_B_K1 / torch.where(rms > 0, rms, 1.0)
    advantage_B_K1 = torch.where(advantage_B_K1 < 0, negative * advantage_B_K1, advantage_B_K1)
    return *tables.split(advantage_B_K1), tables.ones()
