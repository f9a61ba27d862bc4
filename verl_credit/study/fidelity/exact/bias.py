"""The exact bias of every operator: for each set of questions, stop probability and group size.

An operator's expected gradient is a sum over all groups of trajectories, with no sampling. Groups are multisets with their
multinomial probabilities. One token stands for a turn: advantage_B_T is the turns'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations_with_replacement

import torch

from verl_credit.credit.laws.drawn_world import World
from verl_credit.study.fidelity.exact.operators import Credit, all_credits, gradient, policy_free, reward
from verl_credit.study.fidelity.exact.question import (
    QUESTIONS,
    Question,
    Trajectories,
    list_trajectories,
    turn_values,
)

GROUPS_PER_CALL = 4096  # an operator's tables of so many groups fit the caches
NOTHING = 1e-12  # a shorter gradient is rounding, and has no direction


def as_world(trajectories: Trajectories, logits_D: torch.Tensor) -> World:
    """N rows, a prompt each; K = the question's turns - 1.

    State scores are the potentials after each search (the answer is not scored), values are exact V of the outcome, and an
    anchor is the place: visits at different turns are the same state.
    """
    t, rows = trajectories, len(trajectories.outcome_N)
    turn_N_K1, columns_K1 = t.turn_N_K1, torch.arange(t.turn_N_K1.shape[1])
    searched_N_K = columns_K1[:-1] < t.n_turns_N[:, None] - 1
    place_S = torch.tensor([list(t.choices.question.places).index(name) for name, _ in t.choices.states])
    after_N_K = torch.where(searched_N_K, t.potential_N_K1[:, 1:], torch.nan)
    return World(
        outcome_B=t.outcome_N,
        group_B=torch.arange(rows),
        valid_B=torch.ones(rows, dtype=torch.bool),
        gain_B_K=t.gain_N_K,
        has_gain_B_K=searched_N_K,
        turn_ids_B_T=torch.where(turn_N_K1, columns_K1, -1),
        mask_B_T=turn_N_K1,
        log_prob_B_T=t.turn_log_prob_N_K1(logits_D),
        entropy_B_T=torch.where(turn_N_K1, t.choices.entropy_S(logits_D)[t.state_N_K1], 0.0),
        planning_B_T=torch.zeros_like(turn_N_K1),
        anchor_B_K1=torch.where(turn_N_K1, place_S[t.state_N_K1], -1),
        value_B_K1=turn_values(t, logits_D),
        bootstrap_B=torch.zeros(rows, dtype=torch.float64),
        state_score_B_K1=torch.nn.functional.pad(after_N_K, (0, 1), value=torch.nan),
        initial_score_B=t.potential_N_K1[:, 0],
        turn_tokens_B_K1=turn_N_K1.long(),
        result_turn_B=torch.where(t.n_turns_N > 1, 0, -1),
    )


def in_groups(world: World, group_M_G: torch.Tensor) -> World:
    """The groups' rows one after the other, each group as a separate prompt."""
    prompt_B = torch.arange(len(group_M_G)).repeat_interleave(group_M_G.shape[1])
    return world.rows(group_M_G.flatten()).but(group_B=prompt_B)


def list_groups(n: int, size: int) -> torch.Tensor:
    """Every multiset of ``size`` of n trajectories, sorted, int64 [M, G]; M = (n + size - 1 choose size)."""
    return torch.tensor(list(combinations_with_replacement(range(n), size)))


def group_probability(group_M_G: torch.Tensor, probability_N: torch.Tensor) -> torch.Tensor:
    """P(multiset) = G! / product of n_i! x product of p_i^n_i, [M]; sums to 1.

    The order of a group's rows is left out: an operator's expected gradient does not depend on it.
    """
    size = group_M_G.shape[1]
    counts_M_N = torch.zeros(len(group_M_G), len(probability_N), dtype=torch.float64)
    counts_M_N.scatter_add_(1, group_M_G, torch.ones_like(group_M_G, dtype=torch.float64))
    log_rows = torch.lgamma(torch.tensor(size + 1.0, dtype=torch.float64))
    orders_M = (log_rows - torch.lgamma(counts_M_N + 1).sum(1)).exp().round()
    return orders_M * probability_N[group_M_G].prod(1)


