"""Learning runs in DoorKey 6x6, in pairs: a transformer reads words of the state, and credits of verl_credit teach it.

    python evidence/doorkey/pairs.py FILE SEED [SEED ...]    runs what FILE (JSON lines) lacks, a line for each run
    python evidence/doorkey/pairs.py FILE                    prints the table of what FILE has
    python evidence/doorkey/pairs.py FILE --picture PNG      draws its curves, too

World, rollouts and updates are those of the table of credits (../credits/README.md); README.md declares the comparison.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import fmean, stdev

import torch
from scipy.stats import t as student
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_credit.credit.turn.modes import MODES
from verl_credit.precision import one_thread
from verl_credit.records.run.files import append_json, read_json_lines
from verl_credit.study.exact_worlds.door_key import door_key
from verl_credit.study.exact_worlds.fed_credit import FedCredit
from verl_credit.study.exact_worlds.mdp import Mdp
from verl_credit.study.exact_worlds.mdp_learning import MdpLearning

SIZE, LIMIT, UNSEEN, TASKS = 6, 25, 64, 1280
STEPS, RATE = 10, 5e-4
START, ERRS, IMITATED, IMITATION_RATE = 0.25, 0.4, 256, 3e-4
VALUES = {"scale": "rms", "negative": 0.5}
"""With these and its lam, `turn_gae` is what a run has that names nothing (state), or these values alone (progress)."""
ARMS = {
    "grpo": ("none", {}, None),
    "half_negative": ("none", {"outcome_operator": "half_negative"}, None),
    "gigpo": ("gigpo", {}, None),
    "state": ("turn_gae", VALUES | {"lam": 0.9}, "state"),
    "progress": ("turn_gae", VALUES | {"lam": 0.8}, "features"),
}
"""(mode, options, values). `features` are the progress of the state, as `turn_values=column:progress` has it."""
MEASURES = ("area", "end", "held_out", "seconds")


class Reader:
    """A Qwen3 of 64 dimensions and 3 layers. It reads eight words: how far ahead and to the right key, door and goal are,
    which sides have walls, and what is done. The output at the last word chooses the action."""

    runs = 1

    def __init__(self, actions: int, seed: int):
        torch.manual_seed(seed)
        self._first_action = 2 * SIZE + 1 + 8 + 3
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=self._first_action + actions, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, intermediate_size=128, tie_word_embeddings=True, initializer_range=0.06,
                max_position_embeddings=16,
            )
        )  # fmt: skip
        self.weights = [*self.model.parameters()]
        self.asked_N: torch.Tensor | None = None
        """The rows of features that `prob` is asked for; None: all."""

    def log_prob(self, x_R_N_F: torch.Tensor) -> torch.Tensor:
        """log pi, [1, N, A]; equal states are read once."""
        x_n_F, row_N = x_R_N_F[0].unique(dim=0, return_inverse=True)
        return self._read(x_n_F)[row_N][None]

    @torch.no_grad()
    def prob(self, mdp: Mdp) -> torch.Tensor:
        """pi [1, U, A] of the rows that are asked for; the others are 0."""
        asked_N = torch.arange(len(mdp.x_U_F)) if self.asked_N is None else self.asked_N
        prob_U_A = torch.zeros(len(mdp.x_U_F), mdp.actions)
        prob_U_A[asked_N] = torch.cat([self._read(mdp.x_U_F[some]) for some in asked_N.split(512)]).exp()
        return prob_U_A[None]

    def _read(self, x_N_F: torch.Tensor) -> torch.Tensor:
        hidden_N_D = self.model.model(input_ids=words(x_N_F), use_cache=False).last_hidden_state[:, -1]
        return self.model.lm_head(hidden_N_D)[:, self._first_action :].log_softmax(-1)


def words(x_N_F: torch.Tensor) -> torch.Tensor:
    """[N, 8]. Of the features of `door_key` it reads the last two of a thing's seven, walls, and key and open door."""
    things_N_3_7, walls_N_3, done_N_2 = x_N_F[:, :21].view(-1, 3, 7), x_N_F[:, 21:24], x_N_F[:, 24:26]
    far_N_6 = (things_N_3_7[:, :, 5:] * SIZE).round().long().flatten(1) + SIZE
    walls_N = (walls_N_3 * torch.tensor([1, 2, 4])).sum(1).long()
    return torch.column_stack([far_N_6, 2 * SIZE + 1 + walls_N, 2 * SIZE + 9 + done_N_2.sum(1).long()])


class Learning(MdpLearning):
    """One run, which evaluates the policy only in the maps of the step's tasks."""

    def __init__(self, mdp: Mdp, reader: Reader, seed: int):
        super().__init__(mdp, reader, seed, rate=RATE)
        self.reader, self.curve = reader, []

    def step(self, credit) -> None:
        mdp, first = self._mdp, self._steps * self._tasks
        tasks_q = self._order[0, first : first + self._tasks]
        maps_m, place_q = mdp.map_Q[tasks_q].unique(return_inverse=True)
        self.reader.asked_N = mdp.seen_M_S[maps_m].unique()
        *_, value_R_m_S = mdp.values(self.reader.prob(mdp), maps_m)
        self.curve.append(value_R_m_S[0, place_q, mdp.start_Q[tasks_q]].mean().item())
        super().step(credit)
        self.reader.asked_N = None


