"""``search.*``: the search tool."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from verl_credit.address import endpoint
from verl_credit.config.keys import reads
from verl_credit.config.keys.section import Expected, Section, Shown, When
from verl_credit.redact import redact


class Search(Section):
    prefix = "search"

    url: Annotated[
        str | Annotated[list[str], Field(min_length=1)] | None,
        Expected("an address, a list of addresses, or null"),
        Shown(redact),
    ] = None
    """URL of the retriever, or a list of several that serve one index: searches take turns, a retry goes to the next."""
    topk: Annotated[int, Field(ge=1, le=1000), When(reads.searches)] = 3
    """Pages of a result."""
    max_searches: Annotated[int, Field(ge=0, le=1000)] = 4
    """Turns that may search; the turn after the last one must answer. Parallel calls are one turn. 0: no search tool."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 512
    """Tokens per turn, a thought included."""
    include_reasoning: bool = False
    """false: a call or an answer inside a thought (<think>...</think>) does not count; true: it does."""
    max_page_chars: Annotated[int, Field(ge=1), When(reads.searches)] = 1000
    """Characters of each page that the policy reads (its title is cut to as many)."""
    timeout_s: Annotated[float, Field(ge=1e-3), When(reads.searches)] = 20.0
    """Deadline of one search in seconds, retries and pauses included."""
    max_retries: Annotated[int, Field(ge=0, le=100), When(reads.searches)] = 2
    """Retries, each after a pause with jitter, of a failed connection, 429 and 503; other errors are not retried."""
    token_env: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None,
        Expected("the name of an environment variable, or null"),
        Shown(lambda value: "..."),  # it may be the token itself
        When(reads.searches),
    ] = None
    """Name of the environment variable that holds the servers' bearer token (never the token itself); null: none."""
    index_fingerprint: Annotated[
        Annotated[str, Field(pattern=r"\S")] | None,
        Expected("text (put digits in quotes), or null"),
        When(reads.searches),
    ] = None
    """The index that must be served, as GET /info names it; null: any. The start fills in the servers' fingerprint."""
    require_schema: bool = True
    """The chat template must write the tool's schema, without which a policy does not see it. false: it knows the tool."""

    @field_validator("url")
    @classmethod
    def _addresses(cls, url: str | list[str] | None) -> str | list[str] | None:
        for one in [url] if isinstance(url, str) else url or []:
            endpoint(one)
        return url
