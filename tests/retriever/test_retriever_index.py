"""The index: exactness, and refusal of everything that does not belong together."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.retriever_world import make_corpus, make_encoder
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.manifest import IndexMismatch, own_hash, read_manifest
from verl_credit_retriever.index.search import SearchIndex, build_index


def test_k_above_rows_returns_every_row_once_and_k_below_one_is_an_error(world):
    root, encoder = world
    index = SearchIndex.load(root / "index")
    (hits,) = index.search(encoder.encode_queries(["river"]), 1000)
    assert len({document["id"] for document, _ in hits}) == len(hits) == 50
    assert index.search(np.zeros((0, 32), np.float32), 3) == []
    for k in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="k="):
            index.search(encoder.encode_queries(["river"]), k)


@pytest.mark.parametrize("vectors", [np.zeros((1, 31)), np.zeros(32), np.full((1, 32), np.nan)])
def test_search_refuses_vectors_that_cannot_be_compared(world, vectors):
    with pytest.raises(ValueError):
        SearchIndex.load(world[0] / "index").search(vectors, 1)


def test_a_folder_that_is_no_index_is_not_replaced(world, tmp_path):
    _, encoder = world
    small = make_corpus(tmp_path / "small.jsonl", rows=4)
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="not an index"):
        build_index(small, encoder, tmp_path / "mine", overwrite=True)


def _edit_manifest(folder, **changes):
    """Changes values and recomputes the hash, so that the hash hides nothing."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(manifest | {"manifest_sha256": own_hash(manifest)}))


@pytest.mark.slow
def test_one_wrong_byte_anywhere_in_the_manifest_is_refused(world, tmp_path, monkeypatch):
    good = (world[0] / "index" / "manifest.json").read_bytes()
    (tmp_path / "manifest.json").touch()
    # The file system would take most of the time: thousands of files that are written once and read once.
    monkeypatch.setattr(Path, "read_text", lambda _, encoding: bad.decode(encoding))
    for place in range(len(good)):
        for flip in (1, 2, 32):
            bad = good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :]
            try:
                manifest = read_manifest(tmp_path)
            except IndexMismatch:
                continue
            assert manifest == json.loads(good)  # blank for blank


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json does not exist"),
        (lambda d: _edit_manifest(d, rows=49), "index.faiss: rows=50; expected 49"),
        (lambda d: _edit_manifest(d, dim=16), "index.faiss: dim=32; expected 16"),
        (lambda d: _edit_manifest(d, format=2), "format=2; this version reads 3"),
        (lambda d: _edit_manifest(d, kind="pq"), "kind='pq'; this version reads 'flat' or 'sq8'"),
        (lambda d: _edit_manifest(d, kind="sq8"), r"files\['vectors.npy'\]=None"),
        (lambda d: _edit_manifest(d, kind="ivf"), "parameters.*nprobe=None"),
        (lambda d: _edit_manifest(d, dtype="float16"), "index.faiss: code=b'IxFI'; expected b'IxSQ'"),
        (lambda d: _edit_manifest(d, dtype="int8"), "dtype='int8'; this version reads"),
        (lambda d: _edit_manifest(d, rows=True), "rows=True; expected an integer"),
        (lambda d: _edit_manifest(d, corpus_sha256="0" * 64), "corpus_sha256='000"),
        (lambda d: (d / "manifest.json").write_text("[]"), "is not an object"),
        (lambda d: _edit_manifest(d, files={}), "files"),
        (lambda d: (d / "offsets.npy").unlink(), "offsets.npy does not exist"),
    ],
)
def test_a_damaged_index_is_refused_with_file_value_and_expectation(world, tmp_path, damage, message):
    shutil.copytree(world[0] / "index", tmp_path / "index")
    damage(tmp_path / "index")
    with pytest.raises(IndexMismatch, match=message):
        SearchIndex.load(tmp_path / "index")


def test_another_encoder_or_prefix_is_refused(world, tmp_path):
    root, _ = world
    index = SearchIndex.load(root / "index")
    index.check_encoder(SentenceEncoder(root / "encoder"))
    with pytest.raises(IndexMismatch, match="weights_sha256"):
        index.check_encoder(SentenceEncoder(make_encoder(tmp_path / "other", seed=1)))
    with pytest.raises(IndexMismatch, match="query_prefix='q: '"):
        index.check_encoder(SentenceEncoder(root / "encoder", query_prefix="q: "))


def test_a_manifest_that_does_not_say_by_which_encoder_is_refused(world, tmp_path):
    root, encoder = world
    shutil.copytree(root / "index", tmp_path / "index")
    for key in ("weights_sha256", "tokenizer_sha256", "passage_prefix", "max_length", "pooling"):
        described = {name: value for name, value in encoder.fingerprint().items() if name != key}
        _edit_manifest(tmp_path / "index", encoder=described)
        with pytest.raises(IndexMismatch, match=f"encoder {key}=.*; .* None"):
            SearchIndex.load(tmp_path / "index").check_encoder(encoder)


