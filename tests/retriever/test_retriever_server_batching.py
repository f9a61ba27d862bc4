"""What the server does with many queries at once: batches by tokens, the cache, and what it counts."""

import asyncio
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.retriever_fakes import FakeEncoder, FakeIndex, client_of, metric, until
from verl_credit_retriever.http.batcher import Pace
from verl_credit_retriever.http.engine import ResultCache
from verl_credit_retriever.http.metrics import ServerMetrics
from verl_credit_retriever.http.server import create_app
from verl_credit_retriever.http.waiting import Item, Request, WaitingQueries
from verl_credit_retriever.settings import Limits


async def _ask(client, queries, k=3, **headers):
    return await client.post(
        "/retrieve", json={"queries": queries, "topk": k, "return_scores": True}, headers=headers
    )


def _ids(answer):
    assert answer.status_code == 200, answer.text
    return [[hit["document"]["id"] for hit in hits] for hits in answer.json()["result"]]


def _held(limits):
    """An app whose encoder waits for `gate` (it is open for nobody yet)."""
    gate = threading.Event()
    encoder = FakeEncoder(gate=gate)
    index = FakeIndex(encoder)
    return create_app(index, encoder, limits=limits), encoder, index, gate


async def _after_first(app, encoder, gate, requests):
    """Answers of `requests` (queries, k), which all arrive while the encoder is busy with a first query."""
    async with client_of(app) as client:
        first = asyncio.create_task(_ask(client, ["first"], 1))
        await until(encoder.entered.is_set)
        tasks = []
        for count, (queries, k) in enumerate(requests, start=1):
            tasks.append(asyncio.create_task(_ask(client, queries, k)))
            total = sum(len(queries) for queries, _ in requests[:count])
            # One by one, so that their order is known.
            while metric((await client.get("/metrics")).text, "queue_queries") < total:
                await asyncio.sleep(0)
        gate.set()
        answers = await asyncio.gather(first, *tasks)
        return answers[1:], (await client.get("/metrics")).text


def test_batches_keep_the_token_budget_and_the_order():
    app, encoder, _, gate = _held(Limits(max_batch_tokens=40))
    # 10 tokens each: four fit; then a long one alone, although it is over the budget; then the rest.
    requests = [([f"query   {n} "[:10]], 1) for n in range(5)] + [(["x" * 50], 1), (["short"], 1)]
    answers, metrics = asyncio.run(_after_first(app, encoder, gate, requests))
    assert encoder.calls == [1, 4, 1, 1, 1]
    for answer, (queries, _) in zip(answers, requests, strict=True):
        assert _ids(answer) == [[f"{queries[0]}/0"]]
    assert metric(metrics, "batch_tokens_count") == 5
    assert metric(metrics, "batch_tokens_sum") == 5 + 4 * 10 + 10 + 50 + 5
    assert metric(metrics, "batch_queries_sum") == 8
    # What waited while the first was encoded was tokenized at once.
    for stage, count in {"queue": 8, "tokenize": 2, "encode": 5, "search": 5, "serialize": 8}.items():
        assert metric(metrics, "stage_seconds_count", stage=stage) == count


def test_requests_take_turns():
    """A single query behind two large requests is in the next batch; nobody's batches are smaller for it."""
    app, encoder, _, gate = _held(Limits(max_batch_tokens=64))
    large = [[f"{name}  {n:04d}" for n in range(24)] for name in "ab"]  # 7 tokens each: nine fit
    answers, _ = asyncio.run(
        _after_first(app, encoder, gate, [(large[0], 1), (large[1], 1), (["s  0000"], 1)])
    )
    in_turn = [text for pair in zip(*large, strict=True) for text in pair]
    assert encoder.encoded[1:] == [*in_turn[:2], "s  0000", *in_turn[2:]]
    assert encoder.calls == [1, 9, 9, 9, 9, 9, 4]
    for answer, queries in zip(answers, [*large, ["s  0000"]], strict=True):
        assert _ids(answer) == [[f"{query}/0"] for query in queries]


