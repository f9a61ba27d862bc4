"""`verl-credit bench MODE`: exact bias, learning in exact worlds beside GRPO, and the own cosine of one turn mode."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_credit.cli.command import GOES_ON, Params, ends, modules_from_here
from verl_credit.precision import one_thread
from verl_credit.records.run.files import DamagedFile


@ends("bench {mode}", DamagedFile, OSError, interrupted=GOES_ON)
def bench(
    mode: Annotated[str, Argument(help="my_module:my_mode, or a registered turn mode")],
    params: Params = None,
    out: Annotated[Path | None, Option("--dir", help="runs/table if not given")] = None,
    values: Annotated[str | None, Option(help="state, features, group or true, for turn_gae")] = None,
    n: Annotated[int, Option(help="rollouts of a question; a step has 128 in all")] = 8,
    only: Annotated[str, Option(help="beginnings of columns, with commas")] = "",
) -> None:
    """Adds a row of the table of credits to rows.jsonl of --dir, a line for each column. A column that is there is not
    measured again."""
    from verl_credit.study.table_columns import columns_of, measure_row
    from verl_credit.study.table_row import ROWS, row_of

    with modules_from_here(), one_thread():
        row, columns = row_of(mode, params, values, n), columns_of([name for name in only.split(",") if name])
        folder = (out or Path("runs") / "table").expanduser().resolve()
        print(f"{row.name}: areas minus GRPO's in points, in brackets with shuffled signals", flush=True)
        for line in measure_row(row, folder, columns):
            print(line, flush=True)
    print(folder / ROWS)
