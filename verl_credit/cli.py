"""The `verl-credit` command."""

from __future__ import annotations

import argparse
import json
import os
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
    train.add_argument(
        "-m", "--multirun", action="store_true", help="a run for every combination of key=value,value"
    )
    train.add_argument("overrides", nargs="*", help="Hydra overrides: key=value")

    lab = commands.add_parser("lab", help="build the lab's world, policy, encoder and index")
    lab.add_argument("--dir", type=Path, required=True)
    lab.add_argument("--world-seed", type=int, default=0)
    lab.add_argument("--size", choices=("full", "tiny"), default="full")

    data = commands.add_parser("prepare", help="write verl's parquet files from a published question set")
    data.add_argument(
        "data_set",
        help="hotpotqa, nq, musique, 2wiki, triviaqa, popqa, bamboogle, gsm8k; qa: questions of your own",
    )
    data.add_argument(
        "--source", required=True, help="a file, a folder, or OWNER/NAME on the Hugging Face hub"
    )
    data.add_argument("--out", type=Path, required=True, help="a folder that is new or empty")
    data.add_argument("--splits", help="of the source: train,val,test; all where not given")
    data.add_argument("--limit", type=int, help="rows per split, the first ones")
    data.add_argument("--val-size", type=int, help="rows of a single split drawn into val.parquet")
    data.add_argument("--seed", type=int, default=0, help="of --val-size")
    data.add_argument("--subset", help="which part of a data set on the hub")
    data.add_argument("--revision", help="commit, branch or tag on the hub")
    data.add_argument("--overwrite", action="store_true", help="replace what prepare wrote there before")

    report = commands.add_parser("report", help="write report.html and curves.png of a run")
    report.add_argument("run_dir", type=Path)

    explain = commands.add_parser("explain", help="show the pipeline that a recipe with overrides would run")
    explain.add_argument("--config-name", default="lab", help="a shipped recipe or a file in --config-dir")
    explain.add_argument("--config-dir", help="folder with your own recipes")
    explain.add_argument("--values", action="store_true", help="list every value that is not the default")
    explain.add_argument("overrides", nargs="*", help="Hydra overrides: key=value")

    doctor = commands.add_parser("doctor", help="check this machine, and what a recipe asks of it")
    doctor.add_argument(
        "--config-name", help="a shipped recipe or a file in --config-dir; none: the machine alone"
    )
    doctor.add_argument("--config-dir", help="folder with your own recipes")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.add_argument("overrides", nargs="*", help="Hydra overrides: key=value")

    diff = commands.add_parser("diff", help="what differs between two runs or recipes")
    diff.add_argument("a", help="a run's folder, or a recipe with overrides in quotes: 'lab credit=grpo'")
    diff.add_argument("b", help="the same")
    diff.add_argument("--config-dir", help="folder with your own recipes")
    diff.add_argument("--json", action="store_true", help="machine-readable")

    plan = commands.add_parser("plan", help="predict memory, time and disk of a recipe; says whether it fits")
    plan.add_argument(
        "--config-name", action="append", help="a shipped recipe or a file in --config-dir; repeatable"
    )
    plan.add_argument("--config-dir", help="folder with your own recipes")
    plan.add_argument("--all", action="store_true", help="every shipped recipe, as a table")
    plan.add_argument("--hardware", help="h20, h100, h200, a100, gb10 (spark), cpu (this machine)")
    plan.add_argument("--devices", type=int, help="devices in all; the recipe's number otherwise")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument("overrides", nargs="*", help="Hydra overrides, plan.NAME=VALUE, hardware.NAME=VALUE")

    check = commands.add_parser("check", help="run the laws on an operator of yours, or on all of ours")
    check.add_argument("operator", nargs="?", help="my_module:my_operator; none: every registered operator")
    check.add_argument(
        "--kind", choices=("outcome", "transform", "algorithm", "uncertainty"), help="when it cannot be told"
    )
    check.add_argument("--params", type=json.loads, help="JSON object handed to the operator")

    commands.add_parser("modes", help="print docs/modes.md")
    commands.add_parser("keys", help="print docs/keys.md")

    arguments = parser.parse_args(argv)
    return {
        "train": _train,
        "lab": _lab,
        "prepare": _prepare,
        "report": _report,
        "explain": _explain,
        "plan": _plan,
        "doctor": _doctor,
        "diff": _diff,
        "check": _check,
        "modes": _modes,
        "keys": _keys,
    }[arguments.command](arguments)


def _train(arguments) -> int:
    from verl_credit.run.network import ray_on_loopback

    ray_on_loopback(os.environ)  # what is imported below imports Ray
    if arguments.multirun:
        from verl_credit.commands.sweep import sweep

        return sweep(arguments.config_name, arguments.overrides, arguments.config_dir)
    from verl_credit.commands.train import train

    return train(arguments.config_name, arguments.overrides, arguments.config_dir)


def _lab(arguments) -> int:
    from verl_credit.errors import ExitCode
    from verl_credit.lab.build import build_lab
    from verl_credit.lab.warm_start import LabGateError
    from verl_credit.run.progress import Throttled, say_at_once

    progress = Throttled(say_at_once)
    try:
        paths = build_lab(
            arguments.dir, world_seed=arguments.world_seed, size=arguments.size, progress=progress
        )
    except (LabGateError, OSError) as error:
        print(f"verl-credit lab --dir {arguments.dir}: {error}")
        return ExitCode.PREFLIGHT
    print(f"lab ready: {paths.root}")
    return ExitCode.DONE


def _prepare(arguments) -> int:
    from verl_credit.data.command import run

    return run(arguments)


def _report(arguments) -> int:
    from verl_credit.errors import ExitCode
    from verl_credit.report import write_report

    try:
        print(write_report(arguments.run_dir))
    except (OSError, ValueError) as error:
        print(f"verl-credit report {arguments.run_dir}: {error}")
        return ExitCode.PREFLIGHT
    return ExitCode.DONE


def _explain(arguments) -> int:
    from verl_credit.commands.explain import explain

    return explain(arguments.config_name, arguments.overrides, arguments.config_dir, arguments.values)


def _doctor(arguments) -> int:
    from verl_credit.doctor.command import doctor

    return doctor(arguments.config_name, arguments.overrides, arguments.config_dir, arguments.json)


def _diff(arguments) -> int:
    from verl_credit.commands.diff import diff

    return diff(arguments.a, arguments.b, arguments.config_dir, arguments.json)


def _plan(arguments) -> int:
    from verl_credit.plan.command import plan_command

    return plan_command(
        arguments.config_name or ["lab"],
        arguments.overrides,
        arguments.config_dir,
        hardware=arguments.hardware,
        devices=arguments.devices,
        every=arguments.all,
        as_json_text=arguments.json,
    )


def _check(arguments) -> int:
    from verl_credit.commands.check_operators import check_operators

    return check_operators(arguments.operator, arguments.kind, arguments.params)


def _modes(arguments) -> int:
    from verl_credit.commands.modes_page import modes_page

    print(modes_page(), end="")
    return 0


def _keys(arguments) -> int:
    from verl_credit.commands.keys_page import keys_page

    print(keys_page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
