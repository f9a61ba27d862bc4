"""gagpo: worked numbers, gigpo's second term at lam 1, and the laws."""

import pytest
import torch

from kit.modes import batch
from kit.turn_lists import close, turns
from verl_credit.credit import gigpo
from verl_credit.credit.laws import check, own_subject
from verl_credit.credit.plugins import find_turn_mode

GAGPO = find_turn_mode("gagpo")


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_the_first_turn_has_all_of_the_difference_unless_the_paths_meet(lam):
    """V_0 = 1/2 and the last states are alone, with V 1 and 0: the first turn has all of the difference at any lam."""
    given, more = batch([[0.0], [0.0]], [1.0, 0.0])
    credit = GAGPO(*given, **more, anchor_B_K1=torch.tensor([[0, 1], [0, 2]]), lam=lam, norm="mean_norm")
    assert turns(credit, (2, 2)) == close(((0.5, 0.0), (-0.5, 0.0)))
    met = torch.tensor(
        [[0, 1], [0, 1]]
    )  # where both come to one state, the answers have it, and lam hands it back
    credit = GAGPO(*given, **more, anchor_B_K1=met, lam=lam, norm="mean_norm")
    assert turns(credit, (2, 2)) == close(((0.5 * lam, 0.5), (-0.5 * lam, -0.5)))
    scaled = GAGPO(*given, **more, anchor_B_K1=met, lam=lam)
    std = (2 * (0.25 + (0.5 * lam) ** 2) / 3) ** 0.5
    assert scaled.advantage_B_K1[0].tolist() == pytest.approx([0.5 * lam / std, 0.5 / std], rel=1e-5)


def test_gagpo_at_lam_1_is_the_second_term_of_gigpo():
    given, more = batch([[0.1], [0.3, -0.2], []], [1.0, 0.0, 0.5])
    options = {**more, "anchor_B_K1": torch.tensor([[0, 1, -1], [0, -1, 2], [0, -1, -1]]), "gamma": 0.9}
    steps = gigpo(*given, **options).advantage_B_K1 - gigpo(*given, **options, step_weight=0.0).advantage_B_K1
    ours = GAGPO(*given, **options, lam=1.0, norm="mean_norm").advantage_B_K1
    own = torch.arange(3) <= more["n_tool_turns_B"][:, None]
    assert torch.allclose(ours[own], steps[own], atol=1e-12) and steps.any()


@pytest.mark.slow
def test_the_laws_hold_and_an_option_of_the_std_is_refused_without_one():
    findings = check(own_subject(GAGPO.function, "gagpo", kind="turn"), seeds=range(2))
    assert not [finding.name for finding in findings if finding.wrong]
    given, more = batch([[0.1]], [1.0])
    with pytest.raises(ValueError, match="eps=0.1 with norm='mean_norm'"):
        GAGPO(*given, **more, anchor_B_K1=torch.tensor([[0, 1]]), norm="mean_norm", eps=0.1)
