"""`verl-credit fidelity`: does each mode's credit agree with the true advantages of a policy's turns?"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from verl_credit.cli.command import (
    GOES_ON,
    ChildFailed,
    Continuations,
    MovedLab,
    Parallel,
    RunOverrides,
    ends,
    modules_from_here,
    terminate_as_interrupt,
)
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.precision import one_thread
from verl_credit.records.run.files import DamagedFile, plain, write_text
from verl_credit.records.run.progress_line import Throttled, say_at_once

if TYPE_CHECKING:
    from verl_credit.cli.fidelity.policies import Policy
    from verl_credit.study.fidelity.request import Request


FAILED = {IntegrityError: ExitCode.INTEGRITY, ChildFailed: ExitCode.FAILED}


@ends("fidelity {folder}", DamagedFile, OSError, failed=FAILED, interrupted=GOES_ON)
def fidelity(
    folder: Annotated[Path, Argument(help="a run, RUN/checkpoints/global_step_N, or a policy (LAB/policy)")],
    out: Annotated[Path, Option("--dir", help="for the values; an interrupted measurement goes on there")],
    prompts: Annotated[int, Option(min=1, help="the first ones of the split")] = 16,
    continuations: Continuations = 64,
    rollouts: Annotated[int, Option(help="per prompt")] = 8,
    steps: Annotated[str | None, Option(help="of a run: 0,15,30; the last saved one if not given")] = None,
    modes: Annotated[str | None, Option(help="none,joint,my_module:my_mode; every mode if not given")] = None,
    gradient: Annotated[bool, Option("--gradient", help="also gradients; thrice as long")] = False,
    minutes: Annotated[float | None, Option(help="then report finished prompts; the call goes on")] = None,
    parallel: Parallel = None,
    lab: MovedLab = None,
    split: Literal["train", "dev", "test"] = "train",
    seed: Annotated[int, Option(help="of rollouts and continuations")] = 0,
    engine: Annotated[
        Literal["auto", "sampler", "run"],
        Option(help="sampler: the lab alone, in this process; run: the run's own; auto: sampler if it can"),
    ] = "auto",
    overrides: RunOverrides = (),
) -> None:
    from verl_credit.cli.fidelity import by_run
    from verl_credit.cli.fidelity.policies import policies_of, step_numbers
    from verl_credit.records.report.fidelity_page import fidelity_page
    from verl_credit.study.fidelity.request import RESULT, Request
    from verl_credit.study.fidelity.result import write_result

    names = None if modes is None else list(dict.fromkeys(n.strip() for n in modes.split(",") if n.strip()))
    request = Request(str(out), prompts, rollouts, continuations, split, seed, names, gradient, minutes)
    with one_thread(), modules_from_here():
        _check(request)
        policies = policies_of(folder, step_numbers(steps), lab)
        why = by_run.why_by_run(policies[0].config, split)
        if engine == "run" or (engine == "auto" and why is not None):
            _check_by_run(why, policies[0], split, parallel, lab)
            measure = partial(by_run.measure_policy, overrides=overrides)
        elif why is not None:
            raise PreflightError(f"--engine sampler: {why}; expected run")
        elif overrides:
            raise PreflightError(f"{' '.join(overrides)}: overrides are taken with --engine run alone")
        else:
            measure = partial(_by_sampler, lab=lab, parallel=parallel)
        began, results = time.monotonic(), []
        for place, policy in enumerate(policies):
            # The remaining time is divided between the remaining policies.
            left = minutes and (minutes - (time.monotonic() - began) / 60) / (len(policies) - place)
            results.append(measure(policy, replace(request, out=str(out / policy.name), minutes=left)))
        write_result(out / RESULT, request.settings, results)
        page = fidelity_page(plain({"settings": request.settings, "policies": results}))
        write_text(out / "fidelity.html", page)
    print(out / RESULT, out / "fidelity.html", sep="\n")


def _check(request: Request) -> None:
    from verl_credit.study.fidelity.credits import find_modes
    from verl_credit.study.fidelity.true_values import check_continuations

    check_continuations(request.continuations)
    minutes, gradient = request.minutes, request.gradient
    modes = [mode.name for mode in find_modes(request.modes)]
    refused = {
        f"--rollouts {request.rollouts}: expected at least 2, which a group compares": request.rollouts < 2,
        f"--minutes {minutes or 0:g}: expected more than 0": minutes is not None and minutes <= 0,
        "--gradient compares with GRPO: add none to --modes": gradient and "none" not in modes,
        # the jackknife leaves two of three prompts
        f"--prompts {request.prompts}: --gradient takes at least 3": gradient and request.prompts < 3,
    }
    if wrong := next((text for text, applies in refused.items() if applies), None):
        raise PreflightError(wrong)


def _check_by_run(
    why: str | None, policy: Policy, split: str, parallel: int | None, lab: Path | None
) -> None:
    """Refuses what the sampler alone can. ``why``: the reason for measuring by the run."""
    because = f"--engine run ({why})" if why else "--engine run"
    if policy.step is None:
        raise PreflightError("--engine run: expected a run's folder or one of its checkpoints")
    if split == "dev":
        raise PreflightError(f"--split dev: {because} has train (data.train_files) and test (data.val_files)")
    if parallel:
        raise PreflightError(f"--parallel: not with {because}, where a step's rollouts run at a time")
    if lab:
        raise PreflightError(f"--lab: not with {because}, which reads the folders that the run had")


def _by_sampler(policy: Policy, request: Request, lab: Path | None, parallel: int | None) -> dict:
    """Measures a policy by the lab's sampler, in this process, and prints its tables. Returns its part of
    ``fidelity.json``."""
    from verl_credit.study.fidelity.measure import measure
    from verl_credit.study.fidelity.request import RESULT
    from verl_credit.study.fidelity.result import as_dict, table, write_result
    from verl_credit.study.fidelity.workers import workers_of

    load = partial(policy.load, lab=lab, split=request.split, prompts=request.prompts)
    subject, say = load(), Throttled(say_at_once, f"fidelity {policy.name}")
    with terminate_as_interrupt(), workers_of(load, request.prompts, parallel) as workers:
        result = measure(subject, request, say=say, enough=request.timer(), workers=workers)
    print("\n".join(table(subject.name, result)))
    entry = as_dict(subject, result)
    write_result(Path(request.out) / RESULT, request.settings, [entry])
    return entry
