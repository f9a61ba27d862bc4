"""The client against a server that misbehaves on purpose: every fault has a code, a bound, and no page."""

import asyncio

import pytest

from kit.scripted_server import dead_port, hits, scripted_server, search
from verl_credit.turns.rollout.search.client import SearchClient, SearchFault
from verl_credit.turns.rollout.search.faults import FAULT_CODES
from verl_credit.turns.rollout.search.wire import Page, bad_query_reason, format_pages


@pytest.fixture
def server():
    with scripted_server() as scripted:
        yield scripted


def fault(client, query="river"):
    with pytest.raises(SearchFault) as caught:
        search(client, query)
    assert caught.value.code in FAULT_CODES
    return caught.value


def test_a_search_asks_for_scores_and_splits_the_title(server):
    result = search(SearchClient(server.url, topk=2), "wer gründete 東京?")
    asked = {"queries": ["wer gründete 東京?"], "topk": 2, "return_scores": True}
    assert server.requests == [("/retrieve", asked)]
    assert result.pages == [Page("d0", "T0", "a\nb", 1.0), Page("d1", "T1", "a\nb", 0.9)]
    assert result.attempts == 1 and 0 < result.seconds < 10


def test_an_address_may_name_the_endpoint(server):
    search(SearchClient(server.url + "/retrieve"))
    search(SearchClient(server.url + "/"))
    assert [path for path, _ in server.requests] == ["/retrieve"] * 2


@pytest.mark.parametrize(
    "step, code, attempts",
    [
        ((503, b"down"), "overload", 3),
        ((500, {"error": "out of memory"}), "http_5xx", 1),
        ((502, b""), "http_5xx", 1),
        ((501, b""), "http_5xx", 1),
        ((504, b"too late"), "deadline", 1),
        ((401, b""), "http_4xx", 1),
        ((422, {"error": "topk"}), "http_4xx", 1),
        ((404, b""), "http_4xx", 1),
        ((429, b""), "overload", 3),
        ("close", "connect", 3),
        ("half", "connect", 3),
        ((302, b""), "bad_answer", 1),
        ((200, b"<html>"), "bad_answer", 1),
        ((200, b"\xff\xfe"), "bad_answer", 1),
        ((200, b"[" * 100_000), "bad_answer", 1),
        ((200, {"result": [hits(1), hits(1)]}), "bad_answer", 1),
        ((200, {"result": [hits(float("nan"))]}), "bad_answer", 1),
        ((200, {"result": [hits(True)]}), "bad_answer", 1),
        ((200, {"result": [[{"document": {"id": "a", "contents": "\ud800"}, "score": 1}]]}), "bad_answer", 1),
        ((200, {"result": [["a page"]]}), "bad_answer", 1),
    ],
)
def test_a_lasting_fault_has_a_code_and_a_bounded_number_of_attempts(server, step, code, attempts):
    server.script = [step] * 10
    found = fault(SearchClient(server.url))
    assert (found.code, found.attempts) == (code, attempts) and server.url in found.detail
    assert len(found.detail) < 1000
    assert len(server.requests) == attempts


@pytest.mark.parametrize("step", ["hang", "trickle"])
def test_a_server_that_says_nothing_more_ends_at_the_deadline(server, step):
    server.script = [step]
    found = fault(SearchClient(server.url, timeout_s=0.5))
    assert (found.code, found.attempts) == ("deadline", 1)


@pytest.mark.slow
def test_the_deadline_covers_the_retries_and_the_reason_before_it_is_kept(server):
    server.script = [(503, b"overloaded"), "hang"]
    found = fault(SearchClient(server.url, timeout_s=1.5))
    assert found.code == "deadline" and "overloaded" in found.detail


def test_a_retry_goes_to_the_next_server(server):
    with dead_port() as dead:
        client = SearchClient([dead, server.url])
        assert search(client).attempts == 2
        assert fault(SearchClient(dead)).code == "connect"
        with pytest.raises(SearchFault, match=dead):
            asyncio.run(client.check())


def test_connections_are_reused_in_one_loop_and_reopened_in_the_next(server):
    client = SearchClient(server.url)

    async def run():
        for _ in range(5):
            await client.search("river")
        await client.aclose()
        await client.search("river")
        await client.aclose()

    asyncio.run(run())
    assert server.connections == 2
    search(client)
    assert (server.connections, len(server.requests)) == (3, 7)


