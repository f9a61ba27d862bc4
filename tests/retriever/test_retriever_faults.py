"""Bad input, overload, and parts that fail: an answer is right, or it says that it is none."""

import asyncio
import json
import logging
import math
import socket
import threading

import httpx
import pytest
import uvicorn
from omegaconf import OmegaConf

from kit.retriever_fakes import ROWS, FakeEncoder, FakeIndex, client_of, metric, until
from verl_credit.config.keys import Search
from verl_credit.doctor.inputs.recipe import check_retriever
from verl_credit.doctor.result import Status
from verl_credit_retriever.http.limits import Limits
from verl_credit_retriever.http.server import create_app
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, ServeSettings, read_token
from verl_credit_retriever.serving.sockets import check_host

TOKEN = "a-token-of-some-length"


def _app(gate=None, damage=None, **options):
    encoder = FakeEncoder(gate=gate)
    index = FakeIndex(encoder)
    index.damage = damage
    return create_app(index, encoder, **options), encoder


def _post(app, body, path="/v1/search", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body)

    async def run():
        async with client_of(app) as client:
            return await client.post(
                path, content=content, headers={"Content-Type": "application/json", **headers}
            )

    return asyncio.run(run())


@pytest.mark.parametrize(
    "body, named",
    [
        ({"queries": [""], "k": 1}, "queries.0"),
        ({"queries": [" \n"], "k": 1}, "queries.0"),
        ({"queries": [], "k": 1}, "queries"),
        ({"queries": ["a"]}, "k"),
        ({"queries": ["a"], "k": 0}, "k"),
        ({"queries": ["a"], "k": 101}, "k: 101; at most 100"),
        ({"queries": ["a"], "k": 1.5}, "k"),
        ({"queries": ["a"], "k": True}, "k"),
        ({"queries": ["a"], "k": math.nan}, "k"),
        ({"queries": ["a"], "k": None}, "k"),
        ({"queries": ["a"], "k": 1, "topk": 1}, "topk"),
        ({"queries": ["x" * 100_000], "k": 1}, "queries.0: 100000 characters; at most 10000"),
        ({"queries": ["a"] * 1025, "k": 1}, "queries: 1025 of them; at most 1024"),
        ({"queries": ["\udfff"], "k": 1}, "queries.0"),
        (b'{"queries": ["\xff\xfe"], "k": 1}', ""),
        (b"[" * 100_000, ""),
        (b'{"queries": ["a"], "k": ' + b"9" * 5000 + b"}", ""),
    ],
)
def test_the_strict_route_refuses_and_names_the_field(body, named):
    app, encoder = _app()
    answer = _post(app, body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(named) and len(answer.content) < 1000
    assert encoder.encoded == []


def test_k_above_the_rows_gives_all_rows():
    app, _ = _app()
    for path, k in (("/v1/search", "k"), ("/retrieve", "topk")):
        answer = _post(app, {"queries": ["a"], k: ROWS + 5}, path).json()
        (hits,) = answer["results" if path == "/v1/search" else "result"]
        assert [hit["id"] for hit in hits] == [f"a/{row}" for row in range(ROWS)]


@pytest.mark.parametrize("with_length", [True, False])
def test_a_body_over_the_limit_is_413(with_length):
    app, encoder = _app(limits=Limits(max_body_bytes=1000))
    body = json.dumps({"queries": ["x" * 2000], "k": 1}).encode()

    async def pieces():
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async def run():
        async with client_of(app) as client:
            content = body if with_length else pieces()
            return await client.post(
                "/v1/search", content=content, headers={"Content-Type": "application/json"}
            )

    answer = asyncio.run(run())
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
    app, _ = _app(damage=damage)
    for path, k in (("/v1/search", "k"), ("/retrieve", "topk")):
        answer = _post(app, {"queries": ["a", "b"], k: 3}, path)
        assert answer.status_code == 500
        assert answer.json()["error"].startswith("BadHits: the search")


class _Vectors(FakeEncoder):
    """Gives vectors that `spoil` has changed."""

    spoil = staticmethod(lambda vectors_N_D: vectors_N_D)

    def encode_tokens(self, ids_N):
        return self.spoil(super().encode_tokens(ids_N))


@pytest.mark.parametrize("spoil", [lambda v: v * math.nan, lambda v: v[:-1]], ids=["NaN", "one less"])
def test_vectors_that_are_none_are_a_500(spoil):
    encoder = _Vectors()
    encoder.spoil = spoil
    answer = _post(create_app(FakeIndex(encoder), encoder), {"queries": ["a", "b"], "k": 3})
    assert answer.status_code == 500 and "the encoder gave vectors" in answer.json()["error"]


def test_a_fault_passes_and_leaves_nothing_in_the_cache():
    app, encoder = _app()
    encoder.broken["a"] = MemoryError("no memory")
    assert _post(app, {"queries": ["a"], "k": 1}).status_code == 500
    del encoder.broken["a"]
    assert _post(app, {"queries": ["a"], "k": 1}).status_code == 200


def _busy(**options):
    """An app whose encoder is at work until `gate` is set."""
    gate = threading.Event()
    return *_app(gate, **options), gate


async def _occupy(client, encoder):
    first = asyncio.create_task(client.post("/v1/search", json={"queries": ["first"], "k": 1}))
    await until(encoder.entered.is_set)
    return first


async def _waiting(client) -> float:
    return metric((await client.get("/metrics")).text, "queue_queries")


async def _until_waiting(client, number):
    async with asyncio.timeout(30):
        while await _waiting(client) != number:
            await asyncio.sleep(0.001)


def test_a_full_queue_is_429_and_never_a_wrong_answer():
    app, encoder, gate = _busy(limits=Limits(max_queue_queries=8, max_request_queries=4))

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            bodies = [{"queries": [f"q{n}", f"r{n}"], "k": 1} for n in range(20)]
            tasks = [asyncio.create_task(client.post("/v1/search", json=body)) for body in bodies]
            await until(lambda: sum(task.done() for task in tasks) == 16)
            assert await _waiting(client) == 8
            ready = asyncio.create_task(client.get("/readyz"))  # it does not need a place
            gate.set()
            return bodies, await asyncio.gather(*tasks), await first, await ready

    bodies, answers, first, ready = asyncio.run(run())
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 16
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status_code == 200:
            assert [hits[0]["id"] for hits in answer.json()["results"]] == [f"{q}/0" for q in body["queries"]]
        else:
            assert (
                1 <= int(answer.headers["Retry-After"]) <= 60 and "8 queries wait" in answer.json()["error"]
            )
    assert (first.status_code, ready.status_code) == (200, 200)


def test_a_deadline_that_passes_is_504_and_its_work_is_dropped():
    app, encoder, gate = _busy()

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            body = {"queries": ["late", "later"], "k": 1}
            late = await client.post("/v1/search", json=body, headers={"X-Deadline-Ms": "30"})
            old = await client.post("/retrieve", json={"queries": ["late"]}, headers={"X-Deadline-Ms": "0"})
            assert await _waiting(client) == 0
            gate.set()
            await first
            body["queries"] = ["in time"]
            in_time = await client.post("/v1/search", json=body, headers={"X-Deadline-Ms": "60000"})
            return late, old, in_time, (await client.get("/metrics")).text

    late, old, in_time, metrics = asyncio.run(run())
    assert (late.status_code, old.status_code, in_time.status_code) == (504, 504, 200)
    assert "X-Deadline-Ms=30" in late.json()["error"]
    assert encoder.encoded == ["first", "in time"]
    assert metric(metrics, "dropped_queries_total", reason="deadline") == 2


@pytest.mark.parametrize("value", ["-1", "soon", "1e3", "nan", str(2**40)])
def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(value):
    app, _ = _app()
    answer = _post(app, {"queries": ["a"], "k": 1}, **{"X-Deadline-Ms": value})
    assert answer.status_code == 422 and answer.json()["error"].startswith("x-deadline-ms")


async def _raw_post(app, body: bytes, leave: asyncio.Event) -> list[dict]:
    """What an app sends to a client that goes away when `leave` is set."""
    sent, parts = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if parts:
            return parts.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/retrieve", "raw_path": b"/retrieve"}
    scope |= {"query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http"}
    await app(scope | {"server": ("retriever", 80), "client": ("127.0.0.1", 1)}, receive, send)
    return sent


def test_the_work_of_a_client_that_went_away_is_dropped():
    app, encoder, gate = _busy()

    async def run():
        async with client_of(app) as client:
            first, leave = await _occupy(client, encoder), asyncio.Event()
            gone = asyncio.create_task(_raw_post(app, b'{"queries": ["gone", "too"]}', leave))
            stays = asyncio.create_task(client.post("/retrieve", json={"queries": ["stays"]}))
            await _until_waiting(client, 3)
            leave.set()
            assert (await gone)[0]["status"] == 499
            await _until_waiting(client, 1)
            gate.set()
            await first
            return await stays, (await client.get("/metrics")).text

    stays, metrics = asyncio.run(run())
    assert stays.status_code == 200 and encoder.encoded == ["first", "stays"]
    assert metric(metrics, "dropped_queries_total", reason="disconnected") == 2
    assert metric(metrics, "requests_total", route="/retrieve", status="499") == 1


def test_a_draining_server_refuses_and_finishes_what_is_queued():
    app, encoder, gate = _busy()

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            queued = asyncio.create_task(client.post("/retrieve", json={"queries": ["queued"]}))
            await _until_waiting(client, 1)
            app.state.draining = True
            ready, live = await client.get("/readyz"), await client.get("/livez")
            refused = await client.post("/retrieve", json={"queries": ["new"]})
            gate.set()
            return [await first, await queued, ready, live, refused]

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200, 200, 503, 200, 503]
    assert answers[4].headers["Retry-After"] == "1"
    assert encoder.encoded == ["first", "queued"]


