"""How much faster can the lab be learned if every turn gets the credit that it earned?

    python evidence/fidelity/ceiling.py RUNS --worlds 0 1 2 --seeds 1 2 3 --parallel 2
    python evidence/fidelity/ceiling.py RUNS --compare        # what is there, without running anything

Three credits of the same objective, E[r], in the twin's loop; they differ in nothing but noise:

    rloo   A = r - mean of the other rollouts' r         the same for all turns
    value  A_k = r - V(s_k)                              a perfect baseline
    mc     A_k = V(s_{k+1}) - V(s_k), at the end r - V   the true advantage

V is found anew in every step for every distinct context, by 8 continuations of the policy that is being trained. That is
no way to train: it takes three times as long. It says what a value head (value) or a better credit (mc) could reach at most.
Runs of one seed and world have the same questions in the same order; the difference is paired over them.
Writes ceiling.json beside this file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import torch

from verl_credit.campaign.curve import area
from verl_credit.campaign.statistics import compare, mean
from verl_credit.fidelity.rollout import Trajectory
from verl_credit.fidelity.sampler import digest
from verl_credit.fidelity.values import Value, states_of, values_of
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.rules import validate
from verl_credit.recipe.world import world_of
from verl_credit.run.files import METRICS, read_json_lines
from verl_credit.turns.step_credit import TurnStep
from verl_credit.twin.check import check_twin
from verl_credit.twin.credit import Credit
from verl_credit.twin.train import Twin
from verl_credit.twin.update import UpdateBatch

OUT = Path(__file__).with_suffix(".json")
CREDITS = ("rloo", "value", "mc")
CONTINUATIONS, STEPS = 8, 20
METRIC = "credit/outcome/em"


class ValueTwin(Twin):
    """Finds V of every context of a step's rollouts before it gives them credit. ``name``: value or mc."""

    def __init__(self, *args, name: str):
        super().__init__(*args)
        self.credit = ValueCredit(self, self.credit, name)

    def step(self, step: int, questions: list[int]) -> dict[str, float]:
        self.seed = 1000 * self.config.seed + step
        return super().step(step, questions)

    def _roll(self, subject, questions, count, name, *, greedy=False) -> list[list[Trajectory]]:
        groups = super()._roll(subject, questions, count, name, greedy=greedy)
        if subject is self.train_set:
            self.groups = groups
            self.values = values_of(
                states_of(groups),
                subject.sampler(),
                subject.protocol,
                continuations=CONTINUATIONS,
                seed=self.seed,
                prompts_at_once=len(groups),
            )
        return groups


class ValueCredit:
    """In place of `twin.credit.Credit`, whose rows get other advantages."""

    def __init__(self, twin: ValueTwin, plain: Credit, name: str):
        self._twin, self._plain, self._name = twin, plain, name

    def batch(self, *args) -> tuple[UpdateBatch, TurnStep, dict[str, float]]:
        rows, found, metrics = self._plain.batch(*args)
        advantage_B_T = torch.zeros_like(rows.advantage_B_T)
        trajectories = (trajectory for group in self._twin.groups for trajectory in group)
        for row, trajectory in enumerate(trajectories):
            of_turn = torch.tensor(turn_credit(trajectory, self._twin.values, self._name))
            written = rows.turn_ids_B_T[row] >= 0
            advantage_B_T[row, written] = of_turn[rows.turn_ids_B_T[row, written]]
        return replace(rows, advantage_B_T=advantage_B_T), found, metrics


def turn_credit(trajectory: Trajectory, values: dict[str, Value], name: str) -> list[float]:
    v = [values[digest(step.state.ids)].value for step in trajectory.steps]
    if name == "value":
        return [trajectory.reward - before for before in v]
    return [after - before for before, after in pairwise([*v, trajectory.reward])]


def train(folder: Path, credit: str, world: int, seed: int) -> None:
    torch.set_num_threads(1)
    config = load_config(
        "lab",
        [
            f"run_dir={folder}", f"seed={seed}", f"lab.world_seed={world}", f"trainer.total_training_steps={STEPS}",
            "trainer.test_freq=-1", "algorithm.info_gain_norm_mode=none", "algorithm.advantage_mode=rloo",
        ],
    )  # fmt: skip
    validate(config)
    check_twin(config)
    world_of(config).build(config, lambda share, text: None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).unlink(missing_ok=True)
    say = functools.partial(print, flush=True)
    run = Twin(config, folder, say) if credit == "rloo" else ValueTwin(config, folder, say, name=credit)
    with (folder / METRICS).open("w") as file:
        for step, metrics in run.steps():
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()


def curve(folder: Path) -> list[float]:
    """Exact match of every step's rollouts; nothing for a run that has not ended."""
    rows = list(read_json_lines(folder / METRICS)) if (folder / METRICS).exists() else []
    return [row[METRIC] for row in rows] if len(rows) == STEPS else []


def compared(runs: Path) -> dict:
    areas = {credit: {} for credit in CREDITS}
    curves = {credit: [] for credit in CREDITS}
    for folder in sorted(runs.glob("*/seed-*-world-*")):
        if found := curve(folder):
            areas[folder.parent.name][folder.name] = area(range(1, STEPS + 1), found, 1, STEPS)
            curves[folder.parent.name].append(found)
    pairs = [("value", "rloo"), ("mc", "rloo"), ("mc", "value")]
    return {
        "continuations": CONTINUATIONS,
        "steps": STEPS,
        "areas": areas,
        "mean_area": {credit: vars(mean(list(of.values()))) for credit, of in areas.items()},
        "mean_curve": {c: [sum(x) / len(x) for x in zip(*of, strict=True)] for c, of in curves.items()},
        "differences": {f"{a} - {b}": vars(compare(a, b, areas[a], areas[b])) for a, b in pairs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--compare", action="store_true")
    parser.add_argument(
        "--one", nargs=3, metavar=("CREDIT", "WORLD", "SEED"), help="one run, in this process"
    )
    args = parser.parse_args()
    if args.one:
        credit, world, seed = args.one[0], int(args.one[1]), int(args.one[2])
        return train(args.runs / credit / f"seed-{seed}-world-{world}", credit, world, seed)
    waiting = [] if args.compare else list(product(args.seeds, args.worlds, CREDITS))
    running: list[subprocess.Popen] = []
    for seed, world, credit in waiting:
        if curve(args.runs / credit / f"seed-{seed}-world-{world}"):
            continue
        if len(running) == args.parallel:
            running.pop(0).wait()
        print(f"{credit}, world {world}, seed {seed}", flush=True)
        command = [sys.executable, __file__, str(args.runs), "--one", credit, str(world), str(seed)]
        running.append(subprocess.Popen(command))
    for process in running:
        process.wait()
    found = compared(args.runs)
    OUT.write_text(json.dumps(found, indent=1, default=str) + "\n")
    for name, of in found["differences"].items():
        print(name, {key: of[key] for key in of if key not in ("a", "b")})


if __name__ == "__main__":
    main()
