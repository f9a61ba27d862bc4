"""Building: interrupted and taken up, alone at its output, atomic."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import pytest

from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.index import build, memory
from verl_credit_retriever.index import search as index_module
from verl_credit_retriever.index.manifest import IndexMismatch
from verl_credit_retriever.index.search import SearchIndex, build_index
from verl_credit_retriever.index.shards import BuildRefused

ROWS, DIM = 100, 8
SMALL = {"batch_size": 1, "shard_rows": 16}  # 7 shards of a chunk each

# Encodes two shards and then waits for its end: the build can only be killed between shards 2 and 3.
BUILD_AND_HANG = """
import sys, time
from kit.retriever_vectors import TableEncoder, clustered
from verl_credit_retriever.index.search import build_index

class Hanging(TableEncoder):
    def encode_passages(self, texts):
        if self.calls == 2:
            time.sleep(600)
        return super().encode_passages(texts)

encoder = Hanging(clustered(100, 8, seed=1))
build_index(sys.argv[1], encoder, sys.argv[2], kind=sys.argv[3], batch_size=1, shard_rows=16)
"""


@pytest.fixture(autouse=True)
def one_thread():
    faiss.omp_set_num_threads(1)


@pytest.fixture
def encoder():
    return TableEncoder(clustered(ROWS, DIM, seed=1))


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", ROWS)


def _hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def _interrupt(corpus, encoder, out, after=2, **parameters):
    """A build that fails after so many calls of the encoder; a call is a shard under SMALL."""

    class Failing(TableEncoder):
        def encode_passages(self, texts):
            if self.calls == after:
                raise KeyboardInterrupt
            return super().encode_passages(texts)

    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, Failing(encoder.table_M_D), out, **{**SMALL, **parameters})


def _wait_until(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_a_killed_build_is_taken_up_and_ends_with_the_same_bytes(corpus, encoder, tmp_path, kind):
    out, work = tmp_path / "out", tmp_path / ".out.building"
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD_AND_HANG, str(corpus), str(out), kind],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_until(lambda: (work / "shard-000001.json").is_file(), process)
        with pytest.raises(BuildRefused, match=f"process {process.pid} is building it"):
            build_index(corpus, encoder, out, kind=kind, **SMALL)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not out.exists() and encoder.calls == 0
    build_index(corpus, encoder, out, kind=kind, **SMALL)
    assert encoder.calls == 5  # of 7 shards, two were there
    build_index(corpus, encoder, tmp_path / "straight", kind=kind, **SMALL)
    assert _hashes(out) == _hashes(tmp_path / "straight")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "out", "straight"]


@pytest.mark.parametrize("kind", ["sq8", "ivf", "ivfpq", "hnsw", "exact"])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(corpus, encoder, tmp_path, kind):
    seed = {"seed": 5} if kind in ("ivf", "ivfpq", "hnsw") else {}
    if kind == "ivf":
        seed |= {"nlist": 4, "train_rows": 50}
    if kind == "ivfpq":
        corpus, encoder = write_rows(tmp_path / "more.jsonl", 300), TableEncoder(clustered(300, DIM, seed=1))
        seed |= {"nlist": 4, "train_rows": 280}
    for name in "ab":
        build_index(corpus, encoder, tmp_path / name, kind=kind, **seed)
    assert _hashes(tmp_path / "a") == _hashes(tmp_path / "b")
    if seed:
        build_index(corpus, encoder, tmp_path / "c", kind=kind, **{**seed, "seed": 6})
        assert _hashes(tmp_path / "a")["index.faiss"] != _hashes(tmp_path / "c")["index.faiss"]


@pytest.mark.parametrize(
    "change, named",
    [({"batch_size": 2}, "batch_size=2 .was 1"), ({"dtype": "fp16"}, "dtype='fp16' .was 'fp32'")],
)
def test_other_settings_refuse_an_interrupted_build_or_start_anew(corpus, encoder, tmp_path, change, named):
    out = tmp_path / "out"
    _interrupt(corpus, encoder, out)
    with pytest.raises(BuildRefused, match=named):
        build_index(corpus, encoder, out, **{**SMALL, **change})
    assert (tmp_path / ".out.building" / "shard-000001.json").is_file()  # a refusal destroys nothing
    with pytest.raises(BuildRefused, match="encoder="):
        build_index(corpus, TableEncoder(encoder.table_M_D, name="other"), out, **SMALL)
    build_index(corpus, encoder, out, overwrite=True, **{**SMALL, **change})
    straight = tmp_path / "straight"
    build_index(corpus, encoder, straight, **{**SMALL, **change})
    assert _hashes(out) == _hashes(straight)


def _bad_line(corpus, patch):
    corpus.write_text(corpus.read_text() + "{\n")


def _little(name):
    def change(corpus, patch):
        if name == "disk":
            usage = build.shutil.disk_usage(corpus.parent)._replace(free=10_000)
            patch.setattr(build.shutil, "disk_usage", lambda _: usage)
        else:
            patch.setattr(memory, "available_memory", lambda: 0)

    return change


@pytest.mark.parametrize(
    "change, more, error",
    [
        (lambda *_: None, {"kind": "ivf", "nlist": 101}, "nlist=101"),
        (_bad_line, {}, ":101: not JSON"),
        (_little("memory"), {}, "available: 0.0 MB"),
        (_little("disk"), {"shard_rows": 4, "kind": "hnsw"}, "disk has 0.0 MB free"),
    ],
)
def test_overwrite_deletes_nothing_before_all_was_found_right(
    corpus, encoder, tmp_path, monkeypatch, change, more, error
):
    out, work = tmp_path / "out", tmp_path / ".out.building"
    build_index(corpus, encoder, out)
    before = _hashes(out)
    _interrupt(corpus, encoder, out, after=5, overwrite=True)
    shards = {path.name: path.read_bytes() for path in work.glob("shard-*")}
    good = corpus.read_text()
    with monkeypatch.context() as patch:
        change(corpus, patch)
        with pytest.raises((ValueError, OSError), match=error):
            build_index(corpus, encoder, out, overwrite=True, **{**SMALL, "batch_size": 2, **more})
    assert {path.name: path.read_bytes() for path in work.glob("shard-*")} == shards and len(shards) == 10
    assert _hashes(out) == before
    corpus.write_text(good)
    calls = encoder.calls
    build_index(corpus, encoder, out, overwrite=True, **SMALL)
    assert encoder.calls - calls == 2 and _hashes(out) == before


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["flat", "sq8", "ivf", "ivfpq", "hnsw", "exact"])
def test_the_disk_and_the_memory_that_are_asked_for_are_what_a_build_takes(
    tmp_path, monkeypatch, kind, dtype
):
    asked, written = {}, []
    real = build.move_into_place

    def move(stage, out, files):
        names = [stage / name for name in files if name in ("vectors.npy", "index.faiss")]
        written.append(sum(path.stat().st_size for path in [*names, *stage.parent.glob("*.vectors")]))
        real(stage, out, files)

    monkeypatch.setattr(build, "move_into_place", move)
    monkeypatch.setattr(build, "require_disk", lambda folder, size, what: asked.update({what: size}))
    corpus, encoder = write_rows(tmp_path / "c.jsonl", 2000), TableEncoder(clustered(2000, 64, seed=1))
    manifest = build_index(corpus, encoder, tmp_path / "out", kind=kind, dtype=dtype)
    assert asked["vectors and index"] == pytest.approx(written[0], rel=0.02)
    if kind != "exact":
        held = (tmp_path / "out" / "index.faiss").stat().st_size
        assert memory.plan_memory(manifest).total - memory.SEARCH_BUFFERS == pytest.approx(held, rel=0.02)


def test_a_kill_between_the_two_renames_loses_no_index(corpus, encoder, tmp_path):
    out, old = tmp_path / "out", tmp_path / ".out.old"
    build_index(corpus, encoder, out)
    before = _hashes(out)
    out.rename(old)  # as `--overwrite` does just before the new one comes
    with pytest.raises(IndexMismatch, match=f"previous index in {old}: `mv {old} {out}`"):
        SearchIndex.load(out)
    with pytest.raises(FileExistsError, match="pass overwrite"):
        build_index(corpus, encoder, out)
    assert _hashes(out) == before and not old.exists()
    out.rename(old)
    build_index(write_rows(tmp_path / "new.jsonl", 40), encoder, out, overwrite=True)
    assert len(SearchIndex.load(out)) == 40 and not old.exists()


def test_a_rename_that_fails_puts_the_old_index_back(corpus, encoder, tmp_path, monkeypatch):
    out, real = tmp_path / "out", os.rename
    build_index(corpus, encoder, out)
    before = _hashes(out)

    def rename(source, target):
        if Path(source).name == "index":
            raise OSError("no")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no"):
        build_index(corpus, encoder, out, overwrite=True)
    assert _hashes(out) == before


def test_a_changed_line_in_a_finished_shard_is_refused_and_later_lines_may_change(corpus, encoder, tmp_path):
    out = tmp_path / "out"
    _interrupt(corpus, encoder, out)
    lines = corpus.read_text().splitlines(keepends=True)
    corpus.write_text("".join([*lines[:20], lines[20].replace("d20", "changed"), *lines[21:]]))
    with pytest.raises(BuildRefused, match="changed in rows 16 to 31"):
        build_index(corpus, encoder, out, **SMALL)
    corpus.write_text("".join(lines[:24]))
    with pytest.raises(BuildRefused, match="changed in rows 16 to 31"):
        build_index(corpus, encoder, out, **SMALL)
    corpus.write_text("".join(lines[:40]))
    build_index(corpus, encoder, out, **SMALL)
    assert encoder.calls == 1 and len(SearchIndex.load(out)) == 40


def test_lines_added_to_a_short_last_shard_and_overwritten_lines_are_encoded_anew(encoder, tmp_path):
    corpus, out = write_rows(tmp_path / "corpus.jsonl", 20), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:  # fails after all shards are done
        patch.setattr(build, "write_manifest", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_index(corpus, encoder, out, kind="exact", **SMALL)
    write_rows(corpus, 30)
    before = encoder.calls
    build_index(corpus, encoder, out, kind="exact", **SMALL)
    assert encoder.calls - before == 1  # rows 16 to 29; rows 0 to 15 were there
    np.testing.assert_array_equal(SearchIndex.load(out).vectors_M_D, encoder.table_M_D[:30])


@pytest.mark.parametrize("damage", [lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\7"), Path.unlink])
def test_a_damaged_shard_is_encoded_anew(corpus, encoder, tmp_path, damage):
    out = tmp_path / "out"
    _interrupt(corpus, encoder, out)
    damage(tmp_path / ".out.building" / "shard-000001.vectors")
    build_index(corpus, encoder, out, **SMALL)
    assert encoder.calls == 6
    np.testing.assert_array_equal(SearchIndex.load(out).vectors_M_D, encoder.table_M_D)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_vectors_that_their_type_cannot_hold_are_refused_with_their_row(corpus, tmp_path, value):
    table = clustered(ROWS, DIM, seed=1)
    table[40, 3] = value
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="row 40: .* not finite in float16"):
        build_index(corpus, TableEncoder(table), tmp_path / "out", dtype="fp16", shard_rows=64)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", ["read_manifest", "check_files", "open_vectors", "_open_documents"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", ["faiss", "exact"])
def test_an_index_replaced_while_it_loads_is_never_mixed_with_the_old(
    corpus, encoder, tmp_path, monkeypatch, moment, when, backend
):
    out, turned = tmp_path / "out", tmp_path / "turned.jsonl"
    turned.write_text("".join(corpus.read_text().splitlines(keepends=True)[::-1]))  # same rows, other order
    build_index(corpus, encoder, out)
    real = getattr(index_module, moment)

    def replaced(*arguments):
        if when == "before":
            build_index(turned, encoder, out, overwrite=True)
        found = real(*arguments)
        if when == "after":
            build_index(turned, encoder, out, overwrite=True)
        return found

    monkeypatch.setattr(index_module, moment, replaced)
    with pytest.raises(IndexMismatch, match="out: replaced"):
        SearchIndex.load(out, backend=backend)
    monkeypatch.setattr(index_module, moment, real)
    index = SearchIndex.load(out, backend=backend)
    assert index.search(encoder.table_M_D[:1], 1)[0][0][0]["id"] == "d0"
