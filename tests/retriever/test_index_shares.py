"""Encoding in parts: shares of the shards on several machines, a process for each device, half precision."""

import os
import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder, device_for
from verl_credit_retriever.index import build, encoding, shards
from verl_credit_retriever.index.build import build_index, encode_share
from verl_credit_retriever.index.place import lock
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.index.shards import BuildRefused

ROWS = 100
SMALL = {"batch_size": 1, "shard_rows": 16}  # 7 shards


@pytest.fixture
def encoder():
    return TableEncoder(clustered(ROWS, 8, seed=1))


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", ROWS)


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shares_merge_into_the_bytes_of_one_build(corpus, encoder, tmp_path):
    out, seen = tmp_path / "out", []
    for part in (3, 1, 2):
        share = encode_share(corpus, encoder, out, (part, 3), on_progress=seen.append, **SMALL)
        assert seen[-1].done == seen[-1].total == share.rows
    assert (
        encoder.calls == 7 and share.rows == 32 and not out.exists()
    )  # share 2 of 3: shards 1 and 4 of 16 rows
    merged = build_index(corpus, encoder, out, merge=True, **SMALL)
    assert encoder.calls == 7
    assert merged == build_index(corpus, encoder, tmp_path / "straight", **SMALL)
    assert _content(out) == _content(tmp_path / "straight")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "out", "straight"]


def test_shares_of_separate_disks_merge_when_their_files_lie_together(corpus, encoder, tmp_path):
    for part in (1, 2):
        encode_share(corpus, encoder, tmp_path / f"machine{part}" / "out", (part, 2), **SMALL)
    work = tmp_path / ".out.building"
    work.mkdir()
    for part in (1, 2):
        for file in (tmp_path / f"machine{part}" / ".out.building").glob("shard-*"):
            shutil.copy(file, work)
    build_index(corpus, encoder, tmp_path / "out", merge=True, **SMALL)
    np.testing.assert_array_equal(SearchIndex.load(tmp_path / "out").vectors_M_D, encoder.table_M_D)
    assert encoder.calls == 7


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_shard_missing_at_the_merge_is_named_and_the_others_stay(corpus, encoder, tmp_path, how):
    out, work = tmp_path / "out", tmp_path / ".out.building"
    encode_share(corpus, encoder, out, (1, 1), **SMALL)
    bad = work / "shard-000004.vectors"
    bad.unlink() if how == "missing" else bad.write_bytes(bad.read_bytes()[:-1] + b"\7")
    before = {path.name for path in work.glob("shard-*.json")}
    for overwrite in (False, True):
        with pytest.raises(BuildRefused, match="1 of 7 shards .*: shard-000004"):
            build_index(corpus, encoder, out, merge=True, overwrite=overwrite, **SMALL)
    assert {path.name for path in work.glob("shard-*.json")} == before and not out.exists()
    build_index(corpus, encoder, out, **SMALL)  # without merge it is encoded here
    assert encoder.calls == 8


def test_nothing_to_merge_is_said(corpus, encoder, tmp_path):
    with pytest.raises(BuildRefused, match="out.building holds no shards to merge"):
        build_index(corpus, encoder, tmp_path / "out", merge=True, **SMALL)


@pytest.mark.parametrize(
    "change, named",
    [
        (
            lambda corpus, encoder: {"encoder": TableEncoder(encoder.table_M_D, name="other")},
            "settings: encoder=",
        ),
        (lambda corpus, encoder: {"dtype": "fp16"}, "settings: dtype='fp32' .was 'fp16'"),
        (
            lambda corpus, encoder: {
                "corpus": write_rows(corpus.with_name("other.jsonl"), ROWS + 5, first=5)
            },
            "corpus has changed",
        ),
    ],
)
def test_a_shard_of_another_build_among_the_files_is_refused(corpus, encoder, tmp_path, change, named):
    out, work = tmp_path / "out", tmp_path / ".out.building"
    right = {"corpus": corpus, "encoder": encoder}
    encoder.table_M_D = clustered(ROWS + 10, 8, seed=1)
    encode_share(out=out, share=(1, 2), **right, **SMALL)
    other = tmp_path / "elsewhere" / "out"
    encode_share(out=other, share=(2, 2), **{**right, **SMALL, **change(corpus, encoder)})
    for file in (other.parent / ".out.building").glob("shard-*"):
        shutil.copy(file, work)
    before = _content(work)
    with pytest.raises(BuildRefused, match=named):
        build_index(out=out, merge=True, overwrite=True, **right, **SMALL)
    with pytest.raises(BuildRefused, match=named):
        build_index(out=out, **right, **SMALL)
    assert {name: content for name, content in _content_of_files(work).items() if name in before} == before


