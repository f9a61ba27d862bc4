"""What the encoder frees goes back to the system, so that a server under load does not grow."""

import threading
from types import SimpleNamespace

import pytest

from kit.retriever_fakes import app_of, send
from verl_credit_retriever.http import engine


@pytest.mark.parametrize("every_s, times", [(0, 2), (1e9, 0)])
def test_the_encoder_gives_back_between_batches_once_it_is_time(monkeypatch, every_s, times):
    monkeypatch.setattr(engine, "FREED_EVERY_S", every_s)
    given = []
    libc = SimpleNamespace(malloc_trim=lambda pad: given.append(threading.current_thread().name))
    monkeypatch.setattr(engine.ctypes, "CDLL", lambda name: libc)
    app, _ = app_of()
    for query in "ab":
        assert send(app, "POST", "/retrieve", json={"queries": [query]}).status_code == 200
    assert given == ["encode_0"] * times
