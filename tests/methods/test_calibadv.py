"""calibadv: numbers of released code (golden/turn_methods_2026.json), worked ones, and the laws."""

import json
from pathlib import Path

import pytest
import torch

from kit.modes import batch
from kit.turn_lists import close, turns
from verl_credit.credit import grpo, half_negative, rloo
from verl_credit.credit.laws import check, own_subject
from verl_credit.credit.plugins import find_turn_mode

CALIBADV = find_turn_mode("calibadv")
CASES = json.loads((Path(__file__).parents[1] / "golden" / "turn_methods_2026.json").read_text())["cases"]
EACH = [pytest.param(case, id=case["name"]) for case in CASES if case["method"] == "calibadv"]


@pytest.mark.parametrize("case", EACH)
def test_released_numbers(case):
    rows = case["trajectories"]
    group = [sorted({t["prompt"] for t in rows}).index(t["prompt"]) for t in rows]
    for expected in case["expected"]:
        options = {name: value for name, value in expected.items() if name != "released"}
        given, more = batch([t["q"] for t in rows], [t["outcome"] for t in rows], group)
        width = given[1].shape[1] + 1
        tokens = torch.tensor([t["tokens"] + [0] * (width - len(t["tokens"])) for t in rows])
        credit = CALIBADV(*given, **more, turn_tokens_B_K1=tokens, **options)
        found = turns(credit, [len(row) for row in expected["released"]])
        if options.get("zero_if_all_found"):
            found = [cut_before_a_zero(row) for row in found]
        assert found == close(expected["released"], 1e-4), options


def cut_before_a_zero(row):
    """As released: a tool turn that was set to 0 is an integer tensor, and so become those before it."""
    zeros = [k for k, advantage in enumerate(row[:-1]) if advantage == 0 and row[-1] > 0]
    return [float(int(a)) if zeros and k < zeros[-1] else a for k, a in enumerate(row)]


FAILED = [[0.0, 0.25, 1.0, 2.0, -1.0, None, float("nan")], []]


@pytest.mark.parametrize(
    "options, left", [({}, (1, 0.75, 0, 0, 1, 1, 1)), ({"upper_limit": True}, (1, 0.5, -1, -1, 1, 1, 1))]
)
def test_calibadv_takes_from_a_failure_what_its_turns_found(options, left):
    """R = +-1 by rloo; q = 0, 1/4, 1, 1, 0, and 0 where the reward is missing or lost."""
    given, more = batch(FAILED, [0.0, 1.0])
    credit = CALIBADV(*given, **more, outcome_operator=rloo, **options)
    assert turns(credit, (8, 1)) == close(([-share for share in (*left, 1)], [1.0]))


def test_calibadv_with_equal_evidence_is_half_negative_before_the_answer():
    given, more = batch([[0.2], [0.2], [0.2]], [1.0, 0.0, 0.0])
    credit = CALIBADV(*given, **more, evidence="sigmoid")
    assert torch.allclose(credit.advantage_B_K[:, 0], half_negative(given[0], given[-1]))
    assert torch.allclose(credit.outcome_advantage_B, grpo(given[0], given[-1]))


def test_calibadv_gives_nothing_for_what_every_trajectory_found_and_balances_answers_by_their_tokens():
    """R = 1/2, 1/2, -1 by rloo. The answers have 1, 3 and 1 tokens: 2 above 0, 1 below."""
    given, more = batch([[1.0, 1.0], [1.0, 0.5], [1.0]], [1.0, 1.0, 0.0])
    tokens = torch.tensor([[5, 5, 1], [5, 5, 3], [5, 1, 0]])
    options = {**more, "turn_tokens_B_K1": tokens, "outcome_operator": rloo, "zero_if_all_found": True}
    credit = CALIBADV(*given, **options, balance="answers")
    assert turns(credit, (3, 3, 2)) == close(((0, 0.5, 0.25), (0, 0.5, 0.25), (0, -1)))
    with pytest.raises(ValueError, match="balance='answers' needs turn_tokens_B_K1, which is not given"):
        CALIBADV(*given, **more, balance="answers")
    with pytest.raises(ValueError, match="zero_if_all_found=True with evidence='sigmoid': q is below 1"):
        CALIBADV(*given, **options, evidence="sigmoid")


def test_a_turn_without_a_reward_has_not_found_all():
    given, more = batch([[1.0, 1.0], [None, 1.0], [1.0]], [1.0, 1.0, 0.0])
    credit = CALIBADV(*given, **more, outcome_operator=rloo, zero_if_all_found=True)
    assert turns(credit, (3, 3, 2)) == close(((0.5, 0, 0.5), (0.5, 0, 0.5), (0, -1)))


@pytest.mark.slow
def test_the_laws_hold():
    findings = check(own_subject(CALIBADV.function, "calibadv", kind="turn"), seeds=range(2))
    assert not [finding.name for finding in findings if finding.wrong]
