"""verl's rollout correction in a step of each trainer: the weights, the rejected tokens, and the turn-level loss of both."""

import math

import pytest

from kit.stored_step import StoredStep
from verl_credit.credit import turn_policy_loss
from verl_credit.host.step import store
from verl_credit.host.step.async_trainers import CreditColocateAsync, CreditSeparateAsync
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.names import CLIP_SCALE, TURN_IDS

KEY = "algorithm.rollout_correction"
KINDS = {
    "credit": CreditTrainer,
    "credit_colocate_async": CreditColocateAsync,
    "credit_separate_async": CreditSeparateAsync,
}
CLIP = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}


def each_token(weight):
    """A row's log-ratios (step against writer): the weight of every token, and whether it is kept."""
    return lambda deltas: [(weight(math.exp(delta)), True) for delta in deltas]


def kept_tokens(keeps):
    return lambda deltas: [(1.0, keeps(delta)) for delta in deltas]


def kept_row(keeps):
    return lambda deltas: [(1.0, keeps(deltas))] * len(deltas)


# fmt: off
CORRECTIONS = {
    "token, truncated": (["rollout_is=token", "rollout_is_threshold=1.3"], each_token(lambda ratio: min(ratio, 1.3))),
    "token, IcePop": (
        ["rollout_is=token", "rollout_is_threshold=0.5_1.3"], each_token(lambda ratio: ratio if ratio <= 1.3 else 0.0)),
    "sequence": (
        ["rollout_is=sequence", "rollout_is_threshold=9"],
        lambda deltas: [(min(math.exp(sum(deltas)), 9.0), True)] * len(deltas)),
    "token_k1": (
        ["rollout_rs=token_k1", "rollout_rs_threshold=0.77_1.5"], kept_tokens(lambda delta: -delta >= math.log(0.77))),
    "token_k2": (["rollout_rs=token_k2", "rollout_rs_threshold=0.04"], kept_tokens(lambda delta: delta**2 / 2 <= 0.04)),
    "token_k3": (
        ["rollout_rs=token_k3", "rollout_rs_threshold=0.04"],
        kept_tokens(lambda delta: math.exp(delta) - 1 - delta <= 0.04)),
    "seq_mean_k1": (
        ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.74_1.5"],
        kept_row(lambda deltas: -sum(deltas) / len(deltas) >= math.log(0.74))),
    "seq_sum_k2": (
        ["rollout_rs=seq_sum_k2", "rollout_rs_threshold=0.33"],
        kept_row(lambda deltas: sum(delta**2 for delta in deltas) / 2 <= 0.33)),
    "seq_max_k3": (
        ["rollout_rs=seq_max_k3", "rollout_rs_threshold=0.065"],
        kept_row(lambda deltas: max(math.exp(delta) - 1 - delta for delta in deltas) <= 0.065)),
    "both": (
        ["rollout_is=token", "rollout_is_threshold=1.3", "rollout_rs=token_k2", "rollout_rs_threshold=0.04"],
        lambda deltas: [(min(math.exp(delta), 1.3), delta**2 / 2 <= 0.04) for delta in deltas]),
}
# fmt: on
OF_EACH_KIND = ("token, IcePop", "sequence", "seq_mean_k1", "both")  # the trainers do not look at which it is
PAIRS = [(mode, name) for mode in KINDS for name in CORRECTIONS if mode == "credit" or name in OF_EACH_KIND]


@pytest.fixture
def stored(tmp_path, monkeypatch):
    return StoredStep(tmp_path, monkeypatch)


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
    turn_level_loss(stored, weighed)


def same(a, b):
    return a.tolist() == b.tolist()


def turn_level_loss(stored, weighed):
    """Of the fields in the store, against the formula: a turn's ratio over its kept tokens, a weight on every token."""
    names = [TURN_IDS, CLIP_SCALE, "old_log_probs", "advantages", "response_mask"]
    names += ["rollout_is_weights"] if weighed else []
    data = store.read(stored._batch, *names)
    padded = {name: data[name].to_padded_tensor(padding=0) for name in names}
    old_B_T, mask_B_T = padded["old_log_probs"], padded["response_mask"]
    now_B_T = old_B_T + 0.03 * (1 + old_B_T * 10).sin()
    loss, _ = turn_policy_loss(
        now_B_T, old_B_T, padded["advantages"], mask_B_T, padded[TURN_IDS],
        clip_scale_B_T=padded[CLIP_SCALE], rollout_is_weights=padded.get("rollout_is_weights"), **CLIP,
    )  # fmt: skip
    losses = []
    for b, row in enumerate(mask_B_T.tolist()):
        kept = [t for t, counts in enumerate(row) if counts]
        for t in kept:
            turn = [u for u in kept if padded[TURN_IDS][b, u] == padded[TURN_IDS][b, t]]
            ratio = math.exp(sum((now_B_T - old_B_T)[b, u].item() for u in turn) / len(turn))
            scale, a = padded[CLIP_SCALE][b, t].item(), padded["advantages"][b, t].item()
            low, high = 1 - scale * CLIP["clip_ratio_low"], 1 + scale * CLIP["clip_ratio_high"]
            one = max(-a * ratio, -a * min(max(ratio, low), high))
            losses.append(one * (padded["rollout_is_weights"][b, t].item() if weighed else 1.0))
    assert loss.item() == pytest.approx(sum(losses) / len(losses), abs=1e-6)