def test_a_probe_of_a_busy_server_waits_for_no_batch_but_the_one_that_runs():
    app, encoder, gate = _busy()

    async def run():
        async with client_of(app) as client:
            first = await _occupy(client, encoder)
            bodies = [{"queries": [f"q{n}"], "k": 1} for n in range(20)]
            tasks = [asyncio.create_task(client.post("/v1/search", json=body)) for body in bodies]
            await _until_waiting(client, 20)
            ready = asyncio.create_task(client.get("/readyz"))
            await _until_waiting(client, 21)
            gate.set()
            return await first, await ready, await asyncio.gather(*tasks)

    first, ready, answers = asyncio.run(run())
    assert {answer.status_code for answer in (first, ready, *answers)} == {200}
    assert encoder.calls == [1, 1, 20]  # what ran, the probe by itself, all others together


def test_readyz_tells_whether_a_query_can_be_answered():
    app, encoder = _app()

    async def run():
        async with client_of(app) as client:
            before = await client.get("/readyz")
            encoder.broken[encoder.encoded[0]] = RuntimeError("out of memory")
            # The cache knows the canary by now; it must be searched all the same.
            return before, await client.get("/readyz"), await client.get("/livez")

    before, ready, live = asyncio.run(run())
    assert (before.status_code, ready.status_code, live.status_code) == (200, 503, 200)
    assert ready.json() == {"status": "not ready", "error": "RuntimeError: out of memory"}


