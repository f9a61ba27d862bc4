"""The exact bias of every outcome operator and turn mode on two questions whose groups can all be listed.

    python evidence/fidelity/exact_bias.py            # about ten minutes of one core
    python evidence/fidelity/exact_bias.py --again    # the picture and the tables from FOLDER/exact_bias.json
    python evidence/fidelity/exact_bias.py --tiny     # groups of 2 and one stop probability: seconds

Writes exact_bias.json (one row per mode, questions, stop probability and group size) and exact_bias.png into FOLDER, and
prints the tables of README.md. FOLDER is build/evidence/fidelity without --folder, where `make evidence-raw` unpacks the
published file.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from exact_picture import draw

from verl_credit.study.fidelity.exact.bias import bias_rows

FOLDER = Path(__file__).resolve().parents[2] / "build" / "evidence" / "fidelity"
BOTH = "one hop and two hops"
SHOWN = {"stop_probability": 0.3, "group_size": 8}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the result")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="measure nothing; read the result")
    which.add_argument("--tiny", action="store_true", help="a size for a test")
    given = parser.parse_args()
    result = given.folder / "exact_bias.json"
    if not given.again:
        torch.set_num_threads(1)
        given.folder.mkdir(parents=True, exist_ok=True)
        tiny = {"group_sizes": (2,), "stops": (SHOWN["stop_probability"],)}
        result.write_text(as_text(measure(**tiny if given.tiny else {})))
    rows = read(result)
    draw(rows, given.folder / "exact_bias.png")
    print(page(rows))


def measure(**options) -> dict:
    """``options``: of `bias_rows`, which takes all group sizes and stop probabilities without them."""
    begun, rows = time.time(), []
    for row in bias_rows(**options):
        if not rows or (rows[-1]["mode"], rows[-1]["group_size"]) != (row["mode"], row["group_size"]):
            print(f"{time.time() - begun:5.0f} s  {row['group_size']}  {row['mode']}", flush=True)
        rows.append({key: round_off(value) for key, value in row.items()})
    machine = (
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread"
    )
    return {"machine": machine, "seconds": round(time.time() - begun), "rows": rows}


def round_off(value):
    return float(f"{value:.7g}") if isinstance(value, float) else value


def as_text(result: dict) -> str:
    """One line a row, without the names of its columns."""
    columns = list(result["rows"][0])
    lines = ",\n".join(json.dumps([row[column] for column in columns]) for row in result["rows"])
    head = {key: value for key, value in result.items() if key != "rows"} | {"columns": columns}
    return f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'


def read(path: Path) -> list[dict]:
    result = json.loads(path.read_text())
    return [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]


def page(rows: list[dict]) -> str:
    """Both questions together: one stop probability and group size, then the cosine over sizes and over probabilities."""
    both = [row for row in rows if row["questions"] == BOTH]
    modes = list(dict.fromkeys(row["mode"] for row in both))
    largest = {mode: max(row["group_size"] for row in both if row["mode"] == mode) for mode in modes}
    lines = [
        "| mode | group | cosine | length | off | beyond r and gain | fewer turns | own objective | cosine | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode in modes:
        row = of(both, mode, SHOWN["stop_probability"], largest[mode])
        numbers = [
            row[k] for k in ("cosine", "norm_ratio", "difference", "beyond_r_and_gain", "cosine_fewer_turns")
        ]
        own = f"{row['own_objective'] or '-'} | {shown(row['cosine_own'])} | {small(row['own_error'])}"
        lines.append(f"| {mode} | {largest[mode]} | {' | '.join(map(shown, numbers))} | {own} |")
    sizes, stops = (sorted({row[key] for row in both}) for key in ("group_size", "stop_probability"))
    for title, columns, pick in (
        ("group size", sizes, lambda mode, size: of(both, mode, SHOWN["stop_probability"], size)),
        ("stop probability", stops, lambda mode, stop: of(both, mode, stop, largest[mode])),
    ):
        lines += ["", f"| {title} | {' | '.join(map(str, columns))} |", "|---" * (1 + len(columns)) + "|"]
        for mode in modes:
            found = [pick(mode, value) for value in columns]
            lines.append(f"| {mode} | {' | '.join('' if r is None else shown(r['cosine']) for r in found)} |")
    return "\n".join(lines)


def of(rows: list[dict], mode: str, stop: float, size: int) -> dict | None:
    wanted = (mode, stop, size)
    found = [row for row in rows if (row["mode"], row["stop_probability"], row["group_size"]) == wanted]
    return found[0] if found else None


def shown(value: float | None) -> str:
    if value is None:
        return "undefined"
    text = f"{value:.4f}"
    return (
        text.replace("0.", ".", 1)
        if abs(value) < 1 and text != "-0.0000"
        else text.replace("-0.0000", ".0000")
    )


def small(value: float | None) -> str:
    return (
        "-" if value is None else "0" if value < 1e-9 else f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"
    )


if __name__ == "__main__":
    main()
