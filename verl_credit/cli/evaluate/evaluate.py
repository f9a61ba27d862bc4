"""`verl-credit evaluate RUN|MODEL --data FILE`, and `verl-credit evaluate compare A B`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from verl_credit.cli.command import SHIPPED, AsJson, ChildFailed, ConfigDir, ends
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.records.run.files import DamagedFile, plain, write_text

if TYPE_CHECKING:
    from verl_credit.study.evaluation import Measured

FAILED = {IntegrityError: ExitCode.INTEGRITY, ChildFailed: ExitCode.FAILED}


@ends(
    "evaluate {policy}", OSError, DamagedFile, failed=FAILED, interrupted="interrupted; nothing was written"
)
def evaluate(
    policy: Annotated[
        str, Argument(help="a run, RUN/checkpoints/global_step_N, or a model (folder or name)")
    ],
    overrides: Annotated[
        list[str], Argument(help="Hydra overrides of the run's configuration or recipe")
    ] = (),
    data: Annotated[
        list[Path], Option(help="a parquet file with questions, repeatable; data.val_files if not given")
    ] = (),
    step: Annotated[
        int | None, Option(min=0, help="of a run; its last checkpoint if not given, 0 for its first model")
    ] = None,
    samples: Annotated[
        int, Option(min=0, help="per question, at temperature 1, beside the greedy trajectory")
    ] = 0,
    config_name: Annotated[str | None, Option(help=f"for a model: {SHIPPED}")] = None,
    config_dir: ConfigDir = None,
    out: Annotated[
        Path | None, Option(help="a new folder; evaluations/RUN-step-N beside the run if not given")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Exit codes as those of `train`: 4 refused; 5 not reported, the numbers would be wrong; 1 failed; 130 interrupted."""
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # before Ray is imported
    from verl_credit.cli.evaluate.policy import find_policy
    from verl_credit.cli.evaluate.run import data_files, evaluate_policy
    from verl_credit.records.report.evaluation_page import write_pages
    from verl_credit.records.run.validation import EVALUATION
    from verl_credit.study.evaluation import is_right, measure, not_measured

    found = find_policy(policy, step, config_name, config_dir, overrides)
    files, folder = data_files(data, found.config), (out or found.folder).expanduser().resolve()
    if not as_json:
        print(
            f"evaluate: verl's trainer samples the trajectories; its output is in {folder / 'train.log'}",
            flush=True,
        )
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
    print(
        text
        if as_json
        else "\n".join([*_lines(result["measures"], _value), *result["not_measured"], str(page)])
    )


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
    measures = {
        "measures_only_a": sorted(names[0] - names[1]),
        "measures_only_b": sorted(names[1] - names[0]),
    }
    alone = {"only_a": len(questions[0] - questions[1]), "only_b": len(questions[1] - questions[0])}
    result = {"a": result_a["policy"], "b": result_b["policy"], **alone, **measures, "measures": pairs}
    if as_json:
        print(json.dumps(plain(result), indent=1, allow_nan=False))
        return
    print(f"A: {result['a']}\nB: {result['b']}")
    if any(alone.values()):
        print(f"left out: {alone['only_a']} questions that only A has, {alone['only_b']} that only B has")
    for name, only in zip("AB", measures.values(), strict=True):
        if only:
            print(f"left out, because only {name} has it: {'; '.join(only)}")
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
    lines, last = [], None
    for row in rows:
        if (heading := f"{row['source']}, {row['mode']}, {row['questions']} questions") != last:
            lines.append(heading)
            last = heading
        lines.append(f"  {show(row)}")
    return lines


def _value(row: Mapping) -> str:
    from verl_credit.records.report.evaluation_page import interval, label, number

    return f"{label(row['measure']):<26} {number(row['measure'], row['mean']):>8}  {interval(row)}"


def _difference(row: Mapping) -> str:
    from verl_credit.records.report.evaluation_page import interval, label, number

    name = row["measure"]
    a, b, difference = (number(name, row[key]) for key in ("a", "b", "difference"))
    counts = f"A higher in {row['a_higher']}, B in {row['b_higher']}"
    return f"{label(name):<26} {a:>8} - {b:>8} = {difference:>8}  {interval(row)}  {counts}"
