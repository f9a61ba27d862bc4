"""The served index over real HTTP: Search-R1's interface, validation, batching, the process's life."""

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import torch
from retriever_world import make_corpus, make_encoder
from verl_credit_retriever.batcher import Batcher
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index import SearchIndex, build_index
from verl_credit_retriever.launch import start_server
from verl_credit_retriever.manifest import IndexMismatch
from verl_credit_retriever.serve import bind
from verl_credit_retriever.server import create_app

from verl_credit.host.search_client import SearchClient, SearchFault

QUERIES = [f"who is the mayor of town {number} {'by the river ' * (number % 3)}" for number in range(32)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("served")
    make_encoder(root / "encoder")
    build_index(make_corpus(root / "corpus.jsonl"), root / "encoder", root / "index")
    return root


@pytest.fixture(scope="module")
def server(folders):
    with start_server(folders / "index", folders / "encoder", log_path=folders / "log") as handle:
        yield handle
        assert handle.alive()
        assert handle.stop() == 0  # SIGTERM ends it cleanly


def _post(url, body):
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(f"{url}/retrieve", content=content, headers={"Content-Type": "application/json"})


def _local_search(folders, queries, k):
    encoder = SentenceEncoder(folders / "encoder")
    return SearchIndex.load(folders / "index").search(encoder.encode_queries(queries), k)


@pytest.mark.parametrize(
    "fields", [{}, {"topk": None}, {"return_scores": False}, {"topk": 3, "return_scores": False}]
)
def test_without_scores_a_hit_is_the_document(server, folders, fields):
    answer = _post(server.url, {"queries": QUERIES[:2], **fields})
    assert answer.status_code == 200
    expected = [[document for document, _ in hits] for hits in _local_search(folders, QUERIES[:2], 3)]
    assert answer.json() == {"result": expected}


@pytest.mark.parametrize("fields, k", [({}, 3), ({"topk": 1}, 1), ({"topk": 100}, 50)])
def test_with_scores_a_hit_is_document_and_score(server, folders, fields, k):
    found = _post(server.url, {"queries": QUERIES[:2], "return_scores": True, **fields}).json()["result"]
    for hits, expected in zip(found, _local_search(folders, QUERIES[:2], k), strict=True):
        assert [hit["document"] for hit in hits] == [document for document, _ in expected]
        assert [hit["score"] for hit in hits] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_no_query_gives_no_result_and_an_empty_query_is_searched(server):
    assert _post(server.url, {"queries": []}).json() == {"result": []}
    assert len(_post(server.url, {"queries": [""]}).json()["result"][0]) == 3


@pytest.mark.parametrize(
    "body, named",
    [
        ({}, "queries"),
        ({"queries": "one text"}, "queries"),
        ({"queries": [1]}, "queries.0"),
        ({"queries": ["a"], "topk": 0}, "topk"),
        ({"queries": ["a"], "topk": -1}, "topk"),
        ({"queries": ["a"], "topk": "3"}, "topk"),
        ({"queries": ["a"], "topk": 101}, "topk"),
        ({"queries": ["a"], "return_scores": "yes"}, "return_scores"),
        ({"queries": ["a"] * 1025}, "queries"),
        ({"queries": ["a", "b" * 100_000]}, "queries.1"),
        ({"queries": ["\ud800"]}, "queries.0"),
        (b'{"queries": ["\xff"]}', ""),
        (b"{", ""),
        (b"", ""),
    ],
)
def test_a_malformed_request_is_refused_and_the_field_named(server, body, named):
    answer = _post(server.url, body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(named)
    assert len(answer.content) < 1000


def test_health_and_info(server, folders):
    assert httpx.get(f"{server.url}/livez").status_code == 200
    assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}
    info = httpx.get(f"{server.url}/info").json()
    manifest = json.loads((folders / "index" / "manifest.json").read_text())
    assert {key: info[key] for key in manifest} == manifest and info["default_topk"] == 3


def test_concurrent_single_queries_equal_one_by_one(server):
    async def run():
        client = SearchClient(server.url, topk=5)
        alone = [await client.search(query) for query in QUERIES]
        together = await asyncio.gather(*map(client.search, QUERIES))
        await client.aclose()
        return alone, together

    for alone, together in zip(*asyncio.run(run()), strict=True):
        assert [page.id for page in together.pages] == [page.id for page in alone.pages]
        assert [page.score for page in together.pages] == pytest.approx(
            [p.score for p in alone.pages], abs=1e-5
        )


def test_waiting_requests_become_one_batch_within_the_bound():
    started, release, calls = threading.Event(), threading.Event(), []

    def search(queries, k):
        calls.append((len(queries), k))
        started.set()
        assert release.wait(60)
        return [[({"id": query}, float(rank)) for rank in range(k)] for query in queries]

    async def run():
        batcher = Batcher(search, max_batch_queries=8)
        first = asyncio.create_task(batcher.submit(["first"], 1))
        await asyncio.to_thread(started.wait, 60)
        others = [asyncio.create_task(batcher.submit([f"q{n}"], 1 + n % 3)) for n in range(10)]
        others.append(asyncio.create_task(batcher.submit(["large"] * 20, 2)))
        await asyncio.sleep(0)  # every task reaches its submit
        others[0].cancel()
        release.set()
        await asyncio.gather(first, *others[1:])
        batcher.close()
        return [task.result() for task in others[1:]]

    answers = asyncio.run(run())
    assert calls == [(1, 1), (8, 3), (1, 1), (20, 2)]
    for number, hits in enumerate(answers[:9], start=1):
        assert [document["id"] for document, _ in hits[0]] == [f"q{number}"] * (1 + number % 3)


class BrokenEncoder(SentenceEncoder):
    """Raises for one query, as an encoder out of memory would."""

    def encode_queries(self, queries):
        if any("violin" in query or self.path is None for query in queries):
            raise RuntimeError("out of memory")
        return super().encode_queries(queries)


def test_a_search_that_raises_is_a_500_for_its_own_request_only(folders):
    app = create_app(SearchIndex.load(folders / "index"), BrokenEncoder(folders / "encoder"))

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://retriever") as client:
            texts = [*QUERIES[:5], "violin", *QUERIES[5:10]]
            return await asyncio.gather(
                *(client.post("/retrieve", json={"queries": [text]}) for text in texts)
            )

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200] * 5 + [500] + [200] * 5
    assert answers[5].json() == {"error": "RuntimeError: out of memory"}


