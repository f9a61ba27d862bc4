"""What fifteen steps of search training do to a policy with trained weights: held-out answers, calls, gains by hop.

    verl-credit train --config-name real_cpu real.questions=QUESTIONS run_dir=RUN
    python evidence/real/multihop.py --real DIR --run RUN

DIR is the recipe's `real.dir`. Writes multihop.json and multihop.md (five trajectories to read) beside this script.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from common import HERE, machine, with_interval, write

from verl_credit.run.files import METRICS, read_json_lines

MEASURES = ("em", "f1", "format_ok")
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
HOPS = (
    "first supporting page",
    "second supporting page",
    "both at once",
    "neither",
    "only pages seen before",
)


def held_out(run: Path, mode: str) -> dict:
    """Before the first and after the last evaluated step: means, and the difference of each question's answers."""
    files = {
        int(path.stem): read_json_lines(path) for path in sorted((run / "validation" / mode).glob("*.jsonl"))
    }
    first, last = min(files), max(files)
    before, after = (
        sorted(files[step], key=lambda row: row["input"]) for step in (first, last)
    )  # verl's order is random
    if [row["input"] for row in before] != [row["input"] for row in after]:
        raise ValueError(f"{run}: steps {first} and {last} were evaluated on other questions")
    found: dict = {"steps": [first, last], "questions": len(before)}
    for name in MEASURES:
        values = [np.array([row[name] for row in rows], dtype=float) for rows in (before, after)]
        for label, x in (("before", values[0]), ("after", values[1]), ("difference", values[1] - values[0])):
            found[f"{name} {label}"] = mean_of(x)
    for label, rows in (("before", before), ("after", after)):
        calls = [call for row in rows for call in CALL.findall(row["output"])]
        found[f"calls {label}"] = {
            "per answer": len(calls) / len(rows),
            "well-formed": sum(map(well_formed, calls)) / max(1, len(calls)),
        }
    return found


def well_formed(call: str) -> bool:
    """A JSON object that names the search tool, with a query."""
    try:
        parsed = json.loads(call)
        return parsed["name"] == "search" and bool(parsed["arguments"]["query"].strip())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def supporting_titles(real: Path) -> dict[str, list[str]]:
    rows = parquet.read_table(
        real / "multihop" / "data" / "train.parquet", columns=["extra_info"]
    ).to_pylist()
    return {row["extra_info"]["question"]: row["extra_info"]["supporting"] for row in rows}


def gains_by_hop(trajectories: list[dict], real: Path) -> dict:
    """Mean gain of search turns by what they brought for the first time in their trajectory: of each question's mean."""
    lines = (real / "multihop" / "data" / "corpus.jsonl").read_text().splitlines()
    title = {row["id"]: row["contents"].partition("\n")[0] for row in map(json.loads, lines)}
    supporting = supporting_titles(real)
    found: dict[str, dict[str, list[float]]] = {hop: {} for hop in HOPS}
    for one in trajectories:
        wanted, seen = set(supporting[one["question"]]), set()
        for search in one["searches"]:
            turn = one["turns"][search["turn"]]
            if turn.get("info_gain") is None:
                continue
            new = {title[page] for page in search["pages"]} - seen
            brought = len(new & wanted)
            had = len(seen & wanted)
            hop = (
                HOPS[4]
                if not new
                else HOPS[3]
                if not brought
                else HOPS[2]
                if brought == 2
                else HOPS[1 if had else 0]
            )
            found[hop].setdefault(one["question"], []).append(turn["info_gain"])
            seen |= new
    return {
        hop: {
            "turns": sum(map(len, gains.values())),
            **mean_of(np.array([np.mean(x) for x in gains.values()])),
        }
        for hop, gains in found.items()
    }


def mean_of(values: np.ndarray) -> dict:
    """With its interval, where there are enough values for one."""
    return with_interval(len(values), lambda i: values[i].mean()) if len(values) > 2 else {"n": len(values)}


def steps(run: Path) -> list[dict]:
    names = {
        "em": "credit/outcome/em",
        "f1": "credit/outcome/f1",
        "gain": "credit/gain/mean",
        "searches": "credit/tool/searches_per_row",
        "bad_calls": "credit/tool/bad_calls",
        "entropy": "actor/entropy",
        "seconds": "timing_s/step",
    }
    return [
        {"step": row["step"], **{name: round(row[key], 4) for name, key in names.items()}}
        for row in read_json_lines(run / METRICS)
    ]


def to_read(trajectories: list[dict], count: int = 5) -> str:
    """Of the last steps, one of each question: solved ones first."""
    chosen: dict[str, dict] = {}
    for one in sorted(trajectories, key=lambda t: (-t["outcome"], -t["step"])):
        chosen.setdefault(one["question"], one)
    solved = [one for one in chosen.values() if one["outcome"] == 1.0]
    failed = [one for one in chosen.values() if one["outcome"] != 1.0]
    picked = [*solved[: count - 2], *failed][:count]
    return "\n".join(map(_told, picked))


def _told(one: dict) -> str:
    lines = [
        f"## {one['question']}",
        "",
        f"Gold: {', '.join(one['golds'])}. Step {one['step']}, reward {one['outcome']:g}.",
        "",
    ]
    for turn in one["turns"]:
        gain = turn.get("info_gain")
        credit = f"advantage {turn['advantage']:+.2f}" + ("" if gain is None else f", gain {gain:+.3f}")
        text = re.sub(r"<\|\w+\|>", "", turn["text"]).strip().replace("\n", " ")
        pages = re.findall(r"Page \d+: (.*)", turn["observation"])
        lines.append(f"- `{text}` ({credit})" + (f" brought {'; '.join(pages)}" if pages else ""))
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, required=True, help="the recipe's real.dir")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    trajectories = read_json_lines(given.run / "trajectories.jsonl")
    start = json.loads((given.real / "start" / "manifest.json").read_text())
    content = {
        "machine": machine("torch", "transformers", "verl"),
        "start": {key: value for key, value in start.items() if key not in ("files", "version", "made_of")},
        **{mode: held_out(given.run, mode) for mode in ("greedy", "sampled")},
        "gains by hop": gains_by_hop(trajectories, given.real),
        "steps": steps(given.run),
    }
    write(given.out / "multihop.json", content)
    (given.out / "multihop.md").write_text(
        f"# Five trajectories of `real_cpu` to read\n\nWritten by `evidence/real/multihop.py`. "
        f"Questions and answers are HotpotQA's (Yang et al. 2018, CC BY-SA 4.0).\n\n{to_read(trajectories)}"
    )
    print(json.dumps({key: content[key] for key in ("greedy", "sampled", "gains by hop")}, indent=1))


if __name__ == "__main__":
    main()
