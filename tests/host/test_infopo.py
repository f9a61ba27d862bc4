"""InfoPO's turn reward: against plain forward passes of a tiny model over the two texts written out, and what is lost."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.plain_forward import ONE, TWO, WHO, ModelForward, by_hand, made, observed
from kit.settings import settings
from kit.trajectories import policy_text, record, run
from kit.turn_rows import Row, lost_row, padding_row, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns import gains
from verl_credit.turns.book import RowRecord
from verl_credit.turns.gains import plan_gains, score_gains, score_infopo
from verl_credit.turns.requests import turn_spans
from verl_credit.turns.signals.known import find_signal
from verl_credit.turns.signals.signal import StepRows, step_rewards
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, search_turn

NAN = math.nan


MASKED = observed("No information found.")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return made(tokenizer, "auto")


@pytest.fixture(scope="module")
def plain(tokenizer):
    """The same weights with transformers' own attention."""
    return made(tokenizer, "sdpa")


def rows_of(tokenizer):
    masked = tokenizer(MASKED, add_special_tokens=False)["input_ids"]
    told = [
        Row(parts, WHO, record=RowRecord(masked_observations=[masked] * n))
        for parts, n in ((TWO, 2), (ONE, 1))
    ]
    lost = Row(ONE, WHO, record=lost_row("deadline").record)  # its turns are still there
    return [told[0], lost, told[1], Row((answer_turn("x"),), WHO), padding_row(told[0])]


def measured(tokenizer, model, rows, change=lambda forward: None, **changes):
    """(infopo per row, gains, plan) of a step."""
    turns = turn_batch(rows, tokenizer)
    plan = plan_gains(turns, settings(**{"turn_signal": "infopo"} | changes), tokenizer)
    forward = ModelForward(model, turns)
    plan = plan.scorer.before_forward(plan, SimpleNamespace(carry=lambda field: None, budget=None))
    forward.branches_B = plan.branches.branches_B
    change(forward)
    return score_infopo(plan, forward), score_gains(plan, forward, {})[:2], plan


@pytest.mark.parametrize("scorer", ["branch", "rows"])
@pytest.mark.parametrize("alone", [True, False])
def test_the_reward_is_the_difference_of_two_plain_forward_passes(tokenizer, model, plain, scorer, alone):
    """Only the turn's own observation is masked; the one before it stays."""
    named = {} if alone else {"turn_signal": "auto", "turn_signals": {"info_gain": 1.0, "infopo": 0.5}}
    found, (gain, mask), plan = measured(
        tokenizer, model, rows_of(tokenizer), info_gain_scorer=scorer, info_gain_aliases="first", **named
    )
    first, page, second, other, answer = TWO
    texts = [
        (WHO + first + page, WHO + first + MASKED, second),
        (WHO + first + page + second + other, WHO + first + page + second + MASKED, answer),
        (WHO + ONE[0] + ONE[1], WHO + ONE[0] + MASKED, ONE[2]),
    ]
    one, two, three = (
        by_hand(tokenizer, plain, real, said) - by_hand(tokenizer, plain, masked, said)
        for real, masked, said in texts
    )
    assert min(abs(one), abs(two), abs(three)) > 1e-3
    assert [len(row) for row in found] == [2, 0, 1, 0, 0]
    assert found[0] == pytest.approx([one, two], abs=1e-9) and found[2] == pytest.approx([three], abs=1e-9)
    assert (plan.n_gains, len(plan.requests)) == ((0, 3) if alone else (6, 9))
    if alone:
        assert not mask.any() and not gain.any()
    else:
        expected = measured(
            tokenizer, model, rows_of(tokenizer), info_gain_scorer=scorer, turn_signal="info_gain",
            info_gain_aliases="first",
        )  # fmt: skip
        assert expected[0] is None and mask.sum() == 3
        torch.testing.assert_close(gain, expected[1][0], rtol=0, atol=1e-12)


def test_no_gold_answer_is_read(tokenizer, model):
    rows = [replace(row, golds=()) for row in rows_of(tokenizer)]
    assert measured(tokenizer, model, rows)[0] == measured(tokenizer, model, rows_of(tokenizer))[0]


