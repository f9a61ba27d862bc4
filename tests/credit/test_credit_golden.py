"""The released code's numbers (tests/golden) and the worked example of the same algebra."""

import json
from pathlib import Path

import pytest
import torch

from kit.modes import read_by
from verl_credit.credit import turn_credit, turn_policy_loss

GOLDEN = Path(__file__).parents[1] / "golden"
ADVANTAGES = json.loads((GOLDEN / "a2tgpo_advantages.json").read_text())["cases"]
LOSSES = json.loads((GOLDEN / "turn_policy_loss.json").read_text())["cases"]


def tables(trajectories):
    """(outcome_B, info_gain_B_K, turn_mask_B_K, group_B) of trajectories with ragged gains."""
    width = max(len(t["ig"]) for t in trajectories)
    prompts = sorted({t["prompt"] for t in trajectories})
    padded = [t["ig"] + [0.0] * (width - len(t["ig"])) for t in trajectories]
    gain = torch.tensor(padded).view(len(trajectories), width)
    lengths = torch.tensor([len(t["ig"]) for t in trajectories])
    mask = torch.arange(width) < lengths[:, None]
    outcome = torch.tensor([t["outcome"] for t in trajectories])
    return outcome, gain, mask, torch.tensor([prompts.index(t["prompt"]) for t in trajectories])


MODES = sorted({expected["info_gain_norm_mode"] for case in ADVANTAGES for expected in case["expected"]})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ADVANTAGES, ids=lambda case: case["name"])
def test_released_advantages(case, mode):
    """With every gamma, norm_by_std and alpha of the file."""
    tolerance = 1e-3 if (case["name"], mode) == ("outcomes_tied", "turn-group") else 1e-5
    inputs = tables(case["trajectories"])
    asked = [expected for expected in case["expected"] if expected["info_gain_norm_mode"] == mode]
    assert asked
    for expected in asked:
        options = {key: expected[key] for key in ("gamma", "norm_by_std", "alpha")}
        credit = turn_credit(*inputs, **read_by(mode, **options))
        for row, want in enumerate(expected["advantage"]):
            got = credit.advantage_B_K1[row, : len(want)].tolist()
            assert got == pytest.approx(want, abs=tolerance), options
        for row, want in enumerate(expected.get("clip_scale", [])):
            got = credit.clip_scale_B_K1[row, : len(want)].tolist()
            assert got == pytest.approx(want, abs=1e-5), options


def loss_of(case):
    names = ("old_log_prob", "log_prob", "advantages", "response_mask")
    tensors = {name: torch.tensor(case[name]) for name in names}
    log_prob = tensors["log_prob"].requires_grad_()
    scale = None if case["clip_scale"] is None else torch.tensor(case["clip_scale"])
    loss, metrics = turn_policy_loss(
        log_prob,
        tensors["old_log_prob"],
        tensors["advantages"],
        tensors["response_mask"],
        torch.tensor(case["turn_ids"]),
        clip_ratio_low=case["clip_ratio_low"],
        clip_ratio_high=case["clip_ratio_high"],
        clip_scale_B_T=scale,
        ratio_level="turn",
        loss_agg_mode=case["loss_agg_mode"],
    )
    loss.backward()
    return loss, metrics, log_prob.grad


@pytest.mark.parametrize("case", LOSSES, ids=range(len(LOSSES)))
def test_released_turn_loss(case):
    loss, metrics, gradient = loss_of(case)
    expected = case["expected"]
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert metrics["pg_clipfrac"].item() == pytest.approx(expected["clipfrac"], abs=1e-6)
    assert metrics["ppo_kl"].item() == pytest.approx(expected["ppo_kl"], abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(expected["grad_log_prob"]), rtol=0, atol=1e-6)
