"""`verl-credit fidelity` by the lab's sampler, in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from verl_credit.cli.fidelity.policies import Policy
from verl_credit.cli.train.start import terminate_as_interrupt
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.report import as_dict, table
from verl_credit.study.fidelity.swap.report import as_dict as swaps_as_dict
from verl_credit.study.fidelity.swap.report import swap_table
from verl_credit.study.fidelity.swap.swaps import measure_swaps
from verl_credit.study.fidelity.workers import workers_of


def measure_policy(
    policy: Policy,
    out: Path,
    settings: Mapping,
    modes: Sequence[TurnMode],
    *,
    lab: Path | None,
    gradient: bool,
    swaps: int,
    parallel: int | None,
    until: float | None,
) -> dict:
    """The policy's part of ``fidelity.json``; prints its tables. ``until``: stops with the complete prompts then."""
    prompts, continuations, seed = (settings[name] for name in ("prompts", "continuations", "seed"))

    def enough() -> bool:
        return until is not None and time.monotonic() >= until

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
            swap_result = measure_swaps(
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
            print("\n".join(swap_table(swap_result)))
            swapped = swaps_as_dict(swap_result)
    return as_dict(subject, result) | {"swaps": swapped}
