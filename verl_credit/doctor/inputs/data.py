"""Training and held-out files: readable, with the columns that a run reads, no column that steers it, and rows enough."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from verl_credit.doctor.inputs.row import SELECTION, STEERING, Row, checked_row
from verl_credit.errors import PreflightError
from verl_credit.recipe.required import DATA
from verl_credit.search.protocol import SCHEMA

TRAIN, VAL = DATA
TOOL = SCHEMA["function"]["name"]
COLUMNS = ["prompt", "reward_model", "data_source"]


def rows_needed(config: DictConfig, key: str) -> int:
    return config.data.train_batch_size if key == TRAIN else 1


def read_rows(
    files, key: str, *, at_least: int = 1, searches: bool = True, other_tools: bool = False
) -> list[Row]:
    """All rows of the files, each one that can train, and enough of them. Raises PreflightError.

    ``searches=False``: a run without the tool, whose prompts alone can say how an answer is written.
    ``other_tools``: there are tools beside the search, whose names only verl knows.
    """
    paths = [files] if isinstance(files, str) else files
    if not files or isinstance(files, int | float) or not all(isinstance(path, str) for path in paths):
        raise PreflightError(f"{key}={files}: give a parquet file or a list of them")
    found = [
        (f"{path} row {number}", columns) for path in paths for number, columns in enumerate(_read(path, key))
    ]
    # verl joins the files: a column of one is null in the rows of the others
    names_agent = any("agent_name" in columns for _, columns in found)
    known = [TOOL] if searches and not other_tools else None
    rows = [
        checked_row(where, columns, searches=searches, names_agent=names_agent, tools=known)
        for where, columns in found
    ]
    if len(rows) < at_least:
        raise PreflightError(
            f"{key}: {', '.join(paths)} holds {len(rows) or 'no'} rows; at least {at_least} are needed"
        )
    return rows


def _read(path: str, key: str) -> list[dict]:
    import pyarrow
    import pyarrow.parquet as parquet

    file = Path(path).expanduser()
    if not file.exists():
        raise PreflightError(f"{key}: {path} does not exist")
    try:
        dataset = parquet.ParquetDataset(file)
        return dataset.read(columns=_columns(dataset.schema, f"{key}: {path}")).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise PreflightError(f"{key}: {path} is not a parquet file, or is damaged: {said}") from error


def _columns(schema, where: str) -> list[str]:
    """What is read of every row. Raises PreflightError for what no row of the file can have."""
    from pyarrow import types

    names = schema.names
    if missing := set(COLUMNS) - set(names):
        raise PreflightError(f"{where} lacks the columns {sorted(missing)}; it has {names}")
    if steering := sorted(STEERING & set(names)):
        raise PreflightError(
            f"{where} has the columns {steering}, which verl would hand to the agent loop or write over its "
            "trajectories: rename them, or leave them out"
        )
    wanted = [*COLUMNS, *({"agent_name"} & set(names))]
    extra = schema.field("extra_info").type if "extra_info" in names else None
    if extra is None or types.is_null(extra):
        return wanted
    if not types.is_struct(extra):
        raise PreflightError(
            f"{where}: extra_info is of the type {extra}: expected a mapping, or no such column"
        )
    selects = any(field.name == SELECTION for field in extra)
    return [*wanted, f"extra_info.{SELECTION}"] if selects else wanted
