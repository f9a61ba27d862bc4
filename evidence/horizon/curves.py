"""The campaigns of curves.yaml and choice.yaml: area and held-out exact match, with Holm over all comparisons of a horizon.

    python evidence/horizon/curves.py FILE FOLDER [FOLDER ...]     adds the campaigns' finished runs to FILE (JSON lines)
    python evidence/horizon/curves.py FILE                         the tables of what FILE has

Prints for each declared comparison the mean difference over the pairs of seed and world, half of Student's 95 % interval,
how many pairs are above, and p of Student's test, by itself and after Holm. The areas are a family of comparisons, and
held-out questions, greedy and sampled, another. A pair that lacks a run is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import numpy as np
from omegaconf import OmegaConf
from scipy import stats
from statsmodels.stats.multitest import multipletests

from verl_credit.records.run.files import METRICS, VALIDATION, append_json, read_json_lines
from verl_credit.study.campaign.file import read_campaign
from verl_credit.study.campaign.record import read_record
from verl_credit.study.campaign.state import states

CHOSEN = "learned"
"""Of curves.yaml: page has its area less that of every other condition, also where that was not declared."""
FAMILIES = (("area",), ("greedy", "sampled"))
NAMED = ("campaign", "hops", "condition", "seed", "world")
EXPLAINED = "credit/values/explained_variance"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folders", type=Path, nargs="*")
    given = parser.parse_args()
    for folder in given.folders:
        known = [[row[name] for name in NAMED] for row in read_json_lines(given.file)]
        for row in runs(folder):
            if [row[name] for name in NAMED] not in known:
                append_json(given.file, row)
    print(page(read_json_lines(given.file)))


def runs(folder: Path) -> list[dict]:
    """A line for every run that is done. Held-out values are those after the last step."""
    found, campaign = [], read_record(folder).campaign
    for state in states(campaign, folder):
        if state.value is None:
            continue
        steps = read_json_lines(state.folder / METRICS)
        held_out = read_json_lines(state.folder / VALIDATION)[-1]
        hops = OmegaConf.load(state.folder / "config.yaml").lab.hops
        named = zip(
            NAMED, (campaign.name, hops, state.run.condition, state.run.seed, state.run.world), strict=True
        )
        found.append(
            {
                **dict(named),
                "area": 100 * state.value,
                **{how: 100 * held_out[f"val-aux/lab-{how}/em/mean@1"] for how in ("greedy", "sampled")},
                "em": [row["credit/outcome/em"] for row in steps],
                "explained": [round(row[EXPLAINED], 3) for row in steps if EXPLAINED in row],
            }
        )
    return found


def page(rows: list[dict]) -> str:
    tables = []
    for name, hops in sorted({(row["campaign"], row["hops"]) for row in rows}):
        campaign, _ = read_campaign(str(Path(__file__).parent / f"{name.removeprefix('horizon_')}.yaml"))
        some = [row for row in rows if (row["campaign"], row["hops"]) == (name, hops)]
        tables += [
            "",
            f"{name}, {hops} searches",
            "",
            *means(some),
            *compared(some, campaign.pairs()),
        ]
    return "\n".join([*tables, *not_declared([row for row in rows if row["condition"] == CHOSEN], rows)])


def not_declared(chosen: list[dict], rows: list[dict]) -> list[str]:
    """The areas of `CHOSEN` less those of each other condition, by horizon and over all of them; p is not corrected."""
    hops = sorted({row["hops"] for row in chosen})
    heads = [*(f"{one} searches" for one in hops), *(["both"] if len(hops) > 1 else [])]
    if not hops:
        return []
    lines = ["", f"| area of {CHOSEN} minus that of | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    keys = {(row["campaign"], row["hops"]) for row in chosen}
    # Another campaign may have other labs.
    rows = [row for row in rows if (row["campaign"], row["hops"]) in keys]
    others = dict.fromkeys(row["condition"] for row in rows)
    for other in [one for one in others if one != CHOSEN]:
        cells = []
        for some in [[one] for one in hops] + ([hops] if len(hops) > 1 else []):
            a, b = (
                {
                    (row["hops"], row["seed"], row["world"]): row["area"]
                    for row in rows
                    if row["condition"] == name and row["hops"] in some
                }
                for name in (CHOSEN, other)
            )
            mean, half, above, n, p = difference(a, b)
            cells.append(f"{mean:+.1f} ± {half:.1f} ({above} of {n}, p {p:.4f})")
        lines.append(f"| {other} | {' | '.join(cells)} |")
    return lines


def means(rows: list[dict]) -> list[str]:
    lines = [
        "| condition | runs | area | first step | last step | greedy | sampled | EV of V |",
        "|---" * 8 + "|",
    ]
    for condition in dict.fromkeys(row["condition"] for row in rows):
        own = [row for row in rows if row["condition"] == condition]
        ends = [fmean(100 * row["em"][step] for row in own) for step in (0, -1)]
        cells = [
            fmean(row["area"] for row in own),
            *ends,
            *(fmean(row[how] for row in own) for how in FAMILIES[1]),
        ]
        explained = [one for row in own for one in row["explained"]]
        last = f"{fmean(explained):.2f}" if explained else ""
        lines.append(f"| {condition} | {len(own)} | {' | '.join(f'{cell:.1f}' for cell in cells)} | {last} |")
    return lines


def compared(rows: list[dict], comparisons: list[tuple[str, str]]) -> list[str]:
    def of(condition: str, measure: str) -> dict[tuple[int, int], float]:
        return {(row["seed"], row["world"]): row[measure] for row in rows if row["condition"] == condition}

    lines = ["", "| measure | comparison | points | pairs above | p | p, Holm |", "|---" * 6 + "|"]
    for family in FAMILIES:
        own = [(m, a, b, *difference(of(a, m), of(b, m))) for m in family for a, b in comparisons]
        holm = multipletests([p if np.isfinite(p) else 1.0 for *_, p in own], method="holm")[1]
        for (measure, a, b, mean, half, above, n, p), corrected in zip(own, holm, strict=True):
            cells = [f"{measure}, {n} pairs", f"{a} - {b}", f"{mean:+.1f} ± {half:.1f}", f"{above} of {n}"]
            lines.append(f"| {' | '.join([*cells, f'{p:.4f}', f'{corrected:.4f}'])} |")
    return lines


def difference(a: dict, b: dict) -> tuple[float, float, int, int, float]:
    """(mean, half of the interval, pairs above, pairs, p)"""
    apart = np.array([a[block] - b[block] for block in sorted(a.keys() & b.keys())])
    n = len(apart)
    if n < 2:
        return float(apart.mean()) if n else np.nan, np.nan, int((apart > 0).sum()), n, np.nan
    half = stats.t.ppf(0.975, n - 1) * apart.std(ddof=1) / n**0.5
    return (
        float(apart.mean()),
        float(half),
        int((apart > 0).sum()),
        n,
        float(stats.ttest_1samp(apart, 0).pvalue),
    )


if __name__ == "__main__":
    main()
