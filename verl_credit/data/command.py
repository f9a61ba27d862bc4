"""`verl-credit prepare` on the command line."""

from __future__ import annotations

import argparse

from verl_credit.data.prepare import prepare
from verl_credit.data.records import PrepareError
from verl_credit.errors import ExitCode


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or 4 with one line where nothing was written."""
    wanted = [name.strip() for name in arguments.splits.split(",")] if arguments.splits else None
    try:
        tally = prepare(
            arguments.data_set,
            arguments.source,
            arguments.out,
            limit=arguments.limit,
            val_size=arguments.val_size,
            seed=arguments.seed,
            splits=wanted,
            overwrite=arguments.overwrite,
            subset=arguments.subset,
            revision=arguments.revision,
        )
    except (PrepareError, OSError) as error:
        print(f"verl-credit prepare: {error}")
        return ExitCode.PREFLIGHT
    print(tally.table())
    print(f"{arguments.data_set} ready: {arguments.out}")
    return ExitCode.DONE
