"""The exact backend against brute force, and every kind of index against the exact backend."""

import subprocess
import sys

import faiss
import numpy as np
import pytest

from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.index.exact import ExactSearch
from verl_credit_retriever.index.search import SearchIndex, build_index

ROWS, DIM, K = 1500, 24, 10
KINDS = ["flat", "sq8", "ivf", "ivfpq", "hnsw", "exact"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    faiss.omp_set_num_threads(1)
    root = tmp_path_factory.mktemp("kinds")
    encoder = TableEncoder(clustered(ROWS, DIM, seed=1))
    corpus = write_rows(root / "corpus.jsonl", ROWS)
    for kind in KINDS:
        for dtype in ("fp32", "fp16"):
            build_index(corpus, encoder, root / f"{kind}-{dtype}", kind=kind, dtype=dtype, shard_rows=700)
    return root


def _queries(count=40):
    return clustered(count, DIM, seed=2)


def _rows(index, queries_N_D, k=K):
    return [[int(document["id"][1:]) for document, _ in hits] for hits in index.search(queries_N_D, k)]


def _brute_force(queries_N_D, vectors_M_D, k):
    scores_N_M = queries_N_D.astype(np.float32) @ vectors_M_D.astype(np.float32).T
    rows_N_K = np.argsort(-scores_N_M, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores_N_M, rows_N_K, 1), rows_N_K


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("k", [1, 5, 200, 1000])
def test_exact_equals_brute_force_with_ties_by_row(dtype, chunk_rows, k):
    rng = np.random.default_rng(3)
    # Small integers: products are exact in float32, so that ties are ties.
    vectors_M_D = rng.integers(-2, 3, size=(200, 6)).astype(dtype)
    queries_N_D = rng.integers(-2, 3, size=(9, 6)).astype(np.float32)
    scores_N_K, rows_N_K = ExactSearch(vectors_M_D, chunk_rows=chunk_rows).search(queries_N_D, k)
    expected_N_K, expected_rows_N_K = _brute_force(queries_N_D, vectors_M_D, k)
    np.testing.assert_array_equal(rows_N_K, expected_rows_N_K)
    np.testing.assert_array_equal(scores_N_K, expected_N_K)
    assert scores_N_K.shape == (9, min(k, 200))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_exact_refuses_vectors_that_are_not_finite(value):
    vectors_M_D = np.ones((10, 3), dtype=np.float32)
    vectors_M_D[7, 1] = value
    with pytest.raises(ValueError, match="rows 6 to 8"):
        ExactSearch(vectors_M_D, chunk_rows=3).search(np.ones((1, 3), dtype=np.float32), 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_exact_backend_of_every_kind_is_brute_force_over_its_vectors(folder, kind, dtype):
    index = SearchIndex.load(folder / f"{kind}-{dtype}", backend="exact")
    stored_M_D = clustered(ROWS, DIM, seed=1).astype({"fp32": "float32", "fp16": "float16"}[dtype])
    np.testing.assert_array_equal(index.vectors_M_D, stored_M_D)
    assert _rows(index, _queries()) == _brute_force(_queries(), stored_M_D, K)[1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind, least", [("sq8", 0.95), ("ivf", 0.80), ("ivfpq", 0.80), ("hnsw", 0.95)])
def test_recall_of_the_approximate_kinds(folder, kind, least, dtype):
    path = folder / f"{kind}-{dtype}"
    found, expected = (
        _rows(SearchIndex.load(path, backend=backend), _queries()) for backend in ("faiss", "exact")
    )
    shares = [len(set(f) & set(e)) / K for f, e in zip(found, expected, strict=True)]
    assert np.mean(shares) >= least


def test_ivf_that_reads_every_list_is_exact_and_one_list_is_not(folder):
    path = folder / "ivf-fp32"
    expected = _rows(SearchIndex.load(path, backend="exact"), _queries())
    nlist = SearchIndex.load(path).manifest["parameters"]["nlist"]
    assert _rows(SearchIndex.load(path, nprobe=nlist), _queries()) == expected
    assert _rows(SearchIndex.load(path, nprobe=1), _queries()) != expected


def test_ivfpq_scores_the_own_vectors_of_its_candidates(folder):
    """Its codes are rough: the candidates' order and scores are exact, and all candidates of all lists are exact search."""
    path = folder / "ivfpq-fp32"
    exact = SearchIndex.load(path, backend="exact")
    nlist = exact.manifest["parameters"]["nlist"]
    expected, rough = exact.search(_queries(), K), SearchIndex.load(path, nprobe=nlist, refine=1)
    products_N_M = _queries() @ exact.vectors_M_D.T
    for hits, products_M in zip(rough.search(_queries(), K), products_N_M, strict=True):
        scores = [score for _, score in hits]
        rows = [int(document["id"][1:]) for document, _ in hits]
        assert scores == sorted(scores, reverse=True) == pytest.approx(products_M[rows].tolist(), abs=1e-6)
    shares = []
    for refine in (1, 8, -(-ROWS // K)):
        found = SearchIndex.load(path, nprobe=nlist, refine=refine).search(_queries(), K)
        pairs = zip(found, expected, strict=True)
        shares.append(np.mean([len({d["id"] for d, _ in f} & {d["id"] for d, _ in e}) / K for f, e in pairs]))
    assert shares[0] < shares[1] <= shares[2] == 1


def test_what_lists_or_graph_do_not_hold_is_found_exactly(folder):
    for path, parameters in (
        ("ivf-fp32", {"nprobe": 1}),
        ("ivfpq-fp16", {"nprobe": 1}),
        ("hnsw-fp32", {"ef_search": 1}),
    ):
        index = SearchIndex.load(folder / path, **parameters)
        (rows,) = _rows(index, _queries(1), ROWS)
        assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_mapped_index_answers_the_same(folder, kind):
    path = folder / f"{kind}-fp32"
    plain, mapped = SearchIndex.load(path), SearchIndex.load(path, mmap=True)
    assert plain.search(_queries(), K) == mapped.search(_queries(), K)
    assert sum(mapped.memory.mapped.values()) > ROWS * DIM and mapped.memory.total < plain.memory.total


def test_search_parameters_are_in_the_manifest_and_in_the_fingerprint(folder):
    ivf = SearchIndex.load(folder / "ivf-fp32")
    assert ivf.search_parameters == ivf.manifest["search"] == {"nprobe": ivf._faiss.nprobe}
    other = SearchIndex.load(folder / "ivf-fp32", nprobe=3)
    assert other._faiss.nprobe == 3 and other.fingerprint != ivf.fingerprint
    assert SearchIndex.load(folder / "hnsw-fp32", ef_search=77)._faiss.hnsw.efSearch == 77
    exact = SearchIndex.load(folder / "ivf-fp32", backend="exact")
    assert exact.fingerprint == ivf.fingerprint != SearchIndex.load(folder / "ivf-fp16").fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, parameters, message",
    [
        ("flat", {"nprobe": 4}, "nprobe=4 has no effect on kind='flat'"),
        ("ivf", {"ef_search": 4}, "ef_search=4 has no effect on kind='ivf'; it takes nprobe"),
        ("ivf", {"nprobe": 0}, "nprobe=0; expected an integer from 1 to 38"),
        ("ivf", {"nprobe": 39}, "nprobe=39; expected an integer from 1 to 38"),
        ("hnsw", {"ef_search": -1}, "ef_search=-1"),
        ("ivf", {"refine": 4}, "refine=4 has no effect on kind='ivf'; it takes nprobe"),
        ("ivfpq", {"refine": 0}, "refine=0; expected an integer from 1 to 1024"),
        ("exact", {"gpu": True}, "exact backend runs on the CPU"),
        ("hnsw", {"gpu": True}, "no GPU index for kind='hnsw'"),
    ],
)
def test_parameters_without_effect_or_out_of_bounds_are_refused(folder, kind, parameters, message):
    with pytest.raises(ValueError, match=message):
        SearchIndex.load(folder / f"{kind}-fp32", **parameters)


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this FAISS has GPU support")
def test_a_gpu_is_refused_where_faiss_has_none(folder):
    with pytest.raises(ValueError, match="without GPU support"):
        SearchIndex.load(folder / "flat-fp32", gpu=True)


@pytest.mark.slow
def test_everything_exact_works_without_faiss_and_without_torch(folder, tmp_path):
    code = """
import sys
sys.modules["faiss"] = sys.modules["torch"] = None  # importing either raises ImportError
from pathlib import Path
from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.index.search import SearchIndex, build_index
root, out = map(Path, sys.argv[1:])
encoder = TableEncoder(clustered(30, 8, seed=1))
build_index(write_rows(out / "c.jsonl", 30), encoder, out / "i", kind="exact")
assert SearchIndex.load(out / "i").search(encoder.table_M_D[3:4], 1)[0][0][0]["id"] == "d3"
for kind in ("flat-fp32", "flat-fp16", "hnsw-fp16"):
    assert len(SearchIndex.load(root / kind, backend="exact").search(clustered(2, 24, 0), 3)) == 2
for action in (
    lambda: SearchIndex.load(root / "flat-fp32"),
    lambda: build_index(out / "c.jsonl", encoder, out / "j", kind="ivf"),
):
    try:
        action()
    except ValueError as error:
        assert "needs FAISS" in str(error), error
    else:
        raise AssertionError("went on without FAISS")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
