"""The `verl-credit` command."""

import json
import os
import sys
from pathlib import Path
from typing import Literal

from typer import Argument, Option, Typer
from typer.core import TyperGroup

from verl_credit.cli.study import campaign_app as campaign
from verl_credit.cli.trials import lineage
from verl_credit.errors import ExitCode


class Commands(TyperGroup):
    """A command's name may have two words: `prepare check`."""

    def resolve_command(self, ctx, args):
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)


# A command returns its exit code. A wrong command line ends with 2, Ctrl-C with 130.
app = Typer(
    cls=Commands,
    help=__doc__,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=sys.exit,
)
SHIPPED = "a shipped recipe (lab) or a file in --config-dir"
CONFIG_DIR = Option(None, help="folder with your own recipes")
OVERRIDES = Argument((), help="Hydra overrides: key=value")
JSON = Option(False, "--json", help="machine-readable")
app.add_typer(lineage.app, name="lineage")
app.add_typer(campaign.app, name="campaign")


def main(argv: list[str] | None = None) -> int:
    try:
        app(argv, prog_name="verl-credit")
    except SystemExit as end:
        return end.code or 0


def _json_object(text: str) -> dict:
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not a JSON object") from None


def _print(page: str) -> int:
    """A page that is meant for a file."""
    try:
        print(page, end="", flush=True)
    except BrokenPipeError:  # typer's: the reader has seen enough
        raise
    except OSError as error:
        sys.stdout = None  # else the rest is tried again at exit
        print(f"verl-credit: the output cannot be written: {error.strerror}", file=sys.stderr)
        return ExitCode.PREFLIGHT
    return ExitCode.DONE


@app.command(help="run a recipe on verl's trainer")
def train(
    config_name: str = Option(help=SHIPPED),
    config_dir: str | None = CONFIG_DIR,
    multirun: bool = Option(False, "-m", "--multirun", help="a run for every combination of key=value,value"),
    overrides: list[str] = OVERRIDES,
):
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # what is imported below imports Ray
    if multirun:
        from verl_credit.cli.run.sweep import sweep as run
    else:
        from verl_credit.cli.run.train import train as run

    return run(config_name, overrides, config_dir)


@app.command(help="train in the lab in one process, without Ray: a run's twin, in minutes")
def twin(
    config_name: str = Option(help="lab, or a recipe of yours based on it"),
    config_dir: str | None = CONFIG_DIR,
    overrides: list[str] = OVERRIDES,
):
    from verl_credit.cli.run.twin import twin as run

    return run(config_name, overrides, config_dir)


@app.command(help="build the lab's world, policy, encoder and index")
def lab(
    folder: Path = Option(..., "--dir"),
    world_seed: int = Option(0, parser=int),
    size: Literal["full", "tiny"] = "full",
):
    from verl_credit.errors import ExitCode
    from verl_credit.records.run.progress import Throttled, say_at_once
    from verl_credit.worlds.lab.build import build_lab
    from verl_credit.worlds.lab.warm_start import LabGateError

    try:
        paths = build_lab(folder, world_seed=world_seed, size=size, progress=Throttled(say_at_once))
    except (LabGateError, OSError) as error:
        print(f"verl-credit lab --dir {folder}: {error}")
        return ExitCode.PREFLIGHT
    print(f"lab ready: {paths.root}")


@app.command(help="make the policy and encoder of trained weights, and what the real_* recipes ask of them")
def real(
    folder: Path = Option(..., "--dir"),
    task: Literal["arithmetic", "multihop"] = "multihop",
    questions: str | None = Option(
        None, help="of multihop: HotpotQA's file with paragraphs, or OWNER/NAME on the hub"
    ),
    seed: int = Option(
        0, parser=int, help="of the questions, of which are held out, of the supervised start"
    ),
    size: Literal["full", "tiny"] = Option("full", help="tiny: two layers"),
    overrides: list[str] = OVERRIDES,
):
    from verl_credit.cli.worlds.real import real

    return real(folder, task, overrides, questions=questions, data_seed=seed, size=size)


