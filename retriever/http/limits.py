"""The limits of a server, and the error for a request that exceeds one."""

from dataclasses import dataclass, fields
from typing import Annotated

from verl_credit_retriever.options import number


@dataclass(frozen=True)
class Limits:
    """The bounds of one server process, which are options of `serve`; `GET /info` shows them.

    A request above a bound is a 422; max_body_bytes: 413; max_queue_queries: 429 with Retry-After.
    Errors: ValueError names the field.
    """

    default_topk: Annotated[int, number("documents per query when a request names none", "--topk")] = 3
    max_topk: Annotated[int, number("most documents per query")] = 100
    max_request_queries: Annotated[int, number("most queries per request")] = 4096
    """Search-R1's trainer sends up to 2,560 at once."""
    max_query_chars: Annotated[int, number("longest query in characters")] = 10_000
    """The encoder cuts at its own number of tokens."""
    max_body_bytes: Annotated[int, number("largest request body")] = 8 << 20
    max_queue_queries: Annotated[
        int, number("most queries that wait in a worker or front; more are answered with 429")
    ] = 8192
    max_batch_tokens: Annotated[int, number("tokens of one encoder call, padding included")] = 4096
    """The longest text times the number of texts; a single text always fits."""
    cache_entries: Annotated[int, number("most answers that a worker or front keeps in memory; 0: none")] = (
        65_536
    )
    cache_bytes: Annotated[int, number("most memory for kept answers")] = 256 << 20
    """The memory is estimated from the texts."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name != "cache_entries")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name}={value!r}; expected an integer of at least {least}")
        if self.default_topk > self.max_topk:
            raise ValueError(f"default_topk={self.default_topk}; at most max_topk={self.max_topk}")
        if self.max_request_queries > self.max_queue_queries:
            # Even an idle server would refuse such a request.
            raise ValueError(
                f"max_request_queries={self.max_request_queries}; at most "
                f"max_queue_queries={self.max_queue_queries}"
            )

    def refusal(self, queries: list[str], k: int | None, k_name: str) -> str | None:
        """Returns the limit that a request exceeds, as "field: value; what is accepted", or None."""
        if k is not None and k > self.max_topk:
            return f"{k_name}: {k}; at most {self.max_topk}"
        if len(queries) > self.max_request_queries:
            return f"queries: {len(queries)} of them; at most {self.max_request_queries}"
        for row, query in enumerate(queries):
            if len(query) > self.max_query_chars:
                return f"queries.{row}: {len(query)} characters; at most {self.max_query_chars}"
            try:
                query.encode()
            except UnicodeEncodeError:
                return f"queries.{row}: holds a lone surrogate, which is not text"
        return None
