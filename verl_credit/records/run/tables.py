"""Credit as it was given, a file per step: `tables/turns_000012.parquet` of all rows, `tokens_000012.parquet` of a few, and
`rollouts_000012.parquet`, what the update of the step read.

A turns file has a line per turn, at most 40 bytes on disk. A tokens file has a line per rollout, with lists over the tokens
that the policy wrote, at most 35 bytes a token. A rollouts file has a line per rollout, with lists over the tokens of the
response. All carry, as JSON, the settings that made them, so that a report can make the same credit again, and a probe the
same update. A file is written under another name and then renamed: a reader finds it whole or not at all, and a step that is
made again replaces its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from verl_credit.records.run.files import DamagedFile

TABLES, TURNS, TOKENS, ROLLOUTS = "tables", "turns", "tokens", "rollouts"
_PIPELINE, _VERSION = b"verl_credit", 1
_NAME = re.compile(r"(turns|tokens|rollouts)_(\d{6,})\.parquet")

TURNS_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("group", pa.int32()),
        ("row", pa.int32()),
        ("turn", pa.int16()),
        ("answer", pa.bool_()),
        ("tokens", pa.int32()),
        ("has_reward", pa.bool_()),
        ("reward", pa.float64()),  # null: it has none, or lost it
        ("signals", pa.map_(pa.string(), pa.float64())),  # each signal's own value, where the turn has one
        ("anchor", pa.int32()),  # null: the turn mode reads none
        ("advantage", pa.float32()),
        ("clip_scale", pa.float32()),
        ("valid", pa.bool_()),
        ("outcome", pa.float64()),
        ("outcome_advantage", pa.float32()),
    ]
)
_FLOATS = pa.list_(pa.float32())
TOKENS_SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("row", pa.int32()),
        ("question", pa.string()),
        ("golds", pa.list_(pa.string())),
        ("stop_reason", pa.string()),
        ("observations", pa.list_(pa.string())),  # per turn, their beginnings
        ("observation_characters", pa.list_(pa.int32())),  # how long they were
        ("text", pa.list_(pa.string())),
        ("turn", pa.list_(pa.int16())),
        ("trained", pa.list_(pa.bool_())),  # False: rejected by rollout correction
        ("planning", pa.list_(pa.bool_())),
        ("log_prob", _FLOATS),
        ("entropy", _FLOATS),
        ("uncertainty", _FLOATS),
        ("pooled_uncertainty", _FLOATS),
        ("weight", _FLOATS),
        ("advantage", _FLOATS),
    ]
)
ROLLOUTS_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),  # of the prompt
        ("group", pa.int32()),
        ("row", pa.int32()),  # its place in the batch of the update, in which other rows stand too
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),  # observations included; every list below is as long
        ("written", pa.list_(pa.bool_())),  # by the policy
        ("trained", pa.list_(pa.bool_())),  # False also: rejected by rollout correction
        ("turn", pa.list_(pa.int16())),  # -1: not the policy's token
        ("outcome", pa.float64()),
        ("advantage", _FLOATS),
        ("old_log_prob", _FLOATS),
        ("entropy", _FLOATS),  # null: not computed (rollout_correction.bypass_mode)
        ("clip_scale", _FLOATS),
        ("ref_log_prob", _FLOATS),  # null: no reference policy
        ("rollout_is_weight", _FLOATS),  # null: the update has none
    ]
)
_SCHEMAS = {TURNS: TURNS_SCHEMA, TOKENS: TOKENS_SCHEMA, ROLLOUTS: ROLLOUTS_SCHEMA}


class DamagedTable(DamagedFile):
    """A file of tables that cannot be read; the message names it."""


@dataclass(frozen=True)
class StepTable:
    """``lines`` as the schema has them, by column; ``pipeline``: the settings that made the credit, or the update."""

    step: int
    columns: dict[str, list]
    pipeline: dict


def table_path(run_dir: Path, kind: str, step: int) -> Path:
    return Path(run_dir) / TABLES / f"{kind}_{step:06d}.parquet"


def write_table(run_dir: Path, kind: str, step: int, columns: dict[str, list], pipeline: dict) -> Path:
    path, schema = table_path(run_dir, kind, step), _SCHEMAS[kind]
    about = json.dumps({"version": _VERSION, "step": step, "pipeline": pipeline})
    table = pa.table(columns, schema=schema.with_metadata({_PIPELINE: about}))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        parquet.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def tables_of(run_dir: Path, kind: str) -> dict[int, Path]:
    """Files by step, in order; files that are no tables of ours are left out."""
    found = {}
    folder = Path(run_dir) / TABLES
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and match[1] == kind:
            found[int(match[2])] = path
    return dict(sorted(found.items()))


def read_table(path: Path, names: Sequence[str] | None = None) -> StepTable:
    """All columns, or those. Raises DamagedTable for a file that is half written, not Parquet, not ours, or of a later
    version."""
    kind = path.name.partition("_")[0]
    try:
        file = parquet.ParquetFile(path)
        about = json.loads((file.schema_arrow.metadata or {}).get(_PIPELINE, b"null"))
        if not isinstance(about, dict) or about.get("version") != _VERSION:
            raise DamagedTable(f"{path} is no table that this version wrote")
        schema = pa.schema([_SCHEMAS[kind].field(name) for name in names or _SCHEMAS[kind].names])
        table = file.read(columns=schema.names).select(schema.names).cast(schema)
        return StepTable(int(about["step"]), table.to_pydict(), dict(about["pipeline"]))
    except DamagedTable:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedTable(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


def drop_old(run_dir: Path, kind: str, step: int, keep: int) -> None:
    """Remove the tables of steps up to ``step - keep``."""
    for old, path in tables_of(run_dir, kind).items():
        if old <= step - keep:
            path.unlink(missing_ok=True)