@pytest.mark.parametrize("kind", ["flat", "sq8", "ivf", "hnsw", "exact"])
def test_one_wrong_byte_or_a_lost_end_in_any_file_of_any_kind_is_refused(world, tmp_path, kind):
    root, encoder = world
    build_index(root / "corpus.jsonl", encoder, tmp_path / "index", kind=kind)
    for name in [path.name for path in (tmp_path / "index").iterdir()]:
        path = tmp_path / "index" / name
        good = path.read_bytes()
        middle = len(good) // 2
        for bad in (good[:-3], b"", good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(
                IndexMismatch, match=f"{name}:? (bytes=\\d+;|sha256=|manifest_sha256=|is not JSON)"
            ):
                SearchIndex.load(tmp_path / "index")
        path.write_bytes(good)
    assert len(SearchIndex.load(tmp_path / "index")) == 50


@pytest.mark.parametrize("kind", ["flat", "sq8", "ivf", "hnsw", "exact"])
def test_without_hashes_truncated_files_and_wrong_shapes_are_still_refused(world, tmp_path, kind):
    root, encoder = world
    build_index(root / "corpus.jsonl", encoder, tmp_path / "index", kind=kind)
    small = make_corpus(tmp_path / "small.jsonl", rows=40)
    build_index(small, encoder, tmp_path / "small", kind=kind)
    for path in sorted((tmp_path / "index").iterdir()):
        if path.name == "manifest.json":
            continue
        good = path.read_bytes()
        for bad in (good[:-3], b"", (tmp_path / "small" / path.name).read_bytes()):
            path.write_bytes(bad)
            with pytest.raises(IndexMismatch, match=path.name):
                SearchIndex.load(tmp_path / "index", verify="none")
        path.write_bytes(good)


@pytest.mark.parametrize("damage", ["nan", "missing", "beyond", "twice"])
def test_an_impossible_hit_never_leaves_the_index(world, monkeypatch, damage):
    root, encoder = world
    index = SearchIndex.load(root / "index")
    real = index._faiss.search

    def search(vectors, k):
        scores_N_K, rows_N_K = real(vectors, k)
        if damage == "nan":
            scores_N_K[0, 0] = np.nan
        else:
            rows_N_K[0, 0] = {"missing": -1, "beyond": 50, "twice": rows_N_K[0, 1]}[damage]
        return scores_N_K, rows_N_K

    monkeypatch.setattr(index._faiss, "search", search)
    with pytest.raises(IndexMismatch, match="rebuild the index"):
        index.search(encoder.encode_queries(["river"]), 3)


def test_pooling_and_normalisation_are_options_and_part_of_the_fingerprint(world):
    root, encoder = world
    cls = SentenceEncoder(root / "encoder", pooling="cls", normalize=False)
    tokens = encoder._tokenizer("query: river bridge", return_tensors="pt")
    with torch.inference_mode():
        first_D = encoder.model(**tokens).last_hidden_state[0, 0].numpy()
    found_D = cls.encode_queries(["who is the mayor of the town", "river bridge"])[1]
    np.testing.assert_allclose(found_D, first_D, atol=1e-5)
    assert abs(np.linalg.norm(found_D) - 1) > 0.1
    index = SearchIndex.load(root / "index")
    for changed, said in (({"pooling": "cls"}, "pooling='cls'"), ({"normalize": False}, "normalize=False")):
        with pytest.raises(IndexMismatch, match=said):
            index.check_encoder(SentenceEncoder(root / "encoder", **changed))
    again = SentenceEncoder.for_index(root / "encoder", {"encoder": cls.fingerprint()})
    assert again.fingerprint() == cls.fingerprint()


def test_the_index_command_takes_every_option(world, tmp_path, capsys):
    root, _ = world
    arguments = ["index", "--corpus", root / "corpus.jsonl", "--encoder", root / "encoder"]
    arguments += ["--out", tmp_path / "out", "--kind", "ivf", "--nlist", 5, "--nprobe", 2, "--seed", 3]
    arguments += ["--dtype", "fp16", "--pooling", "cls", "--no-normalize", "--shard-rows", 20, "--threads", 1]
    assert main([str(argument) for argument in arguments]) == 0
    manifest = SearchIndex.load(tmp_path / "out").manifest
    assert manifest["parameters"] == {"nlist": 5, "train_rows": 50, "seed": 3}
    assert (manifest["search"], manifest["dtype"]) == ({"nprobe": 2}, "float16")
    assert (manifest["encoder"]["pooling"], manifest["encoder"]["normalize"]) == ("cls", False)
    out, err = capsys.readouterr()
    assert "50 rows of 32 dimensions" in out and "of memory" in out
    assert "100%" in err and "50/50" in err
    more = [str(argument) for argument in [*arguments, "--overwrite", "--m", 4]]
    assert main(more) == 2 and "m=4 has no effect on kind='ivf'" in capsys.readouterr().err
