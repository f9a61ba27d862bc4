"""Encoder and index: exactness, and refusal of everything that does not belong together."""

import json
import shutil

import faiss
import numpy as np
import pytest
import torch
from retriever_world import make_corpus, make_encoder
from verl_credit_retriever.corpus import CorpusError
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index import SearchIndex, build_index
from verl_credit_retriever.manifest import IndexMismatch

TEXTS = ["who is the mayor of town 3", "river", "bridge " * 40, "baker, violin?", "ünknown 東京", ""]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("retriever")
    encoder = SentenceEncoder(make_encoder(root / "encoder"))
    corpus = make_corpus(root / "corpus.jsonl")
    build_index(corpus, encoder, root / "index", batch_size=2)  # more than one chunk
    return root, encoder


def test_vectors_are_unit_float32_and_do_not_depend_on_the_batch(world):
    _, encoder = world
    vectors_N_D = encoder.encode_queries(TEXTS)
    assert vectors_N_D.dtype == np.float32 and vectors_N_D.shape == (len(TEXTS), 32)
    np.testing.assert_allclose(np.linalg.norm(vectors_N_D, axis=1), 1, atol=1e-5)
    alone_N_D = np.concatenate([encoder.encode_queries([text]) for text in TEXTS])
    np.testing.assert_allclose(vectors_N_D, alone_N_D, atol=1e-5)
    assert encoder.encode_queries([]).shape == (0, 32)


def test_pooling_is_the_mean_over_real_tokens(world):
    _, encoder = world
    tokens = encoder._tokenizer("passage: river bridge", return_tensors="pt")
    with torch.inference_mode():
        mean_D = encoder._model(**tokens).last_hidden_state[0].mean(0).numpy()
    found_D = encoder.encode_passages(["a much longer text about the river", "river bridge"])[1]
    np.testing.assert_allclose(found_D, mean_D / np.linalg.norm(mean_D), atol=1e-6)


def test_prefixes_tell_queries_from_passages(world):
    _, encoder = world
    assert np.abs(encoder.encode_queries(["river"]) - encoder.encode_passages(["river"])).max() > 1e-3
    np.testing.assert_array_equal(encoder.encode_passages(["river"]), encoder._encode(["passage: river"], ""))


def test_length_limit_is_the_encoders_when_that_is_smaller(world):
    root, encoder = world
    assert encoder.max_length == 64
    assert SentenceEncoder(root / "encoder", max_length=16).max_length == 16


def test_encoder_refuses_pickled_weights_and_missing_folders(world, tmp_path):
    root, _ = world
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SentenceEncoder(tmp_path / "nowhere")
    shutil.copytree(root / "encoder", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        SentenceEncoder(tmp_path / "pickled")


def test_search_equals_the_full_matrix_product(world):
    root, encoder = world
    index = SearchIndex.load(root / "index")
    documents = [json.loads(line) for line in (root / "corpus.jsonl").read_text().splitlines()]
    queries_N_D = encoder.encode_queries(TEXTS)
    scores_N_M = queries_N_D @ encoder.encode_passages([d["contents"] for d in documents]).T
    for hits, scores_M in zip(index.search(queries_N_D, 5), scores_N_M, strict=True):
        np.testing.assert_allclose([score for _, score in hits], np.sort(scores_M)[::-1][:5], atol=1e-5)
        for document, score in hits:
            assert abs(scores_M[documents.index(document)] - score) < 1e-5


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


GOOD = '{"id": "a", "contents": "A\\ntext"}'


@pytest.mark.parametrize(
    "lines, message",
    [
        ([GOOD, '{"id": "b", "contents"'], ":2: not JSON"),
        ([GOOD, GOOD], ":2: id='a' was used on line 1"),
        ([GOOD, '{"id": "b", "contents": "  "}'], ":2: contents='  '"),
        ([GOOD, '{"id": 7, "contents": "x"}'], ":2: id=7"),
        ([GOOD, '["b"]'], ":2: .* is not an object"),
        ([GOOD, ""], ":2: not JSON"),
        ([GOOD, '{"id": "b", "contents": "\\ud800"}'], ":2: contents holds a lone surrogate"),
        ([GOOD, b"\xff\xfe"], ":2: not UTF-8"),
        ([], "no rows"),
    ],
)
def test_bad_corpus_is_refused_with_its_line_and_leaves_nothing(world, tmp_path, lines, message):
    raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
    (tmp_path / "bad.jsonl").write_bytes(b"".join(line + b"\n" for line in raw))
    with pytest.raises(CorpusError, match=message):
        build_index(tmp_path / "bad.jsonl", world[1], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_an_existing_folder_is_replaced_only_on_request_and_only_if_it_is_an_index(world, tmp_path):
    root, encoder = world
    small = make_corpus(tmp_path / "small.jsonl", rows=4)
    shutil.copytree(root / "index", tmp_path / "index")
    with pytest.raises(FileExistsError, match="overwrite"):
        build_index(small, encoder, tmp_path / "index")
    build_index(small, encoder, tmp_path / "index", overwrite=True)
    assert len(SearchIndex.load(tmp_path / "index")) == 4
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="not an index"):
        build_index(small, encoder, tmp_path / "mine", overwrite=True)


def _edit_manifest(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json does not exist"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json is not JSON"),
        (lambda d: _edit_manifest(d, rows=49), "index.faiss: rows=50; expected 49"),
        (lambda d: _edit_manifest(d, dim=16), "index.faiss: dim=32; expected 16"),
        (lambda d: _edit_manifest(d, kind="hnsw"), "kind='hnsw'; this version reads 'flat'"),
        (lambda d: _edit_manifest(d, files={}), "files"),
        (
            lambda d: (d / "index.faiss").write_bytes((d / "index.faiss").read_bytes()[:-8]),
            "index.faiss: .* bytes",
        ),
        (lambda d: faiss.write_index(faiss.IndexFlatIP(32), str(d / "index.faiss")), "index.faiss: .* bytes"),
        (
            lambda d: (d / "corpus.jsonl").write_text(
                (d / "corpus.jsonl").read_text().replace("mayor", "baker")
            ),
            "corpus.jsonl: sha256",
        ),
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
