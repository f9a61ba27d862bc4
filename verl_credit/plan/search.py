"""What searching costs: core-seconds of the index and of the encoder, and whether a wave of queries is in time."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.plan.job import Assumptions, Job

WIKI_18 = 21_015_324 * 768
"""Numbers in the index that the figures below are for."""
WHOLE = {"flat": 0.4, "flat_fp16": 0.4, "exact": 0.4, "sq8": 1.5, "sq4": 1.5}
"""Core-seconds a query, every vector looked at: FAISS 1.15 on one core, measured on fewer rows and scaled to wiki-18."""
PART = {"ivf": 0.02, "hnsw": 0.005}
"""The same where few vectors are looked at; assumed, and not scaled."""


E5_BASE = 0.05
"""Core-seconds of a query of twenty tokens: 3.4 GFLOP. Assumed."""


def core_seconds(kind: str | None, numbers: float, place: str) -> float:
    """Of one query over an index of rows x dim ``numbers``; 0 where no core of the host searches."""
    if place != "host" or not numbers:
        return 0.0
    if kind in PART:
        return PART[kind]
    return WHOLE[kind or "flat"] * numbers / WIKI_18


def encoder_core_seconds(block: Mapping | None, searching: float) -> float:
    """Of one short query: e5-base's, by the square of the width; 0 where nothing is searched or only a size is given."""
    index = (block or {}).get("index")
    return E5_BASE * (float(index["dim"]) / 768) ** 2 if searching and index else 0.0


def note(job: Job, assumed: Assumptions, place: str) -> str | None:
    """What the predicted time leaves out, or what will be too late."""
    if job.max_turns == 1:
        return None
    if place != "host" and not assumed.search_core_seconds:
        return f"the index is {'on the device' if place == 'device' else 'elsewhere'}: what a search computes is not counted"
    # First turns are short: the cache holds them all.
    queries = min(job.rows, job.max_seqs * max(1, job.devices // job.tensor_parallel))
    each = assumed.search_core_seconds + assumed.encoder_core_seconds
    wave = queries * each / assumed.host_cores
    if wave <= job.search_timeout_s:
        return None
    return (
        f"{queries:.0f} rows may search at once, and {queries:.0f} queries of {each:.2f} core-seconds take {wave:.0f} s on "
        f"{assumed.host_cores:.0f} cores, longer than search.timeout_s={job.search_timeout_s:g}: rows would be lost; "
        "another kind of index (flat, hnsw), more cores, or a longer timeout"
    )
