"""The registered estimator with a token level behind it: turns stay turns, observations get nothing."""

from dataclasses import replace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.modes import NO_TABLES
from kit.turn_rows import Row, estimate, lost_row, step_inputs, turn_batch
from verl_credit.config.keys import CANONICAL
from verl_credit.credit import gtpo_weights
from verl_credit.credit.token.uncertainty import uncertainty
from verl_credit.errors import IntegrityError
from verl_credit.turns.step.token_stage import TokenInputs

PLANS, CALLS = "let me check call", "call it"
BATCH = [
    Row((PLANS, "page", CALLS, "other page", "done")),
    Row((CALLS, "page", "what if we stop")),
    Row(("done at once",)),
    Row((CALLS, "page", CALLS, "page", "done")),
    lost_row("connect"),
    Row((CALLS, "a longer page", "the key is here")),
    Row((PLANS, "page", "yes")),
]
GROUPS = ["a", "a", "a", "b", "b", "b", "b"]
GAINS = [[0.4, 0.2], [-0.1], [], [0.3, -0.1], [], [0.05], [0.6]]
OUTCOMES = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
SEPA = {"steps": 100, "delay_steps": 0, "correct_rate_gate": 0.0}  # lambda = step / 100

each_mode = pytest.mark.parametrize("mode", NO_TABLES)


def ramp(context):
    """An algorithm: the reward times a token's place."""
    return [
        [reward * (t + 1) for t in range(len(row))]
        for reward, row in zip(context.rewards_G, context.logprobs_G, strict=True)
    ]


def turn_rewards(context):
    """An algorithm: a token's turn's reward, 100 where the turn has none and 200 on the answer turn."""
    return [
        [([100.0 if r is None else r for r in rewards] + [200.0])[turn] for turn in turns]
        for turns, rewards in zip(context.turn_ids_G, context.turn_rewards_G, strict=True)
    ]


def of_turns(context):
    return [[3 * value for value in row] for row in context.turn_advantages_G]


