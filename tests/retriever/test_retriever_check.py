"""`check` finds what is wrong with a served index, and a Search-R1-style client works unchanged."""

import json
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from kit.retriever_world import make_corpus
from kit.serving import served
from verl_credit_retriever.asking import Served
from verl_credit_retriever.check import (
    check_servers,
    exact_answers,
    has_exact_scores,
    read_queries,
    recall_at,
    wrong_score,
)
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex, build_index

ROOT = Path(__file__).parents[2]
QUERIES = [f"who is the mayor of town {number}" for number in range(20)]


@pytest.fixture(scope="module")
def checked(folders):
    """The served index, queries, and another index."""
    (folders / "queries.txt").write_text("\n".join(QUERIES) + "\n\n")
    fewer = make_corpus(folders / "fewer.jsonl", rows=40)
    build_index(fewer, folders / "encoder", folders / "other", overwrite=True)
    return folders


@pytest.fixture(scope="module")
def exact(world):
    return SearchIndex.load(world[0] / "index", backend="exact"), world[1]


@pytest.fixture(scope="module")
def search(exact):
    """What the index answers to one query, computed once for all tests."""
    index, encoder = exact
    return cache(lambda query, k: index.search(encoder.encode_queries([query]), k)[0])


def _check(checked, url, *more):
    index = more[more.index("--index") + 1] if "--index" in more else checked / "index"
    arguments = ["check", "--url", url, "--index", index, "--encoder", checked / "encoder"]
    arguments += ["--queries", checked / "queries.txt", "--threads", "1", *more]
    return main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_a_right_server_passes_with_full_recall(server, checked, capsys):
    report_code = _check(checked, f"{server.url},{server.url}/", "--json")
    report = json.loads(capsys.readouterr().out)
    assert (report_code, report["problems"]) == (0, [])
    assert report["fingerprint"] == SearchIndex.load(checked / "index").fingerprint
    (answers,) = report["servers"].values()
    assert answers["recall"] == {"3": 1.0, "10": 1.0} and answers["fingerprint"] == report["fingerprint"]
    assert answers["answered"] == len(QUERIES)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--k", "3,x"], "--k='3,x'"),
        (["--k", "0"], "k='0'"),
        (["--min-recall", "95"], "--min-recall=95.0"),
        (["--queries", "missing.txt"], "missing.txt"),
    ],
)
def test_wrong_arguments_are_exit_code_2(checked, capsys, arguments, named):
    assert _check(checked, "http://127.0.0.1:9", *arguments) == 2
    assert named in capsys.readouterr().err


def test_no_server_is_a_problem_not_a_crash(checked, capsys):
    assert _check(checked, "http://127.0.0.1:9") == 1  # port 9 is never listened on
    errors = capsys.readouterr().err
    assert "ConnectError" in errors and "0 of 20 queries were answered" in errors


@contextmanager
def impostor(index, search, spoil):
    """The address of a server that answers as the index would, spoiled by `spoil(hits, k) -> hits or a status`."""

    async def info(request):
        return JSONResponse({"fingerprint": index.fingerprint})

    async def retrieve(request):
        body = await request.json()
        hits = search(*body["queries"], min(len(index), 2 * body["topk"]))
        spoiled = spoil([{"document": dict(d), "score": s} for d, s in hits], body["topk"])
        if isinstance(spoiled, int):
            return JSONResponse({"error": "spoiled"}, spoiled)
        return JSONResponse({"result": [spoiled]})

    routes = [Route("/info", info), Route("/retrieve", retrieve, methods=["POST"])]
    with served(Starlette(routes=routes)) as port:
        yield f"http://127.0.0.1:{port}"


def _swap_texts(hits, k):
    hits[0]["document"]["contents"], hits[1]["document"]["contents"] = (
        hits[1]["document"]["contents"],
        hits[0]["document"]["contents"],
    )
    return hits[:k]


def busy_at_times(hits, k):
    return next(STATUSES) or hits[:k]


STATUSES = cycle((0, 429))


def _rescored(change):
    return lambda hits, k: [{**hit, "score": change(hit["score"])} for hit in hits[:k]]


