"""A start reads again what has changed, and nothing else."""

import json
import os

import pytest

from verl_credit_retriever.index import manifest
from verl_credit_retriever.index.manifest import IndexMismatch, known_sha256, sha256
from verl_credit_retriever.index.search import SearchIndex


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The files whose content was read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = []
    monkeypatch.setattr(manifest, "sha256", lambda path: (names.append(path.name), sha256(path))[1])
    return names


def test_a_file_is_read_once_until_it_changes(tmp_path, read):
    path = tmp_path / "vectors"
    path.write_bytes(b"one")
    assert known_sha256(path) == known_sha256(path) == sha256(path)
    assert read == ["vectors"]
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"two")  # as long as before
    os.utime(path, ns=times)  # and with the same times: the kernel's ctime tells
    assert known_sha256(path) == sha256(path)
    other = tmp_path / "other"
    other.write_bytes(b"six")
    other.replace(path)
    assert known_sha256(path) == sha256(path)
    assert read == ["vectors"] * 3
    store = tmp_path / "cache" / "verl_credit_retriever" / "hashes.json"
    assert len(json.loads(store.read_text())) == 1  # those of older files are forgotten
    assert store.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["open", "text", "list", "numbers"])
def test_a_store_that_others_could_write_or_that_is_damaged_is_not_believed(tmp_path, read, damage):
    path = tmp_path / "vectors"
    path.write_bytes(b"one")
    known_sha256(path)
    store = tmp_path / "cache" / "verl_credit_retriever" / "hashes.json"
    if damage == "open":
        store.write_text(json.dumps(dict.fromkeys(json.loads(store.read_text()), "f" * 64)))
        store.chmod(0o666)
    else:
        store.write_text({"text": "{", "list": "[]", "numbers": '{"a": 1}'}[damage])
    assert known_sha256(path) == sha256(path) and read == ["vectors"] * 2


def test_an_index_is_loaded_without_reading_it_again_and_a_changed_one_refused(world, tmp_path, read):
    import shutil

    folder = shutil.copytree(world[0] / "index", tmp_path / "index")
    SearchIndex.load(folder, verify="known")
    first = list(read)
    assert sorted(first) == ["corpus.jsonl", "index.faiss", "offsets.npy"]
    SearchIndex.load(folder, verify="known")
    assert read == first
    corpus = folder / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace("mayor", "baker"))
    with pytest.raises(IndexMismatch, match="corpus.jsonl: sha256="):
        SearchIndex.load(folder, verify="known")