def imitated(mdp: Mdp, seed: int) -> tuple[Reader, dict]:
    """A policy as it is once it solves `START` of the unseen tasks. It imitates the actions of a walk on shortest ways that
    takes a random action in the share `ERRS` of its states."""
    reader, random = Reader(mdp.actions, seed), torch.Generator().manual_seed(seed)
    walker_M_S_A = (1 - ERRS) * mdp.best_actions() + ERRS / mdp.actions
    wanted_N_A = (mdp.visits(walker_M_S_A)[..., None] * walker_M_S_A).flatten(0, 1).float()
    target_U_A = torch.zeros(len(mdp.x_U_F), mdp.actions).index_add_(0, mdp.seen_M_S.flatten(), wanted_N_A)
    adam, updates, success = torch.optim.Adam(reader.weights, IMITATION_RATE), 0, 0.0
    while success < START:
        for _ in range(5):
            rows_n = torch.multinomial(target_U_A.sum(1), IMITATED, replacement=True, generator=random)
            wanted_n_A = target_U_A[rows_n] / target_U_A[rows_n].sum(1, keepdim=True)
            loss = -(wanted_n_A * reader.log_prob(mdp.x_U_F[rows_n][None])[0]).sum(-1).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        updates, success = updates + 5, mdp.success(reader.prob(mdp)).item()
    return reader, {"start": round(100 * success, 2), "imitated": updates}


def run(mdp: Mdp, reader: Reader, seed: int, arm: str) -> dict:
    """A line of the file: ``area`` and ``end`` are of tasks that were not asked before, ``held_out`` of the unseen ones."""
    mode, options, values = ARMS[arm]
    learning, credit, began = (
        Learning(mdp, reader, seed),
        FedCredit(MODES[mode], options, values),
        time.process_time(),
    )
    for _ in range(STEPS):
        learning.step(credit.advantages)
    curve = [round(100 * one, 2) for one in learning.curve]
    return {
        "seed": seed,
        "arm": arm,
        "area": round(fmean(curve), 2),
        "end": curve[-1],
        "held_out": round(100 * learning.success().item(), 2),
        "seconds": round(time.process_time() - began, 1),
        "curve": curve,
    }


def measure(file: Path, seeds: list[int]) -> None:
    mdp = door_key(SIZE, LIMIT, UNSEEN, TASKS, 0)
    for seed in seeds:
        done = {row["arm"] for row in read_json_lines(file) if row["seed"] == seed}
        if done >= set(ARMS):
            continue
        reader, begun = imitated(mdp, seed)
        weights = {name: value.clone() for name, value in reader.model.state_dict().items()}
        for arm in [arm for arm in ARMS if arm not in done]:
            reader.model.load_state_dict(weights)
            append_json(file, run(mdp, reader, seed, arm) | begun)


def table(rows: list[dict]) -> str:
    """Means of each arm, and its mean difference to GRPO over the seeds that both have."""
    lines = [
        f"| credit | runs | {' | '.join(MEASURES)} | area minus GRPO's | end | held out |",
        "|---" * 9 + "|",
    ]
    for arm in ARMS:
        own, base = ({row["seed"]: row for row in rows if row["arm"] == name} for name in (arm, "grpo"))
        cells = [f"{fmean(row[name] for row in own.values()):.1f}" for name in MEASURES] if own else []
        pairs = [(own[seed], base[seed]) for seed in sorted(own.keys() & base.keys()) if arm != "grpo"]
        cells += [difference([a[name] - b[name] for a, b in pairs]) for name in MEASURES[:3]]
        lines.append(f"| {arm} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def difference(apart: list[float]) -> str:
    """The mean, half of Student's 95 % interval, and how many pairs are above 0."""
    if len(apart) < 2:
        return "-"
    half = student.ppf(0.975, len(apart) - 1) * stdev(apart) / len(apart) ** 0.5
    return f"{fmean(apart):+.1f} ± {half:.1f} ({sum(one > 0 for one in apart)} of {len(apart)})"


def draw(rows: list[dict], file: Path) -> None:
    """Each arm's mean curve over its runs; the band is the standard error of the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for arm in ARMS:
        curves_R_T = torch.tensor([row["curve"] for row in rows if row["arm"] == arm])
        mean_T, error_T = curves_R_T.mean(0), curves_R_T.std(0) / len(curves_R_T) ** 0.5
        axes.plot(range(1, STEPS + 1), mean_T, label=f"{arm} ({len(curves_R_T)} runs)")
        axes.fill_between(range(1, STEPS + 1), mean_T - error_T, mean_T + error_T, alpha=0.15)
    axes.set(xlabel="step", ylabel="new tasks that are solved, %", title="DoorKey 6x6, 128 rollouts a step")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    with one_thread():
        measure(given.file, given.seeds)
    rows = read_json_lines(given.file)
    print(table(rows))
    if given.picture:
        draw(rows, given.picture)


if __name__ == "__main__":
    main()
