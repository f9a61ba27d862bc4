"""`verl-credit fidelity`: does each mode's credit agree with the true advantages of a policy's turns?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from verl_credit.cli.run.another_run import ChildFailed
from verl_credit.cli.run.train import terminate_as_interrupt
from verl_credit.cli.study.fidelity_policies import Policy, policies_of, step_numbers
from verl_credit.cli.study.fidelity_run import measure_by_run, why_by_run
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import ConfigError, ExitCode, PreflightError, one_line
from verl_credit.records.report.studies.fidelity_page import fidelity_page
from verl_credit.records.run.files import DamagedFile, plain, read_json_lines, write_text
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.fidelity.credit import find_modes
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.report import as_dict, table, write_result
from verl_credit.study.fidelity.request import RESULT, Request
from verl_credit.study.fidelity.scored import TURNS
from verl_credit.study.fidelity.swap.decisions import PER_PROMPT
from verl_credit.study.fidelity.swap.report import as_dict as swaps_as_dict
from verl_credit.study.fidelity.swap.report import swap_table
from verl_credit.study.fidelity.swap.swaps import measure_swaps
from verl_credit.study.fidelity.values import check_continuations
from verl_credit.study.fidelity.workers import workers_of

PAGE = "fidelity.html"
FEWEST_PROMPTS = 3
"""Of which the jackknife leaves two."""


def fidelity(
    folder: Path,
    out: Path,
    *,
    prompts: int,
    rollouts: int,
    continuations: int,
    steps: str | None,
    modes: str | None,
    gradient: bool,
    swaps: int,
    minutes: float | None,
    parallel: int | None,
    lab: Path | None,
    split: str,
    seed: int,
    engine: str,
    overrides: Sequence[str],
) -> int:
    """Exit code 4 for what is refused, in one line; 130 after Ctrl-C or SIGTERM."""
    settings = {
        "prompts": prompts,
        "rollouts": rollouts,
        "continuations": continuations,
        "split": split,
        "seed": seed,
    }
    sys.path.insert(0, "")  # a mode or a signal of the user's, in the folder one stands in
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits for several threads longer than it computes
    try:
        if rollouts < 2:
            raise PreflightError(f"--rollouts {rollouts}: expected at least 2, which a group compares")
        check_continuations(continuations)
        if swaps > PER_PROMPT * prompts:
            raise PreflightError(
                f"--swaps {swaps}: {prompts} prompts have at most {PER_PROMPT} each; expected at most {PER_PROMPT * prompts}"
            )
        if minutes is not None and minutes <= 0:
            raise PreflightError(f"--minutes {minutes:g}: expected more than 0")
        chosen = find_modes(None if modes is None else _names(modes))
        if gradient:
            _refuse_gradient(chosen, prompts)
        policies = policies_of(folder, step_numbers(steps), lab)
        why = why_by_run(policies[0].config)
        by_run = engine == "run" or (engine == "auto" and why is not None)
        if by_run:
            _check_by_run(
                why,
                policies[0],
                split,
                {"--gradient": gradient, "--swaps": swaps, "--parallel": parallel, "--lab": lab},
            )
        elif why is not None:
            raise PreflightError(f"--engine sampler: {why}; expected run")
        elif overrides:
            raise PreflightError(f"{' '.join(overrides)}: overrides are taken with --engine run alone")
        end = None if minutes is None else time.monotonic() + 60 * minutes
        found = []
        for left, policy in zip(range(len(policies), 0, -1), policies, strict=True):
            if by_run:
                minutes_left = None if end is None else (end - time.monotonic()) / 60 / left
                found.append(_by_run(policy, out, settings, modes, minutes_left, overrides))
                continue
            found.append(
                _here(
                    policy,
                    out / policy.name,
                    settings,
                    chosen,
                    lab=lab,
                    gradient=gradient,
                    swaps=swaps,
                    parallel=parallel,
                    enough=_Until(end, left),
                )
            )
            write_result(out / policy.name / RESULT, settings, found[-1:])
        write_result(out / RESULT, settings, found)
        turns = [list(read_json_lines(out / policy.name / TURNS)) for policy in policies]
        write_text(out / PAGE, fidelity_page(plain({"settings": settings, "policies": found}), turns))
    except (ConfigError, PreflightError, DamagedFile, OSError) as error:
        print(f"verl-credit fidelity {folder}: {one_line(str(error))}")
        return ExitCode.PREFLIGHT
    except ChildFailed as error:
        print(f"verl-credit fidelity {folder}: {error}")
        return error.code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on")
        return ExitCode.INTERRUPTED
    finally:
        torch.set_num_threads(threads)
        sys.path.remove("")
    print(out / RESULT, out / PAGE, sep="\n")
    return ExitCode.DONE


def _here(
    policy: Policy,
    out: Path,
    settings: Mapping,
    modes: Sequence[TurnMode],
    *,
    lab: Path | None,
    gradient: bool,
    swaps: int,
    parallel: int | None,
    enough: Callable[[], bool],
) -> dict:
    """By the sampler, in this process. What ``fidelity.json`` has of the policy; its tables are printed."""
    prompts, continuations, seed = (settings[name] for name in ("prompts", "continuations", "seed"))
    load = partial(policy.load, lab=lab, split=settings["split"], prompts=prompts)
    subject, say = load(), Throttled(say_at_once, f"fidelity {policy.name}")
    with terminate_as_interrupt(), workers_of(load, prompts, parallel) as workers:
        result = measure(
            subject,
            out,
            rollouts=settings["rollouts"],
            continuations=continuations,
            seed=seed,
            modes=modes,
            gradient=gradient,
            say=say,
            enough=enough,
            workers=workers,
        )
        print("\n".join(table(subject.name, result)))
        swapped = {}
        if swaps:
            made = measure_swaps(
                subject,
                result.groups,
                out,
                wanted=swaps,
                continuations=continuations,
                seed=seed,
                modes=modes,
                say=say,
                enough=enough,
            )
            print("\n".join(swap_table(made)))
            swapped = swaps_as_dict(made)
    return as_dict(subject, result) | {"swaps": swapped}


def _by_run(
    policy: Policy,
    out: Path,
    settings: Mapping,
    modes: str | None,
    minutes: float | None,
    overrides: Sequence[str],
) -> dict:
    """As `_here`, through the run's own rollouts."""
    folder = (out / policy.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    request = Request(
        out=str(folder),
        name=policy.name,
        policy=str(policy.folder),
        step=policy.step,
        modes=None if modes is None else _names(modes),
        minutes=minutes,
        about={},
        folder=str(Path.cwd()),
        **settings,
    )
    found, lines = measure_by_run(policy.config, policy.folder if policy.step else None, request, overrides)
    print("\n".join(lines))
    return found


def _check_by_run(why: str | None, policy: Policy, split: str, of_sampler: Mapping) -> None:
    """``why``: it has to be the run; ``of_sampler``: options that the sampler alone takes."""
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


class _Until:
    """Is this policy's share of the time spent? What is left until ``end`` is divided between ``left`` policies."""

    def __init__(self, end: float | None, left: int):
        now = time.monotonic()
        self._end = None if end is None else now + (end - now) / left

    def __call__(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
