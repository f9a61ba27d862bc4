"""README.md from the JSON files: per device a table of the parts, then every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from gpu import record
from gpu.parts import PARTS

SHOWN_ROWS = 80  # of a part; the JSON has all
ORDER = [part.name for part in PARTS]
HEAD = """# One command for a GPU machine

`make gpu-evidence [HARDWARE=node8|h100x1|spark] [ARGS="--model FOLDER"]`, or `python evidence/gpu/run.py --help`. The parts
run in order of value, each in a process of its own with a time limit; called again, the command goes on where it was, and
repeats a part only after a change to its own files. It writes this page from `results/DEVICE/PART.json`, and from
`results/DEVICE/NOTES.md` where somebody wrote one. torch and transformers are enough for `kernels`, `branches`, `forward`
and `log_probs`; with `--model FOLDER` they use trained weights in place of random ones. `--device cpu --tiny` runs the same
code at a small size.

The first part, `half_hour`, trains the recipes for larger models on one GPU: five runs with random weights in Qwen3's
shapes, prepared trajectories that search, and a coin as reward ([`half_hour/order.py`](half_hour/order.py)). It can be
started alone: `python evidence/gpu/half_hour/drive.py --help`. Its `half_hour.json` belongs to the device's results.
`make gpu-rehearsal` runs the same queue on two cores, in minutes.
"""
COLUMNS = {
    "run": "run", "recipe": "recipe", "state": "state", "steps": "steps", "first_step_s": "s to the first step",
    "seconds": "s in all", "estimate_s": "s expected", "step_s": "s/step", "step_s_with_gains": "with gains",
    "step_s_without": "without", "contexts_scored": "contexts scored", "clip_scale_std": "clip scales' spread",
    "farthest_phase": "memory farthest from its plan", "mfu": "MFU", "verl_mfu": "verl's MFU", "k3": "k3",
    "resume": "resume", "engine": "engine", "why": "",
}  # fmt: skip
NO_GPU = """
**No GPU has run this yet.** The table below is of a CPU at toy sizes: it shows that the command works and says nothing about
a GPU.
"""


def write_page(out: Path) -> str:
    """Writes OUT/README.md; returns the tables of the parts alone, for the terminal."""
    devices = _read(out)
    on_gpu = any(parts[0]["gpus"] for parts in devices.values())
    tables = "\n\n".join(f"{parts[0]['device']}:\n\n{_parts(parts)}" for parts in devices.values())
    pages = [_device(parts, _notes(out / "results" / name)) for name, parts in devices.items()]
    page = "\n".join([HEAD, *([] if on_gpu else [NO_GPU]), *pages])
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(page.replace("\n\n\n", "\n\n").rstrip("\n") + "\n", encoding="utf-8")
    return tables


def _read(out: Path) -> dict[str, list[dict]]:
    """Device folder -> its parts in their order; GPUs first."""
    found = {}
    for folder in sorted((out / "results").glob("*/")):
        contents = [record.read(path) for path in folder.glob("*.json")]
        parts = [one for one in contents if one and one.get("part") in ORDER]
        if parts:
            found[folder.name] = sorted(parts, key=lambda one: ORDER.index(one["part"]))
    return dict(sorted(found.items(), key=lambda item: (not item[1][0]["gpus"], item[0])))


def _notes(folder: Path) -> str:
    """What somebody wrote about this machine's results by hand; no number in the tables comes from it."""
    path = folder / "NOTES.md"
    return path.read_text(encoding="utf-8").strip() + "\n" if path.exists() else ""


def _device(parts: list[dict], notes: str = "") -> str:
    one = parts[0]
    size = "toy sizes" if one["tiny"] else f"hardware={one['hardware']}"
    gpus = f"{one['gpus']} x " if one["gpus"] else ""
    machines = {}
    for part in parts:
        software = ", ".join(f"{name} {version}" for name, version in part["software"].items())
        machines.setdefault(f"Python {part['python']}, {software}", []).append(part["part"])
    found = [f"{', '.join(of)}: {one}." if len(machines) > 1 else f"{one}." for one, of in machines.items()]
    lines = [
        f"\n## {gpus}{one['device']}, {size}\n",
        "\n\n".join(found) + "\n",
        *([notes] if notes else []),
        _parts(parts),
    ]
    for part in parts:
        if part["rows"]:
            of_runs = [runs(part), ""] if part.get("runs") else []
            lines += [f"\n### {part['part']}\n", *of_runs, _rows(part)]
    return "\n".join(lines) + "\n"


def _parts(parts: list[dict]) -> str:
    lines = [
        "| part | state | ok | off | found, not predicted | not run | seconds | code, date | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for part in parts:
        count = Counter(row["verdict"] for row in part["rows"])
        numbers = [
            str(count[verdict]) if part["rows"] else ""
            for verdict in (record.OK, record.OFF, record.FOUND, record.NOT_RUN)
        ]
        when = f"{part['version']}, {part['when']}" if "when" in part else ""
        state = "cut" if part["state"] == "running" else part["state"]  # the machine went away
        cells = [part["part"], state, *numbers, part.get("seconds", ""), when, part.get("why", "")]
        lines.append(_line(cells))
    return "\n".join(lines)


def _rows(part: Mapping) -> str:
    lines = ["| | found | predicted | |", "|---|---|---|---|"]
    for row in part["rows"][:SHOWN_ROWS]:
        found = record.values(row["found"]) or row.get("why", "")
        lines.append(_line([row["name"], found, record.values(row["predicted"]), row["verdict"]]))
    if len(part["rows"]) > SHOWN_ROWS:
        lines.append(_line([f"{len(part['rows']) - SHOWN_ROWS} more in the JSON", "", "", ""]))
    sources = list(dict.fromkeys(row["source"] for row in part["rows"] if row["source"]))
    return "\n".join([*lines, *([f"\nPredicted by: {'; '.join(sources)}."] if sources else [])])


def runs(part: Mapping) -> str:
    """Returns a line per training run; columns in which no run has anything are left out."""
    lines = [
        {
            "run": name,
            **{key: value for key, value in state.items() if key in COLUMNS},
            **state.get("numbers", {}),
        }
        for name, state in part.get("runs", {}).items()
    ]
    used = [column for column in COLUMNS if any(_cell(one.get(column)) for one in lines)]
    rows = [[COLUMNS[column] for column in used], ["---"] * len(used)]
    rows += [[_cell(one.get(column)) for column in used] for one in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(value) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _line(cells: list) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
