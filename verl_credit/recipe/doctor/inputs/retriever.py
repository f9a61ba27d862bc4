"""The search servers answer a real query, from one index."""

from __future__ import annotations

import asyncio

from verl_credit.errors import PreflightError
from verl_credit.redact import redact
from verl_credit.turns.search.client import SearchFault, client_for, token_of, urls_of
from verl_credit.turns.search.index import ServedIndex, agreed, served_index


def ask_servers(settings) -> tuple[str | None, str]:
    """Every server of ``search.url`` answers a real query of the client that the tool uses, from one index.

    Returns (fingerprint of the index or None, what the servers say of it).
    """
    if not settings.url:
        raise PreflightError("search.url has no value: give the URL of a running retriever")
    try:
        indexes = asyncio.run(_ask(settings))
        return agreed(indexes, settings.index_fingerprint), "; ".join(map(str, indexes))
    except SearchFault as error:
        raise PreflightError(
            f"search.url={redact(settings.url)}: the retriever is not ready ({redact(error)}). Start it with "
            "'verl-credit-retriever serve --index DIR --encoder DIR' or fix the URL"
        ) from error
    except ValueError as error:
        raise PreflightError(redact(error)) from error


async def _ask(settings) -> list[ServedIndex]:
    client, token = client_for(settings), token_of(settings)
    try:
        await client.check()
    finally:
        await client.aclose()
    return [await served_index(url, token=token, timeout_s=settings.timeout_s) for url in urls_of(settings)]
