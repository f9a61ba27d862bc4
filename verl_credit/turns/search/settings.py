"""Makes the search client from the `search` section of a configuration."""

from __future__ import annotations

import os

from verl_credit.turns.search.client import SearchClient


def urls_of(settings) -> list[str]:
    """The addresses as a list."""
    return [settings.url] if isinstance(settings.url, str) else list(settings.url)


def token_of(settings) -> str | None:
    """The token in the environment variable `search.token_env`. Raises ValueError when it is not set."""
    if settings.token_env is None:
        return None
    token = os.environ.get(settings.token_env, "")
    if not token:
        raise ValueError(
            f"search.token_env={settings.token_env}: this environment variable is not set, or empty; "
            "export the servers' token in it where the run is started, and on every node"
        )
    return token


def client_for(settings) -> SearchClient:
    """The client for the search tool and for the check before the run. Raises ValueError."""
    return SearchClient(
        urls_of(settings),
        topk=settings.topk,
        timeout_s=settings.timeout_s,
        max_retries=settings.max_retries,
        max_page_chars=settings.max_page_chars,
        shuffle_seed=settings.shuffle_seed,
        token=token_of(settings),
        index_fingerprint=settings.index_fingerprint,
        breaker_failures=settings.breaker_failures,
        breaker_pause_s=settings.breaker_pause_s,
    )