def advantages(credit: Credit, world: World, group_M_G: torch.Tensor) -> torch.Tensor:
    """The operator's advantage of every turn of every row of every group, float64 [M, G, K1]; 0 past the answer.

    An operator whose scope is the batch gets one group a call. Raises ValueError for an advantage that is not finite.
    """
    calls = group_M_G.split(1 if credit.scope == "batch" else GROUPS_PER_CALL)
    parts = [credit.run(in_groups(world, group_m_G)).advantage_B_T.double() for group_m_G in calls]
    advantage_M_G_K1 = torch.cat(parts).view(*group_M_G.shape, -1)
    if not advantage_M_G_K1.isfinite().all():
        raise ValueError(f"{credit.name}: an advantage is not finite; expected finite numbers in every group")
    return advantage_M_G_K1


def expected_gradient(
    advantage_M_G_K1: torch.Tensor,
    group_M_G: torch.Tensor,
    trajectories: Trajectories,
    logits_D: torch.Tensor,
) -> torch.Tensor:
    """E[g] over groups drawn from the policy, [D].

        g = 1/G sum over rows of sum over turns of A grad log pi(turn)        (seq-mean-token-sum, unclipped, on-policy)

    Groups must be all multisets of one size (`list_groups`).
    """
    weight_M = group_probability(group_M_G, trajectories.probability_N(logits_D)) / group_M_G.shape[1]
    credited_N_K1 = torch.zeros(trajectories.choice_N_K1.shape, dtype=torch.float64)
    weighed_M_G_K1 = weight_M[:, None, None] * advantage_M_G_K1
    credited_N_K1.index_add_(0, group_M_G.flatten(), weighed_M_G_K1.flatten(0, 1))
    return torch.einsum("nk,nkd->d", credited_N_K1, trajectories.score_N_K1_D(logits_D))


def cosine(a_D: torch.Tensor, b_D: torch.Tensor) -> float | None:
    """The cosine of two gradients; None where one has no direction: undefined, not 0."""
    lengths = float(a_D.norm()), float(b_D.norm())
    if min(lengths) < NOTHING:
        return None
    return float(a_D @ b_D) / (lengths[0] * lengths[1])


def length_ratio(a_D: torch.Tensor, b_D: torch.Tensor) -> float | None:
    """|a| / |b|; None where b has no length."""
    return float(a_D.norm() / b_D.norm()) if float(b_D.norm()) >= NOTHING else None


def compare(expected_D: torch.Tensor, true_D: torch.Tensor) -> dict[str, float | None]:
    """The differences between an expected gradient and the true gradient.

        norm_ratio = |E[g]| / |grad J|        difference = min over c of |E[g]/c - grad J| = |grad J| sin(angle)

    scale is that c, |E[g]|^2 / (E[g] . grad J). Cosine, scale and difference are None where E[g] is 0 or (scale and
    difference) at a right angle to grad J; all four are None where grad J is 0.
    """
    angle, ratio = cosine(expected_D, true_D), length_ratio(expected_D, true_D)
    along = float(expected_D @ true_D)
    scale = float(expected_D @ expected_D) / along if angle is not None and abs(angle) > NOTHING else None
    difference = None if scale is None else float((expected_D / scale - true_D).norm())
    return {"cosine": angle, "norm_ratio": ratio, "scale": scale, "difference": difference}


def share_beyond(expected_D: torch.Tensor, basis_D_J: torch.Tensor) -> float | None:
    """|rest| / |E[g]|, the rest being what no sum of the basis' gradients, however weighed, gives; None where E[g] is 0."""
    length = float(expected_D.norm())
    if length < NOTHING:
        return None
    found_J_1 = torch.linalg.lstsq(basis_D_J, expected_D[:, None], driver="gelsd").solution
    return float((expected_D - (basis_D_J @ found_J_1).squeeze(1)).norm()) / length


