"""The table of credits, written between two marks of README.md from the lines of rows.jsonl: one line, one column of a row.

python evidence/credits/page.py              # the table from the lines that are there
python evidence/credits/page.py --measure    # first measures what declared rows lack, column by column: an hour of a core
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_credit.precision import one_thread
from verl_credit.study.table_columns import AREAS, BIAS, COLUMNS, LAB_WORK, measure_row, shown
from verl_credit.study.table_cosine import measure_cosines
from verl_credit.study.table_row import Measured, Row, difference, row_of

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
BEGIN, END = "<!-- table: python evidence/credits/page.py -->", "<!-- end of the table -->"
HALF, QUARTER = {"lam": 0.5, "negative": 0.5}, {"lam": 0.5, "negative": 0.25}


def declared() -> list[Row]:
    """The declared rows, in the order of the table; GRPO, which is the mode none, comes first."""
    operators = ("rloo", "half_negative", "low_baseline", "maxrl", "reinforce_pp")
    modes = (
        "joint",
        "separate",
        "turn-group",
        "turn-group-v1d",
        "turn-group-unbiased",
        "leave_one_out",
        "mt_grpo",
    )
    modes += ("progress", "calibadv", "trace", "gigpo", "hgpo", "g2po", "gagpo")
    return [
        row_of("none"),
        *(row_of("none", {"outcome_operator": operator}) for operator in operators),
        *map(row_of, modes),
        row_of("turn_gae"),
        row_of("turn_gae", {"lam": 0.5}, "group"),
        row_of("turn_gae", {"lam": 0.9}, "group"),
        row_of("turn_gae", HALF, "features"),
        row_of("turn_gae", HALF | {"lam": 0.8}, "features"),
        row_of("turn_gae", HALF, "state"),
        row_of("turn_gae", HALF, "state", 2),
        row_of("turn_gae", QUARTER, "state", 2),
        row_of("turn_gae", HALF, "true"),
    ]


def measure() -> None:
    """One column after the other, the quick ones first, and the slow credits of a column last."""
    order = ("chain H 2", "chain H 4", "DoorKey 6x6", "coin collector 12", "Taxi", "chain H 8", "chain H 12")
    rows = sorted(declared(), key=lambda row: row.values in ("state", "features"))
    with one_thread():
        for column in (*order, BIAS):
            for row in rows:
                for line in measure_row(row, HERE, [column]):
                    print(f"{row.name:<50} {line}", flush=True)
        measure_cosines(rows, HERE, LAB_WORK.resolve())


def table(folder: Path) -> str:
    files = Measured.all(folder)
    names = [row.name for row in declared()]
    known = files[names[0]]
    head = ["credit", "n", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in sorted(files, key=lambda name: (names.index(name) if name in names else len(names), name)):
        cells = [_cell(column, files[name], known) for column in COLUMNS]
        lines.append(f"| {' | '.join([_named(name), _n(files[name]), *cells])} |")
    return "\n".join(lines)


def _cell(column: str, file: Measured, known: Measured) -> str:
    """As `shown`; a difference whose interval is above 0 is bold."""
    text = shown(column, file, known)
    measured = file.columns.get(column, {})
    if column in AREAS and file is not known and "area" in measured:
        own = difference(measured["area"], known.columns[column]["area"])
        return text.replace(str(own), f"**{own}**", 1) if own.wins else text
    return text or "-"


def _n(file: Measured) -> str:
    return "/".join(
        {str(file.columns[column]["settings"]["n"]) for column in AREAS if column in file.columns}
    )


def _named(name: str) -> str:
    name = name.partition(", n ")[0]
    return "none (GRPO: its area)" if name == "none" else name.replace("outcome_operator ", "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="measure what declared rows lack")
    if parser.parse_args().measure:
        measure()
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    made = table(HERE)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
