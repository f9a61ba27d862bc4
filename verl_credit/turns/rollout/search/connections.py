"""HTTP to search servers: an answer read to a bound, and the index that a server reports in GET /info."""

import asyncio
import json
from dataclasses import dataclass

import httpx

from verl_credit.address import base, without_password
from verl_credit.redact import redact

MOST_CHARS = 200  # a longer fingerprint is refused
MOST_BYTES = 8 << 20
"""A longer body is not read on; our server reads as much of a request."""


class TooLarge(httpx.HTTPError):
    """A body of more than MOST_BYTES."""


def start_of(answer: httpx.Response) -> str:
    """What a message quotes of the body."""
    return answer.content[:800].decode("utf-8", "replace")[:200]


async def ask(
    client: httpx.AsyncClient, method: str, url: httpx.URL, *, headers: dict, **options
) -> httpx.Response:
    """The answer, of which no more than MOST_BYTES and one read of the socket are kept. Errors: httpx.HTTPError,
    TooLarge for a 200. A compressed body is refused, because a few bytes of it can become gigabytes."""
    headers, body = {**headers, "Accept-Encoding": "identity"}, bytearray()
    async with client.stream(method, url, headers=headers, **options) as answer:
        if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise httpx.DecodingError(f"Content-Encoding: {encoding[:40]!r}; identity was asked for")
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > MOST_BYTES:
                if answer.status_code == 200:
                    raise TooLarge(
                        f"more than {MOST_BYTES} bytes, the most that is read: are the documents whole books?"
                    )
                break
        return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(body))


@dataclass(frozen=True)
class ServedIndex:
    """The fingerprint that one server reports, or the reason why there is none."""

    url: str
    fingerprint: str | None
    reason: str = ""

    def __str__(self) -> str:
        return f"{redact(self.url)} {self.fingerprint or self.reason}"


async def served_index(url: str, *, token: str | None, timeout_s: float) -> ServedIndex:
    """The index of one server. A server without /info, or with an unknown kind of /info, is accepted."""
    url, found = base(url), None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(trust_env=False, timeout=None) as client:
            address, auth = without_password(f"{url}/info")
            answer = await ask(client, "GET", address, headers=headers, auth=auth)
        reason = f"status {answer.status_code}"
        if answer.status_code == 200:
            info = json.loads(answer.content)
            found = info.get("fingerprint") if isinstance(info, dict) else None
            reason = f'no "fingerprint" of 1 to {MOST_CHARS} printable characters'
    except (TimeoutError, httpx.HTTPError) as error:
        reason = type(error).__name__
    except (ValueError, RecursionError):
        reason = "not JSON"
    if isinstance(found, str) and found.isascii() and found.isprintable() and 0 < len(found) <= MOST_CHARS:
        return ServedIndex(url, found)
    return ServedIndex(url, None, f"names no index (GET /info: {reason})")


def agreed(indexes: list[ServedIndex], expected: str | None) -> str | None:
    """The fingerprint that all servers report; None when no server names its index and none was expected.

    Raises ValueError when they differ, when only some name it, and when it is not the `expected` one.
    """
    served = "; ".join(map(str, indexes))
    fingerprints = {index.fingerprint for index in indexes}
    if len(fingerprints) > 1:
        raise ValueError(
            f"search.url: its servers must serve the same index, and differ or name none: {served}"
        )
    (fingerprint,) = fingerprints
    if expected is not None and fingerprint != expected:
        raise ValueError(f"search.index_fingerprint={expected} is expected, but the servers have: {served}")
    return fingerprint
