"""LAPO's turn reward: against plain forward passes over texts without a turn, its sign gate, and what is lost."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.plain_forward import ONE, TWO, WHO, ModelForward, by_hand, made
from kit.settings import settings
from kit.turn_rows import Row, lost_row, padding_row, turn_batch
from verl_credit.credit.turn.turns import turn_table
from verl_credit.turns.gains import plan_gains, score_gains
from verl_credit.turns.lapo import score_lapo
from verl_credit.turns.signals.known import find_signal
from verl_credit.turns.signals.signal import StepRows
from verl_credit.worlds.lab.protocol import answer_turn

LAPO = {"turn_signal": "lapo", "info_gain_scorer": "rows", "info_gain_template": "<answer>{answer}</answer>"}
ROWS = [Row(TWO, WHO), lost_row("deadline"), Row(ONE, WHO), Row((answer_turn("x"),), WHO)]
ROWS.append(padding_row(ROWS[0]))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def plain(tokenizer):
    return made(tokenizer, "sdpa")


def measured(tokenizer, model, rows=ROWS, **changes):
    turns = turn_batch(rows, tokenizer)
    plan = plan_gains(turns, settings(**LAPO | changes), tokenizer)
    forward = ModelForward(model, turns)
    plan = plan.scorer.before_forward(plan, SimpleNamespace(carry=lambda field: None, budget=None))
    forward.branches_B = plan.branches.branches_B
    return score_lapo(plan, forward), plan, forward


@pytest.mark.parametrize("context, cut", [("observation", 0), ("call", 1)])
@pytest.mark.parametrize("scorer", ["rows", "branch"])
def test_the_reward_is_what_plain_forward_passes_lose_without_the_turn(
    tokenizer, plain, scorer, context, cut
):
    """A branch after the place of the deletion is exact, too, but repeats all that follows; training takes rows."""
    model = made(tokenizer, "auto")
    found, plan, _ = measured(
        tokenizer, model, info_gain_scorer=scorer, info_gain_aliases="first", info_gain_context=context
    )
    first, page, second, other, _ = TWO
    header = "\n<|im_start|>assistant\n" if cut else ""
    end, one_end = ("", "") if cut else (other, ONE[1])

    def score(*parts):
        text = WHO + "".join(parts) + header + "<answer>"
        return by_hand(tokenizer, plain, text, "Paris")

    whole, one = score(first, page, second, end), score(ONE[0], one_end)
    expected = [
        whole - score("[DELETE]", second, end),
        whole - score(first, page, "[DELETE]"),
        one - score("[DELETE]"),
    ]
    assert [len(row) for row in found] == [2, 0, 1, 0, 0]
    assert found[0] + found[2] == pytest.approx(expected, abs=1e-9)
    assert min(map(abs, expected)) > 1e-3 and len(plan.requests) == len(plan.deleted.requests) == 5


def test_aliases_gains_and_infopo_beside_it_change_nothing(tokenizer):
    """Two aliases are scored; the larger probability counts."""
    model = made(tokenizer, "auto")
    alone, plan, _ = measured(tokenizer, model)
    assert len(plan.requests) == 10
    several = {"turn_signal": "auto", "turn_signals": {"info_gain": 1.0, "lapo": 0.5}}
    both, plan, forward = measured(tokenizer, model, **several)
    assert both == alone and plan.n_gains == 12 and score_gains(plan, forward, {}).turn_mask_B_K.sum() == 3
    without = measured(tokenizer, model, [replace(row, golds=("Rome",)) for row in ROWS])[0]
    assert without != alone


def test_a_step_between_measures_nothing_and_a_score_that_is_not_finite_is_lost(tokenizer):
    turns = turn_batch(ROWS, tokenizer)
    assert score_lapo(plan_gains(turns, settings(**LAPO), tokenizer, scored=False), None) is None
    plan = plan_gains(turns, settings(**LAPO | {"info_gain_aliases": "first"}), tokenizer)
    scores = torch.tensor([-1.0, -1.5, math.nan, -2.0, -1.0])
    found = score_lapo(plan, SimpleNamespace(score_rows=lambda rows: scores))
    assert found[0][0] == 0.5 and math.isnan(found[0][1]) and found[2] == [-1.0]


@pytest.mark.parametrize(
    "values, gated",
    [
        ([[0.5, 0.1], [], [-0.3]], [0.5, 0.0, -0.3]),  # mean .1: .1 is not above it
        ([[0.5, 0.2], [], [0.2]], [0.5, 0.0, 0.0]),  # all help, and those below the mean get nothing
        ([[math.nan, 0.4], [], [-0.2]], [math.nan, 0.4, -0.2]),
        ([[0.4, 0.4], [], [0.4]], [0.0, 0.0, 0.0]),
    ],
)
def test_a_value_stays_where_its_distance_from_the_mean_of_its_prompt_has_its_sign(tokenizer, values, gated):
    turns = turn_batch(ROWS[:3], tokenizer)
    n_B = turn_table(turns.turn_ids_B_T, turns.turn_ids_B_T >= 0).n_tool_turns_B
    none = torch.zeros(3, int(n_B.max()))
    rows = StepRows(
        turns, tokenizer.decode, torch.zeros(3), torch.tensor([7, 7, 7]), none, none.bool(), {"lapo": values}
    )
    reward_B_K, has_B_K = find_signal("lapo", {}).rewards(rows)
    assert has_B_K.sum() == 3
    assert reward_B_K[has_B_K].tolist() == pytest.approx(gated, abs=1e-12, nan_ok=True)