def test_a_step_between_measures_nothing(tokenizer):
    plan = plan_gains(
        turn_batch(rows_of(tokenizer), tokenizer), settings(turn_signal="infopo"), tokenizer, scored=False
    )
    assert not plan.scored and not plan.requests and score_infopo(plan, None) is None
    chosen = settings(turn_signal="infopo", info_gain_every=2, info_gain_warmup_steps=1)
    assert [chosen.scores_at(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert not chosen.scores_gain and chosen.curriculum_at(2, 9) == (1, 1)


@pytest.mark.parametrize("bad", [NAN, -math.inf])
def test_a_score_that_is_not_finite_is_lost_and_never_0(tokenizer, model, bad):
    def spoil(forward):
        written = forward.written()
        written[2][-1] = bad
        forward.written = lambda: written

    found, (gain, mask), plan = measured(tokenizer, model, rows_of(tokenizer), spoil)
    assert all(map(math.isfinite, found[0])) and [math.isnan(value) for value in found[2]] == [True]
    turns, signals = plan.turns, {find_signal("infopo", {}): 1.0}
    rows = StepRows(
        turns, tokenizer.decode, torch.zeros(5), torch.tensor([0, 0, 0, 0, 1]), gain, mask, {"infopo": found}
    )

    def rewards(share):
        return step_rewards(signals, plan.settings, rows, scored=True, tolerated_share=share)

    reward, has, metrics = rewards(0.5)
    assert has.tolist() == [[True, True], [False, False], [True, False], [False, False], [False, False]]
    assert reward[0].tolist() == found[0] and math.isnan(reward[2, 0])
    name = "credit/signal/infopo"
    assert [metrics[f"{name}/{of}"] for of in ("turns", "without", "lost")] == [3, 0, 1]
    with pytest.raises(
        IntegrityError, match=r"^turn signal 'infopo' .*1 of 3 rewards .*faults.max_lost_rewards"
    ):
        rewards(0.25)


def test_a_response_that_does_not_fit_its_row_stops_the_run_or_is_lost(tokenizer):
    turns = turn_batch(rows_of(tokenizer), tokenizer)
    carry = SimpleNamespace(carry=lambda field: None, budget=len(turns.prompt_ids[0] + turns.response_ids[0]))
    plan = plan_gains(turns, settings(turn_signal="infopo"), tokenizer)
    with pytest.raises(IntegrityError, match="log_prob_max_token_len_per_gpu=.*info_gain_on_error=drop"):
        plan.scorer.before_forward(plan, carry)
    plan = plan_gains(turns, settings(turn_signal="infopo", info_gain_on_error="drop"), tokenizer)
    plan = plan.scorer.before_forward(plan, carry)
    forward = SimpleNamespace(
        written=lambda: [torch.zeros(len(ids)) for ids in turns.response_ids],
        carried=lambda: [torch.zeros(n) for n in plan.branches.tokens_B],
    )
    found = score_infopo(plan, forward)
    assert [math.isnan(value) for value in found[0]] == [True, True]


def test_a_loop_that_left_no_masked_observation_is_named(tokenizer):
    rows = [*rows_of(tokenizer)[:3], Row(ONE, WHO)]
    said = (
        r"^turn signal 'infopo': row 3 has 1 tool turns, and its record's masked_observations has 0 entries"
    )
    with pytest.raises(IntegrityError, match=said):
        plan_gains(turn_batch(rows, tokenizer), settings(turn_signal="infopo"), tokenizer)


# --- what the agent loop records ---


def masked_of(tokenizer, script, *overrides, **options):
    output, _ = run(tokenizer, script, *overrides, **options)
    return output, [tokenizer.decode(ids) for ids in record(output)["masked_observations"]]


def test_the_agent_loop_renders_the_placeholder_as_it_renders_what_was_found(tokenizer):
    """Behind the turn's own tokens, up to the next turn's; parallel calls have a message each."""
    both = search_turn("a").removesuffix(TURN_END) + "\n" + search_turn("b")
    script = [both, search_turn("c"), answer_turn("x")]
    output, masked = masked_of(tokenizer, script, "algorithm.turn_signal=infopo")
    nothing = "No information found."
    assert masked == [observed(nothing, nothing), observed(nothing)]
    found = ["Page 1: about a\ntext", "Page 1: about b\ntext"], ["Page 1: about c\ntext"]
    assert (
        tokenizer.decode(output.response_ids)
        == both + observed(*found[0]) + script[1] + observed(*found[1]) + script[2]
    )


def test_a_turn_that_was_cut_before_its_end_is_closed_in_both(tokenizer):
    cut = search_turn("a").removesuffix(TURN_END)
    output, masked = masked_of(tokenizer, [cut, answer_turn("x")], "algorithm.turn_signal=infopo")
    whole = tokenizer.decode(output.response_ids)
    assert whole.startswith(cut) and policy_text(tokenizer, output, 0) == cut
    assert masked == [
        whole.removeprefix(cut)
        .removesuffix(answer_turn("x"))
        .replace("Page 1: about a\ntext", "No information found.")
    ]


@pytest.mark.parametrize(
    ("override", "row"),
    [("algorithm.turn_signal=auto", {}), ("algorithm.turn_signal=infopo", {"sampling": "greedy"})],
)
def test_other_runs_and_held_out_rows_record_none(tokenizer, override, row):
    assert masked_of(tokenizer, [search_turn("a"), answer_turn("x")], override, **row)[1] == []


def test_an_observation_that_does_not_fit_has_no_masked_one(tokenizer):
    async def long(query):
        return "x" * 500, ["7"], 0

    _, masked = masked_of(
        tokenizer,
        [search_turn("a")],
        "algorithm.turn_signal=infopo",
        "data.max_response_length=300",
        lookup=long,
    )
    assert masked == []


def test_the_turns_of_a_row_are_looked_for_once(tokenizer, monkeypatch):
    turns = turn_batch(rows_of(tokenizer), tokenizer)
    plan = plan_gains(turns, settings(turn_signal="infopo", info_gain_scorer="rows"), tokenizer)
    looked = []
    monkeypatch.setattr(gains, "turn_spans", lambda ids: looked.append(ids) or turn_spans(ids))
    written = [torch.zeros(len(ids)) for ids in turns.response_ids]
    forward = SimpleNamespace(score_rows=lambda rows: torch.zeros(len(rows)), written=lambda: written)
    score_infopo(plan, forward)
    assert len(looked) == len({each.row for each in plan.requests}) < len(plan.requests)
