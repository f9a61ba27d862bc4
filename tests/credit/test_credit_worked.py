"""Worked numbers of three trajectories of one prompt: gains (.4, .2), (-.1, .1), (.3); outcomes 1, 0, 1."""

import pytest
import torch

from verl_credit.credit import MODES, spread, turn_credit, turn_policy_loss

GAIN = torch.tensor([[0.4, 0.2], [-0.1, 0.1], [0.3, 0.0]])
MASK = torch.tensor([[True, True], [True, True], [True, False]])
OUTCOME = torch.tensor([1.0, 0.0, 1.0])
PROMPT = torch.tensor([4, 4, 4])
NEAR = {"abs": 6e-5}  # the numbers are given to four decimals


def credit(mode, outcome=OUTCOME, gain=GAIN, **options):
    rows = len(outcome)
    return turn_credit(outcome, gain[:rows], MASK[:rows], PROMPT[:rows], info_gain_norm_mode=mode, **options)


WORKED = {
    ("joint", 1.0): [[1.2920, 1.1975, 1.6071], [-2.7416, -1.5756, -0.9139], [1.4496, 1.6071]],
    ("separate", 1.0): [[2.1021, 0.8234, 0.7071], [-3.5067, -1.8792, -1.4142], [1.4046, 0.7071]],
    ("turn-group", 1.0): [[2.1064, 2.0607, 0.7071], [-3.4687, -3.1213, -1.4142], [1.3624, 0.7071]],
    ("turn-group-v1d", 1.0): [[1.1156, 1.0071, 0.7071], [-1.9209, -1.7142, -1.4142], [0.8460, 0.7071]],
    ("joint", 0.5): [[0.2915, 0.3939, 1.6071]],
    ("separate", 0.5): [[1.5136, 0.4698, 0.7071]],
    ("turn-group", 0.5): [[2.0512, 2.0607, 0.7071]],
    ("turn-group-v1d", 0.5): [[1.0096, 1.0071, 0.7071]],
}


@pytest.mark.parametrize(("mode", "gamma"), WORKED)
def test_worked_example(mode, gamma):
    got = credit(mode, gamma=gamma).advantage_B_K1
    for row, want in enumerate(WORKED[mode, gamma]):
        assert got[row, : len(want)].tolist() == pytest.approx(want, **NEAR)


TIED_GAIN = [[0.28], [0.04], [0.28], [0.04]]  # mean .16, std .12


@pytest.mark.parametrize("solved, answer", [(1.0, 0.98), (0.0, -0.69)])
def test_joint_compares_tied_outcomes_with_the_gains_and_says_so(solved, answer):
    """With one gain a row, z of d = |outcome - mean gain| is 1 / sqrt(1 + 2 (std / d)^2)."""
    gain_B_K = torch.tensor(TIED_GAIN, dtype=torch.float64)
    tied_B, group_B = torch.full((4,), solved, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    ours = MODES["joint"](tied_B, gain_B_K, gain_B_K > 0, group_B)
    exact = (1 + 2 * (0.12 / abs(solved - 0.16)) ** 2) ** -0.5 * (1 if solved else -1)
    assert ours.outcome_advantage_B.tolist() == pytest.approx([exact] * 4, rel=1e-4)
    assert exact == pytest.approx(answer, abs=0.005)
    assert f"{answer:+.2f}".replace("0.", ".") in MODES["joint"].bias


@pytest.mark.parametrize("mode", ["separate", "turn-group"])
def test_where_a_prompt_ties_the_gains_act_alone_and_the_mode_says_so(mode):
    """Prompt 0 ties, prompt 1 does not; then both do."""
    gain_B_K = torch.tensor(TIED_GAIN * 2, dtype=torch.float64)
    outcome_B = torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 1], dtype=torch.float64)
    group_B = torch.arange(8) // 4
    ours = MODES[mode](outcome_B, gain_B_K, gain_B_K > 0, group_B)
    assert ours.outcome_advantage_B[:4].tolist() == [0.0] * 4
    assert ours.advantage_B_K[:4, 0].tolist() == pytest.approx([1, -1, 1, -1], rel=1e-3)
    assert "the gains' order acts alone, at full size" in MODES[mode].bias
    all_tied = MODES[mode](torch.ones(8).double(), gain_B_K, gain_B_K > 0, group_B)
    size = 0.01 if mode == "turn-group" else 1
    assert all_tied.advantage_B_K[:4, 0].tolist() == pytest.approx([size, -size, size, -size], rel=0.02)


def test_turn_loss_keeps_turns_of_equal_advantage_apart():
    """Two turns, log-ratio +.1 and -.1. Merged (as runs of equal advantage would be) the ratio is 1."""
    log_prob = torch.tensor([[0.1, 0.1, 0.1, -0.1, -0.1, -0.1]])
    arguments = {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3}
    ones = torch.ones(1, 6)
    two_turns = torch.tensor([[0, 0, 0, 1, 1, 1]])
    loss, metrics = turn_policy_loss(log_prob, 0 * ones, ones, ones, two_turns, **arguments)
    assert (loss.item(), metrics["pg_clipfrac"].item()) == (pytest.approx(-0.9544, **NEAR), 0.5)
    loss, metrics = turn_policy_loss(log_prob, 0 * ones, ones, ones, 0 * two_turns, **arguments)
    assert (loss.item(), metrics["pg_clipfrac"].item()) == (pytest.approx(-1.0), 0.0)

    scale = spread(torch.tensor([[1.3, 0.7]]), two_turns, ones)
    advantage = spread(torch.tensor([[1.0, 1.0001]]), two_turns, ones)
    loss, _ = turn_policy_loss(log_prob, 0 * ones, advantage, ones, two_turns, **arguments)
    assert loss.item() == pytest.approx(-0.9545, **NEAR)
    loss, metrics = turn_policy_loss(
        log_prob, 0 * ones, advantage, ones, two_turns, clip_scale_B_T=scale, **arguments
    )
    assert loss.item() == pytest.approx(-0.9551, **NEAR)
    assert metrics["clip_scale_mean"].item() == pytest.approx(1.0)
    assert metrics["clip_scale_std"].item() == pytest.approx(0.3)
    wide = spread(torch.tensor([[2.0, 1.0]]), two_turns, ones)
    _, metrics = turn_policy_loss(
        log_prob, 0 * ones, advantage, ones, two_turns, clip_scale_B_T=wide, **arguments
    )
    assert metrics["clip_scale_mean"].item() == pytest.approx(1.5)
    assert metrics["clip_scale_std"].item() == pytest.approx(0.5)
