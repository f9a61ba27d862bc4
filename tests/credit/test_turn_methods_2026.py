"""g2po, gagpo, calibadv and trace: numbers of released code (golden/turn_methods_2026.json), and worked ones."""

import json
from pathlib import Path

import pytest
import torch

from kit.modes import batch
from verl_credit.credit import calibadv, exact_anchors, g2po, gagpo, gigpo, grpo, half_negative, rloo, trace

CASES = json.loads((Path(__file__).parents[1] / "golden" / "turn_methods_2026.json").read_text())["cases"]
EACH = [pytest.param(case, id=f"{case['method']}-{case['name']}") for case in CASES]


def turns(credit, lengths):
    return [credit.advantage_B_K1[row, :n].tolist() for row, n in enumerate(lengths)]


def close(rows, tolerance=1e-9):
    return [pytest.approx(list(row), abs=tolerance) for row in rows]


@pytest.mark.parametrize("case", EACH)
def test_released_numbers(case):
    rows = case["trajectories"]
    group = [sorted({t["prompt"] for t in rows}).index(t["prompt"]) for t in rows]
    outcomes = [t["outcome"] for t in rows]
    for expected in case["expected"]:
        options = {name: value for name, value in expected.items() if name != "released"}
        lengths = [len(row) for row in expected["released"]]
        if case["method"] == "g2po":
            given, more = batch([[0.0] * (n - 1) for n in lengths], outcomes, group)
            anchors = exact_anchors([t["anchors"] for t in rows], group)
            credit = g2po(*given, **more, anchor_B_K1=anchors, parity="released", **options)
        else:
            given, more = batch([t["q"] for t in rows], outcomes, group)
            width = given[1].shape[1] + 1
            tokens = torch.tensor([t["tokens"] + [0] * (width - len(t["tokens"])) for t in rows])
            credit = calibadv(*given, **more, turn_tokens_B_K1=tokens, **options)
        found = turns(credit, lengths)
        if options.get("zero_if_all_found"):
            found = [cut_before_a_zero(row) for row in found]
        assert found == close(expected["released"], 1e-4), options


def cut_before_a_zero(row):
    """As released: a tool turn that was set to 0 is an integer tensor, and so become those before it."""
    zeros = [k for k, advantage in enumerate(row[:-1]) if advantage == 0 and row[-1] > 0]
    return [float(int(a)) if zeros and k < zeros[-1] else a for k, a in enumerate(row)]


def test_g2po_worked():
    """Outcomes 1 and 0 by the states 0, 1 and 0, 2, gamma 1/2: V_0 = 1/8, V_1 = 1/2, V_2 = 0.

    From state 0 to V 1/2 and 0, whose mean is 1/4. Gains 3/8 and -1/8, then 1/2 and 0: their mean is 3/16.
    """
    given, more = batch([[None], [None]], [1.0, 0.0])
    anchors = torch.tensor([[0, 1], [0, 2]])
    credit = g2po(*given, **more, anchor_B_K1=anchors, gamma=0.5)
    expected = (0.5 + 0.25 + 3 / 16, 0.5 + 5 / 16), (-0.5 - 0.25 - 5 / 16, -0.5 - 3 / 16)
    assert turns(credit, (2, 2)) == close(expected)
    without = g2po(*given, **more, anchor_B_K1=anchors, step_weight=0.0)
    plain = grpo(given[0], given[-1], norm_by_std=False)
    assert torch.equal(without.advantage_B_K1, plain[:, None].expand(2, 2))


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gagpo_worked(lam):
    """V_0 = 1/2 and the last states are alone, with V 1 and 0: the first turn has all of the difference at any lam."""
    given, more = batch([[0.0], [0.0]], [1.0, 0.0])
    credit = gagpo(*given, **more, anchor_B_K1=torch.tensor([[0, 1], [0, 2]]), lam=lam, norm="mean_norm")
    assert turns(credit, (2, 2)) == close(((0.5, 0.0), (-0.5, 0.0)))
    met = torch.tensor(
        [[0, 1], [0, 1]]
    )  # where both come to one state, the answers have it, and lam hands it back
    credit = gagpo(*given, **more, anchor_B_K1=met, lam=lam, norm="mean_norm")
    assert turns(credit, (2, 2)) == close(((0.5 * lam, 0.5), (-0.5 * lam, -0.5)))
    scaled = gagpo(*given, **more, anchor_B_K1=met, lam=lam)
    std = (2 * (0.25 + (0.5 * lam) ** 2) / 3) ** 0.5
    assert scaled.advantage_B_K1[0].tolist() == pytest.approx([0.5 * lam / std, 0.5 / std], rel=1e-5)


