"""`verl-credit evaluate RUN|MODEL --data FILE`, and `verl-credit evaluate compare A B`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from verl_credit.cli.command import SHIPPED, AsJson, ChildFailed, ConfigDir, Out, RunOverrides, ends
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.records.run.files import DamagedFile, plain, write_text

if TYPE_CHECKING:
    from verl_credit.study.evaluation import Measured

FAILED = {IntegrityError: ExitCode.INTEGRITY, ChildFailed: ExitCode.FAILED}


@ends("evaluate {policy}", OSError, DamagedFile, failed=FAILED, interrupted="interrupted: nothing is written")
def evaluate(
    policy: Annotated[str, Argument(help="a run, RUN/checkpoints/global_step_N, or a model")],
    overrides: RunOverrides = (),
    data: Annotated[list[Path], Option(help="a parquet file, repeatable; data.val_files if not given")] = (),
    step: Annotated[int | None, Option(min=0, help="of a run; its last if not given, 0: its start")] = None,
    samples: Annotated[int, Option(min=0, help="per question at temperature 1, beside the greedy one")] = 0,
    config_name: Annotated[str | None, Option(help=f"for a model: {SHIPPED}")] = None,
    config_dir: ConfigDir = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Exit codes as those of `train`: 4 refused; 5 not reported, the numbers would be wrong; 1 failed; 130 interrupted."""
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # before Ray is imported
    from verl_credit.cli.another_run import LOG
    from verl_credit.cli.evaluate.policy import find_policy
    from verl_credit.cli.evaluate.run import data_files, evaluate_policy
    from verl_credit.records.report.evaluation_page import write_pages
    from verl_credit.records.run.validation import EVALUATION
    from verl_credit.study.evaluation import is_right, measure, not_measured

    found = find_policy(policy, step, config_name, config_dir, overrides)
    files, folder = data_files(data, found.config), (out or found.folder).expanduser().resolve()
    if not as_json:
        print(f"evaluate: verl's trainer samples trajectories; its output is in {folder / LOG}", flush=True)
    of_run = overrides if found.run_dir else ()
    rows = evaluate_policy(found, folder, data=files, samples=samples, overrides=of_run)
    result = {
        "name": found.name,
        "policy": str(found.checkpoint or found.config.actor_rollout_ref.model.path),
        "step": found.step,
        "data": list(map(str, files)),
        "samples": samples,
        "left_out": sum(bool(row["tool_fault"]) for row in rows),
        "not_measured": not_measured(rows),
        "measures": [one.as_dict() for one in measure(rows)],
    }
    page = write_pages(folder, result, rows, is_right)
    text = json.dumps(plain(result), indent=1, allow_nan=False)
    write_text(folder / EVALUATION, text + "\n")
    if not as_json:
        text = "\n".join([*_lines(result["measures"], _value), *result["not_measured"], str(page)])
    print(text)


@ends("evaluate compare {a} {b}", OSError, DamagedFile)
def evaluate_compare(
    a: Annotated[Path, Argument(help="the folder of an evaluation")],
    b: Annotated[Path, Argument(help="another one, of the same questions")],
    as_json: AsJson = False,
) -> None:
    """A minus B, paired by question."""
    from verl_credit.study.evaluation import paired

    (result_a, of_a), (result_b, of_b) = map(_read, (a, b))
    pairs = [one.as_dict() for one in paired(of_a, of_b)]
    if not pairs:
        raise PreflightError("they have no question in common; expected evaluations of the same questions")
    questions = [{id_ for one in of for id_ in one.by_question} for of in (of_a, of_b)]
    names = [{f"{one.name} of {one.source}, {one.mode}" for one in of} for of in (of_a, of_b)]
    only = [(len(questions[one] - questions[1 - one]), sorted(names[one] - names[1 - one])) for one in (0, 1)]
    result = {"a": result_a["policy"], "b": result_b["policy"]}
    if as_json:
        for name, (count, measures) in zip("ab", only, strict=True):
            result |= {f"only_{name}": count, f"measures_only_{name}": measures}
        print(json.dumps(plain(result | {"measures": pairs}), indent=1, allow_nan=False))
        return
    print(f"A: {result['a']}\nB: {result['b']}")
    for name, (count, measures) in zip("AB", only, strict=True):
        if count:
            print(f"left out, because only {name} has them: {count} questions")
        if measures:
            print(f"left out, because only {name} has it: {'; '.join(measures)}")
    print("\n".join(_lines(pairs, _difference)))


def _read(folder: Path) -> tuple[dict[str, Any], list[Measured]]:
    """An evaluation and its measures. Raises PreflightError where the folder has none."""
    from verl_credit.records.run.validation import EVALUATION, read_held_out
    from verl_credit.study.evaluation import measure

    path = folder.expanduser() / EVALUATION
    if not path.is_file():
        raise PreflightError(f"{path} does not exist; expected a folder that `verl-credit evaluate` wrote")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return result, measure(read_held_out(path.parent, result["step"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{folder} cannot be read: {type(error).__name__}: {error}") from error


def _lines(rows: Sequence[Mapping], show: Callable[[Mapping], str]) -> list[str]:
    """A heading for each data source and mode."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        heading = f"{row['source']}, {row['mode']}, {row['questions']} questions"
        lines.setdefault(heading, [heading]).append(f"  {show(row)}")
    return list(chain.from_iterable(lines.values()))


def _value(row: Mapping) -> str:
    from verl_credit.records.report.evaluation_page import interval, label, number

    return f"{label(row['measure']):<26} {number(row['measure'], row['mean']):>8}  {interval(row)}"


def _difference(row: Mapping) -> str:
    from verl_credit.records.report.evaluation_page import interval, label, number

    name = row["measure"]
    a, b, difference = (number(name, row[key]) for key in ("a", "b", "difference"))
    counts = f"A higher in {row['a_higher']}, B in {row['b_higher']}"
    return f"{label(name):<26} {a:>8} - {b:>8} = {difference:>8}  {interval(row)}  {counts}"
