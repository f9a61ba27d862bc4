"""Credit and rollouts as the update read them, in `tables/`: a file per step and kind.

`turns_000012.parquet` has a line per turn of all rows, at most 40 bytes on disk. `rollouts_000012.parquet` has a line per
kept rollout of the last steps, with its texts and with lists over the tokens of its response, at most 60 bytes a token.
`samples_000012.parquet` has the texts of one rollout per kept group; it takes the place of the rollouts of an older step.

The metadata has, as JSON, the settings that made the credit, so that a report can recompute the credit. Where a step
is kept whole, it also has the settings of the update, so that a probe can repeat it. A file is written under another
name and then renamed: a reader finds it whole or not at all, and a repeated step replaces its own files.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from verl_credit.records.run.files import DamagedFile, replaced

TABLES, TURNS, ROLLOUTS, SAMPLES = "tables", "turns", "rollouts", "samples"
_ABOUT, _VERSION = b"verl_credit", 2
_NAME = re.compile(r"[a-z]+_(\d{6,})\.parquet")

TURNS_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("group", pa.int32()),
        ("row", pa.int32()),
        ("turn", pa.int16()),
        ("answer", pa.bool_()),
        ("tokens", pa.int32()),
        ("has_reward", pa.bool_()),
        ("reward", pa.float64()),  # null: no reward, or a missing one
        ("signals", pa.map_(pa.string(), pa.float64())),  # each signal's own value, where the turn has it
        ("z", pa.float64()),  # compares the siblings' same turn; null: the turn mode compares otherwise
        ("anchor", pa.int32()),  # null: the turn mode reads none
        ("value", pa.float64()),  # of the state before the turn; null: the turn mode reads none
        ("advantage", pa.float32()),
        ("clip_scale", pa.float32()),
        ("valid", pa.bool_()),
        ("outcome", pa.float64()),
        ("outcome_advantage", pa.float32()),
    ]
)
_FLOATS, _TEXTS, _FLAGS = pa.list_(pa.float32()), pa.list_(pa.string()), pa.list_(pa.bool_())
_SAMPLE = [
    ("group", pa.int32()),
    ("row", pa.int32()),  # its index in the batch of the update, which has other rows, too
    ("question", pa.string()),
    ("golds", _TEXTS),
    ("gold_ids", pa.string()),  # JSON
    ("searches", pa.string()),  # JSON
    ("stop_reason", pa.string()),
    ("texts", _TEXTS),  # the policy's text of each turn
    ("observations", _TEXTS),  # the observation after each turn
]
ROLLOUTS_SCHEMA = pa.schema(
    [
        *_SAMPLE,
        ("uid", pa.string()),  # the prompt's id
        ("outcome", pa.float64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),  # observations included; every list below is as long
        ("pieces", _TEXTS),  # text per token; empty where the policy did not write it
        ("written", _FLAGS),  # the policy wrote the token
        ("trained", _FLAGS),  # False also: rejected by rollout correction
        ("turn", pa.list_(pa.int16())),  # -1: not the policy's token
        ("advantage", _FLOATS),
        ("old_log_prob", _FLOATS),
        ("entropy", _FLOATS),  # null: not computed (rollout_correction.bypass_mode)
        ("clip_scale", _FLOATS),
        ("ref_log_prob", _FLOATS),  # null: no reference policy
        ("rollout_is_weight", _FLOATS),  # null: the update has no such weights
        ("planning", _FLAGS),  # this and the next: null where nothing computes them
        ("uncertainty", _FLOATS),
        ("pooled_uncertainty", _FLOATS),
        ("weight", _FLOATS),
    ]
)
_SCHEMAS = {TURNS: TURNS_SCHEMA, ROLLOUTS: ROLLOUTS_SCHEMA, SAMPLES: pa.schema(_SAMPLE)}
SAMPLE_NAMES = tuple(_SCHEMAS[SAMPLES].names)


class DamagedTable(DamagedFile):
    """A file of tables that cannot be read; the message names it."""


@dataclass(frozen=True)
class StepTable:
    """Lines as the schema has them, by column."""

    step: int
    columns: dict[str, list]
    pipeline: dict
    """The settings that made the credit; empty when verl's own estimator made it"""
    update: dict | None = None
    """The settings of the update, for a probe; None when some rollouts of the step are not kept"""


def table_path(run_dir: Path, kind: str, step: int) -> Path:
    return Path(run_dir) / TABLES / f"{kind}_{step:06d}.parquet"


def write_table(
    run_dir: Path, kind: str, step: int, columns: dict[str, list], pipeline: dict, update: dict | None = None
) -> Path:
    path = table_path(run_dir, kind, step)
    about = json.dumps({"version": _VERSION, "step": step, "pipeline": pipeline, "update": update})
    table = pa.table(columns, schema=_SCHEMAS[kind].with_metadata({_ABOUT: about}))
    with replaced(path) as file:
        parquet.write_table(table, file, compression="zstd")
    return path


def tables_of(run_dir: Path, kind: str) -> dict[int, Path]:
    """Files by step, in order; other files are left out."""
    found = ((_NAME.fullmatch(path.name), path) for path in (Path(run_dir) / TABLES).glob(f"{kind}_*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def read_table(path: Path, names: Sequence[str] | None = None) -> StepTable:
    """Reads all columns, or the columns ``names``. Raises DamagedTable for a file that is half written, not Parquet, not
    ours, or of another version."""
    kind = path.name.partition("_")[0]
    try:
        file = parquet.ParquetFile(path)
        about = json.loads((file.schema_arrow.metadata or {}).get(_ABOUT, b"null"))
        if not isinstance(about, dict) or about.get("version") != _VERSION:
            raise DamagedTable(f"{path} is no table that this version wrote")
        names = names or _SCHEMAS[kind].names
        schema = pa.schema([_SCHEMAS[kind].field(name) for name in names])
        columns = file.read(columns=schema.names).select(schema.names).cast(schema).to_pydict()
        return StepTable(int(about["step"]), columns, dict(about["pipeline"]), about["update"])
    except DamagedTable:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedTable(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
