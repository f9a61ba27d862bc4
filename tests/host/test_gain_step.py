"""Gains of a batch: which contexts are scored, what their difference is, and what a failed score costs."""

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, lost_row, padding_row, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.host.step.store import score_rows
from verl_credit.turns.score.gains import plan_gains, score_gains
from verl_credit.turns.score.scorers.scorer import fit_branches
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, prompt_text, search_turn

HEADER = "\n<|im_start|>assistant\n"
NAN = float("nan")


def observed(page):
    return f"\n<|im_start|>user\n<tool_response>\n{page}\n</tool_response>{TURN_END}{HEADER}"


WHO, WHERE = prompt_text("Who?"), prompt_text("Where?")
TWO_SEARCHES = Row((search_turn("a"), observed("A"), search_turn("b"), observed("B"), answer_turn("x")), WHO)
ONE_SEARCH = Row((search_turn("c"), observed("C"), answer_turn("x")), WHO)
NO_SEARCH = Row((answer_turn("x"),), WHERE)
BATCH = [TWO_SEARCHES, ONE_SEARCH, NO_SEARCH]
PROBABILITY = {
    WHO: 0.25,
    WHERE: 0.75,
    WHO + "".join(TWO_SEARCHES.parts[:2]): 0.5,
    WHO + "".join(TWO_SEARCHES.parts[:4]): 0.375,
    WHO + "".join(ONE_SEARCH.parts[:2]): 0.125,
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Belief:
    """Stands in for the actor: every token behind a context has the probability of the context, or of it and the answer."""

    def __init__(self, tokenizer, probability):
        self.tokenizer, self.probability = tokenizer, probability
        self.asked: list[tuple[str, str]] = []

    def __call__(self, batch):
        rows = []
        for prompt, response in zip(batch["prompts"].unbind(), batch["responses"].unbind(), strict=True):
            context, answer = self.tokenizer.decode(prompt.tolist()), self.tokenizer.decode(response.tolist())
            if answer.startswith(HEADER):  # a context that ends at a call brings its header along
                context, answer = context + HEADER, answer.removeprefix(HEADER)
            self.asked.append((context, answer))
            probability = self.probability.get((context, answer), self.probability.get(context))
            value = math.log(probability) if probability else -math.inf
            rows.append(torch.full((len(prompt) + len(response),), value, dtype=torch.float64))
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"log_probs": nested}, batch_size=len(rows))


def score(tokenizer, rows, probability=PROBABILITY, info_gain_aliases="first", **changes):
    """(gain_B_K, mask_B_K, metrics, what the actor was asked)."""
    belief, metrics = Belief(tokenizer, probability), {}
    changes |= {"info_gain_aliases": info_gain_aliases}
    gain, mask = scored(turn_batch(rows, tokenizer), tokenizer, belief, metrics, **changes)
    return gain, mask, metrics, belief.asked


def scored(*arguments, **changes):
    return gains(*arguments, **changes)[:2]


def gains(turns, tokenizer, belief, metrics, *, step=True, **changes):
    plan = plan_gains(turns, settings(info_gain_scorer="rows", **changes), tokenizer, scored=step)
    forward = SimpleNamespace(score_rows=lambda rows: score_rows(belief, rows, dp_size=1))
    return score_gains(plan, forward, metrics)


WORKED = {
    ("prob_diff", "prior"): [[0.25, -0.125], [-0.125, 0], [0, 0]],
    ("prob_diff", "none"): [[0, -0.125], [0, 0], [0, 0]],
    ("log_prob_diff", "prior"): [[math.log(2), math.log(0.75)], [-math.log(2), 0], [0, 0]],
    ("log_prob_diff", "none"): [[0, math.log(0.75)], [0, 0], [0, 0]],
}


@pytest.mark.parametrize(("kind", "first_turn"), WORKED)
def test_worked_gains(tokenizer, kind, first_turn):
    gain, mask, metrics, _ = score(
        tokenizer, BATCH, info_gain_type=kind, info_gain_first_turn=first_turn, info_gain_on_error="raise"
    )
    torch.testing.assert_close(gain.double(), torch.tensor(WORKED[kind, first_turn]).double())
    measured = first_turn == "prior"
    assert mask.tolist() == [[measured, True], [measured, False], [False, False]]
    assert metrics == {
        "credit/gain/scored": 1.0,
        "credit/gain/failed_rows": 0,
        "credit/gain/contexts": 6,  # 3 + 2 + 1
        "credit/gain/contexts_scored": 5,  # two rows share their prompt
        "credit/gain/prior": pytest.approx((0.25 + 0.25 + 0.75) / 3),
    }


