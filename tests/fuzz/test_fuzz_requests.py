"""Requests to the retriever with anything in them: each has an answer that the documentation names, and a 200 is right."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.damage import damaged_bytes, damaged_value
from kit.fuzz import ACCEPTED, REFUSED, Check, cuts, told, try_all
from kit.retriever_fakes import ROWS, app_of, ask
from verl_credit_retriever.settings import Limits

LIMITS = Limits(
    max_query_chars=100,
    max_request_queries=20,
    max_topk=10,
    default_topk=3,
    max_body_bytes=4000,
    max_request_documents=100,
)
# fmt: off
ODD = (
    None, True, 0, 1, 3, 10, 11, -1, 2**63, 10**400, 3.0, 0.5, 1e308, float("nan"), float("inf"), "", " ", "text", "3",
    "\x00",
    "\ud800", "\u202e", "é" * 100, "x" * 101, "x" * 4000, [], [None], [[]], ["a"], ["a"] * 20, ["a"] * 21, ["a", 1], {},
    {"a": 1}, [[[[]]]], ["\ud800"], ["\x00"], [" "], [""],
)
PATHS = (*("/retrieve",) * 8, "/livez", "/readyz", "/metrics", "/info", "/", "/retrieve/",
    "/é")
HEADERS = (
    (b"content-type", b"application/json"), (b"content-type", b"text/plain"), (b"content-type",
    b"application/json; charset=x"),
    (b"content-type", b"multipart/form-data; boundary=x"), (b"content-type", b"\xff"), (b"x-deadline-ms", b"0"),
    (b"x-deadline-ms", b"60000"), (b"x-deadline-ms", b"-1"), (b"x-deadline-ms", b"1e9"), (b"x-deadline-ms", b"\xff"),
    (b"x-deadline-ms", b"9" * 5000), (b"authorization", b"Bearer x"), (b"content-length", b"5"), (b"content-length", b"-5"),
    (b"content-length", b"9" * 400), (b"content-length", b"x"), (b"content-encoding", b"gzip"), (b"expect", b"100-continue"),
    (b"accept", b"text/html"), (b"host", b"\xff"), (b"x" * 3000, b"y" * 3000),
)
# fmt: on
METHODS = (*("POST",) * 9, "GET", "PUT", "HEAD", "OPTIONS", "é")
STATUSES = {200, 404, 405, 413, 422, 504}
"""Of a server that is neither full nor ending, whose encoder and index work: docs/retriever.md, and HTTP's 404 and 405."""


def make(seed: int) -> tuple[str, str, list[tuple[bytes, bytes]], bytes]:
    """(method, path, headers, body)"""
    draw = random.Random(seed)
    path = draw.choice(PATHS)
    body = {"queries": draw.choices(("a", "b", "who is it", "é🜂"), k=draw.choice((0, 1, 2))) or ["c"]}
    body |= {"topk": 3, "return_scores": draw.random() < 0.5}
    for _ in range(draw.choice((0, 0, 1, 2))):
        if draw.random() < 0.8:
            damaged_value(body, draw, ODD)
        else:
            body[draw.choice(("topk", "query", "", "queries.0", "x" * 100))] = draw.choice(ODD)
    content = json.dumps(body).encode()
    if draw.random() < 0.1:
        content = damaged_bytes(content, draw)[1]
    headers = draw.sample(HEADERS, k=draw.choice((0, 0, 0, 1, 3)))
    return draw.choice(METHODS), path, [HEADERS[0], *headers][draw.random() < 0.1 :], content


def law(app, method: str, path: str, headers: list, content: bytes, draw: random.Random) -> str:
    cut = sorted(draw.choices(range(len(content) + 1), k=draw.choice((0, 1, 5))))
    pieces = [content[a:b] for a, b in zip([0, *cut], [*cut, len(content)], strict=True)]
    status, answered, body = asyncio.run(ask(app, method, path, headers, pieces))
    assert status in STATUSES, f"status {status}: {body[:300]!r}"
    if status == 504:
        assert (b"x-deadline-ms", b"0") in headers
    if status != 200:
        assert len(body) < 1000, f"{len(body)} bytes of an error"
        if method != "HEAD":
            (said,) = json.loads(body).values()
            assert isinstance(said, str) and said, body
    if status != 200:
        return REFUSED
    if method == "POST":
        right(json.loads(content), json.loads(body), answered)
    return ACCEPTED


def right(asked: dict, answer: dict, headers: dict[bytes, bytes]) -> None:
    """Every query has its own hits, best first."""
    assert headers[b"x-index-fingerprint"] == b"f" * 64
    k = int(asked.get("topk") or LIMITS.default_topk)
    ids = [[hit.get("document", hit)["id"] for hit in hits] for hits in answer["result"]]
    queries = [
        query[: LIMITS.max_query_chars].encode("utf-8", "replace").decode() for query in asked["queries"]
    ]
    assert ids == [[f"{query}/{row}" for row in range(min(k, ROWS))] for query in queries]


@contextmanager
def checker(work: Path) -> Iterator[Check]:
    app, _ = app_of(limits=LIMITS)

    def check(seed: int) -> str:
        case = make(seed)
        with told(case):
            return law(app, *case, random.Random(-seed - 1))

    log = logging.getLogger("verl_credit_retriever")
    before, log.disabled = log.disabled, True
    try:
        yield check
    finally:
        log.disabled = before


@cuts(150)
def test_every_request_has_a_documented_answer_and_a_success_is_right(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