@pytest.mark.parametrize(
    "spoil, problems",
    [
        (lambda hits, k: hits[:k], []),
        (lambda hits, k: hits[1 : k + 1], ["recall@3=0.6667; expected at least 0.99", "recall@10=0.9000"]),
        (lambda hits, k: hits[: k - 1], ["20 malformed answers", "9 hits; expected 10", "0 of 20 queries"]),
        (lambda hits, k: [], ["0 hits; expected 10"]),
        (lambda hits, k: [hits[0]] * k, ["a document is there twice"]),
        (lambda hits, k: hits[:k][::-1], ["scores rise"]),
        (
            lambda hits, k: [{**hit, "score": None} for hit in hits[:k]],
            ["score=None; expected a finite number"],
        ),
        (lambda hits, k: [hit["document"] for hit in hits[:k]], ["not one list of hits"]),
        (_swap_texts, ["has other contents than the corpus"]),
        (_rescored(lambda s: s - 7), ["20 answers with wrong scores, the first: document 'doc-"]),
        (_rescored(lambda s: 1000 * s), ["20 answers with wrong scores"]),
        (_rescored(lambda s: s + 5e-4), ["20 answers with wrong scores"]),
        (_rescored(lambda s: s + 5e-5), []),
        (lambda hits, k: 500, ["20 requests ended with 500", "0 of 20 queries were answered"]),
        (busy_at_times, []),
    ],
)
def test_what_a_wrong_server_does_is_named(exact, search, spoil, problems):
    index, encoder = exact
    with impostor(index, search, spoil) as url:
        report = check_servers([url], index, encoder, QUERIES)
    assert bool(report["problems"]) == bool(problems)
    for problem in problems:
        assert any(problem in found for found in report["problems"]), report["problems"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["flat", "sq8", "ivf", "hnsw", "exact"])
def test_scores_of_every_kind_are_as_exact_as_check_expects(checked, tmp_path, kind, dtype):
    encoder = SentenceEncoder(checked / "encoder")
    build_index(checked / "corpus.jsonl", encoder, tmp_path / "index", kind=kind, dtype=dtype)
    served = SearchIndex.load(tmp_path / "index")
    oracle = SearchIndex.load(tmp_path / "index", backend="exact")
    vectors_N_D = encoder.encode_queries(QUERIES)
    answers = [
        [Served(document["id"], document["contents"], score) for document, score in hits]
        for hits in served.search(vectors_N_D, 10)
    ]
    exact = exact_answers(oracle, vectors_N_D, 10)
    wrong = [found for hits, right in zip(answers, exact, strict=True) if (found := wrong_score(hits, right))]
    assert has_exact_scores(served.manifest) == (kind != "sq8" and (kind, dtype) != ("ivf", "fp16"))
    assert not wrong or not has_exact_scores(served.manifest)


def test_documents_with_the_same_score_are_equal():
    exact = {name: Served(name, name, score) for name, score in zip("abcd", (3, 2, 2, 1), strict=True)}
    for second, recall in (("b", 1.0), ("c", 1.0), ("d", 0.5), ("x", 0.5)):
        assert recall_at([exact["a"], Served(second, second, 2.0)], exact, 2) == recall
    assert recall_at([exact["b"]], exact, 1) == 0.0
    assert recall_at(list(exact.values()), exact, 10) == 1.0


def test_the_oracle_goes_deep_enough_for_all_ties(exact):
    class Tied:
        """20 rows: one best, fifteen equal, four lower."""

        scores = [2.0] + [1.0] * 15 + [0.5] * 4

        def __len__(self):
            return 20

        def search(self, vectors_N_D, k):
            row = [({"id": str(n), "contents": "t"}, score) for n, score in enumerate(self.scores)][:k]
            return [row for _ in vectors_N_D]

    (found,) = exact_answers(Tied(), np.zeros((1, 2), np.float32), 3)
    assert {str(n) for n in range(16)} <= found.keys()
    assert recall_at([found["0"], found["14"], found["15"]], found, 3) == 1.0


def test_queries_are_read_from_text_and_jsonl(tmp_path):
    (tmp_path / "q.txt").write_text("first\n\n second \n")
    assert read_queries(tmp_path / "q.txt") == ["first", "second"]
    lines = ['"first"', '{"query": "second"}', "", '{"question": "third", "answer": "x"}']
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    assert read_queries(tmp_path / "q.jsonl") == ["first", "second", "third"]
    for wrong in ("{", "3", '{"text": "x"}', '{"query": " "}'):
        (tmp_path / "w.jsonl").write_text('"first"\n' + wrong)
        with pytest.raises(ValueError, match="w.jsonl:2: "):
            read_queries(tmp_path / "w.jsonl")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="no queries"):
        read_queries(tmp_path / "empty.txt")
