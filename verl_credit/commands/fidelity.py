"""`verl-credit fidelity`: does each mode's credit agree with the true advantages of a policy's turns?"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from verl_credit.commands.fidelity_policies import Policy, policies_of, step_numbers
from verl_credit.commands.fidelity_run import measure_by_run, why_by_run
from verl_credit.commands.train import terminate_as_interrupt
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import ConfigError, ExitCode, PreflightError, one_line
from verl_credit.fidelity.credit import find_modes
from verl_credit.fidelity.measure import measure
from verl_credit.fidelity.report import as_dict, table, write_result
from verl_credit.fidelity.request import RESULT, Request
from verl_credit.fidelity.scored import TURNS
from verl_credit.fidelity.swap.decisions import PER_PROMPT
from verl_credit.fidelity.swap.report import as_dict as swaps_as_dict
from verl_credit.fidelity.swap.report import swap_table
from verl_credit.fidelity.swap.swaps import measure_swaps
from verl_credit.fidelity.workers import workers_of
from verl_credit.report.fidelity_page import fidelity_page
from verl_credit.run.files import DamagedFile, plain, read_json_lines, write_text
from verl_credit.run.progress import Throttled, say_at_once

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
        _check_engine(
            by_run, why, policies[0], split=split, gradient=gradient, swaps=swaps, overrides=overrides
        )
        end = None if minutes is None else time.monotonic() + 60 * minutes
        found = []
        for left, policy in zip(range(len(policies), 0, -1), policies, strict=True):
            if by_run:
                (out / policy.name).mkdir(parents=True, exist_ok=True)
                request = Request(
                    out=str((out / policy.name).resolve()),
                    name=policy.name,
                    policy=str(policy.folder),
                    step=policy.step,
                    modes=None if modes is None else _names(modes),
                    minutes=None if end is None else (end - time.monotonic()) / 60 / left,
                    overrides=list(overrides),
                    folder=str(Path.cwd()),
                    **settings,
                )
                of_policy, lines = measure_by_run(
                    policy.config, policy.folder if policy.step else None, request
                )
                found.append(of_policy)
                print("\n".join(lines))
                continue
            load = partial(policy.load, lab=lab, split=split, prompts=prompts)
            subject = load()
            say, enough = Throttled(say_at_once, f"fidelity {policy.name}"), _Until(end, left)
            with terminate_as_interrupt(), workers_of(load, prompts, parallel) as workers:
                result = measure(
                    subject,
                    out / policy.name,
                    rollouts=rollouts,
                    continuations=continuations,
                    seed=seed,
                    modes=chosen,
                    gradient=gradient,
                    say=say,
                    enough=enough,
                    workers=workers,
                )
                found.append(as_dict(subject, result) | {"swaps": {}})
                print("\n".join(table(subject.name, result)))
                if swaps:
                    swapped = measure_swaps(
                        subject,
                        result.groups,
                        out / policy.name,
                        wanted=swaps,
                        continuations=continuations,
                        seed=seed,
                        modes=chosen,
                        say=say,
                        enough=enough,
                    )
                    found[-1]["swaps"] = swaps_as_dict(swapped)
                    print("\n".join(swap_table(swapped)))
            write_result(out / policy.name / RESULT, settings, found[-1:])
        write_result(out / RESULT, settings, found)
        turns = [list(read_json_lines(out / policy.name / TURNS)) for policy in policies]
        write_text(out / PAGE, fidelity_page(plain({"settings": settings, "policies": found}), turns))
    except (ConfigError, PreflightError, DamagedFile, OSError) as error:
        print(f"verl-credit fidelity {folder}: {one_line(str(error))}")
        return ExitCode.PREFLIGHT
    except RuntimeError as error:  # the run that measures
        print(f"verl-credit fidelity {folder}: {error}")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print("interrupted; the same command goes on")
        return ExitCode.INTERRUPTED
    finally:
        torch.set_num_threads(threads)
        sys.path.remove("")
    print(out / RESULT, out / PAGE, sep="\n")
    return ExitCode.DONE


def _check_engine(
    by_run: bool,
    why: str | None,
    policy: Policy,
    *,
    split: str,
    gradient: bool,
    swaps: int,
    overrides: Sequence[str],
) -> None:
    """``why``: it has to be the run."""
    if not by_run:
        if why is not None:
            raise PreflightError(f"--engine sampler: {why}; expected run")
        if overrides:
            raise PreflightError(f"{' '.join(overrides)}: overrides are taken with --engine run alone")
        return
    because = f"--engine run ({why})" if why else "--engine run"
    if policy.step is None:
        raise PreflightError("--engine run: expected a run's folder or one of its checkpoints")
    if split == "dev":
        raise PreflightError(f"--split dev: {because} has train (data.train_files) and test (data.val_files)")
    if gradient or swaps:
        raise PreflightError(
            f"{'--gradient' if gradient else '--swaps'}: not with {because}, which gives values alone"
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
