"""Scores from a rollout server: what is read of its answer, and what is not believed."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, padding_row, turn_batch
from verl_credit.config.keys import SCORERS as NAMES
from verl_credit.records.run.progress_line import step_line
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.score.gains import plan_gains
from verl_credit.turns.score.requests import PseudoAnswer, Request
from verl_credit.turns.score.scorers import SCORERS
from verl_credit.turns.score.scorers.rollout_server import server_score

CONTEXT, ANSWER, N_GOLD = [5, 6, 7, 8], [11, 12, 13], 2
GARBAGE = -1e30


class Server:
    """In the form of verl's vLLM server: an entry for each token but the first, then a dummy.

    Of what comes out of its cache it gives garbage, or nothing at all (``short``). ``cached`` and ``said``: for the request
    that may read the cache and the one that may not.
    """

    def __init__(self, *, cached=(0, 0), said=None, short=False, shift=0, names=True):
        self.cached, self.said = cached, cached if said is None else said
        self.short, self.shift, self.names, self.asked = short, shift, names, []

    async def __call__(self, prompt, params):
        turn = int(params["skip_reading_prefix_cache"])
        self.asked.append(params["skip_reading_prefix_cache"])
        values = [
            [GARBAGE] if j < self.cached[turn] else [-float(token)] for j, token in enumerate(prompt[1:])
        ]
        ids = [[token + self.shift] for token in prompt[1:]]
        first = self.cached[turn] if self.short else 0
        given = {
            "num_cached_tokens": self.said[turn],
            "prompt_logprobs": [*values[first:], [GARBAGE]],
            "prompt_ids": [*ids[first:], [0]],
        }
        return SimpleNamespace(extra_fields=given if self.names else {}, stop_reason="completed")


def score(server, max_model_len=None):
    return asyncio.run(server_score(server, CONTEXT, ANSWER, N_GOLD, max_model_len))


RIGHT = -(12 + 13) / 2


@pytest.mark.parametrize("missing", ["prompt_ids", "prompt_logprobs"])
def test_an_answer_that_lacks_a_list_is_not_believed(missing):
    """verl's other servers leave one of them out."""
    whole = {"prompt_ids": [[0]] * 7, "prompt_logprobs": [[0.0]] * 7, "num_cached_tokens": 0}

    async def server(prompt, params):
        return SimpleNamespace(extra_fields=whole | {missing: None}, stop_reason="completed")

    with pytest.raises(RuntimeError, match="no prompt log-probs"):
        score(server)


ONCE, TWICE = [False], [False, True]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("cached, asked", [(0, ONCE), (3, ONCE), (4, ONCE), (5, TWICE), (6, TWICE)])
def test_the_gold_tokens_are_read_from_the_end(cached, asked, short):
    """Seven tokens, the last two gold: predicted from positions 4 and 5, which a cache of up to 4 leaves to compute."""
    server = Server(cached=(cached, 0), short=short)
    assert score(server) == RIGHT
    assert server.asked == asked


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("said", [None, 2, 4])
def test_a_count_that_does_not_fit_the_list_is_not_believed(said, short):
    """Six positions came from the cache, and the server says that they were fewer, or nothing. What it says of a full list
    cannot be checked: there only a missing count shows."""
    server = Server(cached=(6, 0), said=(said, 0), short=short)
    if said is not None and not short:
        assert score(server) == GARBAGE
        return
    assert score(server) == RIGHT
    assert server.asked == TWICE


def test_a_list_shorter_than_its_count_says_is_asked_for_again():
    server = Server(cached=(4, 0), said=(0, 0), short=True)
    assert score(server) == RIGHT
    assert server.asked == TWICE


def test_a_full_list_without_the_cache_needs_no_count():
    server = Server(cached=(6, 0), said=(None, None))
    assert score(server) == RIGHT
    assert server.asked == TWICE


@pytest.mark.parametrize(
    "server, said",
    [
        (
            Server(cached=(6, 6)),
            "7 prompt log-probs for 7 tokens, 6 of them cached, the answer's own among them",
        ),
        (Server(cached=(6, 5), short=True), "2 prompt log-probs for 7 tokens, 5 of them cached"),
        (Server(cached=(6, 4), said=(6, None), short=True), "3 prompt log-probs for 7 tokens, 0 of them"),
        (Server(shift=1), "not those of the answer's tokens"),
        (Server(names=False), "no prompt log-probs (stop reason 'completed')"),
    ],
)
def test_a_server_that_is_not_believed_twice_gives_no_score(server, said):
    with pytest.raises(RuntimeError) as error:
        score(server)
    assert said in str(error.value) and "without the prefix cache" in str(error.value)
    assert server.asked == TWICE


def test_a_request_that_the_engine_cannot_hold_is_not_sent():
    """Four tokens of context, three of answer and the drawn one."""
    server = Server()
    with pytest.raises(ValueError, match="max_model_len=7 .* 4 tokens, .* 3 .*: 8"):
        score(server, 7)
    assert server.asked == []
    assert score(server, 8) == RIGHT


def test_scores_are_found_by_context_and_alias():
    answer = PseudoAnswer((1, 2), 0, 2)
    requests = [Request(0, 0, 0, 4, answer), Request(1, 1, 1, 6, answer), Request(1, 2, 0, 8, answer)]
    records = [{"scores": [[0, 0, -1.5]]}, {"scores": [[1, 0, -9.0], [1, 1, -2.5]]}]
    plan = SimpleNamespace(requests=requests, turns=SimpleNamespace(records=records))
    first, second, missing = SCORERS["server"].score(plan, None).tolist()
    assert (first, second) == (-1.5, -2.5) and math.isnan(missing)


def test_what_scoring_by_the_server_cost_is_shown():
    """Four trajectories, scored in 7 of 10 seconds; a padding row copies the record of the row it is made of."""
    spans = [(100.0, 104.0), (101.0, 102.0), (103.0, 105.0), (108.0, 110.0), ()]
    records = [RowRecord("answer", score_span=list(span)) for span in spans]
    rows = [Row(("call", "page", "answer"), record=one) for one in records]
    turns = turn_batch([*rows, padding_row(rows[0])], make_tokenizer())
    plan = plan_gains(turns, settings(info_gain_scorer="server", info_gain_aliases="first"), make_tokenizer())
    metrics = plan.scorer.cost(plan, 0.5, 0.0)
    assert metrics == {"credit/gain/seconds": 7.5, "credit/gain/request_seconds": 9.0}
    assert "of it gain 7.5" in step_line({"step": 1, **metrics}, 2, None)


@pytest.mark.parametrize("scorer, scored", [("server", 4), ("rows", 3), ("branch", 3)])
def test_every_trajectory_asks_the_server_for_its_own_prior(scorer, scored):
    turns = turn_batch([Row(("call", "one", "answer")), Row(("call", "two", "answer"))], make_tokenizer())
    asked = settings(info_gain_scorer=scorer, info_gain_aliases="first")
    plan = plan_gains(turns, asked, make_tokenizer())
    assert (len(plan.requests), plan.scorer.n_scored(plan)) == (4, scored)


def test_every_scorer_that_the_key_names_is_there_and_no_other():
    assert ("auto", *SCORERS) == NAMES
