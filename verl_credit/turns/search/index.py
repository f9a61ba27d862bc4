"""The index that each search server reports in GET /info, under "fingerprint"."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

from verl_credit.address import base, without_password
from verl_credit.redact import redact

MOST_CHARS = 200


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
    url = base(url)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(trust_env=False, timeout=None) as client:
            address, auth = without_password(f"{url}/info")
            answer = await client.get(address, headers=headers, auth=auth)
        if answer.status_code != 200:
            return ServedIndex(url, None, f"names no index (GET /info: status {answer.status_code})")
        info = answer.json()
    except (TimeoutError, httpx.HTTPError) as error:
        return ServedIndex(url, None, f"names no index (GET /info: {type(error).__name__})")
    except (ValueError, RecursionError):
        return ServedIndex(url, None, "names no index (GET /info: not JSON)")
    fingerprint = info.get("fingerprint") if isinstance(info, dict) else None
    if not (isinstance(fingerprint, str) and fingerprint.isascii() and fingerprint.isprintable()):
        return ServedIndex(url, None, 'names no index (GET /info has no "fingerprint")')
    if not 0 < len(fingerprint) <= MOST_CHARS:
        return ServedIndex(url, None, f'names no index ("fingerprint" of {len(fingerprint)} characters)')
    return ServedIndex(url, fingerprint)


def agreed(indexes: list[ServedIndex], expected: str | None) -> str | None:
    """The fingerprint that all servers report; None when no server names its index and none was expected.

    Raises ValueError when they differ, when only some name it, and when it is not the `expected` one.
    """
    served = "; ".join(map(str, indexes))
    fingerprints = {index.fingerprint for index in indexes}
    if len(fingerprints) > 1:
        raise ValueError(
            f"all servers of search.url must serve the same index; these differ or do not name it: {served}"
        )
    (fingerprint,) = fingerprints
    if expected is not None and fingerprint != expected:
        raise ValueError(f"search.index_fingerprint={expected} is expected, but the servers have: {served}")
    return fingerprint
