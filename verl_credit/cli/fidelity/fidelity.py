"""`verl-credit fidelity`: does each mode's credit agree with the true advantages of a policy's turns?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from verl_credit.cli.command import GOES_ON, ChildFailed, ends, modules_from_here
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.precision import one_thread
from verl_credit.records.run.files import DamagedFile, plain, read_json_lines, write_text

if TYPE_CHECKING:
    from verl_credit.cli.fidelity.policies import Policy
    from verl_credit.credit.turn.mode import TurnMode

PAGE = "fidelity.html"
FEWEST_PROMPTS = 3
"""The jackknife leaves two of three prompts."""


@ends(
    "fidelity {folder}",
    DamagedFile,
    OSError,
    failed={IntegrityError: ExitCode.INTEGRITY, ChildFailed: ExitCode.FAILED},
    interrupted=GOES_ON,
)
def fidelity(
    folder: Annotated[Path, Argument(help="a run, RUN/checkpoints/global_step_N, or a policy (LAB/policy)")],
    out: Annotated[Path, Option("--dir", help="for the values; an interrupted measurement goes on there")],
    prompts: Annotated[int, Option(min=1, help="the first ones of the split")] = 16,
    continuations: Annotated[int, Option(help="per distinct context; an even number")] = 64,
    rollouts: Annotated[int, Option(help="per prompt")] = 8,
    steps: Annotated[
        str | None, Option(help="of the run: 0,15,30; 0 is its start; the last saved one where not given")
    ] = None,
    modes: Annotated[
        str | None, Option(help="names with commas between; my_module:my_mode; every mode if not given")
    ] = None,
    gradient: Annotated[
        bool, Option("--gradient", help="the gradients of modes, too; about three times as long")
    ] = False,
    swaps: Annotated[
        int, Option(min=0, help="turns that are replaced by others of the policy's; at most 2 per prompt")
    ] = 0,
    minutes: Annotated[
        float | None, Option(help="then the prompts that are complete are used; the same call goes on")
    ] = None,
    parallel: Annotated[
        int | None,
        Option(
            min=1,
            help="processes that value contexts; as many as there are cores if not given, from 32 prompts on",
        ),
    ] = None,
    lab: Annotated[
        Path | None, Option(help="the lab's folder, where it was moved or is not beside the policy")
    ] = None,
    split: Literal["train", "dev", "test"] = "train",
    seed: Annotated[int, Option(parser=int, help="of rollouts and continuations")] = 0,
    engine: Annotated[
        Literal["auto", "sampler", "run"],
        Option(
            help="sampler: in this process, the lab alone; run: the run's own engine, agent loops, tools and reward; "
            "auto: the sampler where it can"
        ),
    ] = "auto",
    overrides: Annotated[list[str], Argument(help="of the run's configuration, with --engine run")] = (),
) -> None:
    from verl_credit.cli.fidelity import by_run, sampler
    from verl_credit.cli.fidelity.policies import policies_of, step_numbers
    from verl_credit.records.report.studies.fidelity_page import fidelity_page
    from verl_credit.study.fidelity.mode_credit import find_modes
    from verl_credit.study.fidelity.request import RESULT, Request
    from verl_credit.study.fidelity.result import write_result
    from verl_credit.study.fidelity.scored import TURNS

    about = {
        "prompts": prompts,
        "rollouts": rollouts,
        "continuations": continuations,
        "split": split,
        "seed": seed,
    }
    with one_thread(), modules_from_here():
        _check_numbers(prompts, rollouts, continuations, swaps, minutes)
        names = (
            None if modes is None else list(dict.fromkeys(n.strip() for n in modes.split(",") if n.strip()))
        )
        chosen = find_modes(names)
        if gradient:
            _refuse_gradient(chosen, prompts)
        policies = policies_of(folder, step_numbers(steps), lab)
        why = by_run.why_by_run(policies[0].config)
        through_run = engine == "run" or (engine == "auto" and why is not None)
        if through_run:
            of_sampler = {"--gradient": gradient, "--swaps": swaps, "--parallel": parallel, "--lab": lab}
            _check_by_run(why, policies[0], split, of_sampler)
        elif why is not None:
            raise PreflightError(f"--engine sampler: {why}; expected run")
        elif overrides:
            raise PreflightError(f"{' '.join(overrides)}: overrides are taken with --engine run alone")
        end = None if minutes is None else time.monotonic() + 60 * minutes
        results = []
        for left, policy in zip(range(len(policies), 0, -1), policies, strict=True):
            # The remaining time is divided between the remaining policies.
            now = time.monotonic()
            share_s = None if end is None else (end - now) / left
            if through_run:
                minutes_left = None if share_s is None else share_s / 60
                results.append(by_run.measure_policy(policy, out, about, names, minutes_left, overrides))
                continue
            until = None if share_s is None else now + share_s
            request = Request(
                out=str(out / policy.name), modes=names, gradient=gradient, swaps=swaps, **about
            )
            results.append(sampler.measure_policy(policy, request, lab=lab, parallel=parallel, until=until))
            write_result(out / policy.name / RESULT, about, results[-1:])
        write_result(out / RESULT, about, results)
        turns = [list(read_json_lines(out / policy.name / TURNS)) for policy in policies]
        write_text(out / PAGE, fidelity_page(plain({"settings": about, "policies": results}), turns))
    print(out / RESULT, out / PAGE, sep="\n")


def _check_numbers(
    prompts: int, rollouts: int, continuations: int, swaps: int, minutes: float | None
) -> None:
    from verl_credit.study.fidelity.swap.decisions import PER_PROMPT
    from verl_credit.study.fidelity.values import check_continuations

    if rollouts < 2:
        raise PreflightError(f"--rollouts {rollouts}: expected at least 2, which a group compares")
    check_continuations(continuations)
    if swaps > PER_PROMPT * prompts:
        raise PreflightError(
            f"--swaps {swaps}: {prompts} prompts have at most {PER_PROMPT} each; expected at most {PER_PROMPT * prompts}"
        )
    if minutes is not None and minutes <= 0:
        raise PreflightError(f"--minutes {minutes:g}: expected more than 0")


def _check_by_run(why: str | None, policy: Policy, split: str, of_sampler: Mapping) -> None:
    """Refuses options that only the sampler (``of_sampler``) reads. ``why``: the reason for measuring by the run."""
    because = f"--engine run ({why})" if why else "--engine run"
    if policy.step is None:
        raise PreflightError("--engine run: expected a run's folder or one of its checkpoints")
    if split == "dev":
        raise PreflightError(f"--split dev: {because} has train (data.train_files) and test (data.val_files)")
    if given := [name for name, value in of_sampler.items() if value]:
        instead = {
            "--lab": "which reads the folders that the run had",
            "--parallel": "where as many rollouts run at a time as a step of training has",
        }
        raise PreflightError(
            f"{given[0]}: not with {because}, {instead.get(given[0], 'only with the sampler')}"
        )


def _refuse_gradient(modes: Sequence[TurnMode], prompts: int) -> None:
    if "none" not in [mode.name for mode in modes]:
        raise PreflightError("--gradient compares with GRPO: add none to --modes")
    if prompts < FEWEST_PROMPTS:
        raise PreflightError(f"--prompts {prompts}: --gradient takes at least {FEWEST_PROMPTS}")