@pytest.mark.parametrize("kind", ["prob_diff", "log_prob_diff"])
def test_the_answers_probability_is_that_after_the_last_context(tokenizer, kind):
    """A row without a search has its prompt's; one that was lost, or a step that scores nothing, has none."""
    turns = turn_batch([*BATCH, lost_row("connect")], tokenizer)
    of = gains(turns, tokenizer, Belief(tokenizer, PROBABILITY), {}, info_gain_type=kind)
    torch.testing.assert_close(of.answer_B, torch.tensor([0.375, 0.125, 0.75, NAN]).double(), equal_nan=True)
    assert gains(turns, tokenizer, None, {}, step=False).answer_B.isnan().all()


def test_every_context_is_followed_by_the_alias_in_the_template(tokenizer):
    _, _, _, asked = score(tokenizer, BATCH, info_gain_template="So: {answer}.", info_gain_aliases="first")
    assert asked == [(context, "So: Paris.") for context in (WHO, *list(PROBABILITY)[2:], WHERE)]


@pytest.mark.parametrize(
    ("aliases", "expected"), [("first", 0.25 - 0.5), ("max", 0.75 - 0.5), ("mean", 0.5 - 0.3125)]
)
def test_aliases_are_taken_together(tokenizer, aliases, expected):
    after = WHO + "".join(ONE_SEARCH.parts[:2])
    first, second = "<answer>Paris</answer>", "<answer>paris, france</answer>"
    belief = Belief(
        tokenizer, {(WHO, first): 0.5, (WHO, second): 0.125, (after, first): 0.25, (after, second): 0.75}
    )
    turns, metrics = turn_batch([ONE_SEARCH], tokenizer), {}
    gain, _ = scored(turns, tokenizer, belief, metrics, info_gain_aliases=aliases)
    assert gain.tolist() == [[pytest.approx(expected)]]
    assert metrics["credit/gain/contexts"] == (2 if aliases == "first" else 4)


def test_questions_with_other_answers_are_asked_for_theirs(tokenizer):
    rows = [ONE_SEARCH, Row(NO_SEARCH.parts, WHO, golds=("Rome",))]
    _, _, metrics, asked = score(tokenizer, rows)
    assert [answer for context, answer in asked if context == WHO] == [
        "<answer>Paris</answer>",
        "<answer>Rome</answer>",
    ]
    assert metrics["credit/gain/contexts"] == metrics["credit/gain/contexts_scored"] == 3


def test_rows_that_do_not_count_are_never_scored(tokenizer):
    rows = [TWO_SEARCHES, lost_row("connect", prompt=WHERE), ONE_SEARCH, padding_row(TWO_SEARCHES)]
    gain, mask, metrics, asked = score(tokenizer, rows)
    alone_gain, alone_mask, alone_metrics, alone_asked = score(tokenizer, [TWO_SEARCHES, ONE_SEARCH])
    assert asked == alone_asked and metrics == alone_metrics
    assert torch.equal(gain[[0, 2]], alone_gain) and torch.equal(mask[[0, 2]], alone_mask)
    assert not gain[[1, 3]].any() and not mask[[1, 3]].any()


def test_a_batch_of_lost_rows_scores_nothing(tokenizer):
    gain, mask, metrics, asked = score(tokenizer, [lost_row("connect"), lost_row("deadline")])
    assert gain.shape == mask.shape == (2, 0) and asked == []
    assert metrics == {
        "credit/gain/scored": 1.0,
        "credit/gain/failed_rows": 0,
        "credit/gain/contexts": 0,
        "credit/gain/contexts_scored": 0,
    }


def test_trajectories_without_a_search_have_a_prior_and_no_gain(tokenizer):
    gain, mask, metrics, _ = score(tokenizer, [NO_SEARCH, NO_SEARCH])
    assert gain.shape == mask.shape == (2, 0)
    assert metrics["credit/gain/prior"] == pytest.approx(0.75)
    assert (metrics["credit/gain/contexts"], metrics["credit/gain/contexts_scored"]) == (2, 1)


@pytest.mark.parametrize("bad", [NAN, 0.0])  # log-probs of NaN and of -infinity
def test_a_score_that_is_not_finite_stops_the_run_or_counts_as_no_gain(tokenizer, bad):
    broken = PROBABILITY | {WHO + "".join(TWO_SEARCHES.parts[:2]): bad}
    with pytest.raises(IntegrityError, match=r"^2 information gains in 1 rows .*info_gain_on_error=drop"):
        score(tokenizer, BATCH, broken)
    gain, mask, metrics, _ = score(tokenizer, BATCH, broken, info_gain_on_error="zero")
    assert gain.tolist() == [[0, 0], [pytest.approx(-0.125), 0], [0, 0]]
    assert mask.tolist() == [[True, True], [True, False], [False, False]]  # a gain of 0 is a gain
    assert metrics["credit/gain/failed_rows"] == 1
    gain, same_mask, metrics, _ = score(tokenizer, BATCH, broken, info_gain_on_error="drop")
    assert gain.isnan().tolist() == [[True, True], [False, False], [False, False]]  # missing, to every mode
    assert torch.equal(same_mask, mask) and metrics["credit/gain/failed_rows"] == 1


