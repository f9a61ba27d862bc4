"""Trials for the tests of the lineage."""

from __future__ import annotations

from verl_credit.records.lineage import COLUMNS, FailureLabel, Trial

HEADER = "\t".join(COLUMNS) + "\n"


def trial(exp_id: str, status: str = "keep", metric: float | None = None, **others) -> Trial:
    """Columns that are not given are empty."""
    cells = dict.fromkeys(COLUMNS, "") | dict.fromkeys(
        ("core_metric", "val_bpb", "delta_vs_best", "train_s", "total_s")
    )
    return Trial(**cells | {"exp_id": exp_id, "status": FailureLabel(status), "core_metric": metric} | others)


def line(
    exp_id: str, status: str = "keep", metric: object = "", hypothesis: str = "", notes: str = ""
) -> str:
    """A row as any writer of the format writes it, without quotes and without its end."""
    cells = {
        "exp_id": exp_id,
        "status": status,
        "core_metric": metric,
        "hypothesis": hypothesis,
        "notes": notes,
    }
    return "\t".join(str(cells.get(name, "")) for name in COLUMNS)