def test_gagpo_at_lam_1_is_the_second_term_of_gigpo():
    given, more = batch([[0.1], [0.3, -0.2], []], [1.0, 0.0, 0.5])
    options = {**more, "anchor_B_K1": torch.tensor([[0, 1, -1], [0, 1, 2], [0, -1, -1]]), "gamma": 0.9}
    steps = gigpo(*given, **options).advantage_B_K1 - gigpo(*given, **options, step_weight=0.0).advantage_B_K1
    ours = gagpo(*given, **options, lam=1.0, norm="mean_norm").advantage_B_K1
    own = torch.arange(3) <= more["n_tool_turns_B"][:, None]
    assert torch.allclose(ours[own], steps[own], atol=1e-12) and steps.any()


FAILED = [[0.0, 0.25, 1.0, 2.0, -1.0, None, float("nan")], []]


@pytest.mark.parametrize(
    "options, left", [({}, (1, 0.75, 0, 0, 1, 1, 1)), ({"upper_limit": True}, (1, 0.5, -1, -1, 1, 1, 1))]
)
def test_calibadv_takes_from_a_failure_what_its_turns_found(options, left):
    """R = +-1 by rloo; q = 0, 1/4, 1, 1, 0, and 0 where the reward is missing or lost."""
    given, more = batch(FAILED, [0.0, 1.0])
    credit = calibadv(*given, **more, outcome_operator=rloo, **options)
    assert turns(credit, (8, 1)) == close(([-share for share in (*left, 1)], [1.0]))


def test_calibadv_with_equal_evidence_is_half_negative_before_the_answer():
    given, more = batch([[0.2], [0.2], [0.2]], [1.0, 0.0, 0.0])
    credit = calibadv(*given, **more, evidence="sigmoid")
    assert torch.allclose(credit.advantage_B_K[:, 0], half_negative(given[0], given[-1]))
    assert torch.allclose(credit.outcome_advantage_B, grpo(given[0], given[-1]))


def test_calibadv_gives_nothing_for_what_every_trajectory_found_and_balances_answers_by_their_tokens():
    """R = 1/2, 1/2, -1 by rloo. The answers have 1, 3 and 1 tokens: 2 above 0, 1 below."""
    given, more = batch([[1.0, 1.0], [1.0, 0.5], [1.0]], [1.0, 1.0, 0.0])
    tokens = torch.tensor([[5, 5, 1], [5, 5, 3], [5, 1, 0]])
    options = {**more, "turn_tokens_B_K1": tokens, "outcome_operator": rloo, "zero_if_all_found": True}
    credit = calibadv(*given, **options, balance="answers")
    assert turns(credit, (3, 3, 2)) == close(((0, 0.5, 0.25), (0, 0.5, 0.25), (0, -1)))
    with pytest.raises(ValueError, match="balance='answers' needs turn_tokens_B_K1, which is not given"):
        calibadv(*given, **more, balance="answers")
    with pytest.raises(ValueError, match="zero_if_all_found=True with evidence='sigmoid': q is below 1"):
        calibadv(*given, **options, evidence="sigmoid")


def test_trace_worked():
    """Outcomes 1 and 0: A_out is 1 and -1. Four tool turns, H 2, g 1/2: means over (1, 1/2) / 1.5, alone at the last one.

    The horizon reaches the end from the third turn on: 2 (1/4) A_out there and 2 (1/2) A_out in the fourth.
    """
    given, more = batch([[0.3, 0.6, 0.0, 0.9], []], [1.0, 0.0])
    options = {"horizon": 2, "horizon_gamma": 0.5, "turn_weight": 0.5, "eps": 1e-12}
    r = (0.6 / 1.5, 0.6 / 1.5, 0.45 / 1.5 + 0.5, 0.9 + 1.0)
    credit = trace(*given, **more, **options)
    assert turns(credit, (5, 1)) == close(([1 + each / 2 for each in r] + [1.0], (-1.0,)))
    twice = trace(*given, **more, **options, outcome_weight=2.0, end_bonus=0.0)
    plain = (0.4, 0.4, 0.3, 0.9)
    assert turns(twice, (5, 1)) == close(([2 + each / 2 for each in plain] + [2.0], (-2.0,)))


def test_trace_leaves_a_missing_reward_out_of_its_means_and_gives_nothing_where_none_is_known():
    """H 2, g 1: means over what is known; the last two turns know nothing, and have no end's part either."""
    given, more = batch([[None, 0.4, float("nan"), None], []], [1.0, 0.0])
    credit = trace(*given, **more, horizon=2, horizon_gamma=1.0, turn_weight=1.0, eps=1e-12)
    assert turns(credit, (5, 1)) == close(((1.4, 1.4, 1.0, 1.0, 1.0), (-1.0,)))
    near = trace(*given, **more, horizon=1, horizon_gamma=0.0, turn_weight=1.0, eps=1e-12)
    assert turns(near, (5, 1)) == close(((1.0, 1.4, 1.0, 1.0, 1.0), (-1.0,)))