def test_a_prompt_that_could_not_be_scored_leaves_the_mean_prior_of_the_others(tokenizer):
    options = {"info_gain_on_error": "zero"}
    _, _, metrics, _ = score(tokenizer, BATCH, PROBABILITY | {WHO: NAN}, **options)
    assert metrics["credit/gain/prior"] == pytest.approx(0.75)
    _, _, metrics, _ = score(tokenizer, BATCH, PROBABILITY | {WHO: NAN, WHERE: NAN}, **options)
    assert "credit/gain/prior" not in metrics


def test_context_call_ends_at_the_call_and_brings_the_assistant_header(tokenizer):
    first, _, second, _, _ = TWO_SEARCHES.parts
    after_first = WHO + first + HEADER
    after_second = WHO + first + TWO_SEARCHES.parts[1] + second + HEADER
    gain, _, _, asked = score(
        tokenizer,
        [TWO_SEARCHES],
        {WHO: 0.25, after_first: 0.5, after_second: 0.875},
        info_gain_context="call",
    )
    assert [context for context, _ in asked] == [WHO, after_first, after_second]
    assert gain.tolist() == [[pytest.approx(0.25), pytest.approx(0.375)]]


def riding(tokenizer, budget, **changes):
    """(gains, mask, metrics, lengths of rows with their branches) of the scorer `branch` within a budget of tokens."""
    turns, metrics = turn_batch(BATCH, tokenizer), {}
    plan = plan_gains(turns, settings(info_gain_aliases="first", **changes), tokenizer)
    plan = fit_branches(plan, budget)

    def carried():
        """Of the branch tokens: that of the text before the base, on every one."""
        found = []
        for row, branches in enumerate(plan.branches.branches_B):
            trunk = turns.prompt_ids[row] + turns.response_ids[row]
            values = [
                torch.full((len(b.token_ids),), math.log(PROBABILITY[tokenizer.decode(trunk[: b.base])]))
                for b in branches
            ]
            found.append(torch.cat(values or [torch.zeros(1)]).double())
        return found

    lengths = [
        len(p) + len(r) + more
        for p, r, more in zip(turns.prompt_ids, turns.response_ids, plan.branches.tokens_B, strict=True)
    ]
    return *score_gains(plan, SimpleNamespace(carried=carried), metrics)[:2], metrics, lengths


def test_answers_that_do_not_fit_their_row_stop_the_run_or_count_as_failed(tokenizer):
    """The last context of the longest row is left out: its gain is lost, those before it stay."""
    all_gains, _, _, lengths = riding(tokenizer, None)
    longest = max(lengths)
    assert longest == lengths[0]
    for budget in (None, longest):
        gain, mask, metrics, _ = riding(tokenizer, budget)
        assert torch.equal(gain, all_gains) and metrics["credit/gain/failed_rows"] == 0
    said = f"log_prob_max_token_len_per_gpu={longest - 1} cannot hold a row and its answers: {longest} tokens"
    with pytest.raises(IntegrityError, match=said):
        riding(tokenizer, longest - 1)
    gain, mask, metrics, kept = riding(tokenizer, longest - 1, info_gain_on_error="zero")
    assert max(kept) <= longest - 1 and kept[1:] == lengths[1:]
    assert riding(tokenizer, max(kept), info_gain_on_error="zero")[3] == kept  # filled to the last token
    assert gain[0].tolist() == [all_gains[0, 0].item(), 0] and torch.equal(gain[1:], all_gains[1:])
    assert mask[0].tolist() == [True, True] and metrics["credit/gain/failed_rows"] == 1
    assert metrics["credit/gain/contexts_scored"] == 4


def test_a_row_that_has_room_for_no_answer_fails_and_with_it_who_reads_its_prior(tokenizer):
    turns = turn_batch(BATCH, tokenizer)
    *_, metrics, kept = riding(
        tokenizer, len(turns.prompt_ids[0] + turns.response_ids[0]), info_gain_on_error="zero"
    )
    assert (
        kept[0] == len(turns.prompt_ids[0] + turns.response_ids[0])
        and metrics["credit/gain/failed_rows"] == 2
    )
