"""An index in shards answers as the whole index does, or says which shard is missing."""

import faiss
import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from starlette.exceptions import HTTPException

from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit.host.deploy import ray_serve as cluster
from verl_credit.host.deploy.ray_serve import Asking
from verl_credit_retriever.index.manifest import IndexMismatch
from verl_credit_retriever.index.parts import Part, Shard, ShardedIndex, cut
from verl_credit_retriever.index.search import SearchIndex, build_index

ROWS, DIM = 103, 12
PARTS = [Part(0, 2, 0, 5, "f"), Part(1, 2, 5, 9, "f")]
QUERY = np.ones((1, 3), dtype=np.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Indexes of different vectors, and `tied`, of small integers: their products are exact, so that ties are ties."""
    faiss.omp_set_num_threads(1)
    root = tmp_path_factory.mktemp("shards")
    corpus = write_rows(root / "corpus.jsonl", ROWS)
    encoder = TableEncoder(clustered(ROWS, DIM, seed=1))
    for kind, dtype in [
        ("flat", "fp32"),
        ("flat", "fp16"),
        ("exact", "fp32"),
        ("exact", "fp16"),
        ("sq8", "fp32"),
    ]:
        build_index(corpus, encoder, root / f"{kind}-{dtype}", kind=kind, dtype=dtype)
    integers = np.random.default_rng(3).integers(-1, 2, size=(ROWS, DIM)).astype(np.float32)
    build_index(corpus, TableEncoder(integers, "integers"), root / "tied", kind="exact")
    return root


def sharded(folder, shards, backend="faiss"):
    """The index over shards in this process."""
    parts = cut(SearchIndex.load(folder, backend="exact"), shards, backend)
    running = [Shard(str(folder), part, backend, 1) for part in parts]

    def ask(vectors_N_D, k):
        return [shard.search(part, vectors_N_D, k) for shard, part in zip(running, parts, strict=True)]

    return ShardedIndex.open(folder, parts, ask)


def rows_and_scores(index, queries_N_D, k):
    found = index.search(queries_N_D, k)
    return [[d["id"] for d, _ in hits] for hits in found], np.array([[s for _, s in hits] for hits in found])


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 7, 20])
@pytest.mark.parametrize("name", ["flat-fp32", "flat-fp16", "exact-fp32", "exact-fp16"])
def test_shards_find_what_the_whole_index_finds(root, name, shards):
    whole, split, queries_N_D = (
        SearchIndex.load(root / name),
        sharded(root / name, shards),
        clustered(9, DIM, 2),
    )
    assert split.fingerprint == whole.fingerprint
    for k in (1, 4, 40, ROWS, ROWS + 5):
        documents, scores = rows_and_scores(split, queries_N_D, k)
        expected, expected_scores = rows_and_scores(whole, queries_N_D, k)
        assert documents == expected
        np.testing.assert_allclose(scores, expected_scores, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 5, 50])
def test_equal_scores_come_in_order_of_their_rows_also_across_shards(root, shards):
    whole, split = SearchIndex.load(root / "tied"), sharded(root / "tied", shards)
    queries_N_D = np.random.default_rng(4).integers(-1, 2, size=(20, DIM)).astype(np.float32)
    for k in (1, 3, 30):
        documents, scores = rows_and_scores(split, queries_N_D, k)
        expected, expected_scores = rows_and_scores(whole, queries_N_D, k)
        assert len(np.unique(expected_scores)) < 30  # there are ties
        assert documents == expected
        np.testing.assert_array_equal(scores, expected_scores)


def test_a_kind_that_is_no_list_of_rows_is_cut_for_the_exact_backend_only(root):
    with pytest.raises(ValueError, match=r"kind='sq8' cannot be cut by rows; use --backend exact"):
        cut(SearchIndex.load(root / "sq8-fp32"), 2, "faiss")
    exact = SearchIndex.load(root / "sq8-fp32", backend="exact")
    queries_N_D = clustered(5, DIM, 2)
    split = sharded(root / "sq8-fp32", 3, "exact")
    assert rows_and_scores(split, queries_N_D, 4)[0] == rows_and_scores(exact, queries_N_D, 4)[0]


def test_a_replica_over_another_index_does_not_start_and_names_both(root):
    here = SearchIndex.load(root / "tied").fingerprint
    other = SearchIndex.load(root / "exact-fp32").fingerprint
    with pytest.raises(
        IndexMismatch, match=f"tied on .* has the fingerprint {here}; this deployment serves {other}"
    ):
        Shard(str(root / "tied"), Part(0, 2, 0, 50, other), "exact", 1)


def test_a_replica_answers_for_its_own_rows_only(root):
    fingerprint = SearchIndex.load(root / "tied").fingerprint
    shard = Shard(str(root / "tied"), Part(0, 2, 0, 50, fingerprint), "exact", 1)
    with pytest.raises(IndexMismatch, match=r"asked for shard 0 of 3 \(rows 0 to 33\)"):
        shard.search(Part(0, 3, 0, 34, fingerprint), np.ones((1, DIM), dtype=np.float32), 3)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda scores, rows: (scores[:, :-1], rows[:, :-1]), r"shard 1 of 2 .* gave hits of shape \(2, 2\)"),
        (lambda scores, rows: (scores, rows - 60), "shard 1 of 2 .* gave rows from -"),
    ],
)
def test_less_than_a_whole_answer_is_none(root, damage, words):
    index = sharded(root / "flat-fp32", 2)
    right = index.ask
    index.ask = lambda vectors, k: [right(vectors, k)[0], damage(*right(vectors, k)[1])]
    with pytest.raises(IndexMismatch, match=words):
        index.search(clustered(2, DIM, 2), 3)


class Response:
    def __init__(self, outcome):
        self.outcome, self.cancelled = outcome, False

    def result(self, timeout_s):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self):
        self.cancelled = True


class Handle:
    """A shard's handle: call n has the n-th outcome, the last one for ever."""

    def __init__(self, *outcomes):
        self.outcomes, self.responses = list(outcomes), []
        self.search = self

    def remote(self, part, vectors_N_D, k):
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        self.responses.append(Response(outcome))
        return self.responses[-1]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(cluster, "AGAIN_SECONDS", 0.0)


def test_another_replica_answers_for_a_lost_one():
    first, second = Handle("a"), Handle(ActorDiedError(), RayError("its answer is lost"), "b")
    assert Asking(PARTS, [first, second], lambda part: 1)(QUERY, 1) == ["a", "b"]
    assert (len(first.responses), len(second.responses)) == (1, 3)


def test_a_shard_without_a_replica_is_named_and_then_not_waited_for_until_one_lives():
    living = {0: 1, 1: 0}
    handles = [Handle("a"), Handle(TimeoutError(), "b")]
    ask = Asking(PARTS, handles, lambda part: living[part.number])
    for _ in range(3):
        with pytest.raises(HTTPException) as refused:
            ask(QUERY, 1)
        assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "5"})
        assert refused.value.detail == "shard 1 of 2 (rows 5 to 8) has no living replica"
    assert len(handles[1].responses) == 1 and handles[1].responses[0].cancelled
    living[1] = 1
    assert ask(QUERY, 1) == ["a", "b"]


def test_a_slow_shard_is_waited_for_and_given_up_in_the_end(monkeypatch):
    calls = []

    def unknown(part):
        calls.append(part)
        raise RayError("the controller does not answer")

    class Slow(Response):
        def result(self, timeout_s):
            if len(calls) < 3:
                raise TimeoutError
            return "b"

    handle = Handle("b")
    handle.remote = lambda part, vectors_N_D, k: Slow(None)
    assert Asking(PARTS, [Handle("a"), handle], unknown)(QUERY, 1) == ["a", "b"]
    assert len(calls) == 3
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.0)
    with pytest.raises(HTTPException, match=r"503: shard 0 of 2 \(rows 0 to 4\) has not answered within 0 s"):
        Asking(PARTS, [Handle("a"), handle], unknown)(QUERY, 1)


def test_a_shards_own_error_is_that_of_the_request():
    error = RayTaskError("search", "traceback", IndexMismatch("asked for another index"))
    with pytest.raises(IndexMismatch, match="asked for another index"):
        Asking(PARTS, [Handle("a"), Handle(error)], lambda part: 1)(QUERY, 1)
