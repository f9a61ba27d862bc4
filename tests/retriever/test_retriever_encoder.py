"""The encoder: its conventions, and refusal of a folder that would give other vectors than it says."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_credit_retriever.encoder import SentenceEncoder

TEXTS = ["who is the mayor of town 3", "river", "bridge " * 40, "baker, violin?", "ünknown 東京", ""]


def test_queries_are_split_where_padding_costs_more_than_a_call_and_passages_are_not(world, monkeypatch):
    _, encoder = world
    plain, shapes = encoder.forward, []
    monkeypatch.setattr(
        encoder, "forward", lambda batch: shapes.append(tuple(batch["input_ids"].shape)) or plain(batch)
    )
    lengths = [5] * 13 + [6, 4, 30]  # 14 rows in the first call: the 15th would add 24 tokens to each
    ids_N = [[encoder._tokenizer.cls_token_id] * length for length in lengths]
    split_N_D = encoder.encode_tokens(ids_N)
    assert shapes == [(14, 5), (1, 6), (1, 30)]
    shapes.clear()
    np.testing.assert_allclose(encoder.encode_tokens(ids_N, split=False), split_N_D, atol=1e-6)
    assert shapes == [(16, 30)]


def test_pooling_is_the_mean_over_real_tokens(world):
    _, encoder = world
    tokens = encoder._tokenizer("passage: river bridge", return_tensors="pt")
    with torch.inference_mode():
        mean_D = encoder.model(**tokens).last_hidden_state[0].mean(0).numpy()
    found_D = encoder.encode_passages(["a much longer text about the river", "river bridge"])[1]
    np.testing.assert_allclose(found_D, mean_D / np.linalg.norm(mean_D), atol=1e-6)


def test_encoder_refuses_pickled_weights_and_missing_folders(world, tmp_path):
    root, _ = world
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SentenceEncoder(tmp_path / "nowhere")
    shutil.copytree(root / "encoder", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        SentenceEncoder(tmp_path / "pickled")


def _wrapped(tensors):
    return {f"backbone.{name}": tensor for name, tensor in tensors.items()}


def _without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _reshaped(tensors):
    return {**tensors, "encoder.layer.1.output.dense.weight": torch.zeros(32, 65)}


@pytest.mark.parametrize(
    "change, message",
    [
        (_wrapped, "miss 3. tensors .*embeddings.*; unknown: backbone.*save_pretrained"),
        (_without("encoder.layer.0.output.dense.bias"), "miss 1 .* encoder.layer.0.output.dense.bias; "),
        (_reshaped, r"miss 1 .* encoder.layer.1.output.dense.weight \[32, 65\], not \[32, 64\]; "),
    ],
)
def test_weights_that_do_not_all_load_are_refused_by_name(world, tmp_path, change, message):
    shutil.copytree(world[0] / "encoder", tmp_path / "encoder")
    file = tmp_path / "encoder" / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        SentenceEncoder(tmp_path / "encoder")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_is_not_the_encoder_s_is_named(world, tmp_path, name):
    shutil.copytree(world[0] / "encoder", tmp_path / "encoder")
    (tmp_path / "encoder" / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    )
    with pytest.raises(ValueError, match=f"{name}: a Git-LFS pointer: .*git lfs pull"):
        SentenceEncoder(tmp_path / "encoder")


def test_weights_without_the_unused_pooler_load(world, tmp_path):
    root, encoder = world
    shutil.copytree(root / "encoder", tmp_path / "encoder")
    file = tmp_path / "encoder" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("pooler.")}
    assert len(kept) == len(load_file(file)) - 2
    save_file(kept, file, metadata={"format": "pt"})
    found_N_D = SentenceEncoder(tmp_path / "encoder").encode_queries(TEXTS)
    np.testing.assert_array_equal(found_N_D, encoder.encode_queries(TEXTS))


def _modules(*kinds):
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return [
        {
            "idx": n,
            "name": str(n),
            "path": paths.get(kind, f"{n}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]


def _sentence_transformers(source, folder, files):
    shutil.copytree(source, folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


CLS = {"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}
BGE = {"modules.json": _modules("Transformer", "Pooling", "Normalize"), **CLS}


@pytest.mark.parametrize(
    "files", [BGE, CLS, {"1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "cls"}}]
)
def test_the_pooling_that_the_folder_says_is_taken_and_another_refused(world, tmp_path, files):
    root, encoder = world
    folder = _sentence_transformers(root / "encoder", tmp_path / "bge", files)
    found = SentenceEncoder(folder)
    assert found.pooling == found.fingerprint()["pooling"] == "cls"
    expected_N_D = SentenceEncoder(root / "encoder", pooling="cls").encode_queries(TEXTS)
    np.testing.assert_array_equal(found.encode_queries(TEXTS), expected_N_D)
    assert np.abs(expected_N_D - encoder.encode_queries(TEXTS)).max() > 1e-3
    with pytest.raises(ValueError, match="pooling='mean'; .*bge .*'cls'"):
        SentenceEncoder(folder, pooling="mean")


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {**BGE, "modules.json": _modules("Transformer", "Pooling", "Dense")},
            "modules.json: modules Transformer, Pooling, Dense; ",
        ),
        (
            {**BGE, "modules.json": [{"type": "x.Transformer", "path": "0_T"}, {"type": "Pooling"}]},
            "in '0_T'",
        ),
        ({"modules.json": _modules("Transformer", "Pooling")}, "lists Pooling, but .*1_Pooling/config.json"),
        ({"modules.json": "{"}, "modules.json is not JSON"),
        ({"modules.json": {}}, "modules.json: '{}'; expected a JSON list"),
        ({"1_Pooling/config.json": {"pooling_mode_lasttoken": True}}, "config.json: pooling .*lasttoken"),
        (
            {"1_Pooling/config.json": {"pooling_mode_mean_tokens": False}},
            r"config.json: pooling \[\]; accepted",
        ),
        ({"1_Pooling/config.json": {"pooling_mode": "max"}}, "config.json: pooling .'max'.; accepted"),
        (
            {"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            "pooling .'cls', 'mean'.; accepted: one of",
        ),
        (
            {"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}},
            "include_prompt=False",
        ),
    ],
)
def test_modules_that_would_give_other_vectors_are_refused(world, tmp_path, files, message):
    folder = _sentence_transformers(world[0] / "encoder", tmp_path / "encoder", files)
    with pytest.raises(ValueError, match=message):
        SentenceEncoder(folder)


def test_vectors_that_the_folder_normalises_keep_their_length(world, tmp_path):
    folder = _sentence_transformers(world[0] / "encoder", tmp_path / "normalized", BGE)
    with pytest.raises(ValueError, match="normalize=False; .*modules.json lists Normalize"):
        SentenceEncoder(folder, normalize=False)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"])
def test_every_file_of_a_tokenizer_is_part_of_the_fingerprint(world, tmp_path, name):
    root, encoder = world
    shutil.copytree(root / "encoder", tmp_path / "encoder")
    found = []
    for text in ("{}", "{ }"):
        (tmp_path / "encoder" / name).write_text(text)
        other = copy.copy(encoder)
        other.path, other._fingerprint = tmp_path / "encoder", None
        found.append(other.fingerprint()["tokenizer_sha256"])
    assert len({encoder.fingerprint()["tokenizer_sha256"], *found}) == 3


@pytest.mark.slow
def test_tokens_and_vectors_in_two_steps_equal_one(world):
    _, encoder = world
    texts = [*TEXTS, "river " * 20_000]  # 120 kB
    ids_N = encoder.tokenize_queries(texts)
    assert [len(ids) for ids in ids_N] == [11, 5, 44, 13, 6, 4, 64]
    np.testing.assert_array_equal(encoder.encode_tokens(ids_N), encoder.encode_queries(texts))
    alone_N_D = np.concatenate([encoder.encode_tokens([ids]) for ids in ids_N])
    np.testing.assert_allclose(encoder.encode_tokens(ids_N), alone_N_D, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(alone_N_D, axis=1), 1, atol=1e-5)
    assert alone_N_D.dtype == np.float32
    assert encoder.tokenize_queries([]) == [] and encoder.encode_tokens([]).shape == (0, 32)
    for bad in ([[]], [ids_N[0], [5] * 65]):
        with pytest.raises(ValueError, match=r"row \d: \d+ tokens; expected 1 to max_length=64"):
            encoder.encode_tokens(bad)
    with pytest.raises(TypeError, match="list of str"):
        encoder.tokenize_queries("river")


def test_an_encoder_that_gives_nan_is_refused_with_the_text(world, monkeypatch):
    root, _ = world
    encoder = SentenceEncoder(root / "encoder")
    monkeypatch.setattr(encoder, "_pool", lambda hidden, mask: hidden[:, 0] * float("nan"))
    with pytest.raises(ValueError, match="no unit vector for row 0.*river"):
        encoder.encode_queries(["river"])
