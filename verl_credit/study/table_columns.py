"""The columns of the table of credits: exact bias, areas in exact worlds beside GRPO's, and the own cosine in the lab."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch

from verl_credit.errors import PreflightError, one_line
from verl_credit.study.bench import exact_rows
from verl_credit.study.exact_worlds.chain_learning import ChainLearning
from verl_credit.study.exact_worlds.coin_collector import coin_collector
from verl_credit.study.exact_worlds.door_key import door_key
from verl_credit.study.exact_worlds.learning import Learning, curve
from verl_credit.study.exact_worlds.mdp import Mdp
from verl_credit.study.exact_worlds.mdp_learning import MdpLearning, Network, imitated
from verl_credit.study.exact_worlds.taxi import taxi
from verl_credit.study.table_cosine import OWN, measure_cosines, shown_cosine
from verl_credit.study.table_row import Measured, Row, difference, row_of

Draw = Callable[[int, int, int], Mdp]
"""(unseen tasks, other tasks, seed) -> a world."""
CHAINS = {f"chain H {hops}": hops for hops in (2, 4, 8, 12)}
WORLDS: dict[str, Draw] = {
    "DoorKey 6x6": partial(door_key, 6, 25),
    "Taxi": partial(taxi, 27),
    "coin collector 12": partial(coin_collector, 12, 19),
}
"""With the limit of decisions."""
BIAS = "exact bias"
AREAS = (*CHAINS, *WORLDS)
COLUMNS = (BIAS, *AREAS, OWN)
LAB_WORK = Path("runs") / "table_lab"
"""What rows of the lab share: the later policy and the true values."""


@dataclass(frozen=True)
class Size:
    """A measurement of areas. The defaults are what the published table was declared with."""

    pairs: int = 12
    steps: int = 20
    seed: int = 0
    unseen: int = 64
    tasks: int = 1280


def columns_of(only: Collection[str]) -> list[str]:
    """The columns that are named, each by the beginning of its name: ``chain`` has all four. Nothing: every column."""
    for name in only:
        if not any(column.lower().startswith(name.lower()) for column in COLUMNS):
            raise PreflightError(f"--only {name}: expected the beginnings of {', '.join(COLUMNS)}")
    return [one for one in COLUMNS if not only or any(one.lower().startswith(name.lower()) for name in only)]


def measure_row(row: Row, folder: Path, columns: Collection[str], size: Size = Size()) -> Iterator[str]:
    """Adds what the folder lacks of the row, and yields a line for each column. What it lacks of GRPO is measured first."""
    file, reference = Measured.of(row, folder), row_of("none")
    known = file if row == reference else Measured.of(reference, folder)
    for column in columns:
        if column in AREAS:
            for one, its_file in ((reference, known), (row, file)):
                _check(its_file, column, one, size)
                if column not in its_file.columns:
                    its_file.add(column, area(one, column, size))
        elif column == OWN:
            measure_cosines([row], folder, LAB_WORK.resolve())
            file = Measured.of(row, folder)
        elif column not in file.columns:
            file.add(column, exact_bias(row))
        yield f"{column:<20} {shown(column, file, known)}"


def _check(file: Measured, column: str, row: Row, size: Size) -> None:
    """Raises PreflightError for a column of other seeds or steps, because no pair would be one."""
    asked = asdict(size) | {"n": row.group}
    given = file.columns.get(column, {}).get("settings", asked)
    if given != asked:
        raise PreflightError(
            f"{file.path}: {column} of {file.row} has {given}; expected {asked}: take another --dir"
        )


def exact_bias(row: Row) -> dict:
    """The lowest and the highest cosine of E[g] with grad E[r], over 9 settings of the exact world with true values."""
    begun, name = time.process_time(), row.candidate.path
    try:
        rows = exact_rows([row.candidate])
    except ValueError as error:
        return {"why": one_line(str(error))}
    found = [one["cosine"] for one in rows if one["mode"] == name and one["cosine"] is not None]
    seconds = round(time.process_time() - begun, 1)
    if not found:
        return {"why": "its expected gradient is 0", "cpu_seconds": seconds}
    return {"cosine": [round(min(found), 4), round(max(found), 4)], "cpu_seconds": seconds}


def area(row: Row, column: str, size: Size) -> dict:
    """The mean exact success over the steps, in points, of every run; and that with shuffled signals, if it reads any."""
    begun = time.process_time()
    measured: dict = {"settings": asdict(size) | {"n": row.group}}
    try:
        measured["area"] = _areas(row, column, size, shuffled=False)
        if signals := row.credit().signals:
            measured |= {"signals": list(signals), "shuffled": _areas(row, column, size, shuffled=True)}
    except ValueError as error:  # the mode refuses the tables or its options
        measured["why"] = one_line(str(error))
    return measured | {"cpu_seconds": round(time.process_time() - begun, 1)}


def _areas(row: Row, column: str, size: Size, *, shuffled: bool) -> list[float]:
    credit, random = row.credit(), torch.Generator().manual_seed(size.seed + 1)

    def give(rolled):
        return credit.advantages(rolled.shuffled(random) if shuffled else rolled)

    success_T_R = curve(_begun(column, size, row.group), give, size.steps)
    return [round(one, 3) for one in (100 * success_T_R.mean(0)).tolist()]


def _begun(column: str, size: Size, group: int) -> Learning:
    if column in CHAINS:
        return ChainLearning(CHAINS[column], size.pairs, size.seed, group=group)
    mdp, start = _world(column, size)
    return MdpLearning(mdp, Network(start), size.seed, group=group)


@cache
def _world(column: str, size: Size) -> tuple[Mdp, list[torch.Tensor]]:
    try:
        mdp = WORLDS[column](size.unseen, size.tasks, size.seed)
    except ModuleNotFoundError as error:
        use = "pip install 'verl-credit[env]', or --only chain"
        raise PreflightError(f"{column} needs the package {error.name}: {use}") from error
    return mdp, imitated(mdp, size.pairs, size.seed)


def shown(column: str, file: Measured, known: Measured) -> str:
    """The cell. For an area: the difference to GRPO's, and in brackets the shuffled control's. GRPO's own is the area."""
    measured = file.columns.get(column)
    if measured is None:
        return ""
    if "why" in measured:
        return measured["why"]
    if column == BIAS:
        low, high = measured["cosine"]
        return f"{low:.3f} to {high:.3f}"
    if column == OWN:
        return shown_cosine(measured, difference=file.row != known.row)
    of_grpo = known.columns[column]["area"]
    if file.row == known.row:
        return f"{sum(of_grpo) / len(of_grpo):.1f}"
    cells = [str(difference(measured[name], of_grpo)) for name in ("area", "shuffled") if name in measured]
    return cells[0] + "".join(f" ({one})" for one in cells[1:])
