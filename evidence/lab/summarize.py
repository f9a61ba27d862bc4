"""Tables of results as Markdown: python evidence/lab/summarize.py [RESULTS] > evidence/lab/tables.md

RESULTS is the folder of `labs.py` and `run.py`; without it the one into which `make evidence-raw` unpacks what is published.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "build" / "evidence" / "lab" / "results"


def main(results: Path = RESULTS) -> None:
    labs = json.loads((results / "labs.json").read_text())
    runs = [json.loads(path.read_text()) for path in sorted(results.glob("*-*.json"))]
    tables = [lab_table(labs), learning_table(runs), gain_table(runs), clip_table(runs), gram_table(runs)]
    print(*tables, sep="\n\n")


def table(header: list[str], rows: list[list]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def lab_table(labs: list[dict]) -> str:
    rows = []
    for lab in labs:
        recall = lab["test_recall_by_question"]
        keys = ("dev_em", "dev_greedy_em", "dev_gram_token_share")
        rows.append(
            [
                lab["world_seed"],
                *(f"{lab[key]:.3f}" for key in keys),
                f"{recall['1']:.3f}",
                f"{recall['3']:.3f}",
            ]
        )
    header = ["world seed", "dev EM T=1", "dev EM greedy", "gram tokens", "test recall@1", "test recall@3"]
    return "The lab after the warm start:\n\n" + table(header, rows)


def learning_table(runs: list[dict]) -> str:
    rows = []
    for run in (run for run in runs if len(run["held_out"]) > 1):
        steps = [entry["step"] for entry in run["held_out"]]
        cells = [run["condition"], run["world_seed"], ", ".join(map(str, steps))]
        for mode in ("sampled", "greedy"):
            for key in ("em", "em_formatted"):
                values = [entry[mode][key] for entry in run["held_out"]]
                cells.append(" → ".join("none" if value is None else f"{value:.3f}" for value in values))
        rows.append([*cells, f"{sum(run['seconds_per_step']) / len(run['seconds_per_step']):.1f}"])
    header = [
        "condition",
        "world seed",
        "steps",
        "EM T=1",
        "EM T=1, formatted",
        "EM greedy",
        "EM greedy, formatted",
    ]
    return 'Held-out EM after the steps named ("none": no formatted answer):\n\n' + table(
        [*header, "s/step"], rows
    )


def gain_table(runs: list[dict]) -> str:
    rows = []
    for run in (run for run in runs if run["condition"] == "main"):
        gain, cells = run["gain"], [run["world_seed"]]
        for kind in ("answer", "intermediate", "useless"):
            entry = gain[kind]
            cells.append(
                f"{entry['mean']:+.4f} ± {entry['standard_error']:.4f} (n={entry['turns']})"
                if entry["turns"]
                else "none"
            )
        rows.append([*cells, separation(gain)])
    header = ["world seed", "answer's article", "intermediate article", "useless", "answer above useless"]
    return "Information gain by what a search brought (steps 1-5, ± standard error):\n\n" + table(
        header, rows
    )


def separation(gain: dict) -> str:
    answer, useless = gain["answer"], gain["useless"]
    if not answer["turns"] or not useless["turns"]:
        return "not measurable"
    error = (answer["standard_error"] ** 2 + useless["standard_error"] ** 2) ** 0.5
    return f"{(answer['mean'] - useless['mean']) / error:.1f} standard errors"


def clip_table(runs: list[dict]) -> str:
    static = {run["world_seed"]: run["pg_clipfrac"] for run in runs if run["condition"] == "static_clip"}
    rows = []
    for run in (run for run in runs if run["condition"] == "main" and run["world_seed"] in static):
        seed, ours = run["world_seed"], run["pg_clipfrac"]
        differs = next(
            (i for i, (a, b) in enumerate(zip(ours, static[seed], strict=False), 1) if a != b), "none"
        )
        for name, values in (("dynamic", ours), ("static", static[seed])):
            rows.append([seed, name, *(f"{value:.4f}" for value in values[:5]), differs])
    header = ["world seed", "clip", *(f"step {n}" for n in range(1, 6)), "first step that differs"]
    return "Share of clipped tokens:\n\n" + table(header, rows)


def gram_table(runs: list[dict]) -> str:
    rows = []
    for run in (run for run in runs if run["condition"] == "main"):
        share = run["gram_token_share"]
        rows.append([run["world_seed"], *(f"{share[step - 1]:.4f}" for step in (1, 5, 10, 20, len(share)))])
    header = ["world seed", "step 1", "step 5", "step 10", "step 20", "last step"]
    return "Share of the policy's tokens in strategic grams:\n\n" + table(header, rows)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
