"""verl's rollout correction in a step of each trainer: weights, rejected tokens, bypass mode, and the loss of each."""

import math

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from kit.stored_step import StoredStep
from verl_credit.host.actor.policy_loss import TurnPolicyLossConfig, credit_ppo_loss
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.host.step import store
from verl_credit.host.step.async_trainers import CreditColocateAsync, CreditSeparateAsync
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.names import CLIP_SCALE, LOSS_MODE, TURN_IDS

KEY = "algorithm.rollout_correction"
KINDS = {
    "credit": CreditTrainer,
    "credit_colocate_async": CreditColocateAsync,
    "credit_separate_async": CreditSeparateAsync,
}
CLIP = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}


CORRECTIONS = {  # the trainers do not look at which it is
    "token, IcePop": (
        ["rollout_is=token", "rollout_is_threshold=0.5_1.3"],
        lambda deltas: [(ratio if (ratio := math.exp(delta)) <= 1.3 else 0.0, True) for delta in deltas],
    ),
    "sequence": (
        ["rollout_is=sequence", "rollout_is_threshold=9"],
        lambda deltas: [(min(math.exp(sum(deltas)), 9.0), True)] * len(deltas),
    ),
    "seq_mean_k1": (
        ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.74_1.5"],
        lambda deltas: [(1.0, -sum(deltas) / len(deltas) >= math.log(0.74))] * len(deltas),
    ),
    "both": (
        ["rollout_is=token", "rollout_is_threshold=1.3", "rollout_rs=token_k2", "rollout_rs_threshold=0.04"],
        lambda deltas: [(min(math.exp(delta), 1.3), delta**2 / 2 <= 0.04) for delta in deltas],
    ),
}
"""Keys, and from a row's log-ratios (step against writer) each token's weight and whether it is kept."""
PAIRS = [
    pytest.param(mode, name, marks=() if mode == "credit" else pytest.mark.slow)
    for mode in KINDS
    for name in CORRECTIONS
]


@pytest.fixture
def stored(tmp_path, monkeypatch):
    return StoredStep(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mode, name", PAIRS)
def test_a_correction_reaches_the_turn_level_loss_and_nothing_else_changes(stored, mode, name):
    overrides, corrected = CORRECTIONS[name]
    _, plain = stored.make(KINDS[mode], f"trainer.v1.trainer_mode={mode}")
    ids, advantages, written_mask = plain(TURN_IDS), plain("advantages"), plain("response_mask")
    metrics, field = stored.make(
        KINDS[mode], f"trainer.v1.trainer_mode={mode}", *(f"{KEY}.{override}" for override in overrides)
    )
    old, written, mask = field("old_log_probs"), field("rollout_log_probs"), field("response_mask")
    weighed = any("rollout_is=" in override for override in overrides)
    weights = field("rollout_is_weights") if weighed else None
    dropped = 0
    for row in range(len(ids)):
        places = [t for t, turn in enumerate(ids[row].tolist()) if turn >= 0 and written_mask[row][t]]
        expected = corrected([(old[row][t] - written[row][t]).item() for t in places]) if places else []
        for t, (weight, kept) in zip(places, expected, strict=True):
            assert bool(mask[row][t]) == kept, (row, t)
            assert field("advantages")[row][t] == (advantages[row][t] if kept else 0.0)
            if weighed:
                assert weights[row][t].item() == pytest.approx(weight, rel=1e-5)
            dropped += not kept
    assert all(same(a, b) for a, b in zip(field(TURN_IDS), ids, strict=True))
    assert any(name.startswith("rollout_corr/") for name in metrics)
    if "rollout_rs" in "".join(overrides):
        assert dropped and any(row.any() for row in mask)  # some, and not all
    stored.weighed = ["rollout_is_weights"] if weighed else []
    turn_level_loss(stored)


def same(a, b):
    return a.tolist() == b.tolist()


def turn_level_loss(stored):
    """Of the fields in the store, against the formula: a turn's ratio over its kept tokens, a weight on every token.

    In verl's mean a rejected token counts as 0: its engine divides by loss_mask, and its trainer rewrites response_mask.
    """
    loss, padded, now_B_T = loss_of(stored, credit_ppo_loss, TurnPolicyLossConfig(loss_mode=LOSS_MODE))
    ids_B_T, old_B_T = padded[TURN_IDS], padded["old_log_probs"]
    weight_B_T = padded.get("rollout_is_weights", torch.ones_like(old_B_T))
    losses = []
    for b, row in enumerate(padded["response_mask"].tolist()):
        kept = [t for t, counts in enumerate(row) if counts]
        for t in kept:
            turn = [u for u in kept if ids_B_T[b, u] == ids_B_T[b, t]]
            ratio = math.exp(sum((now_B_T - old_B_T)[b, u].item() for u in turn) / len(turn))
            losses.append(
                weight_B_T[b, t].item() * clipped(ratio, padded, b, t, padded[CLIP_SCALE][b, t].item())
            )
    assert loss == pytest.approx(sum(losses) / padded["loss_mask"].sum().item(), abs=1e-6)


def loss_of(stored, loss, policy_loss):
    """(Its value of all rows, as verl's engine calls it; what it was given; log-probs that are others than any in it)"""
    names = [
        TURN_IDS,
        CLIP_SCALE,
        "old_log_probs",
        "advantages",
        "response_mask",
        "loss_mask",
        "prompts",
        "responses",
    ]
    data = store.read(stored._batch, *names, *stored.weighed)
    padded = {name: data[name].to_padded_tensor(padding=0) for name in (*names, *stored.weighed)}
    old = [row.float() for row in data["old_log_probs"].unbind()]
    now = [row + 0.03 * (1 + row * 10).sin() for row in old]
    around = [
        torch.cat([torch.zeros(len(prompt) - 1), row, torch.zeros(1)])
        for prompt, row in zip(data["prompts"].unbind(), now, strict=True)
    ]
    tu.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=data["loss_mask"].sum().item(), global_batch_size=len(now)
    )
    config = ActorConfig(
        strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, **CLIP
    )
    value, _ = loss(config, {"log_probs": nested(around)}, data)
    return value.item(), padded, nested(now).to_padded_tensor(padding=0)


