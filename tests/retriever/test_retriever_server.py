"""The served index over real HTTP: Search-R1's interface, validation, and the life of its processes."""

import asyncio
import json
import os
import socket
import subprocess
import sys

import httpx
import pytest

from kit.retriever_fakes import metric
from verl_credit.turns.rollout.search.client import SearchClient, SearchFault
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.launch import start_server
from verl_credit_retriever.serve import bind

QUERIES = [f"who is the mayor of town {number} {'by the river ' * (number % 3)}" for number in range(32)]


def _post(url, body):
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(f"{url}/retrieve", content=content, headers={"Content-Type": "application/json"})


def _local_search(folders, queries, k):
    encoder = SentenceEncoder(folders / "encoder")
    return SearchIndex.load(folders / "index").search(encoder.encode_queries(queries), k)


@pytest.mark.slow
def test_every_search_answer_names_the_index(server, folders):
    named = SearchIndex.load(folders / "index").fingerprint
    scored = [_post(server.url, {"queries": ["river"], "return_scores": flag}) for flag in (True, False)]
    for answer in scored:
        assert (answer.status_code, answer.headers["X-Index-Fingerprint"]) == (200, named)
    client = SearchClient(server.url, index_fingerprint=named)
    assert len(asyncio.run(client.search("river")).pages) == 3
    with pytest.raises(SearchFault, match="bad_answer.*another"):
        asyncio.run(SearchClient(server.url, index_fingerprint="another").search("river"))


@pytest.mark.slow
@pytest.mark.parametrize("fields, k", [({}, 3), ({"topk": 0}, 3), ({"topk": 1}, 1), ({"topk": 100}, 50)])
def test_with_scores_a_hit_is_document_and_score(server, folders, fields, k):
    found = _post(server.url, {"queries": QUERIES[:2], "return_scores": True, **fields}).json()["result"]
    for hits, expected in zip(found, _local_search(folders, QUERIES[:2], k), strict=True):
        assert [hit["document"] for hit in hits] == [document for document, _ in expected]
        assert [hit["score"] for hit in hits] == pytest.approx([score for _, score in expected], abs=1e-5)


@pytest.mark.slow
def test_health_and_info(server, folders):
    assert httpx.get(f"{server.url}/livez").status_code == 200
    assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}
    info = httpx.get(f"{server.url}/info").json()
    manifest = json.loads((folders / "index" / "manifest.json").read_text())
    assert {key: info[key] for key in manifest} == manifest and info["default_topk"] == 3
    assert info["fingerprint"] == SearchIndex.load(folders / "index").fingerprint
    assert info["limits"]["max_topk"] == 100


@pytest.mark.slow
def test_concurrent_single_queries_equal_one_by_one_and_one_batch(server):
    async def run():
        client = SearchClient(server.url, topk=5)
        alone = [await client.search(query) for query in QUERIES]
        together = await asyncio.gather(*map(client.search, QUERIES))
        await client.aclose()
        return alone, together

    batch = _post(server.url, {"queries": QUERIES, "topk": 5, "return_scores": True}).json()["result"]
    for alone, together, hits in zip(*asyncio.run(run()), batch, strict=True):
        ids, scores = [hit["document"]["id"] for hit in hits], [hit["score"] for hit in hits]
        for result in (alone, together):
            assert [page.id for page in result.pages] == ids
            assert [page.score for page in result.pages] == pytest.approx(scores, abs=1e-5)


def _cli(folders, *more, **options):
    command = [sys.executable, "-m", "verl_credit_retriever.cli", "serve", "--index", str(folders / "index")]
    command += ["--encoder", str(folders / "encoder"), "--threads", "1", *map(str, more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_a_port_in_use_is_one_line_and_exit_code_4(server, folders, tmp_path):
    port = server.url.rsplit(":", 1)[1]
    (tmp_path / "port.json").write_text("of the server that has the port")
    process = _cli(folders, "--port", port, "--port-file", tmp_path / "port.json")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 4
    assert (tmp_path / "port.json").read_text() == "of the server that has the port"
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


def _lines_until_ready(process):
    """What a server prints before and when it serves; the last line holds its URL."""
    for line in process.stdout:
        if line.startswith("serving on "):
            return line
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
def test_the_end_of_the_parent_is_a_sigterm_that_drains(folders, tmp_path):
    # A process nobody has waited for yet is a zombie when it ends: it must count as gone.
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    more = ("--port-file", tmp_path / "port.json", "--parent-pid", parent.pid, "--cache-entries", 0)
    process = _cli(folders, "--port", 0, *more)
    line = _lines_until_ready(process)
    announced = json.loads((tmp_path / "port.json").read_text())
    url = f"http://{announced['host']}:{announced['port']}"
    assert f"{url} (pid {process.pid})" in line and announced["pid"] == process.pid
    many = [f"{query} {n}" for n in range(32) for query in QUERIES]

    async def run():
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            asked = asyncio.create_task(client.post(f"{url}/retrieve", json={"queries": many, "topk": 5}))
            metrics = ""
            while metric(metrics, "cache_misses_total") < len(many):  # it has come in
                metrics = (await client.get(f"{url}/metrics")).text
            parent.communicate(b"\n")
            return await asked

    answer = asyncio.run(run())
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors, os.listdir(tmp_path)) == (0, "", [])
    with pytest.raises(SearchFault) as caught:
        asyncio.run(SearchClient(url).search("river"))
    assert caught.value.code == "connect"
    assert answer.status_code == 200
    expected = _local_search(folders, many[-3:], 5)
    assert answer.json()["result"][-3:] == [[document for document, _ in hits] for hits in expected]


@pytest.mark.slow
def test_launch_reports_why_a_server_did_not_start(folders, tmp_path):
    with pytest.raises(
        RuntimeError, match="code 2 before it was ready\n.*\nerror: .*manifest.json does not exist"
    ):
        start_server(tmp_path, folders / "encoder", log_path=tmp_path / "log")
