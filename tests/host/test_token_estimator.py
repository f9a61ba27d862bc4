"""The registered estimator with a token level behind it: turns stay turns, observations get nothing."""

from dataclasses import replace

import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

from kit.byte_world import make_tokenizer
from kit.modes import NO_TABLES
from kit.turn_rows import Row, estimate, lost_row, padding_row, step_inputs, turn_batch
from verl_credit.config.keys import CANONICAL
from verl_credit.credit import gtpo_weights
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import uncertainty
from verl_credit.errors import IntegrityError
from verl_credit.turns.token_stage import TokenInputs

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
ROWS = len(BATCH)
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


def run(tokenizer, pipeline=None, order=range(ROWS), reject=None, **changes):
    """(advantages_B_T, step, turns); places past the batch's end are padding rows, no pipeline is no stage.

    ``reject``: turns and token inputs to what is left of the response mask.
    """
    rows, columns = (
        [*BATCH, *[padding_row(BATCH[0])] * 2],
        ([*GAINS, [], []], [*OUTCOMES, 0.0, 0.0], [*GROUPS, "p", "p"]),
    )
    turns = turn_batch([rows[place] for place in order], tokenizer)
    gains, outcomes, groups = ([column[place] for place in order] for column in columns)
    chosen = {"sepa": SEPA, **(pipeline or {})}
    tokens = None if pipeline is None else token_inputs(turns, order)
    inputs = step_inputs(turns, gains, None if pipeline is None else tokenizer, **chosen, **changes)
    mask_B_T = None if reject is None else reject(turns, tokens)
    step = estimate(replace(inputs, tokens=tokens), turns, outcomes, groups, mask_B_T)
    return step.advantage_B_T, step, turns


def token_inputs(turns, order):
    shape = turns.turn_ids_B_T.shape
    ids_B_T = torch.tensor([ids + [0] * (shape[1] - len(ids)) for ids in turns.response_ids])
    seeds = [torch.Generator().manual_seed(place) for place in order]  # a row's numbers travel with it
    log_prob_B_T = torch.stack([-3 * torch.rand(400, generator=seed)[: shape[1]] for seed in seeds])
    entropy_B_T = torch.stack([torch.rand(400, generator=seed)[: shape[1]] for seed in seeds])
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


def reject_by_verl(turns, tokens):
    """verl's own rejection, of single tokens and of rows: the engine was wrong about a whole turn and about a row."""
    wrong_B_T = turns.turn_ids_B_T == torch.tensor([0, 1, -2, -2, -2, -2, -2])[:, None]
    wrong_B_T[6] = True
    batch = DataProto.from_dict(
        {
            "old_log_probs": tokens.log_prob_B_T,
            "rollout_log_probs": tokens.log_prob_B_T + torch.where(wrong_B_T, 3.0, 0.001),
            "response_mask": turns.response_mask_B_T,
        }
    )
    config = {"rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": "1.0,10.0"}
    left_B_T = compute_rollout_correction_and_add_to_batch(batch, config)[0].batch["response_mask"].bool()
    assert torch.equal(left_B_T, turns.response_mask_B_T.bool() & ~wrong_B_T) and wrong_B_T.any()
    return left_B_T


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


@pytest.mark.parametrize(
    "pipeline", [*map(of, TRANSFORMS), *REPLACING], ids=lambda pipeline: next(iter(pipeline.values()))
)
def test_what_verl_rejects_is_in_no_token_statistic(tokenizer, pipeline):
    """A first turn that is gone as a whole stops nothing; its mean in the table is 0."""

    def wild(turns, tokens):
        left_B_T = reject_by_verl(turns, tokens)
        for values_B_T in (tokens.log_prob_B_T, tokens.entropy_B_T):
            values_B_T[~left_B_T] = torch.nan
        return left_B_T

    mode = "none" if pipeline in REPLACING else "turn-group-v1d"
    advantages_B_T, step, turns = run(tokenizer, pipeline, reject=reject_by_verl, info_gain_norm_mode=mode)
    other_B_T, other, _ = run(tokenizer, pipeline, reject=wild, info_gain_norm_mode=mode)
    assert torch.equal(advantages_B_T, other_B_T) and step.metrics == other.metrics
    left_B_T = reject_by_verl(turns, token_inputs(turns, range(ROWS)))
    assert advantages_B_T.isfinite().all() and advantages_B_T.any() and not advantages_B_T[~left_B_T].any()
    assert (step.credit.advantage_B_K1[0, 0] == 0) == (pipeline in REPLACING)


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


@pytest.mark.parametrize(
    "pipeline", [*map(of, TRANSFORMS), *REPLACING], ids=lambda pipeline: next(iter(pipeline.values()))
)
@pytest.mark.parametrize(
    "order", [[*range(ROWS + 2)], [ROWS, 3, 0, ROWS + 1, 1, 2, 6, 5, 4]], ids=["last", "mixed"]
)
def test_padding_rows_change_no_bit_of_the_others(tokenizer, pipeline, order):
    mode = "none" if pipeline in REPLACING else "turn-group-v1d"
    alone_B_T, alone, _ = run(tokenizer, pipeline, info_gain_norm_mode=mode)
    padded_B_T, padded, _ = run(tokenizer, pipeline, order, info_gain_norm_mode=mode)
    back = [order.index(place) for place in range(ROWS)]
    assert torch.equal(padded_B_T[back], alone_B_T)
    assert not padded_B_T[[order.index(ROWS), order.index(ROWS + 1)]].any()
    assert padded.metrics == pytest.approx(alone.metrics, rel=1e-9)


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
