"""A small index with its encoder, and one server of it for all tests that only ask."""

import pytest

from kit.retriever_world import make_corpus, make_encoder
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import build_index
from verl_credit_retriever.launch import start_server


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """(folder of encoder, corpus.jsonl and index, the encoder)"""
    root = tmp_path_factory.mktemp("served")
    encoder = SentenceEncoder(make_encoder(root / "encoder"))
    build_index(
        make_corpus(root / "corpus.jsonl"), encoder, root / "index", batch_size=2
    )  # more than one chunk
    return root, encoder


@pytest.fixture(scope="session")
def folders(world):
    return world[0]


@pytest.fixture(scope="session")
def server(folders):
    no_cache = ["--cache-entries", "0"]  # what is compared must have been computed
    with start_server(
        folders / "index", folders / "encoder", log_path=folders / "log", options=no_cache
    ) as handle:
        yield handle
        assert handle.alive()
        assert handle.stop() == 0  # SIGTERM ends it cleanly
