"""Search-R1's trainer: every search of a step in one request, sent by a blocking client that knows no status."""

import importlib.util
import random
from pathlib import Path

import pytest

from kit.retriever_fakes import app_of
from kit.retriever_serving import served

CLIENT = Path(__file__).parents[2] / "evidence" / "retriever" / "search_r1_client.py"
TRAJECTORIES = 512 * 5
"""Its train_batch_size times n_agent: in the first turn all of them may search."""


@pytest.fixture(scope="module")
def client():
    spec = importlib.util.spec_from_file_location("search_r1_client", CLIENT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_of_requests_are_answered_unchanged(client):
    """It used to end with a KeyError: a request of more than 1,024 queries was a 422."""
    app, _ = app_of()
    draw = random.Random(0)
    with served(app) as port:
        url = f"http://127.0.0.1:{port}"
        for step in range(2):
            searching = list(range(TRAJECTORIES))
            for turn in range(2):
                queries = [f"{step} {turn} {one % 600}" for one in searching]  # a group asks the same
                found = client.batch_search(url, queries, 3)
                assert [[document["id"] for document in page] for page in found] == [
                    [f"{query}/{row}" for row in range(3)] for query in queries
                ]
                searching = [one for one in searching if draw.random() < 0.5]
        assert client.batch_search(url, [], 3) == []  # a turn in which nobody searches
        (page,) = client.batch_search_without_scores(url, ["a"], 0)  # its server reads 0 as its default
        assert [document["id"] for document in page] == ["a/0", "a/1", "a/2"]