def clipped(ratio, padded, b, t, scale=1.0):
    a = padded["advantages"][b, t].item()
    low, high = 1 - scale * CLIP["clip_ratio_low"], 1 + scale * CLIP["clip_ratio_high"]
    return max(-a * ratio, -a * min(max(ratio, low), high))


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTIONS)
def test_at_token_level_a_corrected_loss_is_verls_own_its_mean_too(stored, name):
    stored.make(CreditTrainer, *(f"{KEY}.{override}" for override in CORRECTIONS[name][0]))
    stored.weighed = ["rollout_is_weights"] if "rollout_is=" in "".join(CORRECTIONS[name][0]) else []
    ours = TurnPolicyLossConfig(loss_mode=LOSS_MODE, ratio_level="token", dynamic_clip=False)
    verls = PolicyLossConfig(loss_mode="vanilla")
    expected, *_ = loss_of(stored, ppo_loss, verls)
    assert loss_of(stored, credit_ppo_loss, ours)[0] == pytest.approx(expected, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_are_1_in_the_mean(stored, level):
    overrides = (f"{KEY}.rollout_is={level}", f"{KEY}.rollout_is_threshold=1.3")
    _, field = stored.make(CreditTrainer, *overrides)
    weights, mask = field("rollout_is_weights"), [row.bool() for row in field("response_mask")]
    counted = [row[on] for row, on in zip(weights, mask, strict=True) if on.any()]
    mean = (
        torch.cat(counted).mean() if level == "token" else torch.stack([row.mean() for row in counted]).mean()
    )
    _, field = stored.make(CreditTrainer, *overrides, f"{KEY}.rollout_is_batch_normalize=true")
    for row, before in zip(field("rollout_is_weights"), weights, strict=True):
        torch.testing.assert_close(row, before / mean)
    assert abs(mean.item() - 1) > 0.01
    stored.weighed = ["rollout_is_weights"]
    turn_level_loss(stored)


@pytest.mark.parametrize("mode", KINDS)
def test_bypass_mode_compares_turns_with_the_engines_log_probs_without_a_forward(stored, mode):
    _, field = stored.make(
        KINDS[mode],
        f"trainer.v1.trainer_mode={mode}",
        f"{KEY}.bypass_mode=true",
        "algorithm.info_gain_scorer=rows",
    )
    assert not stored.workers.asked
    assert all(same(a, b) for a, b in zip(field("old_log_probs"), field("rollout_log_probs"), strict=True))
    turn_level_loss(stored)
