"""The Prometheus metrics of a server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "verl_credit_retriever"
STAGES = ("queue", "tokenize", "encode", "search", "serialize")
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class ServerMetrics:
    """The metrics of one server, in their own registry, so that two servers in one process do not mix.

    The cache's hit rate is cache_hits_total / (cache_hits_total + cache_misses_total).
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def metric(kind, name: str, text: str, labels: tuple[str, ...] = (), **options):
            return kind(f"{PREFIX}_{name}", text, labels, registry=registry, **options)

        self.requests = metric(Counter, "requests_total", "Answers by route and status", ("route", "status"))
        self.request_seconds = metric(Histogram, "request_seconds", "Time taken", ("route",), buckets=SECONDS)
        each = "queue: per query; tokenize, encode, search (with reading documents): per batch; serialize: per answer"
        self.stage_seconds = metric(Histogram, "stage_seconds", each, ("stage",), buckets=SECONDS)
        self.batch_queries = metric(Histogram, "batch_queries", "Texts of a batch", buckets=QUERIES)
        self.batch_tokens = metric(Histogram, "batch_tokens", "Tokens of a padded batch", buckets=TOKENS)
        self.queue_queries = metric(Gauge, "queue_queries", "Queries that wait for the encoder")
        self.dropped = metric(Counter, "dropped_queries_total", "Queries given up while waiting", ("reason",))
        self.mended = metric(Counter, "mended_queries_total", "Cut, or given valid text", ("reason",))
        self.cache_hits = metric(Counter, "cache_hits_total", "Queries answered by the cache")
        self.cache_misses = metric(Counter, "cache_misses_total", "Queries that had to be searched")
        self.cache_entries = metric(Gauge, "cache_entries", "Answers in the cache")
        self.cache_bytes = metric(Gauge, "cache_bytes", "Estimated memory of the cache")
        # All series exist from the start, so that dashboards find them.
        for stage in STAGES:
            self.stage_seconds.labels(stage)
        for reason in ("deadline", "disconnected"):
            self.dropped.labels(reason)
        for reason in ("cut", "not_text"):
            self.mended.labels(reason)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as one observation of stage `name`, also when it raises. For any thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stage_seconds.labels(name).observe(time.perf_counter() - start)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
