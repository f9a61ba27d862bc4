"""Encoding by a process for each device, and in half precision."""

from types import SimpleNamespace

import numpy as np
import pytest

from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index import encoding
from verl_credit_retriever.index.build import build_index
from verl_credit_retriever.index.search import SearchIndex
from verl_credit_retriever.index.shards import BuildRefused

ROWS = 100


@pytest.fixture
def encoder():
    return TableEncoder(clustered(ROWS, 8, seed=1))


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", ROWS)


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options, said",
    [
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


@pytest.mark.slow
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

    def stop(done, total):
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, half, tmp_path / "again", shard_rows=10, on_progress=stop)
    with pytest.raises(BuildRefused, match="encode_dtype='fp32' .was 'bf16'"):
        build_index(corpus, whole, tmp_path / "again", shard_rows=10)


@pytest.mark.slow
def test_two_devices_write_the_bytes_of_one_and_a_killed_process_loses_its_shard_alone(folders, tmp_path):
    loaded = SentenceEncoder(folders / "encoder", batch_size=2)
    out, work, options = tmp_path / "out", tmp_path / ".out.building", {"batch_size": 2, "shard_rows": 2}

    def kill(done, total):
        for child in encoding.multiprocessing.active_children() if done > 8 else ():
            child.kill()

    with pytest.raises(ChildProcessError, match="was killed .*missing shards"):
        build_index(
            folders / "corpus.jsonl", loaded, out, devices=["cpu", "cpu"], on_progress=kill, **options
        )
    assert 4 <= len(list(work.glob("shard-*.json"))) < 25
    build_index(folders / "corpus.jsonl", loaded, out, **options)
    build_index(folders / "corpus.jsonl", loaded, tmp_path / "straight", **options)
    assert _content(out) == _content(tmp_path / "straight")


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