@pytest.mark.slow
def test_concurrent_searches_have_a_connection_each_and_keep_them(server):
    client = SearchClient(server.url)

    async def run():
        for _ in range(3):
            await asyncio.gather(*(client.search(f"q{number}") for number in range(12)))
        await client.aclose()

    asyncio.run(run())
    assert (server.connections, len(server.requests)) == (12, 36)


def test_pages_are_written_in_order_and_each_text_is_cut():
    pages = [
        Page("a", "Zet", "x" * 30 + "\nend", 1.0),
        Page("b", "No text", "", 0.5),
        Page("c", "Kon", "ü\ny", 0.1),
    ]
    assert format_pages(pages, 10) == f"Page 1: Zet\n{'x' * 10}\nPage 2: No text\nPage 3: Kon\nü\ny"
    assert format_pages(pages[:1], 1000) == f"Page 1: Zet\n{'x' * 30}\nend"
    assert format_pages([Page("d", "z" * 30, "", 1.0)], 10) == f"Page 1: {'z' * 10}"
    assert format_pages([], 10) == ""


def test_a_query_that_utf8_cannot_hold_reaches_the_server_escaped(server):
    search(SearchClient(server.url), "\ud800")
    assert server.requests[0][1]["queries"] == ["\ud800"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"urls": []}, "urls"),
        ({"urls": "localhost:8000"}, "localhost:8000"),
        ({"urls": ["ftp://host"]}, "ftp://host"),
        ({"urls": "http://host:99999999"}, "99999999"),
        ({"topk": 0}, "topk=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"max_page_chars": 0}, "max_page_chars=0"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"urls": "http://me:secret@host/?x=1"}, r"http://\*\*\*@host"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        SearchClient(**{"urls": "http://127.0.0.1:1", **arguments})


def test_the_token_travels_and_the_server_is_told_the_time_that_is_left(server):
    search(SearchClient(server.url, token="s3cret", timeout_s=5))
    search(SearchClient(server.url))
    first, second = server.request_headers
    assert first["Authorization"] == "Bearer s3cret" and "Authorization" not in second
    assert 0 < int(first["X-Deadline-Ms"]) <= 5000 < int(second["X-Deadline-Ms"]) <= 10000


@pytest.mark.parametrize(
    "url, token",
    [("http://h", "tab\there"), ("http://h", "s3cret "), ("http://h", ""), ("http://me:pw@h", "s3cret")],
)
def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(url, token):
    with pytest.raises(ValueError, match="^token: ") as caught:
        SearchClient(url, token=token)
    assert not token or token not in str(caught.value)


@pytest.mark.slow
def test_a_client_works_on_whenever_a_search_was_cancelled(server):
    async def run():
        client = SearchClient(server.url, timeout_s=20)
        for moment in range(60):
            task = asyncio.create_task(client.search("given up"))
            for _ in range(moment):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await client.search("river")).attempts == 1
        await client.aclose()

    asyncio.run(run())


def _from(index):
    return (200, {"result": [hits(1.0, 0.9, 0.8)]}, {} if index is None else {"X-Index-Fingerprint": index})


def test_an_answer_from_another_index_is_a_fault_and_no_page(server):
    client = SearchClient(server.url, index_fingerprint="ab12")
    server.script = [_from("ab12"), _from("cd34"), _from("ab12")]
    assert len(search(client).pages) == 3
    caught = fault(client)
    assert (caught.code, caught.attempts) == ("bad_answer", 1)
    assert "index 'cd34'; search.index_fingerprint=ab12" in caught.detail
    assert len(search(client).pages) == 3


def test_a_server_that_named_its_index_must_go_on_naming_it(server):
    server.script = [_from(None), _from("ab12"), _from(None), _from("")]
    client = SearchClient(server.url, index_fingerprint="ab12")
    search(client)  # Search-R1's servers never name one
    search(client)
    assert "no longer sends X-Index-Fingerprint" in fault(client).detail
    assert fault(client).code == "bad_answer"


@pytest.mark.parametrize("depth", ["[" * 100_000, '{"a":' * 100_000, '{"query": ' + "[" * 100_000])
def test_arguments_that_are_nested_without_end_are_a_mistake_of_the_policy(depth):
    reason, query = bad_query_reason(depth)
    assert reason.startswith("Error: the arguments of search are not valid JSON (") and not query
