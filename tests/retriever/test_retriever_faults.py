"""Bad input, overload, and parts that fail: an answer is right, or it says that it is none."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator

import pytest

from kit.retriever_fakes import FakeEncoder, FakeIndex, app_of, ask, client_of, metric, send, until
from verl_credit_retriever.http import batcher
from verl_credit_retriever.http.engine import Engine
from verl_credit_retriever.http.metrics import ServerMetrics
from verl_credit_retriever.settings import Limits


def _post(app, body, **headers):
    content = body if isinstance(body, bytes | AsyncIterator) else json.dumps(body)
    return send(
        app, "POST", "/retrieve", content=content, headers={"Content-Type": "application/json", **headers}
    )


@pytest.mark.parametrize(
    "body, named",
    [
        ({}, "queries"),
        ({"queries": "one text"}, "queries"),
        ({"queries": [1]}, "queries.0"),
        ({"queries": ["a"], "topk": -1}, "topk"),
        ({"queries": ["a"], "topk": "3"}, "topk"),
        ({"queries": ["a"], "topk": 101}, "topk: 101; at most 100"),
        ({"queries": ["a"], "topk": 1.5}, "topk"),
        ({"queries": ["a"], "topk": True}, "topk"),
        ({"queries": ["a"], "topk": math.nan}, "topk"),
        ({"queries": ["a"], "return_scores": "yes"}, "return_scores"),
        (
            {"queries": ["a"] * 4097, "topk": 100},
            "queries: 4097 of them; at most 4096 with 100 documents each",
        ),
        (b'{"queries": ["\xff\xfe"]}', ""),
        (b"[" * 100_000, ""),
        (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", ""),
        (b"{", ""),
        (b"", ""),
    ],
)
def test_a_malformed_request_is_refused_and_the_field_named(body, named):
    app, encoder = app_of()
    answer = _post(app, body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(named) and len(answer.content) < 1000
    assert encoder.encoded == []


@pytest.mark.parametrize("with_length", [True, False])
def test_a_body_over_the_limit_is_413(with_length):
    app, encoder = app_of(limits=Limits(max_body_bytes=1000))
    body = json.dumps({"queries": ["x" * 2000], "topk": 1}).encode()

    async def pieces():
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    answer = _post(app, body if with_length else pieces())
    assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]
    assert encoder.encoded == []


def _replace_first(hit):
    return lambda found: [[hit, *hits[1:]] for hits in found]


DAMAGES = {
    "a score that is NaN": _replace_first(({"id": "1", "contents": "c"}, math.nan)),
    "an infinite score": _replace_first(({"id": "1", "contents": "c"}, math.inf)),
    "no document": _replace_first((None, 0.5)),
    "a document without contents": _replace_first(({"id": "1"}, 0.5)),
    "worst first": lambda found: [hits[::-1] for hits in found],
    "one document twice": lambda found: [[hits[0], hits[0]] for hits in found],
    "no hit": lambda found: [[] for _ in found],
    "one hit less": lambda found: [hits[:-1] for hits in found],
    "too many hits": lambda found: [[*hits, *hits] for hits in found],
    "an answer less": lambda found: found[1:],
    "an answer more": lambda found: [*found, found[0]],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_answer_never_leaves_the_server(damage):
    app, _ = app_of(damage=damage)
    answer = _post(app, {"queries": ["a", "b"], "topk": 3})
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("BadHits: the search")


def _busy(**options):
    """An app whose encoder is at work until `gate` is set."""
    gate = threading.Event()
    return *app_of(gate, **options), gate


async def _occupy(client, encoder):
    first = asyncio.create_task(client.post("/retrieve", json={"queries": ["first"], "topk": 1}))
    await until(encoder.entered.is_set)
    return first


async def _waiting(client) -> float:
    return metric((await client.get("/metrics")).text, "queue_queries")


async def _until_waiting(client, number):
    async with asyncio.timeout(30):
        while await _waiting(client) != number:
            await asyncio.sleep(0.001)


def test_a_full_queue_is_429_and_never_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(batcher, "REFUSED_AFTER_S", 0)
    app, encoder, gate = _busy(limits=Limits(max_queue_queries=8, max_request_queries=4))

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            bodies = [{"queries": [f"q{n}", f"r{n}"], "topk": 1} for n in range(20)]
            tasks = [asyncio.create_task(client.post("/retrieve", json=body)) for body in bodies]
            await until(lambda: sum(task.done() for task in tasks) == 16)
            assert await _waiting(client) == 8
            ready = asyncio.create_task(client.get("/readyz"))  # it does not need a place
            gate.set()
            return bodies, await asyncio.gather(*tasks), await first, await ready

    bodies, answers, first, ready = asyncio.run(run())
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 16
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status_code == 200:
            assert [hits[0]["id"] for hits in answer.json()["result"]] == [f"{q}/0" for q in body["queries"]]
        else:
            assert (
                1 <= int(answer.headers["Retry-After"]) <= 60 and "8 queries wait" in answer.json()["error"]
            )
    assert (first.status_code, ready.status_code) == (200, 200)


def test_a_request_waits_for_room_before_it_is_refused_but_only_so_many_do(monkeypatch):
    """Clients that ask again at once took most of the answers that a full server could give."""
    monkeypatch.setattr(batcher, "HELD", 3)
    monkeypatch.setattr(batcher, "REFUSED_AFTER_S", 60)
    app, encoder, gate = _busy(limits=Limits(max_queue_queries=2, max_request_queries=2))

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            queued = asyncio.create_task(client.post("/retrieve", json={"queries": ["a", "b"], "topk": 1}))
            await _until_waiting(client, 2)
            body = {"queries": ["c", "d"], "topk": 1}
            late = await client.post("/retrieve", json=body, headers={"X-Deadline-Ms": "30"})
            waits = asyncio.create_task(client.post("/retrieve", json=body))
            await asyncio.sleep(0)
            at_once = await client.post("/retrieve", json=body)  # two more would be four
            assert not waits.done()
            gate.set()
            return [(await task).status_code for task in (first, queued, waits)], late, at_once

    answered, late, at_once = asyncio.run(run())
    assert answered == [200] * 3
    assert (late.status_code, at_once.status_code) == (504, 429)


def _in_line(monkeypatch, run):
    """What is encoded after "0" while `run` sends requests of letters, a query each; four letters have room."""
    monkeypatch.setattr(batcher, "REFUSED_AFTER_S", 60)

    async def main():
        encoder, metrics = FakeEncoder(gate=threading.Event()), ServerMetrics()
        engine, limits = (
            Engine(FakeIndex(encoder), encoder, metrics),
            Limits(max_queue_queries=4, max_request_queries=4),
        )
        waiting = batcher.Batcher(engine, limits, metrics)

        async def send(letters):
            task = asyncio.create_task(waiting.submit(list(letters), 1))
            for _ in range(5):
                await asyncio.sleep(0)
            return task

        async with asyncio.timeout(30):
            tasks = [await send("0"), *await run(send, lambda: len(waiting._waiting))]
            encoder.gate.set()
            await asyncio.gather(*tasks)
        return "".join(encoder.encoded)

    return asyncio.run(main())


def test_who_waits_for_room_is_not_overtaken(monkeypatch):
    """Small requests that fit into what is left would keep a large one out for ever."""

    async def run(send, queued):
        return [await send(letters) for letters in ("abc", "LMNO", "s", "t")]

    assert _in_line(monkeypatch, run) == "0abcLMNOst"


@pytest.mark.parametrize("leaves, order", [("abc", "0LsMN"), ("LMN", "0asbc")])
def test_who_leaves_the_queue_or_the_line_makes_way_for_the_next(monkeypatch, leaves, order):
    async def run(send, queued):
        tasks = {letters: await send(letters) for letters in ("abc", "LMN", "s")}
        tasks[leaves].cancel()
        await asyncio.wait([tasks.pop(leaves)])
        await send("")  # no query, no room needed
        assert queued() == 4  # although nothing was encoded meanwhile
        return tasks.values()

    assert _in_line(monkeypatch, run) == order


def test_a_deadline_that_passes_is_504_and_its_work_is_dropped():
    app, encoder, gate = _busy()

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            body = {"queries": ["late", "later"], "topk": 1}
            late = await client.post("/retrieve", json=body, headers={"X-Deadline-Ms": "30"})
            old = await client.post("/retrieve", json={"queries": ["late"]}, headers={"X-Deadline-Ms": "0"})
            assert await _waiting(client) == 0
            gate.set()
            await first
            body["queries"] = ["in time"]
            in_time = await client.post("/retrieve", json=body, headers={"X-Deadline-Ms": "60000"})
            return late, old, in_time, (await client.get("/metrics")).text

    late, old, in_time, metrics = asyncio.run(run())
    assert (late.status_code, old.status_code, in_time.status_code) == (504, 504, 200)
    assert "X-Deadline-Ms=30" in late.json()["error"]
    assert encoder.encoded == ["first", "in time"]
    assert metric(metrics, "dropped_queries_total", reason="deadline") == 2


@pytest.mark.parametrize("value", ["-1", "soon", "1e3", "nan", "1_000", "+5000", "5000.0", "٣", str(2**40)])
def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(value):
    app, _ = app_of()
    answer = _post(app, {"queries": ["a"], "topk": 1}, **{"X-Deadline-Ms": value.encode()})
    assert answer.status_code == 422 and answer.json()["error"].startswith("x-deadline-ms")


JSON = [(b"content-type", b"application/json")]


def test_the_work_of_a_client_that_went_away_is_dropped():
    app, encoder, gate = _busy()

    async def run():
        async with client_of(app) as client:
            first, leave = await _occupy(client, encoder), asyncio.Event()
            body = [b'{"queries": ["gone", "too"]}']
            gone = asyncio.create_task(ask(app, "POST", "/retrieve", JSON, body, leave))
            stays = asyncio.create_task(client.post("/retrieve", json={"queries": ["stays"]}))
            await _until_waiting(client, 3)
            leave.set()
            assert (await gone)[0] == 499
            await _until_waiting(client, 1)
            gate.set()
            await first
            return await stays, (await client.get("/metrics")).text

    stays, metrics = asyncio.run(run())
    assert stays.status_code == 200 and encoder.encoded == ["first", "stays"]
    assert metric(metrics, "dropped_queries_total", reason="disconnected") == 2
    assert metric(metrics, "requests_total", route="/retrieve", status="499") == 1


def test_a_probe_of_a_busy_server_waits_for_no_batch_but_the_one_that_runs():
    app, encoder, gate = _busy()

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            bodies = [{"queries": [f"q{n}"], "topk": 1} for n in range(20)]
            tasks = [asyncio.create_task(client.post("/retrieve", json=body)) for body in bodies]
            await _until_waiting(client, 20)
            ready = asyncio.create_task(client.get("/readyz"))
            await _until_waiting(client, 21)
            gate.set()
            return await first, await ready, await asyncio.gather(*tasks)

    first, ready, answers = asyncio.run(run())
    assert {answer.status_code for answer in (first, ready, *answers)} == {200}
    assert encoder.calls == [1, 1, 20]  # what ran, the probe by itself, all others together


def test_readyz_tells_whether_a_query_can_be_answered():
    app, encoder = app_of()

    async def run():
        async with client_of(app) as client:
            before = await client.get("/readyz")
            encoder.broken[encoder.encoded[0]] = RuntimeError("out of memory")
            # The cache knows the canary by now; it must be searched all the same.
            return before, await client.get("/readyz"), await client.get("/livez")

    before, ready, live = asyncio.run(run())
    assert (before.status_code, ready.status_code, live.status_code) == (200, 503, 200)
    assert ready.json() == {"status": "not ready", "error": "RuntimeError: out of memory"}