def _content_of_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_share_waits_for_no_other_share_and_goes_not_beside_a_whole_build(corpus, encoder, tmp_path):
    out = tmp_path / "out"
    with lock(out, (1, 2)):
        encode_share(corpus, encoder, out, (2, 2), **SMALL)
        for more in ({}, {"merge": True}):
            with pytest.raises(BuildRefused, match=f"process {os.getpid()} is building it"):
                build_index(corpus, encoder, out, **more, **SMALL)
        with pytest.raises(BuildRefused, match="is building it"):
            encode_share(corpus, encoder, out, (1, 2), **SMALL)
        with pytest.raises(BuildRefused, match="is building it"):  # shards 0 and 4 are of both
            encode_share(corpus, encoder, out, (1, 4), **SMALL)
    with lock(out), pytest.raises(BuildRefused, match="is building it"):
        encode_share(corpus, encoder, out, (1, 2), **SMALL)
    encode_share(corpus, encoder, out, (1, 2), **SMALL)
    assert encoder.calls == 7


def test_shares_that_begin_together_write_the_settings_side_by_side(tmp_path, monkeypatch):
    real, begun = os.fsync, []

    def other_share(descriptor):
        if not begun:  # while the first share writes, a second one writes and ends
            begun.append(True)
            shards.begin(tmp_path, {"a": 1})
        real(descriptor)

    monkeypatch.setattr(os, "fsync", other_share)
    shards.begin(tmp_path, {"a": 1})
    assert _content(tmp_path) == {"settings.json": b'{\n  "a": 1\n}'} and begun


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        shards.begin(tmp_path, {"a": 1})
    assert not list(tmp_path.iterdir())


def test_a_share_never_deletes_what_others_encoded(corpus, encoder, tmp_path):
    out, work = tmp_path / "out", tmp_path / ".out.building"
    encode_share(corpus, encoder, out, (1, 2), **SMALL)
    before = _content(work)
    no_hint = r"dtype='fp16' .was 'fp32'.; repeat its command to finish it \(overwrite replaces no shards"
    with pytest.raises(BuildRefused, match=no_hint):
        encode_share(corpus, encoder, out, (2, 2), dtype="fp16", overwrite=True, **SMALL)
    with pytest.raises(BuildRefused, match=no_hint):
        build_index(corpus, encoder, out, merge=True, dtype="fp16", overwrite=True, **SMALL)
    with pytest.raises(ValueError, match="nlist=101"):
        encode_share(corpus, encoder, out, (2, 2), kind="ivf", nlist=101, **SMALL)
    assert _content(work) == before


