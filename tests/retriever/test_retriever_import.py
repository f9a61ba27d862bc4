"""An index that another program built is taken over as it is, or refused by what does not fit."""

import json

import faiss
import numpy as np
import pytest

from kit.retriever_world import make_encoder
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index import importing
from verl_credit_retriever.index.importing import import_index
from verl_credit_retriever.index.manifest import IndexMismatch
from verl_credit_retriever.index.search import SearchIndex

QUERIES = [f"who is the mayor of town {number}" for number in range(8)]


@pytest.fixture(scope="module")
def vectors_M_D(world):
    folders, encoder = world
    lines = (folders / "corpus.jsonl").read_text().splitlines()
    return encoder.encode_passages([json.loads(line)["contents"] for line in lines])


def faiss_file(path, vectors_M_D, metric=faiss.METRIC_INNER_PRODUCT, form="Flat"):
    """As Search-R1's indexer writes it."""
    index = faiss.index_factory(vectors_M_D.shape[1], form, metric)
    index.train(vectors_M_D)
    ids = [np.arange(len(vectors_M_D))] * ("IDMap" in form)
    index.add_with_ids(vectors_M_D, *ids) if ids else index.add(vectors_M_D)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("half", [False, True])
def test_an_imported_index_answers_as_one_that_was_built(world, vectors_M_D, tmp_path, half):
    folders, encoder = world
    source = faiss_file(tmp_path / "e5_Flat.index", vectors_M_D, form="SQfp16" if half else "Flat")
    manifest = import_index(source, folders / "corpus.jsonl", encoder, tmp_path / "out")
    dtype = "float16" if half else "float32"
    assert (manifest["kind"], manifest["rows"], manifest["dtype"]) == ("flat", len(vectors_M_D), dtype)
    assert source.stat().st_ino == (tmp_path / "out" / "index.faiss").stat().st_ino  # 65 GB are not copied
    found, built = SearchIndex.load(tmp_path / "out"), SearchIndex.load(folders / "index")
    queries_N_D = encoder.encode_queries(QUERIES)
    for hits, expected in zip(found.search(queries_N_D, 5), built.search(queries_N_D, 5), strict=True):
        assert [score for _, score in hits] == pytest.approx(
            [score for _, score in expected], abs=2e-3 if half else 1e-6
        )
        assert half or [document for document, _ in hits] == [document for document, _ in expected]
    exact = SearchIndex.load(tmp_path / "out", backend="exact").search(queries_N_D, 5)
    for hits, expected in zip(exact, found.search(queries_N_D, 5), strict=True):
        assert [document for document, _ in hits] == [document for document, _ in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e5_Flat.index", "out"]


def test_a_row_that_no_sample_met_may_not_hold_nan(world, vectors_M_D, tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "SAMPLE", 4)
    rows = len(vectors_M_D)
    sampled = {0, rows - 1, *np.random.default_rng(0).choice(rows, 4, replace=False).tolist()}
    other = min(set(range(rows)) - sampled)
    spoiled = vectors_M_D.copy()
    spoiled[other, 3] = np.nan
    with pytest.raises(IndexMismatch, match=f"row {other} holds NaN"):
        import_index(
            faiss_file(tmp_path / "i", spoiled), world[0] / "corpus.jsonl", world[1], tmp_path / "out"
        )


def test_it_is_copied_where_it_cannot_be_linked(world, vectors_M_D, tmp_path, monkeypatch):
    def link(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(importing.os, "link", link)
    source = faiss_file(tmp_path / "i", vectors_M_D)
    import_index(source, world[0] / "corpus.jsonl", world[1], tmp_path / "out")
    assert (tmp_path / "out" / "index.faiss").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "spoil, named",
    [
        (lambda path, v: faiss_file(path, v[:-1]), "rows; .*corpus.jsonl has"),
        (lambda path, v: faiss_file(path, v[:, :-1].copy()), "dimensions; the encoder has"),
        (lambda path, v: faiss_file(path, v, faiss.METRIC_L2), "metric 1; expected the inner product"),
        (lambda path, v: faiss_file(path, v, form="SQ8"), "IndexScalarQuantizer; a flat index of float32 or float16"),
        (lambda path, v: faiss_file(path, v, form="IDMap,Flat"), "IndexIDMap; a flat index"),
        (lambda path, v: path.write_text("<!DOCTYPE html><html>log in"), "a web page .*; expected a FAISS index"),
        (lambda path, v: faiss_file(path, v[::-1].copy()), r"row 0 is not .*corpus.jsonl:1 .*order of lines"),
        (lambda path, v: faiss_file(path, 2 * v), "row 0 has length 2.000; this encoder gives 1.000"),
        (lambda path, v: faiss_file(path, v * np.nan), "row 0 is not .* \\(cosine nan"),
        (lambda path, v: path.write_bytes(faiss_file(path, v).read_bytes()[:-10]), "FAISS cannot read it"),
        (lambda path, v: path.write_text("no index"), "FAISS cannot read it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_nothing_is_left(world, vectors_M_D, tmp_path, spoil, named):
    spoil(tmp_path / "i", vectors_M_D)
    with pytest.raises(IndexMismatch, match=named):
        import_index(tmp_path / "i", world[0] / "corpus.jsonl", world[1], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


@pytest.mark.parametrize("change", ["prefix", "encoder"])
def test_another_encoder_or_prefix_is_refused(world, vectors_M_D, tmp_path, change):
    source = faiss_file(tmp_path / "i", vectors_M_D)
    if change == "prefix":
        other = SentenceEncoder(world[0] / "encoder", passage_prefix="something else altogether, at length: ")
    else:
        other = SentenceEncoder(make_encoder(tmp_path / "other", seed=1))
    with pytest.raises(IndexMismatch, match="row 0 is not"):
        import_index(source, world[0] / "corpus.jsonl", other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_imports_and_refuses_what_would_have_no_effect(world, vectors_M_D, tmp_path, capsys):
    source = faiss_file(tmp_path / "i", vectors_M_D)
    command = [
        "index",
        "--import",
        source,
        "--corpus",
        world[0] / "corpus.jsonl",
        "--encoder",
        world[0] / "encoder",
    ]
    command = [str(word) for word in [*command, "--out", tmp_path / "out"]]
    for more in (["--kind", "sq8"], ["--dtype", "fp16"]):
        assert main([*command, *more]) == 2
        assert "leave out --kind and --dtype" in capsys.readouterr().err
    assert main([*command, "--nlist", "5"]) == 2
    assert "nlist=5 has no effect on kind='flat'" in capsys.readouterr().err
    assert main(command) == 0
    assert f"{len(vectors_M_D)} rows" in capsys.readouterr().out
    assert main(command) == 2 and "exists" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
