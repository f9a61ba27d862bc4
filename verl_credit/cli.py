"""The `verl-credit` command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verl-credit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="run a recipe on verl's trainer")
    train.add_argument(
        "--config-name", required=True, help="a shipped recipe (lab) or a file in --config-dir"
    )
    train.add_argument("--config-dir", help="folder with your own recipes")
    train.add_argument("overrides", nargs="*", help="Hydra overrides: key=value")

    lab = commands.add_parser("lab", help="build the lab's world, policy, encoder and index")
    lab.add_argument("--dir", type=Path, required=True)
    lab.add_argument("--world-seed", type=int, default=0)
    lab.add_argument("--size", choices=("full", "tiny"), default="full")

    report = commands.add_parser("report", help="write report.html and curves.png of a run")
    report.add_argument("run_dir", type=Path)

    explain = commands.add_parser("explain", help="show the pipeline that a recipe with overrides would run")
    explain.add_argument("--config-name", default="lab", help="a shipped recipe or a file in --config-dir")
    explain.add_argument("--config-dir", help="folder with your own recipes")
    explain.add_argument("overrides", nargs="*", help="Hydra overrides: key=value")

    check = commands.add_parser("check", help="run the laws on an operator of yours, or on all of ours")
    check.add_argument("operator", nargs="?", help="my_module:my_operator; none: every registered operator")
    check.add_argument(
        "--kind", choices=("outcome", "transform", "algorithm", "uncertainty"), help="when it cannot be told"
    )
    check.add_argument("--params", type=json.loads, help="JSON object handed to the operator")

    commands.add_parser("modes", help="print docs/modes.md")

    arguments = parser.parse_args(argv)
    return {
        "train": _train,
        "lab": _lab,
        "report": _report,
        "explain": _explain,
        "check": _check,
        "modes": _modes,
    }[arguments.command](arguments)


def _train(arguments) -> int:
    from verl_credit.train import train

    return train(arguments.config_name, arguments.overrides, arguments.config_dir)


def _lab(arguments) -> int:
    from verl_credit.host.progress import Throttled, say_at_once
    from verl_credit.lab.build import build_lab

    paths = build_lab(
        arguments.dir, world_seed=arguments.world_seed, size=arguments.size, progress=Throttled(say_at_once)
    )
    print(f"lab ready: {paths.root}")
    return 0


def _report(arguments) -> int:
    from verl_credit.report import write_report

    print(write_report(arguments.run_dir))
    return 0


def _explain(arguments) -> int:
    from verl_credit.explain import explain

    return explain(arguments.config_name, arguments.overrides, arguments.config_dir)


def _check(arguments) -> int:
    from verl_credit.check_operators import check_operators

    return check_operators(arguments.operator, arguments.kind, arguments.params)


def _modes(arguments) -> int:
    from verl_credit.modes_page import modes_page

    print(modes_page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
