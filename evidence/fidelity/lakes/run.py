"""Credit on frozen lakes, where values are known: FrozenLake as a text tool, slippery or not, in two contexts.

    python evidence/fidelity/lakes/run.py FOLDER            # builds four small policies in FOLDER, unless they are there
    python evidence/fidelity/lakes/run.py FOLDER --again    # the tables from FOLDER/lakes.json
    python evidence/fidelity/lakes/run.py FOLDER --tiny     # two smaller policies, which takes seconds

Writes FOLDER/lakes.json (an entry for each world and context) and prints the tables of evidence/fidelity/README.md. The
published file is in the archive: after `make evidence-raw` FOLDER is build/evidence/fidelity/lakes.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # the package `lakes`, and not its files

from lakes.credit import ANCHORS  # noqa: E402
from lakes.demos import WalkStyle  # noqa: E402
from lakes.dynamic import state_values  # noqa: E402
from lakes.integrity import Agreement, compare  # noqa: E402
from lakes.measure import Result, measure  # noqa: E402
from lakes.policy import GridConfig, GridSubject, grid_subject  # noqa: E402
from lakes.world import roll  # noqa: E402
from verl_credit.study.fidelity.credits import Credit  # noqa: E402
from verl_credit.study.fidelity.values import values_of  # noqa: E402

RESULT = "lakes.json"
SEEDS = range(1, 7)
CAREFUL = WalkStyle(careful=0.8)
"""On ice that slips half of the walks careless would leave too few that arrive."""
SETTINGS = {
    "deterministic, state": (GridConfig("state", slippery=False), 1, 2, 8, 64),
    "slippery, state": (GridConfig("state", slippery=True, style=CAREFUL), 1, 2, 8, 64),
    "deterministic, state, groups of 64": (GridConfig("state", slippery=False), 1, 1, 64, 8),
    "slippery, state, groups of 64": (GridConfig("state", slippery=True, style=CAREFUL), 1, 1, 64, 8),
    "deterministic, history": (GridConfig("history", slippery=False), 1, 1, 8, 48),
    "slippery, history": (GridConfig("history", slippery=True, style=CAREFUL), 2, 1, 8, 16),
}
"""The policy; the step between starts, prompts per start, rollouts per prompt, continuations per context."""
QUICK = {"horizon": 4, "walks": 300, "layers": 1, "steps": 40}
TINY = {
    "deterministic, state": (GridConfig("state", slippery=False, **QUICK), 4, 1, 8, 8),
    "deterministic, history": (GridConfig("history", slippery=False, **QUICK), 8, 1, 8, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the policies and of the result")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="measure nothing; read the result")
    which.add_argument("--tiny", action="store_true", help="a size for a test")
    given = parser.parse_args()
    if not given.again:
        torch.set_num_threads(1)
        given.folder.mkdir(parents=True, exist_ok=True)
        result = run(given.folder, *((TINY, SEEDS[:1]) if given.tiny else (SETTINGS, SEEDS)))
        (given.folder / RESULT).write_text(as_text(result))
    print(page(json.loads((given.folder / RESULT).read_text())["entries"]))


def run(folder: Path, settings: dict, seeds: Sequence[int]) -> dict:
    entries = []
    for name, (config, every, repeats, rollouts, continuations) in settings.items():
        begun = time.process_time()
        policy = folder / f"{'slippery' if config.slippery else 'deterministic'}_{config.context}"
        subject = grid_subject(policy, config)
        built = time.process_time()
        result = measure(
            subject.world,
            subject.sampler(),
            subject.decoder(),
            every=every,
            repeats=repeats,
            rollouts=rollouts,
            continuations=continuations,
            seed=0,
            path=policy.with_name(f"{policy.name}_{rollouts}_{continuations}.jsonl"),
            say=lambda done, of, name=name: print(f"{name}: values of {done} of {of} lakes", flush=True),
        )
        spent = {"build": round(built - begun), "measure": round(time.process_time() - built)}
        entries.append(
            {
                "world": name,
                "config": asdict(config),
                "rollouts": rollouts,
                "continuations": continuations,
                "cpu_seconds": spent,
                **entry(result),
            }
        )
        if config.context == "state" and rollouts == 8:
            entries[-1]["other_draws"] = other_draws(subject, seeds)
        print(page(entries[-1:]), flush=True)
    machine = (
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread"
    )
    return {"machine": machine, "entries": entries}


def other_draws(subject: GridSubject, seeds: Sequence[int]) -> list[dict]:
    """Every context of a policy that sees the state, by other continuations of each seed."""
    world, exact = subject.world, state_values(subject.world, subject.decoder())
    states = [
        world.start(number, cell, turn)
        for number, lake in enumerate(world.lakes)
        for cell in lake.ice
        for turn in range(world.horizon)
    ]
    found = []
    for seed in seeds:
        values = values_of(
            states, partial(roll, subject.sampler(), world), continuations=64, seed=seed, prompts_at_once=1
        )
        found.append(rounded({"seed": seed, **agreement(compare(values, exact))}))
    return found


def agreement(found: Agreement) -> dict:
    return {
        "contexts": found.contexts,
        "mean_z": found.mean,
        "sd_z": found.sd,
        "z_of_mean": found.z_of_mean,
        "chi_square_z": found.fit.z,
        "shift": found.shift,
        "error": found.error,
    }


def minus_grpo(result: Result) -> dict:
    """Pearson of a credit less GRPO's, over tool turns, not corrected for noise: the value, and 95 % by bootstrap over
    prompts, the same for both. Without credit that shares its continuations with A*."""
    tool = [place for place, turn in enumerate(result.turns) if turn.kind == "tool"]
    prompt = np.array([result.turns[place].prompt for place in tool])
    star = np.array([result.turns[place].a_star for place in tool])
    drawn = np.random.default_rng(0).integers(len(result.groups), size=(1000, len(result.groups)))
    weight = np.stack(
        [np.ones(len(result.groups)), *(np.bincount(d, minlength=drawn.shape[1]) for d in drawn)]
    )

    def pearson(credit: Credit) -> np.ndarray:
        flat = [one for group in credit.advantages for row in group for one in row]
        x, y = np.array(flat)[tool], star
        terms = [
            np.bincount(prompt, t, weight.shape[1]) for t in (np.ones_like(x), x, y, x * x, y * y, x * y)
        ]
        n, sx, sy, sxx, syy, sxy = np.stack(terms) @ weight.T
        return (n * sxy - sx * sy) / np.sqrt((n * sxx - sx**2) * (n * syy - sy**2))

    of = {credit.name: credit for credit in result.credits if credit.advantages is not None}
    grpo, found = pearson(of["none, grpo"]), {}
    for name, credit in of.items():
        if name.startswith(("gigpo", "hgpo", "turn_gae")) and not credit.held_out:
            difference = pearson(credit) - grpo
            low, high = np.quantile(difference[1:], [0.025, 0.975])
            found[name] = {"value": float(difference[0]), "low": float(low), "high": float(high)}
    return found


def entry(result: Result) -> dict:
    rewards = np.array([[t.reward for t in group] for group in result.groups])
    stars = np.array([turn.a_star for turn in result.turns])
    return rounded(
        {
            "prompts": len(result.groups),
            "turns": len(result.turns),
            "contexts": result.contexts,
            "success": rewards.mean(),
            "tied_prompts": (rewards.std(axis=1) == 0).mean(),
            "repeated": {name: repeated(result, anchor) for name, anchor in ANCHORS.items()},
            "sd_of_a_star": stars.std(),
            "sd_of_luck": np.std(result.luck),
            "dynamic": agreement(result.dynamic),
            "reliability": asdict(result.reliability),
            "sure_pairs": result.sure_pairs,
            "integrity": [asdict(score) for score in result.integrity],
            "minus_grpo": minus_grpo(result),
            "credits": {
                credit.name: {"reason": credit.reason} if found is None else asdict(found)
                for credit, found in zip(result.credits, result.agreements, strict=True)
            },
        }
    )


def repeated(result: Result, anchor) -> float:
    """The share of turns whose state another trajectory of the prompt visits, too."""
    shared = []
    for group in result.groups:
        visits = [{anchor(step.state) for step in trajectory.steps} for trajectory in group]
        for row, trajectory in enumerate(group):
            others = set().union(*(some for other, some in enumerate(visits) if other != row))
            shared += [anchor(step.state) in others for step in trajectory.steps]
    return float(np.mean(shared))


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def as_text(result: dict) -> str:
    """A line for each measure."""
    return (
        re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), json.dumps(result, indent=1)) + "\n"
    )


def page(entries: list[dict]) -> str:
    """What is known of each world, and then a table for each measure."""
    columns = [entry["world"] for entry in entries]
    facts = {
        "right": lambda e: f"{e['success']:.2f}",
        "prompts, rollouts of each; turns": lambda e: f"{e['prompts']}, {e['rollouts']}; {e['turns']}",
        "prompts whose rollouts end alike": lambda e: f"{e['tied_prompts']:.0%}",
        "turns in a cell that another trajectory visits": lambda e: f"{e['repeated']['cell']:.0%}",
        "and with as many moves left": lambda e: f"{e['repeated']['cell and moves left']:.0%}",
        "continuations; contexts": lambda e: f"{e['continuations']}; {e['dynamic']['contexts']}",
        "z: mean, sd": lambda e: f"{e['dynamic']['mean_z']:+.3f}, {e['dynamic']['sd_z']:.3f}",
        "z of the mean, of the chi-square": lambda e: (
            f"{e['dynamic']['z_of_mean']:+.1f}, {e['dynamic']['chi_square_z']:+.1f}"
        ),
        "six other draws: z of the mean, of the chi-square": lambda e: ", ".join(
            f"{d['z_of_mean']:+.1f} {d['chi_square_z']:+.1f}" for d in e.get("other_draws", ())
        ),
        "shift, error beyond the noise": lambda e: (
            f"{e['dynamic']['shift']:+.3f}, {e['dynamic']['error']:.3f}"
        ),
        "sd of A*, of luck": lambda e: f"{e['sd_of_a_star']:.3f}, {e['sd_of_luck']:.3f}",
        "reliability of A*": lambda e: f"{e['reliability']['value']:.2f}",
        "CPU seconds: policy, measurement": lambda e: (
            f"{e['cpu_seconds']['build']}, {e['cpu_seconds']['measure']}"
        ),
    }
    lines = table("", columns, {name: [shown(e) for e in entries] for name, shown in facts.items()})
    credits = list(dict.fromkeys(name for entry in entries for name in entry["credits"]))
    for measure_name in ("pearson", "same_turn", "pairs"):
        rows = {
            name: [cell(entry["credits"].get(name), measure_name) for entry in entries]
            for name in credits
            if any("pearson" in entry["credits"].get(name, {}) for entry in entries)
        }
        lines += ["", *table(measure_name, columns, rows)]
    names = list(dict.fromkeys(name for entry in entries for name in entry["minus_grpo"]))
    rows = {name: [between(entry["minus_grpo"].get(name)) for entry in entries] for name in names}
    return "\n".join([*lines, "", *table("pearson minus GRPO's", columns, rows)])


def between(found: dict | None) -> str:
    return "" if found is None else f"{found['value']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"


def table(title: str, columns: list[str], rows: dict[str, list[str]]) -> list[str]:
    head = [f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    return head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def cell(found: dict | None, measure_name: str) -> str:
    if found is None or "reason" in found:
        return ""
    measure_of = found[measure_name]
    if measure_of["value"] is None:
        return "undefined"
    half = (measure_of["high"] - measure_of["low"]) / 2
    return f"{measure_of['value']:.2f} ± {half:.2f}"


if __name__ == "__main__":
    main()
