"""Version 1 of the tables: tokens and texts of a step stood apart from its rollouts, the texts in `trajectories.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as parquet

TOKENS = "tokens"
_FLOATS, _TEXTS, _FLAGS = pa.list_(pa.float32()), pa.list_(pa.string()), pa.list_(pa.bool_())
TOKENS_SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("row", pa.int32()),
        ("question", pa.string()),
        ("golds", _TEXTS),
        ("stop_reason", pa.string()),
        ("observations", _TEXTS),  # per turn, their first 4000 characters
        ("observation_characters", pa.list_(pa.int32())),
        ("text", _TEXTS),  # this and the next: over the tokens that the policy wrote
        ("turn", pa.list_(pa.int16())),
        ("trained", _FLAGS),
        ("planning", _FLAGS),
        ("log_prob", _FLOATS),
        ("entropy", _FLOATS),
        ("uncertainty", _FLOATS),
        ("pooled_uncertainty", _FLOATS),
        ("weight", _FLOATS),
        ("advantage", _FLOATS),
    ]
)
PER_TOKEN = TOKENS_SCHEMA.names[TOKENS_SCHEMA.names.index("text") :]


def schema(kind: str, now: Mapping[str, pa.Schema]) -> pa.Schema:
    return TOKENS_SCHEMA if kind == TOKENS else now[kind]


def columns(kind: str, file: parquet.ParquetFile, schema: pa.Schema) -> dict[str, list]:
    """A column that version 1 does not have is null."""
    new = {
        "turns": {"z"},
        "rollouts": {
            *("question", "golds", "gold_ids", "searches", "stop_reason", "texts", "observations"),
            *("pieces", "planning", "uncertainty", "pooled_uncertainty", "weight"),
        },
    }.get(kind, set())
    names = [name for name in schema.names if name not in new]
    old = pa.schema([schema.field(name) for name in names])
    read = file.read(columns=names).select(names).cast(old).to_pydict()
    return {name: read.get(name, [None] * file.metadata.num_rows) for name in schema.names}


def about(kind: str, metadata: dict) -> tuple[dict, dict | None]:
    """(pipeline, update)"""
    own = dict(metadata["pipeline"])
    return ({}, own) if kind == "rollouts" else (own, None)