@pytest.mark.parametrize("seed", range(20))
def test_no_item_is_lost_or_taken_twice_whoever_comes_and_goes(seed):
    draw = random.Random(seed)

    async def run():
        waiting = WaitingQueries(Limits(max_batch_tokens=30), ServerMetrics())
        loop, there, taken = asyncio.get_running_loop(), {}, []
        for number in range(200):
            kind = draw.choice(("come", "come", "go", "take", "take", "again"))
            if kind == "come":
                request = Request(loop.create_future(), [], 0, None, alone=draw.random() < 0.1)
                items = [
                    Item(request, row, f"{number} {row}", 1, ids=[0] * draw.randint(1, 9))
                    for row in range(draw.choice((1, 1, 20)))
                ]
                (waiting.put_first if request.alone else waiting.append)(items)
                there[request] = list(items)
            elif kind == "go" and there:
                request = draw.choice(list(there))
                assert waiting.remove(request) == len(there.pop(request))
            elif kind == "again" and taken:  # a batch that failed
                back = [item for item in taken.pop() if item.request in there]
                waiting.put_first(back)
                for item in reversed(back):
                    there[item.request].insert(0, item)
            elif kind == "take" and len(waiting):
                batch = waiting.take()
                assert len({item.request for item in batch}) == 1 or not any(
                    item.request.alone for item in batch
                )
                for item in batch:
                    assert there[item.request].pop(0) is item  # in its request's own order
                taken.append(batch)
            there = {
                request: items
                for request, items in there.items()
                if items or any(item.request is request for batch in taken for item in batch)
            }
            assert len(waiting) == sum(map(len, there.values()))

    asyncio.run(run())


def test_equal_texts_are_encoded_once_and_k_is_each_ones_own():
    app, encoder, index, gate = _held(Limits())
    requests = [(["same", "other", "same"], 2), (["same"], 5), (["other"], 2)]
    answers, _ = asyncio.run(_after_first(app, encoder, gate, requests))
    assert encoder.encoded == ["first", "same", "other"]
    assert index.calls == [(1, 1), (2, 2), (1, 5)]
    assert [[len(hits) for hits in _ids(answer)] for answer in answers] == [[2, 2, 2], [5], [2]]
    assert _ids(answers[0])[0] == _ids(answers[0])[2] == _ids(answers[1])[0][:2]


def test_nobody_is_blamed_for_the_fault_of_a_client_that_has_left():
    app, encoder, _, gate = _held(Limits())
    encoder.broken["bad"] = RuntimeError("out of memory")

    async def run():
        async with client_of(app) as client:
            first = asyncio.create_task(_ask(client, ["first"], 1))
            await until(encoder.entered.is_set)
            tasks = [asyncio.create_task(_ask(client, [query], 1)) for query in ("bad", "good")]
            while metric((await client.get("/metrics")).text, "queue_queries") < 2:
                await asyncio.sleep(0)
            encoder.entered.clear()
            encoder.gate = threading.Event()  # for the next batch
            gate.set()
            await until(encoder.entered.is_set)  # the two are in one batch now
            tasks[0].cancel()
            await asyncio.wait([tasks[0]])
            encoder.gate.set()
            await first
            return await tasks[1]

    assert _ids(asyncio.run(run())) == [["good/0"]]
    assert encoder.encoded == ["first", "bad", "good", "good"]


class _Panic(BaseException):
    """As tokenizers written in Rust raise it."""


@pytest.mark.parametrize(
    "error, named", [(_Panic("index out of bounds"), "_Panic: index out of bounds"), (StopIteration(), "")]
)
def test_what_is_no_ordinary_exception_fails_its_own_request_and_nobody_waits_for_ever(error, named):
    app, encoder, _, gate = _held(Limits())
    encoder.broken["bad"] = error

    async def run():
        async with asyncio.timeout(30):
            return await _after_first(app, encoder, gate, [(["a"], 1), (["bad"], 1), (["b"], 1)])

    answers, _ = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert answers[1].json()["error"].startswith("RuntimeError: encode raised") and named in answers[1].text


def test_a_failing_search_fails_its_own_request_only():
    app, encoder, index, gate = _held(Limits())

    def damage(found):
        if any(hits[0][0]["id"] == "bad/0" for hits in found):
            raise OSError("the disk is gone")
        return found

    index.damage = damage
    answers, _ = asyncio.run(_after_first(app, encoder, gate, [(["a"], 1), (["bad"], 2), (["b"], 1)]))
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert "the disk is gone" in answers[1].json()["error"]


def test_the_next_batch_is_encoded_while_one_is_searched():
    app, encoder, index, gate = _held(Limits(max_batch_tokens=5))
    gate.set()
    searching, go_on = threading.Event(), threading.Event()

    def damage(found):
        searching.set()
        assert go_on.wait(60)
        return found

    index.damage = damage

    async def run():
        async with client_of(app) as client:
            one = asyncio.create_task(_ask(client, ["one"]))
            await until(searching.is_set)
            two = asyncio.create_task(_ask(client, ["two"]))
            await until(lambda: "two" in encoder.encoded)
            assert not one.done()
            go_on.set()
            return await asyncio.gather(one, two)

    assert [_ids(answer)[0][0] for answer in asyncio.run(run())] == ["one/0", "two/0"]


