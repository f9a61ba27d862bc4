"""The exact bias of every operator: for each set of questions, stop probability and group size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from verl_credit.study.fidelity.exact.expectation import advantages, as_world, expected_gradient, list_groups
from verl_credit.study.fidelity.exact.objectives import fewer_turns, gain, gradient, reward
from verl_credit.study.fidelity.exact.operators import Credit, all_credits, policy_free
from verl_credit.study.fidelity.exact.question import QUESTIONS, Question
from verl_credit.study.fidelity.exact.trajectories import Trajectories, list_trajectories

NOTHING = 1e-12  # a shorter gradient is rounding, and has no direction


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
    """Plain rows: mode, questions, stop_probability, group_size, what `compare` finds against grad E[r], and

        cosine_own            with the gradient of the mode's own objective; None: it names none
        own_error             |E[g] - that gradient| / |that gradient|
        beyond_r_and_gain     the share of E[g] that is no sum a grad E[r] + b grad E[gain]
        cosine_fewer_turns    with the gradient of -E[turns]

    Operators whose scope is the batch get one group a call, so they are left out above LARGEST_OF_BATCH_SCOPE.
    One row per question, and with several questions one for all of them together: each has logits of its own, so the
    gradients stand one after the other, and an operator that weighs questions differently turns their sum.
    """
    subjects, listed = (
        all_credits() if subjects is None else subjects,
        [list_trajectories(q) for q in questions],
    )
    for size in group_sizes:
        for credit in subjects:
            if credit.scope == "batch" and size > LARGEST_OF_BATCH_SCOPE:
                continue
            expected = [expected_gradients(credit, trajectories, size, stops) for trajectories in listed]
            for number, stop in enumerate(stops):
                of_question = [gradients[number] for gradients in expected]
                parts = [[i] for i in range(len(listed))]
                for part in parts if len(parts) == 1 else [*parts, list(range(len(listed)))]:
                    yield _row(credit, [listed[i] for i in part], [of_question[i] for i in part], stop, size)


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


def _row(credit: Credit, part: list[Trajectories], expected: list[torch.Tensor], stop: float, size: int):
    def true(objective) -> torch.Tensor:
        return torch.cat([gradient(objective, t, t.choices.logits_with_stop(stop), size) for t in part])

    expected_D = torch.cat(expected)
    own_D = None if credit.own is None else true(credit.own)
    return {
        "mode": credit.name,
        "questions": " and ".join(t.choices.question.name for t in part),
        "stop_probability": stop,
        "group_size": size,
        **compare(expected_D, true(reward)),
        "own_objective": credit.own_name,
        "cosine_own": None if own_D is None else cosine(expected_D, own_D),
        "own_error": None if own_D is None else length_ratio(expected_D - own_D, own_D),
        "beyond_r_and_gain": share_beyond(expected_D, torch.stack([true(reward), true(gain)], dim=1)),
        "cosine_fewer_turns": cosine(expected_D, true(fewer_turns)),
    }