@app.command(help="write verl's parquet files from a published question set")
def prepare(
    data_set: str = Argument(
        help="hotpotqa, nq, musique, 2wiki, triviaqa, popqa, bamboogle, gsm8k; qa: questions of your own"
    ),
    source: str = Option(help="a file, a folder, or OWNER/NAME on the Hugging Face hub"),
    out: Path = Option(help="a folder that is new or empty"),
    splits: str | None = Option(None, help="of the source: train,val,test; all where not given"),
    limit: int | None = Option(None, parser=int, help="rows per split, the first ones"),
    val_size: int | None = Option(None, parser=int, help="rows of a single split drawn into val.parquet"),
    seed: int = Option(0, parser=int, help="of --val-size"),
    subset: str | None = Option(None, help="which part of a data set on the hub"),
    revision: str | None = Option(None, help="commit, branch or tag on the hub"),
    overwrite: bool = Option(False, "--overwrite", help="replace what prepare wrote there before"),
):
    from verl_credit.cli.worlds.prepare import run

    return run(
        data_set,
        source,
        out,
        limit=limit,
        val_size=val_size,
        seed=seed,
        splits=[name.strip() for name in splits.split(",")] if splits else None,
        overwrite=overwrite,
        subset=subset,
        revision=revision,
    )


@app.command("prepare check", help="can the rows of a file train? and how the policy sees one")
def prepare_check(
    file: Path,
    model: str | None = Option(None, help="whose chat template and tokens: a folder or a hub name"),
    no_search: bool = Option(False, "--no-search", help="for runs with search.max_searches=0"),
):
    from verl_credit.cli.worlds.check_data import check_data

    return check_data(file, model, not no_search)


@app.command(help="write the report of a run or a campaign; of two runs, a page that compares them")
def report(
    run_dir: list[Path] = Argument(help="the folder of a run, of two, or of a campaign"),
    watch: bool = Option(False, "--watch", help="write it anew while the run goes on"),
):
    from verl_credit.cli.run.report import report

    return report(run_dir, watch)


@app.command(help="does one update change the entropy as first order says? of a saved step of a run")
def probe(
    checkpoint: Path = Option(help="RUN/checkpoints/global_step_N"),
    config: Path | None = Option(None, help="the probe's file (docs/probe.md); defaults where not given"),
    out: Path | None = Option(None, help="a folder for the result; probes/RUN-step-N beside the run"),
    overrides: list[str] = Argument((), help="Hydra overrides of the run's configuration, for new rollouts"),
):
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)
    from verl_credit.cli.study.probe import probe

    return probe(checkpoint, config, out, overrides)


@app.command(help="does each mode's credit agree with the true advantages of a policy's turns?")
def fidelity(
    folder: Path = Argument(help="a run, RUN/checkpoints/global_step_N, or a policy (LAB/policy)"),
    out: Path = Option(..., "--dir", help="for the values; an interrupted measurement goes on there"),
    prompts: int = Option(16, min=1, help="the first ones of the split"),
    continuations: int = Option(64, help="per distinct context; an even number"),
    rollouts: int = Option(8, help="per prompt"),
    steps: str | None = Option(
        None, help="of the run: 0,15,30; 0 is its start; the last saved one where not given"
    ),
    modes: str | None = Option(
        None, help="names with commas between; my_module:my_mode; every mode if not given"
    ),
    gradient: bool = Option(
        False, "--gradient", help="the gradients of modes, too; about three times as long"
    ),
    swaps: int = Option(
        0, min=0, help="turns that are replaced by others of the policy's; at most 2 per prompt"
    ),
    minutes: float | None = Option(
        None, help="then the prompts that are complete are used; the same call goes on"
    ),
    parallel: int | None = Option(
        None,
        min=1,
        help="processes that value contexts; as many as there are cores if not given, from 32 prompts on",
    ),
    lab: Path | None = Option(None, help="the lab's folder, where it was moved or is not beside the policy"),
    split: Literal["train", "dev", "test"] = "train",
    seed: int = Option(0, parser=int, help="of rollouts and continuations"),
    engine: Literal["auto", "sampler", "run"] = Option(
        "auto",
        help="sampler: in this process, the lab alone; run: the run's own engine, agent loops, tools and reward; "
        "auto: the sampler where it can",
    ),
    overrides: list[str] = Argument(None, help="of the run's configuration, with --engine run"),
):
    from verl_credit.cli.study.fidelity import fidelity

    return fidelity(
        folder,
        out,
        prompts=prompts,
        rollouts=rollouts,
        continuations=continuations,
        steps=steps,
        modes=modes,
        gradient=gradient,
        swaps=swaps,
        minutes=minutes,
        parallel=parallel,
        lab=lab,
        split=split,
        seed=seed,
        engine=engine,
        overrides=overrides or [],
    )