@pytest.mark.slow
@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(["a", "bb", "ccc", "", "bad"]), max_size=6), st.integers(1, 30)),
        max_size=12,
    ),
    st.integers(1, 12),
)
def test_whoever_asks_at_the_same_time_everyone_gets_his_own_answer(requests, budget):
    """Concurrent requests of any sizes and k, some failing, are answered as each one would be alone."""
    encoder = FakeEncoder()
    encoder.broken["bad"] = RuntimeError("broken")
    app = create_app(FakeIndex(encoder), encoder, limits=Limits(max_batch_tokens=budget))

    async def run():
        async with client_of(app) as client:
            bodies = [{"queries": queries, "topk": k} for queries, k in requests]
            return await asyncio.gather(*(client.post("/retrieve", json=body) for body in bodies))

    for answer, (queries, k) in zip(asyncio.run(run()), requests, strict=True):
        assert answer.status_code == (500 if "bad" in queries else 200)
        if answer.status_code == 200:
            ids = [[hit["id"] for hit in hits] for hits in answer.json()["result"]]
            assert ids == [[f"{query}/{r}" for r in range(min(k, 20))] for query in queries]


def test_a_cached_answer_is_the_uncached_one():
    encoder, plain = FakeEncoder(), FakeEncoder()
    cached_app = create_app(FakeIndex(encoder), encoder)
    plain_app = create_app(FakeIndex(plain), plain, limits=Limits(cache_entries=0))
    asked = [["a", "b"], ["b"], ["b", "c", "a"], [" b"]]

    async def run():
        async with client_of(cached_app) as client, client_of(plain_app) as uncached:
            for queries in asked:
                for k in (2, 3):
                    assert (await _ask(client, queries, k)).content == (
                        await _ask(uncached, queries, k)
                    ).content
            return (await client.get("/metrics")).text, (await uncached.get("/metrics")).text

    metrics, without = asyncio.run(run())
    # Texts are keys as they are, and k is a part of the key.
    assert sorted(encoder.encoded) == sorted([" b", "a", "b", "c"] * 2)
    assert len(plain.encoded) == 2 * sum(map(len, asked))
    assert (metric(metrics, "cache_hits_total"), metric(metrics, "cache_misses_total")) == (6, 8)
    assert metric(metrics, "cache_entries") == 8 and metric(metrics, "cache_bytes") > 0
    assert metric(without, "cache_hits_total") == 0


def _hits(text):
    return [({"id": text, "contents": text}, 1.0)]


def test_the_cache_forgets_what_was_not_used_longest():
    cache = ResultCache(max_entries=3, max_bytes=1 << 20)
    for name in ("a", "b", "c"):
        cache.put(name, 1, _hits(name))
    assert cache.get("a", 1) == _hits("a") and cache.get("a", 2) is None
    cache.put("d", 1, _hits("d"))
    assert [name for name in "abcd" if cache.get(name, 1)] == ["a", "c", "d"]
    cache.put("d", 1, _hits("new"))
    assert cache.get("d", 1) == _hits("new") and len(cache) == 3


@pytest.mark.slow
@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 3000)), max_size=30))
def test_the_cache_keeps_both_bounds(puts):
    cache = ResultCache(max_entries=4, max_bytes=20_000)
    for name, size in puts:
        cache.put(name, 1, _hits(name * size))
        assert len(cache) <= 4 and 0 <= cache.bytes <= 20_000
        assert cache.get(name, 1) in (None, _hits(name * size))
    for name in "abcdefgh":
        cache.put(name, 1, _hits("x" * 10_000))  # larger than all the room there is
        assert cache.get(name, 1) is None


def test_retry_after_follows_the_pace():
    pace = Pace(weight=1.0)
    assert pace.pause_s(1000) == 1  # nothing is known yet
    pace.answered(50, began=0.0, now=5.0)
    assert pace.queries_per_s == 10 and pace.pause_s(95) == 10 and pace.pause_s(3) == 1
    assert pace.pause_s(10**6) == 60
    pace.answered(20, began=3.0, now=6.0)  # it overlapped the one before for two seconds
    assert pace.queries_per_s == 20
    pace.answered(20, began=100.0, now=101.0)  # and an idle time is no work
    assert pace.queries_per_s == 20


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_topk", 0),
        ("max_batch_tokens", True),
        ("cache_entries", -1),
        ("default_topk", 101),
        ("max_request_queries", 8193),
    ],
)
def test_a_wrong_limit_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        Limits(**{field: value})
