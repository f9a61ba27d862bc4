"""The limits of a server, and the error for a request that exceeds one."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """The bounds of one server process; `GET /info` shows them. Errors: ValueError names the field."""

    default_topk: int = 3
    """Documents per query when POST /retrieve names no number."""
    max_topk: int = 100
    """Most documents per query (more: 422)."""
    max_request_queries: int = 4096
    """Most queries of one request (more: 422). Search-R1's trainer sends up to 2,560 at once."""
    max_query_chars: int = 10_000
    """Longest query in characters (longer: 422). The encoder cuts at its own number of tokens."""
    max_body_bytes: int = 8 << 20
    """Largest request body in bytes (larger: 413)."""
    max_queue_queries: int = 8192
    """Most queries that wait for the encoder at a time (more: 429 with Retry-After)."""
    max_batch_tokens: int = 4096
    """Tokens of one encoder call, counted with padding: longest text times number of texts. A single text
    always fits."""
    cache_entries: int = 65_536
    """Most answers kept in the cache, one per query and k; 0 switches the cache off."""
    cache_bytes: int = 256 << 20
    """Most memory of the kept answers in bytes, as estimated from their texts."""

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
        """Which limit a request exceeds, as "field: value; what is accepted"; None when it exceeds none."""
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
