"""Command line: `verl-credit-retriever index`, `serve` and `check`."""

import argparse
import os
import sys

from verl_credit_retriever.commands.check import add_check
from verl_credit_retriever.commands.index import add_index
from verl_credit_retriever.commands.serve import add_serve


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 `check` found a problem, 2 a wrong argument or input (one line says which), 4 the port
    is in use.
    """
    options = _parser().parse_args(arguments)
    if options.threads is not None and options.threads > 0:
        # Before NumPy is imported: its matrix products, the exact backend, read this then and never again.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        return options.run(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-credit-retriever", description="Dense retrieval over a JSONL corpus."
    )
    commands = parser.add_subparsers(required=True, metavar="{index,serve,check}")
    defaults = argparse.ArgumentDefaultsHelpFormatter

    _add_compute(add_index(commands, defaults))
    _add_compute(add_serve(commands, defaults))
    _add_compute(add_check(commands, defaults))
    return parser


def _add_compute(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="torch device of the encoder")
    parser.add_argument("--threads", type=int, help="CPU threads; default: what torch takes")


if __name__ == "__main__":
    sys.exit(main())