of_turns.uses_turn_advantages = True
REPLACING = [
    *({"transform_mode": mode, "uncertainty_kind": "shannon_entropy"} for mode in CANONICAL),
    {"algorithm_mode": f"{__name__}.ramp"},
]
each_replacing = pytest.mark.parametrize(
    "pipeline", REPLACING, ids=lambda pipeline: next(iter(pipeline.values()))
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def run(tokenizer, pipeline=None, **changes):
    """(advantages_B_T, step, turns); no pipeline is no stage."""
    turns = turn_batch(BATCH, tokenizer)
    chosen = {"sepa": SEPA, **(pipeline or {})}
    tokens = None if pipeline is None else token_inputs(turns)
    inputs = step_inputs(turns, GAINS, None if pipeline is None else tokenizer, **chosen, **changes)
    step = estimate(replace(inputs, tokens=tokens), turns, OUTCOMES, GROUPS)
    return step.advantage_B_T, step, turns


def token_inputs(turns):
    shape, random = turns.turn_ids_B_T.shape, torch.Generator().manual_seed(0)
    ids_B_T = torch.tensor([ids + [0] * (shape[1] - len(ids)) for ids in turns.response_ids])
    log_prob_B_T, entropy_B_T = -3 * torch.rand(shape, generator=random), torch.rand(shape, generator=random)
    return TokenInputs(
        50, turns.response_mask_B_T.bool(), ids_B_T, log_prob_B_T, entropy_B_T, turns.row_valid_B
    )


def of(transform):
    return {"transform_mode": transform} | (
        {"uncertainty_kind": "shannon_entropy"} if transform in CANONICAL else {}
    )


@each_mode
def test_gtpo_weighs_the_advantages_of_turns_and_leaves_their_table(tokenizer, mode):
    plain_B_T, plain, turns = run(tokenizer, info_gain_norm_mode=mode)
    advantages_B_T, step, _ = run(tokenizer, of("gtpo"), info_gain_norm_mode=mode)
    mask_B_T = turns.response_mask_B_T.bool()
    weights_B_T = gtpo_weights(
        uncertainty("surprisal", step.inputs.tokens.log_prob_B_T, mask_B_T), mask_B_T, beta=0.1
    )
    assert torch.equal(advantages_B_T, plain_B_T * weights_B_T) and not torch.equal(advantages_B_T, plain_B_T)
    assert torch.equal(step.credit.advantage_B_K1, plain.credit.advantage_B_K1)
    assert torch.equal(step.clip_scale_B_T, plain.clip_scale_B_T)
    assert step.metrics["credit/token_weight/mean"] == pytest.approx(1.0)


def test_a_transform_of_the_users_reads_the_advantages_of_turns(tokenizer):
    advantages_B_T, _, _ = run(tokenizer, {"transform_mode": f"{__name__}.of_turns"})
    assert torch.allclose(advantages_B_T, 3 * run(tokenizer)[0])


def test_an_algorithm_knows_the_turn_of_every_token_and_what_each_turn_earned(tokenizer):
    pipeline = {"algorithm_mode": f"{__name__}.turn_rewards"}
    advantages_B_T, step, turns = run(tokenizer, pipeline, info_gain_norm_mode="none")
    mask_B_T = turns.response_mask_B_T.bool() & turns.row_valid_B[:, None]
    assert int(turns.turn_ids_B_T.max()) > 1
    for row, t in mask_B_T.nonzero().tolist():
        turn = int(turns.turn_ids_B_T[row, t])
        known = turn < step.tables.has_reward_B_K.shape[1] and bool(step.tables.has_reward_B_K[row, turn])
        last = turn == int(turns.turn_ids_B_T[row].max())
        expected = 200.0 if last else float(step.tables.reward_B_K[row, turn]) if known else 100.0
        assert advantages_B_T[row, t] == pytest.approx(expected)


@each_replacing
def test_what_replaces_turns_writes_their_means_into_the_table(tokenizer, pipeline):
    """A plain loop; columns past a row's tool turns read the answer's, as everywhere."""
    plain = run(tokenizer, info_gain_norm_mode="none")[1]
    advantages_B_T, step, turns = run(tokenizer, pipeline, info_gain_norm_mode="none")
    for row, ids in enumerate(turns.turn_ids_B_T.tolist()):
        values = {turn: [] for turn in ids if turn >= 0}
        for turn, value in zip(ids, advantages_B_T[row].tolist(), strict=True):
            if turn >= 0:
                values[turn].append(value)
        means = [sum(values[turn]) / len(values[turn]) for turn in range(len(values))] or [0.0]
        expected = means + means[-1:] * (step.credit.advantage_B_K1.shape[1] - len(means))
        assert step.credit.advantage_B_K1[row].tolist() == pytest.approx(expected, abs=1e-6)
        assert step.credit.outcome_advantage_B[row].item() == pytest.approx(means[-1], abs=1e-6)
    assert not torch.equal(step.credit.advantage_B_K1, plain.credit.advantage_B_K1)
    assert step.credit.counts == plain.credit.counts and (step.credit.clip_scale_B_K1 == 1).all()


def test_an_algorithm_gets_rewards_and_its_numbers_go_out_as_they_are(tokenizer):
    advantages_B_T, _, turns = run(tokenizer, REPLACING[-1], info_gain_norm_mode="none")
    for row, mask in enumerate(turns.response_mask_B_T.bool()):
        places = torch.arange(1, int(mask.sum()) + 1)
        assert torch.equal(advantages_B_T[row][mask], OUTCOMES[row] * places)


@pytest.mark.parametrize("mode", ["none", "turn-group-v1d"])
def test_maxrl_stops_the_run_at_an_outcome_below_zero(tokenizer, monkeypatch, mode):
    monkeypatch.setitem(globals(), "OUTCOMES", [*OUTCOMES[:3], -0.5, *OUTCOMES[4:]])
    with pytest.raises(IntegrityError, match="advantage_mode=maxrl .* row 3 of this step has outcome -0.5"):
        run(tokenizer, {"advantage_mode": "maxrl"}, info_gain_norm_mode=mode)
    run(tokenizer, {"advantage_mode": "grpo"}, info_gain_norm_mode=mode)


def test_tied_prompts_are_skipped_below_a_token_level_too(tokenizer, monkeypatch):
    monkeypatch.setitem(globals(), "OUTCOMES", [0.0, 0.0, 0.0, *OUTCOMES[3:]])
    kept_B_T, *_ = run(tokenizer, of("gtpo_hicra"))
    skipped_B_T, *_ = run(tokenizer, of("gtpo_hicra") | {"tied_groups": "skip"})
    assert kept_B_T[:2].any() and not skipped_B_T[:3].any() and torch.equal(skipped_B_T[3:], kept_B_T[3:])
