"""Do the twin's learning curves look like verl's trainer's? Same recipe, overrides, world, questions and seeds.

    python evidence/fidelity/twin_against_trainer.py RUNS --modes turn-group-v1d --seeds 1 2 3 --parallel 2
    python evidence/fidelity/twin_against_trainer.py RUNS --compare       # what is there, without running anything

The trainer's curves are those of evidence/campaigns/turn_modes_lab. The twin runs the same campaign in the folder RUNS, GRPO
and the named modes; what is done there is not repeated. A run takes 140 s of one core (20 minutes beside eight
other jobs on two cores). Writes twin_against_trainer.json and .png beside this file.

A seed means other random numbers to each of the two, so runs are not paired. With means m over seeds, their standard
deviations s and n seeds on either side:

    difference = m_twin - m_trainer        standard error = sqrt(s_twin^2 / n_twin + s_trainer^2 / n_trainer)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import matplotlib
import yaml

from verl_credit.campaign.curve import area
from verl_credit.campaign.file import Campaign
from verl_credit.campaign.record import CONDITION, read_record
from verl_credit.campaign.runner import run_campaign
from verl_credit.campaign.state import State, states

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TRAINER = HERE.parent / "campaigns" / "turn_modes_lab"
OUT = HERE / "twin_against_trainer"
METRICS = ("val-aux/lab-sampled/em/mean@1", "val-aux/lab-greedy/em/mean@1")
COLOURS = {"trainer": "#0072b2", "twin": "#d55e00"}
OWN = (
    "lab.dir",
    "data.",
    "actor_rollout_ref.model.path",
    "trainer.default_local_dir",
    "search.",
    "actor_rollout_ref.rollout.prometheus",
)
"""Keys with folders and addresses of a machine."""

Curves = dict[int, dict[int, float]]
"""Seed -> step -> exact match on 256 held-out questions."""


def run(folder: Path, modes: Sequence[str], seeds: list[int], parallel: int) -> int:
    declared = read_record(TRAINER).campaign
    wanted = {name: declared.conditions[name] for name in (declared.baseline, *modes)}
    tree = declared.model_dump() | {"engine": "twin", "conditions": wanted, "seeds": seeds, "budget": {}}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "campaign.yaml"
        file.write_text(yaml.safe_dump(tree, sort_keys=False))
        return run_campaign(str(file), folder, parallel)[0]


def curves(folder: Path, campaign: Campaign, metric: str, mode: str) -> Curves:
    """Of the runs that are done."""
    read = campaign.model_copy(update={"metric": campaign.metric.model_copy(update={"name": metric})})
    return {
        one.run.seed: dict(zip(one.curve.steps, one.curve.values, strict=True))
        for one in states(read, folder)
        if one.run.condition == mode and one.state is State.DONE
    }


def compare(trainer: Curves, twin: Curves, window: Sequence[int]) -> dict:
    areas = {
        name: {seed: area(list(curve), list(curve.values()), *window) for seed, curve in found.items()}
        for name, found in (("trainer", trainer), ("twin", twin))
    }
    steps = sorted(set.intersection(*(set(curve) for found in (trainer, twin) for curve in found.values())))
    return {
        "area_of_seed": areas,
        "area": difference(*(list(areas[name].values()) for name in ("trainer", "twin"))),
        "steps": {
            step: difference(*([curve[step] for curve in found.values()] for found in (trainer, twin)))
            for step in steps
        },
    }


def difference(trainer: Sequence[float], twin: Sequence[float]) -> dict[str, float | None]:
    """The standard error is null for fewer than two seeds on a side."""
    spread = [stdev(values) if len(values) > 1 else None for values in (trainer, twin)]
    error = None
    if None not in spread:
        error = sum(s**2 / len(v) for s, v in zip(spread, (trainer, twin), strict=True)) ** 0.5
    return {
        "trainer": mean(trainer), "twin": mean(twin), "difference": mean(twin) - mean(trainer),
        "standard_error": error, "sd_trainer": spread[0], "sd_twin": spread[1],
    }  # fmt: skip


def other_keys(folder: Path, mode: str) -> dict[str, list]:
    """[the trainer's value, the twin's] of every key that is not the same; null where it is absent."""
    before, now = (json.loads((at / mode / CONDITION).read_text()) for at in (TRAINER, folder))
    return {
        key: [before.get(key), now.get(key)]
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(OWN)
    }


def draw(found: dict[str, dict[str, dict[str, Curves]]], path: Path) -> None:
    figure, axes = plt.subplots(
        len(METRICS),
        len(found),
        figsize=(4.5 * len(found), 7),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for column, (mode, of_metric) in enumerate(found.items()):
        for axis, (metric, of_engine) in zip(axes[:, column], of_metric.items(), strict=True):
            for engine, of_seed in of_engine.items():
                for number, curve in enumerate(of_seed.values()):
                    label = f"{engine}, {len(of_seed)} seeds" if number == 0 else None
                    axis.plot(
                        list(curve), list(curve.values()), color=COLOURS[engine], alpha=0.7, label=label
                    )
            axis.set(title=f"{mode}: {metric.split('/')[1]}", xlabel="step", ylim=(0, 1))
            axis.legend()
    for axis in axes[:, 0]:
        axis.set_ylabel("exact match, 256 held-out questions")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--modes", nargs="+", default=["turn-group-v1d"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    if not given.compare and (code := run(given.runs, given.modes, given.seeds, given.parallel)):
        return code
    theirs, ours = (read_record(folder).campaign for folder in (TRAINER, given.runs))
    found, result = {}, {}
    for mode in ours.conditions:
        of_metric = {
            metric: {
                "trainer": curves(TRAINER, theirs, metric, mode), "twin": curves(given.runs, ours, metric, mode)
            }
            for metric in METRICS
        }  # fmt: skip
        if all(all(engines.values()) for engines in of_metric.values()):
            found[mode] = of_metric
            compared = {
                metric: compare(engines["trainer"], engines["twin"], ours.metric.window)
                for metric, engines in of_metric.items()
            }
            result[mode] = {"other_keys": other_keys(given.runs, mode), **compared}
    if not found:
        print(f"{given.runs} has no run that is done")
        return 1
    OUT.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(found, OUT.with_suffix(".png"))
    for mode, of_metric in result.items():
        for metric in METRICS:
            one = of_metric[metric]["area"]
            print(mode, metric, {name: value and round(value, 4) for name, value in one.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