@pytest.mark.parametrize(
    "options, said",
    [
        (["--shard=5/4"], "shard=5/4; expected i/n with i from 1 to n"),
        (["--shard=two"], "--shard='two'; expected i/n, such as 1/4"),
        (["--shard=1/2", "--merge"], "--import, --shard and --merge: give one of them"),
        (["--shard=1/2", "--gpu"], "--gpu: has no effect with --shard=1/2"),
        (
            ["--import=i", "--device=cpu,cpu"],
            "--device=cpu,cpu: --import=i encodes a few rows, on one device",
        ),
        (["--device=cpu,cuda:9"], "device='cuda:9'; torch "),
        (["--device=cpu,nosuch"], "device='nosuch'; expected cpu, cuda, cuda:1"),
        (["--encode-dtype=fp16"], "encode dtype=fp16 on device='cpu'; a CPU computes in fp32 or bf16"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(folders, tmp_path, capsys, options, said):
    paths = [
        f"--{name}={folders / path}" for name, path in (("corpus", "corpus.jsonl"), ("encoder", "encoder"))
    ]
    assert main(["index", *paths, f"--out={tmp_path / 'out'}", *options]) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_machine_too_many_is_told_that_there_is_nothing_to_encode(folders, tmp_path, capsys):
    paths = [
        f"--{name}={folders / path}" for name, path in (("corpus", "corpus.jsonl"), ("encoder", "encoder"))
    ]
    assert main(["index", *paths, f"--out={tmp_path / 'out'}", "--shard=2/2"]) == 0
    said = "shard 2/2: nothing to encode here, because the corpus has only 1 of 20,000 rows"
    assert said in capsys.readouterr().out


def test_an_old_gpu_is_told_that_it_has_no_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (7, 5) if device.index else (8, 0)
    )
    assert device_for("cuda:0", "bf16") == torch.device("cuda:0")
    assert device_for("cuda:1", "fp16") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device='cuda:1': .* 7.5, bf16 needs 8.0"):
        device_for("cuda:1", "bf16")


def test_half_precision_changes_no_form_and_is_recorded(world, tmp_path):
    folders, whole = world
    half = SentenceEncoder(folders / "encoder", dtype="bf16")
    texts = ["the mayor of the town", "river", "born by the bridge"]
    vectors_N_D, expected_N_D = half.encode_passages(texts), whole.encode_passages(texts)
    assert vectors_N_D.dtype == np.float32
    cosines_N = (vectors_N_D * expected_N_D).sum(1)
    assert (cosines_N > 0.99).all() and (vectors_N_D != expected_N_D).any()
    corpus = folders / "corpus.jsonl"
    manifest = build_index(corpus, half, tmp_path / "out")
    assert manifest["encoded_in"] == "bf16"
    SearchIndex.load(tmp_path / "out").check_encoder(whole)  # queries may be encoded in fp32
    encode_share(corpus, half, tmp_path / "again", (1, 2), shard_rows=20)
    with pytest.raises(BuildRefused, match="encode_dtype='fp32' .was 'bf16'"):
        build_index(corpus, whole, tmp_path / "again", shard_rows=20)


@pytest.mark.slow
def test_two_devices_write_the_bytes_of_one_and_a_killed_process_loses_its_shard_alone(folders, tmp_path):
    loaded = SentenceEncoder(folders / "encoder", batch_size=2)
    out, work, options = tmp_path / "out", tmp_path / ".out.building", {"batch_size": 2, "shard_rows": 2}

    def kill(progress):
        for child in encoding.multiprocessing.active_children() if progress.done > 8 else ():
            child.kill()

    with pytest.raises(ChildProcessError, match="was killed .*missing shards"):
        build_index(
            folders / "corpus.jsonl", loaded, out, devices=["cpu", "cpu"], on_progress=kill, **options
        )
    assert 4 <= len(list(work.glob("shard-*.json"))) < 25
    build_index(folders / "corpus.jsonl", loaded, out, **options)
    build_index(folders / "corpus.jsonl", loaded, tmp_path / "straight", **options)
    assert _content(out) == _content(tmp_path / "straight")


def test_the_command_names_the_devices(folders, tmp_path, monkeypatch, capsys):
    given = {}

    def stop(*_, **options):
        given.update(options)
        raise ValueError("far enough")

    monkeypatch.setattr(build, "build_index", stop)
    paths = [f"--corpus={folders / 'corpus.jsonl'}", f"--encoder={folders / 'encoder'}"]
    assert main(["index", *paths, f"--out={tmp_path / 'out'}", "--device=cpu, cpu", "--merge"]) == 2
    assert (given["devices"], given["merge"]) == (["cpu", "cpu"], True)


def test_a_task_of_a_process_encodes_its_shard(folders, tmp_path, monkeypatch):
    """What a process of the pool does, in this one."""
    loaded, seen = SentenceEncoder(folders / "encoder", batch_size=2), []

    class InPlace:
        def __init__(self, workers, context, initializer, initargs):
            assert workers == 2
            encoding._loaded.cache_clear()
            initializer(*initargs)

        def submit(self, task, shard):
            future = Future()
            future.set_result(task(shard))
            return future

        def shutdown(self, cancel_futures):
            encoding._loaded.cache_clear()

    monkeypatch.setattr(encoding, "ProcessPoolExecutor", InPlace)
    options = {"batch_size": 2, "shard_rows": 8}
    corpus = folders / "corpus.jsonl"
    build_index(corpus, loaded, tmp_path / "two", devices=["cpu", "cpu"], on_progress=seen.append, **options)
    assert [seen[0].done, seen[-1].done] == [0, 50]
    build_index(corpus, loaded, tmp_path / "one", **options)
    assert _content(tmp_path / "one") == _content(tmp_path / "two")


def test_an_encoder_that_does_not_load_is_the_error_of_every_task(tmp_path, monkeypatch):
    """A process gets one device and more tasks than that; a task that asked for another would wait for ever."""
    monkeypatch.setattr(encoding, "_given", ())
    encoding._loaded.cache_clear()
    job = ({"path": tmp_path / "none", "manifest": {"encoder": {}}}, 1, None, 8)
    encoding._start(job, SimpleNamespace(get=iter(["cpu"]).__next__), None)
    for shard in range(3):
        with pytest.raises(FileNotFoundError, match="none' is not a folder"):
            encoding._encode_shard(shard)
    encoding._loaded.cache_clear()
