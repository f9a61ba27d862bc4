"""`verl-credit fidelity` by the lab's sampler, in this process."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from verl_credit.cli.fidelity.policies import Policy
from verl_credit.cli.train.start import terminate_as_interrupt
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.result import as_dict, table
from verl_credit.study.fidelity.swap.swaps import measure_swaps, swap_table, swaps_as_dict
from verl_credit.study.fidelity.workers import workers_of


def measure_policy(
    policy: Policy, request: Request, *, lab: Path | None, parallel: int | None, until: float | None
) -> dict:
    """Measures a policy until ``until``, prints its tables and returns its part of ``fidelity.json`` (complete prompts)."""

    def enough() -> bool:
        return until is not None and time.monotonic() >= until

    load = partial(policy.load, lab=lab, split=request.split, prompts=request.prompts)
    subject, say = load(), Throttled(say_at_once, f"fidelity {policy.name}")
    with terminate_as_interrupt(), workers_of(load, request.prompts, parallel) as workers:
        result = measure(subject, request, say=say, enough=enough, workers=workers)
        print("\n".join(table(subject.name, result)))
        swapped = {}
        if request.swaps:
            swaps = measure_swaps(subject, request, result.groups, say=say, enough=enough)
            print("\n".join(swap_table(swaps)))
            swapped = swaps_as_dict(swaps)
    return as_dict(subject, result) | {"swaps": swapped}