GROUP_SIZES = tuple(range(2, 9))
STOPS = (0.1, 0.3, 0.5, 0.7)
LARGEST_OF_BATCH_SCOPE = 5


def bias_rows(
    subjects: Sequence[Credit] | None = None,
    questions: Iterable[Question] = tuple(QUESTIONS.values()),
    *,
    group_sizes: Iterable[int] = GROUP_SIZES,
    stops: Sequence[float] = STOPS,
) -> Iterator[dict[str, object]]:
    """Rows: mode, questions, stop_probability, group_size, what `compare` finds against grad E[r], and

        cosine_own            with the gradient of the mode's own objective; None: it names none
        own_error             |E[g] - that gradient| / |that gradient|
        beyond_r_and_gain     the share of E[g] that is no sum a grad E[r] + b grad E[gain]
        cosine_fewer_turns    with the gradient of -E[turns]

    Operators whose scope is the batch get one group a call, so they are left out above LARGEST_OF_BATCH_SCOPE.
    One row per question, and with several questions one for all of them together, whose gradients stand one after the other.
    """
    listed = [list_trajectories(question) for question in questions]
    parts = [[i] for i in range(len(listed))]
    if len(parts) > 1:
        parts.append(list(range(len(listed))))
    for size in group_sizes:
        for credit in all_credits() if subjects is None else subjects:
            if credit.scope == "batch" and size > LARGEST_OF_BATCH_SCOPE:
                continue
            expected = [expected_gradients(credit, trajectories, size, stops) for trajectories in listed]
            for number, stop in enumerate(stops):
                for part in parts:
                    expected_D = torch.cat([expected[i][number] for i in part])
                    yield _row(credit, [listed[i] for i in part], expected_D, stop, size)


def expected_gradients(
    credit: Credit, trajectories: Trajectories, size: int, stops: Sequence[float]
) -> list[torch.Tensor]:
    """E[g] under each stop probability.

    Advantages of an operator that reads nothing of the policy are computed once. One whose scope is the row needs no
    groups: its E[g] is the same for every size.
    """
    group_M_G = list_groups(len(trajectories.outcome_N), 1 if credit.scope == "row" else size)
    gradients, advantage_M_G_K1 = [], None
    for stop in stops:
        logits_D = trajectories.choices.logits_with_stop(stop)
        world = as_world(trajectories, logits_D)
        if credit.reads_policy or advantage_M_G_K1 is None:
            world = world if credit.reads_policy else policy_free(world)
            advantage_M_G_K1 = advantages(credit, world, group_M_G)
        gradients.append(expected_gradient(advantage_M_G_K1, group_M_G, trajectories, logits_D))
    return gradients


def _row(credit: Credit, part: list[Trajectories], expected_D: torch.Tensor, stop: float, size: int) -> dict:
    def true(objective) -> torch.Tensor:
        return torch.cat([gradient(objective, t, t.choices.logits_with_stop(stop), size) for t in part])

    reward_D, gain_D = true(reward), true(lambda expected, _: expected.gain())
    own_D = None if credit.own is None else true(credit.own)
    return {
        "mode": credit.name,
        "questions": " and ".join(t.choices.question.name for t in part),
        "stop_probability": stop,
        "group_size": size,
        **compare(expected_D, reward_D),
        "own_objective": credit.own_name,
        "cosine_own": None if own_D is None else cosine(expected_D, own_D),
        "own_error": None if own_D is None else length_ratio(expected_D - own_D, own_D),
        "beyond_r_and_gain": share_beyond(expected_D, torch.stack([reward_D, gain_D], dim=1)),
        "cosine_fewer_turns": cosine(expected_D, true(lambda expected, _: -expected.turns)),
    }
