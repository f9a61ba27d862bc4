"""Retries, pauses, breakers and deadlines over several misbehaving servers; time is the test's own."""

import asyncio
import random
from contextlib import ExitStack

import pytest

from kit.scripted_server import FakeTime, dead_port, hits, scripted_server
from verl_credit.turns.rollout.search import client as client_file
from verl_credit.turns.rollout.search.client import SearchClient, SearchFault
from verl_credit.turns.rollout.search.faults import FAULT_CODES, backoff, retry_after_pause

BUSY = (429, b"busy")


@pytest.fixture
def time():
    return FakeTime()


@pytest.fixture
def servers():
    """Function that starts n servers for the test."""
    with ExitStack() as stack:
        yield lambda count: [stack.enter_context(scripted_server()) for _ in range(count)]


def client_of(servers, time, failures=client_file.FAILURES, pause_s=client_file.PAUSE_S, **arguments):
    urls = [getattr(server, "url", server) for server in servers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_file, "FAILURES", failures)
        patch.setattr(client_file, "PAUSE_S", pause_s)
        return SearchClient(urls, clock=time.clock, sleep=time.sleep, jitter=random.Random(7), **arguments)


def outcomes(client, searches):
    """Per search, one after the other: "pages", or the code of its fault."""

    async def run():
        found = []
        for _ in range(searches):
            try:
                found.append("pages" if (await client.search("river")).pages else "no pages")
            except SearchFault as fault:
                assert fault.code in FAULT_CODES
                found.append(fault.code)
        await client.aclose()
        return found

    return asyncio.run(run())


def asked(servers):
    return [len(server.requests) for server in servers]


# --- which server, and when ------------------------------------------------------------------------


def test_searches_take_turns(servers, time):
    three = servers(3)
    assert outcomes(client_of(three, time), 9) == ["pages"] * 9
    assert asked(three) == [3, 3, 3]


def test_a_failed_search_goes_round_and_each_server_is_asked_once(servers, time):
    three = servers(3)
    three[0].script, three[1].script = [(503, b"")], ["close"]
    assert outcomes(client_of(three, time), 1) == ["pages"]
    assert asked(three) == [1, 1, 1]


def test_a_dead_server_among_living_ones_costs_no_search_and_soon_no_attempt(servers, time):
    two = servers(2)
    with dead_port() as dead:
        client = client_of([dead, *two], time, failures=3, pause_s=60)
        assert outcomes(client, 30) == ["pages"] * 30
    assert sum(asked(two)) == 30
    assert len(time.pauses) == 3  # one per failure until the breaker opened; then the dead one is passed over


def test_retry_after_is_waited_for_on_the_server_that_asked(servers, time):
    (server,) = servers(1)
    server.script = [(*BUSY, {"Retry-After": "3"})]
    assert outcomes(client_of([server], time), 1) == ["pages"]
    assert len(time.pauses) == 1 and 3 <= time.pauses[0] <= 3.75


def test_retry_after_of_one_server_does_not_hold_up_another(servers, time):
    two = servers(2)
    two[0].script = [(*BUSY, {"Retry-After": "3"})]
    assert outcomes(client_of(two, time), 1) == ["pages"]
    assert asked(two) == [1, 1] and time.pauses[0] <= 0.1


def test_with_all_servers_busy_the_first_that_is_ready_is_asked(servers, time):
    two = servers(2)
    two[0].script = [(*BUSY, {"Retry-After": "6"})]
    two[1].script = [(*BUSY, {"Retry-After": "1"})]
    assert outcomes(client_of(two, time), 1) == ["pages"]
    assert asked(two) == [1, 2] and sum(time.pauses) < 2


# --- the breaker -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, code",
    [
        ((500, b""), "http_5xx"),
        ((503, b""), "overload"),
        ((504, b""), "deadline"),
        ((200, b"<html>"), "bad_answer"),
        ("close", "connect"),
    ],
)
def test_a_server_that_keeps_failing_is_left_alone_then_probed(servers, time, step, code):
    (server,) = servers(1)
    server.script = [step] * 4
    client = client_of([server], time, max_retries=0, failures=3, pause_s=5)
    assert outcomes(client, 6) == [code] * 3 + ["breaker_open"] * 3
    assert asked([server]) == [3]
    time.now += 5
    assert outcomes(client, 2) == [code, "breaker_open"]  # the probe failed
    time.now += 5
    assert outcomes(client, 3) == ["pages"] * 3
    assert asked([server]) == [7]


@pytest.mark.parametrize("status, code", [(400, "http_4xx"), (404, "http_4xx"), (429, "overload")])
def test_a_mistake_of_the_client_or_a_busy_server_does_not_open_the_breaker(servers, time, status, code):
    (server,) = servers(1)
    server.script = [(status, b"")] * 8
    client = client_of([server], time, max_retries=0, failures=2)
    assert outcomes(client, 9) == [code] * 8 + ["pages"]


def test_a_refused_search_sent_nothing_and_says_which_servers(servers, time):
    (server,) = servers(1)
    server.script = [(500, b"")]
    client = client_of([server], time, failures=1)
    outcomes(client, 1)
    with pytest.raises(SearchFault, match=server.url) as caught:
        asyncio.run(client.search("river"))
    assert (caught.value.code, caught.value.attempts) == ("breaker_open", 0)
    assert (
        "before that: status 500" in caught.value.detail
    )  # the cause, which most rows would otherwise not name
    assert time.pauses == []


