"""Training and held-out rows: readable, with a prompt and a gold answer, and enough of them."""

from __future__ import annotations

from pathlib import Path

from verl_credit.errors import PreflightError
from verl_credit.reward.qa import answer_form, gold_answers, stated_form


def check_data(files, key: str, *, at_least: int = 1, searches: bool = True) -> int:
    """Every row has a prompt and a gold answer, and there are enough of them. Returns the number of rows.

    ``searches=False``: a run without the tool, whose prompts alone can say how an answer is written.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    paths = [files] if isinstance(files, str) else files
    if not files or isinstance(files, int | float) or not all(isinstance(path, str) for path in paths):
        raise PreflightError(f"{key}={files}: give a parquet file or a list of them")
    total = 0
    for path in paths:
        if not Path(path).expanduser().exists():
            raise PreflightError(f"{key}: {path} does not exist")
        try:
            table = parquet.read_table(Path(path).expanduser())
        except pyarrow.ArrowException as error:
            raise PreflightError(f"{key}: {path} is not a parquet file: {error}") from error
        missing = {"prompt", "reward_model"} - set(table.column_names)
        if missing:
            raise PreflightError(
                f"{key}: {path} lacks the columns {sorted(missing)}; it has {table.column_names}"
            )
        for number, row in enumerate(table.select(["prompt", "reward_model"]).to_pylist()):
            _check_row(path, number, row)
            if not searches:
                _check_form(path, number, row)
        total += table.num_rows
    if total < at_least:
        raise PreflightError(
            f"{key}: {', '.join(paths)} holds {total or 'no'} rows; at least {at_least} are needed"
        )
    return total


def _check_row(path: str, number: int, row: dict) -> None:
    if not row["prompt"]:
        raise PreflightError(f"{path} row {number}: empty prompt")
    try:
        truth = (row["reward_model"] or {}).get("ground_truth")
        gold_answers(truth)
        answer_form(truth)
    except ValueError as error:
        raise PreflightError(f"{path} row {number}: {error}") from error


def _check_form(path: str, number: int, row: dict) -> None:
    """A row that does not say how it is answered, in a prompt that does not either."""
    truth = row["reward_model"]["ground_truth"]
    if stated_form(truth) is None and "<answer>" not in str(row["prompt"]):
        raise PreflightError(
            f"{path} row {number}: reward_model.ground_truth={truth!r} has no form, so that the answer is read from "
            "<answer>...</answer>, and the prompt asks for no such tag (search.max_searches=0): every reward would be 0. "
            "`verl-credit prepare` writes {'target': [...], 'form': 'boxed'} with a prompt that asks for \\boxed{}; "
            "'form': 'tag' is for a policy that writes the tag unasked"
        )
