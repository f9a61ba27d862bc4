"""Scores from a rollout server: what is read of its answer, and what is not believed."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from byte_world import make_tokenizer
from turn_rows import Row, padding_row, settings, turn_batch

from verl_credit.host.answer_template import PseudoAnswer
from verl_credit.host.gain_requests import Request
from verl_credit.host.gain_server import scores_of_records, server_score
from verl_credit.host.gain_step import plan_gains, score_gains
from verl_credit.host.metrics import gain_cost
from verl_credit.host.progress import step_line
from verl_credit.host.turn_book import RowRecord

CONTEXT, ANSWER, N_GOLD = [5, 6, 7, 8], [11, 12, 13], 2
GARBAGE = -1e30


class Server:
    """In the form of verl's vLLM server: entry j is token j + 1, a dummy stands last, cached entries are garbage."""

    def __init__(self, *, cached=0, obeys=True, shift=0, names=True, says=True):
        self.says = says
        self.cached, self.obeys, self.shift, self.names, self.asked = cached, obeys, shift, names, []

    async def __call__(self, prompt, params):
        self.asked.append(params["skip_reading_prefix_cache"])
        cached = 0 if params["skip_reading_prefix_cache"] and self.obeys else self.cached
        values = [[GARBAGE] if j < cached else [-float(token)] for j, token in enumerate(prompt[1:])] + [
            [0.0]
        ]
        ids = [[token + self.shift] for token in prompt[1:]] + [[0]]
        said = {
            "num_cached_tokens": cached if self.says else None,
            "prompt_logprobs": values,
            "prompt_ids": ids,
        }
        return SimpleNamespace(extra_fields=said if self.names else {}, stop_reason="completed")


def score(server):
    return asyncio.run(server_score(server, CONTEXT, ANSWER, N_GOLD))


@pytest.mark.parametrize("cached", [0, 3, 4])
def test_the_gold_tokens_are_read_from_the_end(cached):
    """Seven tokens, the last two gold: predicted from positions 4 and 5, which a cache of up to 4 leaves to compute."""
    server = Server(cached=cached)
    assert score(server) == -(12 + 13) / 2
    assert server.asked == [False]


def test_a_server_that_does_not_say_what_was_cached_is_asked_again():
    server = Server(cached=6, says=False)
    assert score(server) == -(12 + 13) / 2
    assert server.asked == [False, True]


@pytest.mark.parametrize("cached", [5, 6])
def test_cached_positions_are_scored_again_without_the_cache(cached):
    server = Server(cached=cached)
    assert score(server) == -(12 + 13) / 2
    assert server.asked == [False, True]


def test_a_server_that_cannot_be_believed_stops_the_run():
    with pytest.raises(RuntimeError, match="read its prefix cache although told not to"):
        score(Server(cached=6, obeys=False))
    with pytest.raises(RuntimeError, match="not those of the answer's tokens"):
        score(Server(shift=1))
    with pytest.raises(RuntimeError, match="gave 0 prompt log-probs for 7 tokens"):
        score(Server(names=False))


def test_scores_are_found_by_context_and_alias():
    answer = PseudoAnswer((1, 2), 0, 2)
    requests = [Request(0, 0, 0, 4, answer), Request(1, 1, 1, 6, answer), Request(1, 2, 0, 8, answer)]
    records = [{"scores": [[0, 0, -1.5]]}, {"scores": [[1, 0, -9.0], [1, 1, -2.5]]}]
    first, second, missing = scores_of_records(requests, records).tolist()
    assert (first, second) == (-1.5, -2.5) and math.isnan(missing)


def test_what_scoring_by_the_server_cost_is_shown():
    """Three trajectories, scored in 7 of 10 seconds; a padding row copies the record of the row it is made of."""
    spans = [(100.0, 104.0), (101.0, 103.0), (107.0, 110.0), ()]
    records = [RowRecord("answer", score_span=list(span)) for span in spans]
    rows = [Row(("call", "page", "answer"), record=one) for one in records]
    turns = turn_batch([*rows, padding_row(rows[0])], make_tokenizer())
    plan = plan_gains(turns, settings(info_gain_scorer="server", info_gain_aliases="first"), make_tokenizer())
    metrics = gain_cost(plan, 0.5, 0.0)
    assert metrics == {"credit/gain/seconds": 7.5, "credit/gain/request_seconds": 9.0}
    assert "of it gain 7.5" in step_line({"step": 1, **metrics}, 2, None)


@pytest.mark.parametrize("scorer, scored", [("server", 4), ("rows", 3), ("branch", 3)])
def test_every_trajectory_asks_the_server_for_its_own_prior(scorer, scored):
    turns = turn_batch([Row(("call", "one", "answer")), Row(("call", "two", "answer"))], make_tokenizer())
    asked = settings(info_gain_scorer=scorer, info_gain_aliases="first")
    plan, metrics = plan_gains(turns, asked, make_tokenizer()), {}
    score_gains(plan, lambda plan: -torch.arange(1.0, len(plan.requests) + 1), metrics)
    assert (metrics["credit/gain/contexts"], metrics["credit/gain/contexts_scored"]) == (4, scored)