def test_readyz_is_503_when_a_query_cannot_be_answered(folders):
    encoder = BrokenEncoder(folders / "encoder")
    app = create_app(SearchIndex.load(folders / "index"), encoder)

    async def run():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://retriever"
        ) as client:
            before = await client.get("/readyz")
            encoder.path = None
            return before, await client.get("/readyz"), await client.get("/livez")

    before, ready, live = asyncio.run(run())
    assert (before.status_code, ready.status_code, live.status_code) == (200, 503, 200)
    assert "out of memory" in ready.json()["error"]


def test_a_score_that_is_not_finite_never_leaves_the_index(folders, monkeypatch):
    index, encoder = SearchIndex.load(folders / "index"), SentenceEncoder(folders / "encoder")
    vectors_N_D = encoder.encode_queries(["river"])
    faiss_search = index._faiss.search
    for damage in ("score", "row"):

        def search(vectors, k, damage=damage):
            scores_N_K, rows_N_K = faiss_search(vectors, k)
            (scores_N_K if damage == "score" else rows_N_K)[0, 0] = math.nan if damage == "score" else -1
            return scores_N_K, rows_N_K

        monkeypatch.setattr(index._faiss, "search", search)
        with pytest.raises(IndexMismatch, match="without a document or score"):
            index.search(vectors_N_D, 2)


def test_an_encoder_that_did_not_build_the_index_is_refused(folders, tmp_path):
    other = SentenceEncoder(make_encoder(tmp_path / "other", seed=1))
    with pytest.raises(IndexMismatch, match="weights_sha256"):
        create_app(SearchIndex.load(folders / "index"), other)


def _cli(folders, *more, **options):
    command = [sys.executable, "-m", "verl_credit_retriever.cli", "serve", "--index", str(folders / "index")]
    command += ["--encoder", str(folders / "encoder"), "--threads", "1", *map(str, more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_port_in_use_is_one_line_and_exit_code_4(server, folders):
    port = server.url.rsplit(":", 1)[1]
    process = _cli(folders, "--port", port)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 4
    assert errors == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_answers_do_not_wait_for_acknowledgements():
    async def run():
        seen = asyncio.Queue()

        async def accepted(_, writer):
            await seen.put(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await seen.get()

    assert asyncio.run(run()) == 1


def test_sigint_ends_the_server_and_withdraws_the_port_file(folders, tmp_path):
    process = _cli(folders, "--port", 0, "--port-file", tmp_path / "port.json")
    line = process.stdout.readline()  # printed once it serves
    announced = json.loads((tmp_path / "port.json").read_text())
    assert f"http://{announced['host']}:{announced['port']} (pid {process.pid})" in line
    assert announced["pid"] == process.pid
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors, os.listdir(tmp_path)) == (0, "", [])


def test_the_server_ends_with_its_parent(folders):
    # A process nobody has waited for yet is a zombie when it ends: it must count as gone.
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = _cli(folders, "--port", 0, "--parent-pid", parent.pid)
    url = process.stdout.readline().split()[2]
    asyncio.run(SearchClient(url).check())
    parent.communicate(b"\n")
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    with pytest.raises(SearchFault) as caught:
        asyncio.run(SearchClient(url).search("river"))
    assert caught.value.code == "connect"


def test_launch_reports_why_a_server_did_not_start(folders, tmp_path):
    with pytest.raises(
        RuntimeError, match="code 2 before it was ready\n.*\nerror: .*manifest.json does not exist"
    ):
        start_server(tmp_path, folders / "encoder", log_path=tmp_path / "log")


def test_other_hosts_need_a_flag(folders, capsys):
    arguments = [
        "serve",
        "--index",
        str(folders / "index"),
        "--encoder",
        str(folders / "encoder"),
        "--host",
        "0.0.0.0",
    ]
    assert main(arguments) == 2
    assert "--allow-remote" in capsys.readouterr().err


def test_index_command_writes_what_build_index_writes(folders, tmp_path, capsys):
    arguments = ["--corpus", str(folders / "corpus.jsonl"), "--encoder", str(folders / "encoder")]
    assert main(["index", *arguments, "--out", str(tmp_path / "index")]) == 0
    for name in ("index.faiss", "corpus.jsonl", "offsets.npy", "manifest.json"):
        assert (tmp_path / "index" / name).read_bytes() == (folders / "index" / name).read_bytes()
    assert main(["index", *arguments, "--out", str(tmp_path / "index")]) == 2
    assert "error: out=" in capsys.readouterr().err
