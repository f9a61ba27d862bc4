"""Checks that data files are readable, have the columns that a run reads and enough rows, and no column that steers it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.errors import PreflightError, printable
from verl_credit.names import AGENT_NAME, AGENTS
from verl_credit.recipe.doctor.inputs.row import SELECTION, STEERING, Row, checked_row
from verl_credit.recipe.world import DATA
from verl_credit.turns.search.protocol import SCHEMA

TRAIN, VAL = DATA
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
TOOL = SCHEMA["function"]["name"]
COLUMNS = ["reward_model", "data_source"]
"""The columns that a run reads beside the prompt's column (data.prompt_key)."""


def rows_needed(config: DictConfig, key: str) -> int:
    return config.data.train_batch_size if key == TRAIN else 1


def read_rows(
    files,
    key: str,
    *,
    at_least: int = 1,
    searches: bool = True,
    other_tools: bool = False,
    agents: Sequence[str] = AGENTS,
    prompt_key: str = "prompt",
    default_loop: str = AGENT_NAME,
) -> list[Row]:
    """Reads all rows of the files. Raises PreflightError for a row that cannot train, and for too few rows.

    ``searches=False``: the run has no tool, so the prompt has to name the form of an answer.
    ``other_tools``: there are tools beside the search; only verl knows their names. ``agents``: loops that a row may name.
    ``prompt_key``: the column of the prompts. ``default_loop``: the agent loop of rows that name none.
    """
    paths = [files] if isinstance(files, str) else files
    if not files or isinstance(files, int | float) or not all(isinstance(path, str) for path in paths):
        raise PreflightError(f"{key}={files}: give a parquet file or a list of them")
    numbered = [
        (f"{path} row {number}", columns)
        for path in paths
        for number, columns in enumerate(_read(path, key, prompt_key))
    ]
    # verl joins the files: a column of one is null in the rows of the others
    names_agent = any("agent_name" in columns for _, columns in numbered)
    if numbered and not names_agent and default_loop not in agents:
        raise PreflightError(
            f"{LOOP}={default_loop}: {', '.join(paths)} has no column agent_name, so that every row would take that loop; "
            f"expected {' or '.join(agents)}, which say to which turn a token belongs"
        )
    known = [TOOL] if searches and not other_tools else None
    rows = [
        checked_row(
            where,
            columns,
            searches=searches,
            names_agent=names_agent,
            agents=agents,
            tools=known,
            prompt_key=prompt_key,
        )
        for where, columns in numbered
    ]
    if len(rows) < at_least:
        raise PreflightError(
            f"{key}: {', '.join(paths)} holds {len(rows) or 'no'} rows; at least {at_least} are needed"
        )
    return rows


def _read(path: str, key: str, prompt_key: str) -> list[dict]:
    import pyarrow
    import pyarrow.dataset as arrow_dataset
    import pyarrow.parquet as parquet

    file = Path(path).expanduser()
    if not file.exists():
        raise PreflightError(f"{key}: {path} does not exist")
    try:
        files = parquet.ParquetDataset(file).files
        for one in files:
            parquet.read_schema(one)
        dataset = arrow_dataset.dataset(files, format="parquet")
        wanted = _columns(dataset.schema, f"{key}: {path}", prompt_key)
        # The trainer reads all columns, so a damaged column that no key names would end it, too.
        batches = [_picked(batch, wanted) for batch in dataset.to_batches()]
        return [row for batch in batches for row in batch.to_pylist()]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        # pyarrow raises KeyError where two columns have one name.
        reason = printable((str(error).splitlines() or [type(error).__name__])[0])
        raise PreflightError(f"{key}: {path} is not a parquet file, or is damaged: {reason}") from error


def _picked(batch, wanted: list[str]):
    """Returns columns of a batch by name, and a field of extra_info by its own name."""
    from pyarrow import RecordBatch, compute

    columns = {name: batch.column(name) for name in wanted if name != SELECTION}
    if SELECTION in wanted:
        columns[SELECTION] = compute.struct_field(batch.column("extra_info"), SELECTION)
    return RecordBatch.from_pydict(columns)


def _columns(schema, where: str, prompt_key: str) -> list[str]:
    """Returns the columns that are read from every row. Raises PreflightError for missing and for forbidden columns."""
    from pyarrow import types

    names = schema.names
    if missing := {prompt_key, *COLUMNS} - set(names):
        of = f" (data.prompt_key={prompt_key})" if prompt_key in missing - {"prompt"} else ""
        raise PreflightError(f"{where} lacks the columns {sorted(missing)}{of}; it has {names}")
    if steering := sorted(STEERING & set(names)):
        raise PreflightError(
            f"{where} has the columns {steering}, which verl would hand to the agent loop or write over its "
            "trajectories: rename them, or leave them out"
        )
    wanted = [prompt_key, *COLUMNS, *({"agent_name"} & set(names))]
    extra = schema.field("extra_info").type if "extra_info" in names else None
    if extra is None or types.is_null(extra):
        return wanted
    if not types.is_struct(extra):
        raise PreflightError(
            f"{where}: extra_info is of the type {extra}: expected a mapping, or no such column"
        )
    selects = any(field.name == SELECTION for field in extra)
    return [*wanted, SELECTION] if selects else wanted
