"""Own cosine and learning curves in the chain world, by the number of searches that an answer takes. Anchors are the states.

python evidence/horizon/chain.py FILE            # measures, writes FILE (JSON) and prints the tables: minutes of a core
python evidence/horizon/chain.py FILE --again    # the tables from FILE, which may be numbers_chain.json here
python evidence/horizon/chain.py FILE --tiny     # a size for a test
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from scipy import stats

from verl_credit.credit import MODES
from verl_credit.credit.turn.values import explained_variance
from verl_credit.study.exact_worlds.chain_credit import own_cosines, without_values
from verl_credit.study.exact_worlds.chain_learning import ChainLearning
from verl_credit.study.exact_worlds.fed_credit import FedCredit
from verl_credit.study.exact_worlds.learning import curve

FULL = {"hops": [1, 2, 3, 4, 6, 8], "batches": 400, "learns": [2, 4, 8, 12], "runs": 20, "steps": 20}
TINY = {"hops": [1, 2], "batches": 20, "learns": [2], "runs": 3, "steps": 2}
GRPO = "grpo"
OF_VALUES = ("true values", "values of EV 0.5", "values of EV 0.2")
SHOWN = ["half_negative", "gigpo"]
SHOWN += [
    f"{of}, lam {how}" for of in OF_VALUES for how in ("0", "0.5", "0.8", "1", "0, halved", "0.5, halved")
]
"""Other rows of own cosines are in the file alone."""
WITH_VALUES = {
    "A*": ("true", 0.0, 1.0),
    "A*, halved": ("true", 0.0, 0.5),
    "true values, lam 0.5": ("true", 0.5, 1.0),
    **{f"learned, lam {lam:g}": ("features", lam, 1.0) for lam in (0.0, 0.5, 0.8, 1.0)},
    "learned, lam 0.5, halved": ("features", 0.5, 0.5),
    "learned, lam 0.8, halved": ("features", 0.8, 0.5),
}
"""(values, lam, the weight below 0). Learned values see the hops that are done and the searches that were wasted."""


def credits() -> dict[str, FedCredit]:
    """Every credit that learns, without a replay."""
    of_values = {
        name: FedCredit(MODES["turn_gae"], {"lam": lam, "negative": negative}, values)
        for name, (values, lam, negative) in WITH_VALUES.items()
    }
    return without_values() | of_values


def learned(credit: FedCredit, hops: int, runs: int, steps: int) -> tuple[torch.Tensor, list[float]]:
    """(success after each step, [steps, R]; the share of the true values' variance that learned ones explain, by step)."""
    shares: list[float] = []

    def give(rolled):
        credit_B_K1 = credit.advantages(rolled)
        if credit.values == "features":
            values = credit.value_B_K1, rolled.true_B_K1()
            shares.append(explained_variance(*(value_B_K1[rolled.turn_B_K1] for value_B_K1 in values)))
        return credit_B_K1

    return curve(ChainLearning(hops, runs, 0), give, steps), shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", action="store_true", help="measure nothing; read the file")
    which.add_argument("--tiny", action="store_true", help="a size for a test")
    given = parser.parse_args()
    if not given.again:
        torch.set_num_threads(1)
        given.file.write_text(as_text(measure(**TINY if given.tiny else FULL)))
    print(page(json.loads(given.file.read_text())))


def measure(*, hops: list[int], batches: int, learns: list[int], runs: int, steps: int) -> dict:
    cosine, area, end, explained, seconds = {}, {}, {}, {}, {}
    for h in hops:
        begun = time.process_time()
        found = own_cosines(h, batches)
        for name, of in found.items():
            apart = of if name in (GRPO, "turns") else of - found[GRPO]
            cosine.setdefault(name, []).append(with_half(apart))
        seconds[f"own cosine, H {h}"] = round(time.process_time() - begun, 1)
    for h in learns:
        begun, of_grpo = time.process_time(), None
        for name, credit in credits().items():
            curve_T_R, shares = learned(credit, h, runs, steps)
            of_grpo = curve_T_R if of_grpo is None else of_grpo
            apart = curve_T_R if name == GRPO else curve_T_R - of_grpo
            area.setdefault(name, []).append(with_half(100 * apart.mean(0)))
            end.setdefault(name, []).append(with_half(100 * apart[-1]))
            if shares:
                first = shares[: steps // 2]
                explained.setdefault(name, []).append(round(sum(first) / len(first), 2))
        seconds[f"learning, H {h}"] = round(time.process_time() - begun, 1)
    machine = (
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread"
    )
    settings = {"hops": hops, "batches": batches, "learns": learns, "runs": runs, "steps": steps}
    values = {"own_cosine": cosine, "area": area, "end": end, "explained": explained}
    return {"machine": machine, "cpu_seconds": seconds, **settings, **values}


def with_half(values_R: torch.Tensor) -> list[float]:
    """(mean, half of Student's 95 % interval)"""
    n = len(values_R)
    half = stats.t.ppf(0.975, n - 1) * float(values_R.std()) / n**0.5
    return [round(float(values_R.mean()), 5), round(half, 5)]


def as_text(result: dict) -> str:
    """A line for each row of a table."""
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            rows = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in value.items())
            lines.append(f"{json.dumps(name)}: {{\n  {rows}}}")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{" + ",\n ".join(lines) + "}\n"


def page(result: dict) -> str:
    cosine = result["own_cosine"]
    columns = " | ".join(f"H {h}" for h in result["hops"])
    lines = [f"| own cosine minus GRPO's | {columns} |", "|---" * (1 + len(result["hops"])) + "|"]
    lines.append(row("turns", [f"{mean:.1f}" for mean, _ in cosine["turns"]]))
    lines.append(row("GRPO's own cosine", [f"{mean:.3f} ± {half:.3f}" for mean, half in cosine[GRPO]]))
    lines += [row(name, [f"{mean:+.3f} ± {half:.3f}" for mean, half in cosine[name]]) for name in SHOWN]
    columns = " | ".join(f"H {h}" for h in result["learns"])
    lines += ["", f"| area minus GRPO's, points | {columns} |", "|---" * (1 + len(result["learns"])) + "|"]
    lines.append(row("GRPO's area", [f"{mean:.1f}" for mean, _ in result["area"][GRPO]]))
    rest = {name: of for name, of in result["area"].items() if name != GRPO}
    lines += [row(name, [f"{mean:+.1f} ± {half:.1f}" for mean, half in of]) for name, of in rest.items()]
    of = result["explained"]["learned, lam 0.5"]
    lines.append(row("EV of V, learned, lam 0.5, first half", [f"{share:.2f}" for share in of]))
    return "\n".join(lines)


def row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