def test_a_breaker_that_opens_during_a_search_leaves_its_reason(servers, time):
    (server,) = servers(1)
    server.script = [(503, b"full")] * 9
    client = client_of([server], time, max_retries=5, failures=2)
    with pytest.raises(SearchFault, match="full") as caught:
        asyncio.run(client.search("river"))
    assert (caught.value.code, caught.value.attempts) == ("overload", 2)


def test_cancelled_probes_do_not_block_the_server(servers, time):
    (server,) = servers(1)
    server.script = [(500, b""), "hang"]
    client = client_of([server], time, failures=1, pause_s=5)

    async def run():
        with pytest.raises(SearchFault):
            await client.search("river")
        time.now += 5
        probe = asyncio.create_task(client.search("river"))
        assert await asyncio.to_thread(server.hanging.wait, 60)
        with pytest.raises(SearchFault, match="breaker_open"):
            await client.search("river")
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        found = await client.search("river")
        await client.aclose()
        return found.pages

    assert asyncio.run(run())


def test_many_connections_that_break_at_once_lose_no_search(servers):
    """A worker process of the server dies with all its requests; the others are well, and the breaker stays closed."""
    (server,) = servers(1)
    server.script = ["hang"] * 20

    async def run():
        client = SearchClient(server.url, timeout_s=60)
        searches = [asyncio.create_task(client.search(f"q{number}")) for number in range(20)]
        async with asyncio.timeout(60):
            while len(server.requests) < 20:
                await asyncio.sleep(0.001)
        server.release.set()  # and all of them hang up
        found = await asyncio.gather(*searches)
        await client.aclose()
        return [result.attempts for result in found]

    assert asyncio.run(run()) == [2] * 20


# --- the deadline ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_search_outlives_its_deadline_whatever_the_servers_ask_for(servers, time):
    """Random scripts of busy servers: pauses never reach beyond the deadline, and nothing is asked after it."""
    chance = random.Random(3)
    two = servers(2)
    for _ in range(40):
        for server in two:
            server.script = [
                (429, b"", {"Retry-After": str(chance.choice([0, 1, 3, 9, 10**30]))}) for _ in range(9)
            ]
        begin, client = time.now, client_of(two, time, timeout_s=8, max_retries=8)
        assert outcomes(client, 1) == ["overload"]
        assert time.now - begin < 8


def test_a_pause_that_overslept_is_the_end(servers, time):
    (server,) = servers(1)
    server.script = [(503, b"full")]

    async def oversleep(seconds):
        time.now += 60

    client = SearchClient(server.url, clock=time.clock, sleep=oversleep)
    assert outcomes(client, 1) == ["overload"]
    assert asked([server]) == [1]


def test_each_attempt_tells_what_is_left_of_the_deadline(servers, time):
    (server,) = servers(1)
    server.script = [(*BUSY, {"Retry-After": "4"})]
    assert outcomes(client_of([server], time, timeout_s=10), 1) == ["pages"]
    first, second = (int(headers["X-Deadline-Ms"]) for headers in server.request_headers)
    assert first == 10_000 and second == pytest.approx(10_000 - 1000 * time.pauses[0], abs=1)


# --- nothing wrong passes as pages -----------------------------------------------------------------


@pytest.mark.slow
def test_whatever_the_servers_do_pages_are_the_right_ones_or_there_is_a_fault(servers, time):
    """Random faults on three servers; every search ends with the true pages or a code, and never with others."""
    chance = random.Random(11)
    steps = [
        *[(200, {"result": [hits(1.0, 0.9, 0.8)]})] * 8,
        (200, {"result": [hits(1.0, float("nan"))]}),
        (200, b'{"result": [[{"document": {"id": "d0", "contents": "T0"}, "scor'),
        (200, {"result": [hits(1.0), hits(1.0)]}),
        (500, {"result": [hits(1.0, 0.9, 0.8)]}),
        (429, {"result": [hits(1.0, 0.9, 0.8)]}),
        (503, b""),
        (504, b""),
        (302, b"", {"Location": "http://127.0.0.1:9/retrieve"}),
        "close",
        "half",
    ]
    three = servers(3)
    for server in three:
        server.script = [chance.choice(steps) for _ in range(400)]
    client = client_of(three, time, failures=2, pause_s=2)
    seen = set()

    async def run():
        for _ in range(300):
            time.now += 0.2
            try:
                result = await client.search("river")
            except SearchFault as fault:
                seen.add(fault.code)
                assert fault.code in FAULT_CODES and fault.attempts <= 3
            else:
                seen.add("pages")
                assert [page.id for page in result.pages] == ["d0", "d1", "d2"]
                assert [page.score for page in result.pages] == [1.0, 0.9, 0.8]
        await client.aclose()

    asyncio.run(run())
    assert seen == {"pages", *FAULT_CODES} - {"http_4xx"}


# --- pauses ----------------------------------------------------------------------------------------


def test_backoff_doubles_to_a_ceiling():
    jitter = random.Random(0)
    for attempt in range(100):
        least = min(2.0, 0.05 * 2**attempt)
        assert least <= backoff(attempt, jitter) <= 2 * least


@pytest.mark.parametrize(
    "header, seconds",
    [
        ("0", 0),
        (" 3 ", 3),
        (None, 0),
        ("1.5", 0),
        ("²", 0),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 0),
        ("9" * 400, float("inf")),
    ],
)
def test_retry_after_is_read_as_seconds(header, seconds):
    pause = retry_after_pause(header, random.Random(0))
    assert seconds <= pause <= 1.25 * seconds