ROUTES = [("GET", path) for path in ("/readyz", "/metrics", "/info", "/openapi.json", "/nothing")]


@pytest.mark.parametrize("method, path", [*ROUTES, ("POST", "/retrieve"), ("POST", "/v1/search")])
def test_without_the_token_only_livez_answers(method, path, caplog):
    caplog.set_level(logging.DEBUG)
    app, encoder = _app(token=TOKEN)
    body = {"queries": ["a"], **({"k": 1} if path == "/v1/search" else {})}
    wrong = [
        None,
        "",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        "Bearer ",
        "Bearer ü",
    ]

    async def run():
        async with client_of(app) as client:
            for value in wrong:
                headers = {} if value is None else {"Authorization": value.encode()}
                answer = await client.request(method, path, json=body, headers=headers)
                assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
                assert TOKEN not in answer.text
            assert (await client.get("/livez")).status_code == 200
            assert encoder.encoded == []
            headers = {"Authorization": f"Bearer {TOKEN}"}
            return await client.request(method, path, json=body, headers=headers)

    assert asyncio.run(run()).status_code == (404 if path == "/nothing" else 200)
    assert TOKEN not in caplog.text


def test_the_doctor_asks_a_protected_server_with_the_token(monkeypatch):
    """It used to ask /info once more without it, and to report a server that has none."""
    section = {
        **dict.fromkeys(Search.model_fields), "topk": 3, "max_searches": 2, "max_page_chars": 500,
        "timeout_s": 30.0, "max_retries": 0, "breaker_failures": 3, "breaker_pause_s": 1.0, "token_env": "SEARCH_TOKEN",
    }  # fmt: skip
    app, _ = _app(token=TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = OmegaConf.create({"search": {**section, "url": url}})
        thread.start()
        try:
            monkeypatch.setenv("SEARCH_TOKEN", TOKEN)
            right = check_retriever(None, config)
            monkeypatch.setenv("SEARCH_TOKEN", "another")
            wrong = check_retriever(None, config)
        finally:
            server.should_exit = True
            thread.join()
    assert (right.status, right.found) == (Status.PASS, f"index: {url} {FakeIndex.fingerprint}")
    assert wrong.status is Status.FAIL and "401" in wrong.found and "another" not in wrong.found


def test_where_a_token_comes_from(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(file, {}) == read_token(None, {TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert read_token(None, {}) is None
    with pytest.raises(ValueError, match="both given"):
        read_token(file, {TOKEN_VARIABLE: TOKEN})
    for bad in ("", " \n", "two words", "a\nb", "schlüssel"):
        file.write_text(bad, encoding="utf-8")
        for source in ((file, {}), (None, {TOKEN_VARIABLE: bad})):
            with pytest.raises(ValueError, match="expected one line of printable ASCII") as caught:
                read_token(*source)
            assert not bad.strip() or bad.strip() not in str(caught.value)


def test_settings_travel_and_hide_the_token(tmp_path):
    options = {"port_file": tmp_path / "port", "limits": Limits(max_topk=7), "token": TOKEN, "workers": 2}
    settings = ServeSettings(tmp_path / "index", tmp_path / "encoder", **options)
    assert ServeSettings.from_json(settings.to_json()) == settings
    assert TOKEN not in repr(settings)
    for wrong in ({"workers": 0}, {"threads": 0}, {"port": -1}, {"port": 65536}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"--{name}={value}"):
            ServeSettings(tmp_path, tmp_path, **wrong)


def test_other_hosts_need_a_flag_and_get_a_warning():
    for host in ("127.0.0.1", "::1", "localhost"):
        assert check_host(host, allow_remote=False, token=False) is None
    with pytest.raises(ValueError, match="--host=0.0.0.0: not loopback; add --allow-remote"):
        check_host("0.0.0.0", allow_remote=False, token=True)
    assert "there is no token" in check_host("0.0.0.0", allow_remote=True, token=False)
    assert "unencrypted" in check_host("::", allow_remote=True, token=True)


def test_other_paths_and_methods_are_json_errors():
    app, _ = _app()

    async def run():
        async with client_of(app) as client:
            return [
                await client.get("/nothing"),
                await client.get("/retrieve"),
                await client.delete("/livez"),
            ]

    answers: list[httpx.Response] = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [404, 405, 405]
    assert all(set(answer.json()) == {"error"} for answer in answers)
