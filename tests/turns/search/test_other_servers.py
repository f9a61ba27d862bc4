"""Servers of others: what Search-R1's own kinds answer is read, and what is no such answer is told what it lacks."""

import asyncio
import gzip
import hashlib
import json
import random
import tracemalloc

import pytest

from kit.damage import damaged_value
from kit.fuzz import ACCEPTED, REFUSED, cuts, told, try_all
from kit.scripted_server import hits, scripted_server, search
from verl_credit.turns.rollout.search.client import SearchClient, SearchFault
from verl_credit.turns.rollout.search.connections import MOST_BYTES, served_index
from verl_credit.turns.rollout.search.wire import Page, parse_answer

TEXT = '"Ada"\nAda wrote\nprograms.'
HASH = hashlib.sha256(TEXT.encode()).hexdigest()[:16]


@pytest.fixture
def server():
    with scripted_server() as scripted:
        yield scripted


@pytest.mark.parametrize(
    "hit, page",
    [
        ({"document": {"id": "7", "contents": TEXT}, "score": 0.5}, Page("7", '"Ada"', "Ada wrote\nprograms.", 0.5)),
        ({"document": {"id": 7, "contents": TEXT}, "score": 3}, Page("7", '"Ada"', "Ada wrote\nprograms.", 3.0)),
        (  # BM25
            {"document": {"title": "Ada", "text": "Ada wrote\nprograms.", "contents": TEXT}, "score": 11.25},
            Page(HASH, '"Ada"', "Ada wrote\nprograms.", 11.25),
        ),
        ({"document": {"contents": TEXT}}, Page(HASH, '"Ada"', "Ada wrote\nprograms.", None)),  # SERP, Google
        ({"document": {"id": "a", "title": "Ada", "text": "wrote"}, "score": 1}, Page("a", "Ada", "wrote", 1.0)),
        ({"document": {"id": "a", "text": "Ada\nwrote"}, "score": 1}, Page("a", "Ada", "wrote", 1.0)),
    ],
)  # fmt: skip
def test_a_hit_of_each_server_is_a_page(server, hit, page):
    server.script = [(200, {"result": [[hit]]})]
    assert search(SearchClient(server.url)).pages == [page]


def test_a_search_that_finds_nothing_is_a_page_without_text(server):
    client = SearchClient(server.url)
    server.script = [(200, {"result": [[]]})]
    result = search(client)
    assert (result.pages, client.render(result), result.attempts) == ([], "", 1)


def test_a_server_with_its_own_number_of_hits_is_cut_to_ours(server):
    server.script = [(200, {"result": [hits(4, 3, 2, 1)]})]
    assert [page.id for page in search(SearchClient(server.url, topk=2)).pages] == ["d0", "d1"]


@pytest.mark.parametrize(
    "answer, lacks",
    [
        ({"results": []}, 'expected {"result": [[hit'),
        ({"result": [[{"id": "a", "contents": "b"}]]}, 'without "document"'),
        ({"result": [[{"document": {"id": "a", "body": "b"}}]]}, 'without text; expected a string "contents"'),
        ({"result": [[{"document": {"id": 1.5, "contents": "b"}}]]}, '"id": \'1.5\'; expected text, a whole number'),
        ({"result": [[{"document": {"contents": "b"}, "score": None}]]}, '"score" is not finite'),
    ],
)  # fmt: skip
def test_another_answer_is_told_what_it_lacks(server, answer, lacks):
    server.script = [(200, answer)]
    with pytest.raises(SearchFault) as caught:
        search(SearchClient(server.url))
    assert caught.value.code == "bad_answer" and lacks in caught.value.detail


def test_a_server_without_the_route_is_told_what_is_asked_of_it(server):
    """ReSearch's has POST /search and /batch_search alone."""
    server.script = [(404, {"detail": "Not Found"})]
    with pytest.raises(SearchFault) as caught:
        search(SearchClient(server.url))
    assert caught.value.code == "http_4xx" and "Not Found" in caught.value.detail
    asked = json.dumps(server.requests[0][1] | {"queries": ["..."]}).replace('"..."', "...")
    assert f"it has no search by POST {asked}, as Search-R1's servers do" in caught.value.detail


def damaged(seed: int) -> str:
    """Any JSON is read as pages whose text stands in it, or refused in a sentence."""
    draw = random.Random(seed)
    texts = draw.choices(("a", "b\nc", "é🜂", "", "\ud800"), weights=(4, 4, 2, 1, 1), k=draw.randrange(4))
    answer = {"result": [[{"document": {"contents": text}, "score": 1.0} for text in texts]]}
    for hit, number in zip(answer["result"][0], draw.choices((None, 3, "x"), k=len(texts)), strict=True):
        hit["document"] |= {} if number is None else {"id": number}
    for _ in range(draw.choice((0, 0, 1, 2))):
        damaged_value(
            answer,
            draw,
            (None, True, 0, 10**400, 1.5, float("nan"), "", "x", [], [[]], {}, {"contents": "x"}),
        )
    with told(answer):
        try:
            pages = parse_answer(answer, 2)
        except ValueError as error:
            assert not isinstance(error, UnicodeError) and len(str(error)) > 20
            return REFUSED
        (result,) = answer["result"]
        assert len(pages) == min(2, len(result))
        for page, hit in zip(pages, result, strict=False):
            document = hit["document"]
            assert f"{page.title}\n{page.text}".removesuffix("\n") == document["contents"].removesuffix("\n")
            assert page.id == (str(document["id"]) if "id" in document else page.id) and page.id.isascii()
        return ACCEPTED


@cuts(300)
def test_any_json_is_pages_or_a_sentence(seeds):
    try_all(damaged, seeds)


@pytest.mark.parametrize("status, code", [(200, "bad_answer"), (500, "http_5xx")])
def test_a_body_is_read_to_a_bound(server, status, code):
    body = b'{"result": "' + b"x" * (6 * MOST_BYTES)
    server.script = [(status, body)]
    tracemalloc.start()
    with pytest.raises(SearchFault) as caught:
        search(SearchClient(server.url, max_retries=0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code == code and len(caught.value.detail) < 1000
    assert peak < 3.5 * MOST_BYTES, peak  # the bytes, the buffer that grows under them, and reading


def test_a_large_page_within_the_bound_is_read(server):
    hit = {"document": {"id": "a", "contents": "x" * (MOST_BYTES - 100)}, "score": 1.0}
    server.script = [(200, {"result": [[hit]]})]
    assert len(search(SearchClient(server.url)).pages[0].title) == MOST_BYTES - 100


def test_no_compressed_body_is_unpacked(server):
    body = gzip.compress(json.dumps({"result": [hits(1.0)]}).encode())
    server.script = [(200, body, {"Content-Encoding": "gzip"})]
    with pytest.raises(SearchFault, match="bad_answer: .*Content-Encoding: 'gzip'; identity was asked for"):
        search(SearchClient(server.url))
    assert server.request_headers[0]["Accept-Encoding"] == "identity"


def test_info_is_read_to_the_same_bound(server):
    server.info = b'{"fingerprint": "' + b"x" * (2 * MOST_BYTES)
    found = asyncio.run(served_index(server.url, token=None, timeout_s=20))
    assert found.fingerprint is None and "TooLarge" in found.reason
