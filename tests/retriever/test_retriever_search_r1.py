"""Search-R1's trainer: every search of a step in one request, sent by a blocking client that knows no status."""

import importlib.util
import json
import logging
import random
from pathlib import Path

import pytest

from kit.retriever_fakes import app_of, metric, send
from kit.serving import served
from verl_credit_retriever.settings import Limits

CLIENT = Path(__file__).parents[2] / "evidence" / "retriever" / "search_r1_client.py"
JSON = {"Content-Type": "application/json"}
TRAJECTORIES = 512 * 5
"""Its train_batch_size times n_agent: in the first turn all of them may search."""


@pytest.fixture(scope="module")
def client():
    spec = importlib.util.spec_from_file_location("search_r1_client", CLIENT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_steps_of_requests_are_answered_unchanged(client):
    """It used to end with a KeyError: a request of more than 1,024 queries was a 422."""
    app, _ = app_of()
    draw = random.Random(0)
    with served(app) as port:
        url = f"http://127.0.0.1:{port}"
        for step in range(2):
            searching = list(range(TRAJECTORIES))
            for turn in range(2):
                queries = [f"{step} {turn} {one % 600}" for one in searching]  # a group asks the same
                found = client.batch_search(url, queries, 3)
                assert [[document["id"] for document in page] for page in found] == [
                    [f"{query}/{row}" for row in range(3)] for query in queries
                ]
                searching = [one for one in searching if draw.random() < 0.5]
        assert client.batch_search(url, [], 3) == []  # a turn in which nobody searches
        (page,) = client.batch_search_without_scores(url, ["a"], 0)  # its server reads 0 as its default
        assert [document["id"] for document in page] == ["a/0", "a/1", "a/2"]


@pytest.mark.parametrize("path", ["/search", "/batch_search"])
def test_research_s_client_is_told_the_right_request(path):
    """Its RemoteRetriever posts {"query", "top_n", "return_score"} and reads a list of documents."""
    app, _ = app_of()
    body = {"query": "a" if path == "/search" else ["a"], "top_n": 3, "return_score": False}

    refused = send(app, "POST", path, json=body)
    said = refused.json()["error"]
    shape = said[said.index("{") : said.index("}") + 1].replace('"a text", ...', '"a text"')
    answer = send(app, "POST", "/retrieve", content=shape, headers=JSON)
    assert refused.status_code == 404 and set(refused.json()) == {"error"}
    assert refused.json()["error"].startswith(
        f"there is no POST {path!r}; a search is POST /retrieve with {{"
    )
    assert (
        answer.status_code == 200 and len(answer.json()["result"][0]) == 3
    )  # the request that the sentence gives


def post(app, *bodies):
    """The answers to these bodies, and then /metrics."""
    answers = [send(app, "POST", "/retrieve", content=json.dumps(body), headers=JSON) for body in bodies]
    return answers, send(app, "GET", "/metrics").text


def test_one_odd_query_costs_its_batch_nothing(caplog):
    """Its server cuts a long query; ours refused the batch, which this client knows as a KeyError."""
    app, _ = app_of(limits=Limits(max_query_chars=100, cache_entries=0))
    queries = ["a", "x" * 101, "", "b\ud800", "x" * 100, "\U0001f702"]
    bodies = [{"queries": queries}, {"queries": [queries[1]]}, {"queries": ["c"]}]
    caplog.set_level(logging.WARNING, "verl_credit_retriever")
    answers, metrics = post(app, *bodies)
    read_as = ["a", "x" * 100, "", "b?", "x" * 100, "\U0001f702"]
    assert [[hit["id"] for hit in hits] for hits in answers[0].json()["result"]] == [
        [f"{query}/{row}" for row in range(3)] for query in read_as
    ]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert metric(metrics, "mended_queries_total", reason="cut") == 2
    assert metric(metrics, "mended_queries_total", reason="not_text") == 1
    assert sorted(record.message for record in caplog.records) == [
        "1 queries of a request were mended: cut (logged once)",
        "1 queries of a request were mended: not_text (logged once)",
    ]


def test_more_queries_than_the_queue_holds_are_answered_in_pieces():
    app, encoder = app_of(
        limits=Limits(max_request_queries=50, max_queue_queries=60, max_request_documents=900)
    )
    queries = [str(number) for number in range(300)]
    (whole, above, fewer), _ = post(
        app,
        {"queries": queries, "topk": 3},
        {"queries": [*queries, "more"], "topk": 3},
        {"queries": queries[:9], "topk": 100},
    )
    assert [hits[2]["id"] for hits in whole.json()["result"]] == [f"{query}/2" for query in queries]
    assert max(encoder.calls) <= 50
    assert (above.status_code, above.json()["error"]) == (
        422,
        "queries: 301 of them; at most 300 with 3 documents each",
    )
    assert fewer.status_code == 200


def test_documents_have_the_url_of_the_corpus_which_asearcher_reads():
    def with_url(found):
        for hits in found:
            hits[0][0]["url"] = "https://town"
        return found

    app, _ = app_of(damage=with_url)
    (plain, scored), _ = post(
        app, {"queries": ["a"], "topk": 2}, {"queries": ["a"], "topk": 2, "return_scores": True}
    )
    (hits,), (with_scores,) = plain.json()["result"], scored.json()["result"]
    assert hits == [
        {"id": "a/0", "contents": "T\n0", "url": "https://town"},
        {"id": "a/1", "contents": "T\n1"},
    ]
    assert with_scores[0]["document"] == hits[0]
