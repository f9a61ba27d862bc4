"""What the encoder frees goes back to the system, so that a server under load does not grow."""

import asyncio
import ctypes
import threading
from types import SimpleNamespace

import psutil
import pytest

from kit.retriever_fakes import app_of, client_of
from verl_credit_retriever.http import engine


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_holes_between_blocks_in_use_are_given_back(monkeypatch):
    monkeypatch.setattr(engine, "FREED_EVERY_S", 0)
    libc, size, megabyte = ctypes.CDLL(None), 60_000, 1 << 20  # too small to be mapped one by one
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [libc.malloc(size) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    resident = psutil.Process().memory_info().rss
    for number, block in enumerate(blocks):
        if number % 10:
            libc.free(block)
    engine.FreedMemory().give_back()
    assert resident - psutil.Process().memory_info().rss > 40 * megabyte
    for block in blocks[::10]:
        libc.free(block)


@pytest.mark.parametrize("every_s, times", [(0, 2), (1e9, 0)])
def test_the_encoder_gives_back_between_batches_once_it_is_time(monkeypatch, every_s, times):
    monkeypatch.setattr(engine, "FREED_EVERY_S", every_s)
    given = []
    libc = SimpleNamespace(malloc_trim=lambda pad: given.append(threading.current_thread().name))
    monkeypatch.setattr(engine.ctypes, "CDLL", lambda name: libc)
    app, _ = app_of()

    async def run():
        async with client_of(app) as client:
            for query in "ab":
                assert (await client.post("/retrieve", json={"queries": [query]})).status_code == 200

    asyncio.run(run())
    assert given == ["encode_0"] * times
