"""Mapped files are read in the background, and /readyz says how far that is."""

import asyncio
import threading

import faiss
import pytest

from kit.retriever_fakes import app_of, client_of
from kit.retriever_vectors import TableEncoder, clustered, write_rows
from verl_credit_retriever.index import faiss_kinds, memory
from verl_credit_retriever.index.search import SearchIndex, build_index

ROWS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("warm")
    corpus, encoder = write_rows(root / "corpus.jsonl", ROWS), TableEncoder(clustered(ROWS, 8, seed=1))
    for kind in ("flat", "ivf", "ivfpq", "exact"):
        build_index(corpus, encoder, root / kind, kind=kind)
    return root


@pytest.mark.parametrize(
    "kind, options, files",
    [
        ("flat", {}, {"offsets.npy"}),
        ("flat", {"mmap": True}, {"offsets.npy", "index.faiss"}),
        ("flat", {"mmap": True, "backend": "exact"}, {"offsets.npy", "index.faiss"}),
        ("flat", {"gpu": True}, {"offsets.npy"}),
        ("exact", {"mmap": True}, {"offsets.npy", "vectors.npy"}),
        ("ivf", {"mmap": True}, {"offsets.npy", "index.faiss"}),
        ("ivfpq", {}, {"offsets.npy", "vectors.npy"}),
        ("ivfpq", {"mmap": True}, {"offsets.npy", "vectors.npy", "index.faiss"}),
    ],
)
def test_what_is_mapped_is_read_whole(folder, monkeypatch, kind, options, files):
    # A flat CPU index for the GPU's.
    monkeypatch.setattr(faiss_kinds, "_flat_on", lambda device, dim, *, half: faiss.IndexFlatIP(dim))
    monkeypatch.setattr(faiss_kinds, "require_gpu", lambda kind: None)
    monkeypatch.setattr(faiss_kinds, "free_gpu_memory", lambda: (1, None))
    index = SearchIndex.load(folder / kind, **options)
    assert index.warming() is None
    index.warm()
    index._warming.thread.join(60)
    assert index.warming() is None
    assert {path.name for path in index._warming._files} == files
    assert index._warming._read == sum((folder / kind / name).stat().st_size for name in files)


def test_how_far_it_is_is_said_until_it_is_done(tmp_path, monkeypatch):
    go, file = threading.Event(), tmp_path / "file"
    file.write_bytes(b"x" * 1_000_000)
    began = threading.Event()

    def opened(path, *_, **__):
        began.set()
        assert go.wait(60)
        return path.open("rb", buffering=0)

    monkeypatch.setattr(memory, "open", opened, raising=False)
    warming = memory.Warming([file])
    assert began.wait(60) and warming.text() == "warming: 0.0 MB of 1.0 MB"
    go.set()
    warming.thread.join(60)
    assert warming.text() is None and warming._read == 1_000_000


def test_what_is_larger_than_the_memory_is_left_and_a_lost_file_ends_it(tmp_path, monkeypatch, caplog):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    monkeypatch.setattr(memory, "available_memory", lambda: 99)
    assert memory.Warming([file]).text() is None and "not warmed: 0.0 MB of memory are free" in caplog.text
    monkeypatch.setattr(memory, "available_memory", lambda: 100)
    monkeypatch.setattr(
        memory, "open", lambda *_, **__: (_ for _ in ()).throw(OSError("gone")), raising=False
    )
    warming = memory.Warming([file])
    warming.thread.join(60)
    assert warming.text() is None and f"{file}: warming ended: gone" in caplog.text


def test_readyz_waits_for_it_and_queries_do_not():
    app, _ = app_of()
    said = ["warming: 12.3 GB of 64.8 GB", None]
    app.state.warming = lambda: said[0]

    async def ask():
        async with client_of(app) as client:
            before = await client.get("/readyz")
            found = await client.post("/retrieve", json={"queries": ["a"]})
            del said[0]
            return before, found, await client.get("/readyz")

    before, found, after = asyncio.run(ask())
    assert (before.status_code, before.json()["error"]) == (503, "warming: 12.3 GB of 64.8 GB")
    assert (found.status_code, after.status_code) == (200, 200)
