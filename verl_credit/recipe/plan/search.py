"""The cost of searching: core-seconds of index and encoder, and whether a wave of queries meets the timeout."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.recipe.plan.job import Assumptions, Job

WIKI_18 = 21_015_324 * 768
"""Numbers in wiki-18's index, for which the following figures hold."""
WHOLE = {"flat": 0.4, "flat_fp16": 0.4, "exact": 0.4, "sq8": 1.5, "sq4": 1.5}
"""Core-seconds per query of kinds that read every vector: FAISS 1.15 on one core, scaled up from fewer rows."""
PART = {"ivf": 0.02, "hnsw": 0.005}
"""Core-seconds per query of kinds that read few vectors; assumed, and not scaled."""
E5_BASE = 0.05
"""Core-seconds of a query of twenty tokens: 3.4 GFLOP. Assumed."""


def core_seconds(kind: str | None, numbers: float, place: str) -> float:
    """Core-seconds of one query over an index of rows x dim ``numbers``; 0 when the host does not search."""
    if place != "host" or not numbers:
        return 0.0
    if kind in PART:
        return PART[kind]
    return WHOLE[kind or "flat"] * numbers / WIKI_18


def encoder_core_seconds(block: Mapping | None, searching: float) -> float:
    """Core-seconds of encoding a short query: e5-base's x (dim / 768)²; 0 without a search or the index's dim."""
    index = (block or {}).get("index")
    return E5_BASE * (float(index["dim"]) / 768) ** 2 if searching and index else 0.0


def note(job: Job, assumed: Assumptions, place: str) -> str | None:
    """A note about uncounted search time, or about searches that would exceed their timeout."""
    if job.max_turns == 1:
        return None
    if place != "host" and not assumed.search_core_seconds:
        where = "on the device" if place == "device" else "elsewhere"
        return f"the index is {where}: the time of its searches is not counted"
    # All rows' first turns fit into the cache, because they are short.
    queries = min(job.rows, job.max_seqs * max(1, job.devices // job.tensor_parallel))
    each = assumed.search_core_seconds + assumed.encoder_core_seconds
    wave = queries * each / assumed.host_cores
    if wave <= job.search_timeout_s:
        return None
    return (
        f"{queries:.0f} rows may search at once, and {queries:.0f} queries of {each:.2f} core-seconds take {wave:.0f} s on "
        f"{assumed.host_cores:.0f} cores, longer than search.timeout_s={job.search_timeout_s:g}: rows would be lost; use "
        "another kind of index (flat, hnsw), more cores, or a longer timeout"
    )
