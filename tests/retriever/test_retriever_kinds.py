"""Parameters of the kinds of index: by a stated rule, and refused where they make no sense."""

import os

import pytest

from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.index.kinds import resolve
from verl_credit_retriever.index.search import build_index


@pytest.mark.parametrize(
    "kind, rows, given, parameters, search",
    [
        ("flat", 50, {}, {}, {}),
        ("ivf", 10, {}, {"nlist": 1, "train_rows": 10, "seed": 0}, {"nprobe": 1}),
        ("ivf", 390, {}, {"nlist": 10, "train_rows": 390, "seed": 0}, {"nprobe": 8}),
        ("ivf", 21_015_324, {}, {"nlist": 18337, "train_rows": 1_173_568, "seed": 0}, {"nprobe": 136}),
        ("ivf", 10, {"nlist": 10, "nprobe": 2}, {"nlist": 10, "train_rows": 10, "seed": 0}, {"nprobe": 2}),
        (
            "ivfpq",
            300,
            {"nlist": 2, "refine": 4},
            {"nlist": 2, "train_rows": 300, "pq_bytes": 192, "seed": 0},
            {"nprobe": 2, "refine": 4},
        ),
        (
            "ivfpq",
            21_015_324,
            {"pq_bytes": 96},
            {"nlist": 18337, "train_rows": 1_173_568, "pq_bytes": 96, "seed": 0},
            {"nprobe": 136, "refine": 16},
        ),
        ("hnsw", 50, {"m": 8}, {"m": 8, "ef_construction": 200, "seed": 0}, {"ef_search": 128}),
    ],
)
def test_parameters_follow_the_stated_rule(kind, rows, given, parameters, search):
    assert resolve(kind, rows, 768, given) == (parameters, search)


def test_codes_divide_the_dimensions():
    assert resolve("ivfpq", 999, 50, {})[0]["pq_bytes"] == 10  # the largest divisor up to 12.5
    assert resolve("ivfpq", 999, 7, {})[0]["pq_bytes"] == 1
    for wrong in (12, 0, 100, True):
        with pytest.raises(
            ValueError, match=r"expected a divisor of the 50 dimensions: \[1, 2, 5, 10, 25, 50\]"
        ):
            resolve("ivfpq", 999, 50, {"pq_bytes": wrong})


@pytest.mark.parametrize(
    "kind, given, message",
    [
        ("ivf", {"nlist": 101}, "nlist=101; expected an integer from 1 to 100"),
        ("ivf", {"nlist": 10, "nprobe": 11}, "nprobe=11; expected an integer from 1 to 10"),
        ("ivf", {"nlist": 10, "train_rows": 9}, "train_rows=9; expected an integer from 10 to 100"),
        ("ivfpq", {}, "kind='ivfpq': 100 rows; it has 256 codes and needs as many: use flat"),
        ("hnsw", {"m": 1}, "m=1; expected an integer from 2 to 512"),
        ("hnsw", {"nlist": 4}, "nlist=4 has no effect on kind='hnsw'"),
        ("flat", {"seed": 1}, "seed=1 has no effect on kind='flat'; it takes no parameter"),
        ("ivf", {"lists": 4}, "lists=4 has no effect"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_encoded(tmp_path, kind, given, message):
    corpus, encoder = write_rows(tmp_path / "corpus.jsonl", 100), TableEncoder(clustered(100, 8, seed=1))
    with pytest.raises(ValueError, match=message):
        build_index(corpus, encoder, tmp_path / "out", kind=kind, **given)
    assert encoder.calls == 0 and os.listdir(tmp_path) == ["corpus.jsonl"]
