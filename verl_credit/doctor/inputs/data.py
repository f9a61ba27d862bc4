"""Training and held-out rows: readable, with a prompt and a gold answer, and enough of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from verl_credit.errors import PreflightError
from verl_credit.recipe.required import DATA
from verl_credit.reward.qa import answer_form, gold_answers, stated_form

TRAIN, VAL = DATA
COLUMNS = ["prompt", "reward_model"]


class Row(NamedTuple):
    where: str
    """The file, and the row's number in it."""
    prompt: list[dict]
    truth: object
    """``reward_model.ground_truth``"""


def rows_needed(config: DictConfig, key: str) -> int:
    return config.data.train_batch_size if key == TRAIN else 1


def read_rows(files, key: str, *, at_least: int = 1, searches: bool = True) -> list[Row]:
    """Every row has a prompt and a gold answer, and there are enough of them. Raises PreflightError.

    ``searches=False``: a run without the tool, whose prompts alone can say how an answer is written.
    """
    paths = [files] if isinstance(files, str) else files
    if not files or isinstance(files, int | float) or not all(isinstance(path, str) for path in paths):
        raise PreflightError(f"{key}={files}: give a parquet file or a list of them")
    rows = [row for path in paths for row in _read(path, key)]
    for row in rows:
        _check(row, searches)
    if len(rows) < at_least:
        raise PreflightError(
            f"{key}: {', '.join(paths)} holds {len(rows) or 'no'} rows; at least {at_least} are needed"
        )
    return rows


def _read(path: str, key: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet as parquet

    file = Path(path).expanduser()
    if not file.exists():
        raise PreflightError(f"{key}: {path} does not exist")
    try:
        dataset = parquet.ParquetDataset(file)
        names = dataset.schema.names
        if missing := set(COLUMNS) - set(names):
            raise PreflightError(f"{key}: {path} lacks the columns {sorted(missing)}; it has {names}")
        found = dataset.read(columns=COLUMNS).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise PreflightError(f"{key}: {path} is not a parquet file: {error}") from error
    return [
        Row(f"{path} row {number}", row["prompt"], _truth(row["reward_model"]))
        for number, row in enumerate(found)
    ]


def _truth(reward_model: object) -> object:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _check(row: Row, searches: bool) -> None:
    if not row.prompt:
        raise PreflightError(f"{row.where}: empty prompt")
    try:
        gold_answers(row.truth)
        answer_form(row.truth)
    except ValueError as error:
        raise PreflightError(f"{row.where}: {error}") from error
    if not searches and stated_form(row.truth) is None and "<answer>" not in str(row.prompt):
        raise PreflightError(
            f"{row.where}: reward_model.ground_truth={row.truth!r} has no form, so that the answer is read from "
            "<answer>...</answer>, and the prompt asks for no such tag (search.max_searches=0): every reward would be 0. "
            "`verl-credit prepare` writes {'target': [...], 'form': 'boxed'} with a prompt that asks for \\boxed{}; "
            "'form': 'tag' is for a policy that writes the tag unasked"
        )