@app.command(
    "fidelity lens", help="the true advantages of the turns in a run's credit lens; of a run in the lab"
)
def fidelity_lens(
    folder: Path = Argument(help="a run, with keep_rollouts.steps and keep_checkpoints"),
    steps: str | None = Option(None, help="whose rollouts: 5,10; all that can be measured if not given"),
    continuations: int = Option(64, help="per distinct context; an even number"),
    lab: Path | None = Option(None, help="the lab's folder, where it was moved"),
    seed: int = Option(0, parser=int, help="of continuations"),
):
    from verl_credit.cli.study.fidelity_lens import fidelity_lens

    return fidelity_lens(folder, steps=steps, continuations=continuations, lab=lab, seed=seed)


@app.command(
    help="what is a turn mode worth? laws, exact bias, true advantages, and learning curves of the lab"
)
def bench(
    mode: str = Argument(help="my_module:my_mode, or a registered turn mode"),
    overrides: list[str] = Argument(None, help="of the recipe lab, for all runs"),
    params: dict | None = Option(None, parser=_json_object, help="JSON object with options of the mode"),
    out: Path | None = Option(
        None, "--dir", help="runs/bench/MODE if not given; an interrupted bench goes on there"
    ),
    beside: str = Option("joint", help="the published mode that it is compared with, beside GRPO"),
    seeds: int = Option(8, min=2, help="of the learning curves"),
    steps: int = Option(12, min=5, help="of each learning curve"),
    prompts: int = Option(48, min=18, help="whose true advantages are measured"),
    continuations: int = Option(32, help="per distinct context; an even number"),
    parallel: int | None = Option(None, min=1, help="processes; as many as there are cores if not given"),
):
    from verl_credit.cli.study.bench import bench

    return bench(
        mode,
        params,
        out,
        beside=beside,
        seeds=seeds,
        steps=steps,
        prompts=prompts,
        continuations=continuations,
        parallel=parallel,
        overrides=overrides or [],
    )


@app.command(help="show the pipeline that a recipe with overrides would run")
def explain(
    config_name: str = Option("lab", help=SHIPPED),
    config_dir: str | None = CONFIG_DIR,
    values: bool = Option(False, "--values", help="list every value that is not the default"),
    overrides: list[str] = OVERRIDES,
):
    from verl_credit.cli.run.explain import explain

    return explain(config_name, overrides, config_dir, values)


@app.command(help="check this machine, and what a recipe asks of it")
def doctor(
    config_name: str | None = Option(None, help=f"{SHIPPED}; none: the machine alone"),
    config_dir: str | None = CONFIG_DIR,
    as_json: bool = JSON,
    overrides: list[str] = OVERRIDES,
):
    from verl_credit.cli.run.doctor import doctor

    return doctor(config_name, overrides, config_dir, as_json)


@app.command(help="what differs between two runs or recipes")
def diff(
    a: str = Argument(help="a run's folder, or a recipe with overrides in quotes: 'lab credit=grpo'"),
    b: str = Argument(help="the same"),
    config_dir: str | None = CONFIG_DIR,
    as_json: bool = JSON,
):
    from verl_credit.cli.run.diff import diff

    return diff(a, b, config_dir, as_json)


@app.command(help="predict memory, time and disk of a recipe; says whether it fits")
def plan(
    config_name: list[str] = Option(("lab",), help=f"{SHIPPED}; repeatable"),
    config_dir: str | None = CONFIG_DIR,
    every: bool = Option(False, "--all", help="every shipped recipe, as a table"),
    hardware: str | None = Option(None, help="h20, h100, h200, a100, gb10 (spark), cpu (this machine)"),
    devices: int | None = Option(None, parser=int, help="devices in all; the recipe's number otherwise"),
    as_json: bool = JSON,
    overrides: list[str] = Argument((), help="Hydra overrides, plan.NAME=VALUE, hardware.NAME=VALUE"),
):
    from verl_credit.cli.run.plan import plan_command

    return plan_command(config_name, overrides, config_dir, hardware, devices, every, as_json)


@app.command(help="run the laws on an operator of yours, or on all of ours")
def check(
    operator: str | None = Argument(None, help="my_module:my_operator; none: every registered operator"),
    kind: Literal["outcome", "turn", "transform", "algorithm", "uncertainty"] | None = Option(
        None, help="when it cannot be told"
    ),
    params: dict | None = Option(None, parser=_json_object, help="JSON object handed to the operator"),
):
    from verl_credit.cli.study.check_operators import check_operators

    return check_operators(operator, kind, params)


@app.command(help="print docs/modes.md")
def modes():
    from verl_credit.cli.pages.modes import modes_page

    return _print(modes_page())


@app.command(help="print docs/keys.md")
def keys():
    from verl_credit.cli.pages.keys import keys_page

    return _print(keys_page())
