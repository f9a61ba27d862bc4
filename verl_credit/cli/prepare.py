"""`verl-credit prepare` writes question sets as verl's parquet files; `prepare check` checks that a file can train; `lab`
and `real` build the files of their recipes without a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from verl_credit.cli.command import Overrides, ends, json_object, modules_from_here
from verl_credit.errors import ConfigError, ExitCode, PreflightError
from verl_credit.names import ENVIRONMENTS
from verl_credit.records.run.progress_line import Throttled, say_at_once
from verl_credit.worlds.data.records import PrepareError

if TYPE_CHECKING:
    from verl_credit.recipe.doctor.data import Row

DATA_SETS = "hotpotqa, nq, musique, 2wiki, triviaqa, popqa, bamboogle, gsm8k; qa: questions of your own"


@ends("prepare", PrepareError, OSError)
def prepare(
    data_set: Annotated[str, Argument(help=DATA_SETS)],
    source: Annotated[str, Option(help="a file, a folder, or OWNER/NAME on the Hugging Face hub")],
    out: Annotated[Path, Option(help="a folder that is new or empty")],
    splits: Annotated[str | None, Option(help="of the source: train,val,test; all where not given")] = None,
    limit: Annotated[int | None, Option(help="rows per split, the first ones")] = None,
    val_size: Annotated[int | None, Option(help="rows of a single split drawn into val.parquet")] = None,
    seed: Annotated[int, Option(help="of --val-size")] = 0,
    subset: Annotated[str | None, Option(help="which part of a data set on the hub")] = None,
    revision: Annotated[str | None, Option(help="commit, branch or tag on the hub")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace what prepare wrote there before")] = False,
) -> None:
    from verl_credit.worlds.data import prepare as data

    wanted = [name.strip() for name in splits.split(",")] if splits else None
    more = {"limit": limit, "val_size": val_size, "seed": seed, "subset": subset, "revision": revision}
    tally = data.prepare(data_set, source, out, splits=wanted, overwrite=overwrite, **more)
    print(tally.table())
    print(f"{data_set} ready: {out}")


@ends("prepare env", PrepareError, OSError)
def prepare_env(
    out: Annotated[Path, Option(help="a folder that is new or empty")],
    path: Annotated[str, Option(help=f"{', '.join(ENVIRONMENTS)}, or my_module.MyEnvironment")],
    seeds: Annotated[str, Option(help="FIRST:END of train.parquet, without the end")],
    held_out: Annotated[str, Option(help="FIRST:END of val.parquet")],
    prompt: Annotated[Path | None, Option(help="a file with the text of the system message")] = None,
    options: Annotated[dict | None, Option(parser=json_object, help="JSON; {seed} is the row's")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace what prepare wrote there before")] = False,
    keys: Annotated[list[str], Argument(help="the run's keys: environment.kwargs.id=FrozenLake-v1")] = [],  # noqa: B006
) -> None:
    from omegaconf import OmegaConf

    from verl_credit.config.keys import Environment, defaults_tree, read_section
    from verl_credit.worlds.data.env_rows import prepare_environment, seeds_of

    if wrong := [key for key in keys if not key.lstrip("+").startswith("environment.") or "=" not in key]:
        raise PrepareError(f"{wrong[0]}: expected environment.KEY=VALUE")
    given = OmegaConf.from_dotlist([f"environment.path={path}", *(key.lstrip("+") for key in keys)])
    known = OmegaConf.create({"environment": defaults_tree()["environment"]})
    if unknown := [name for name in given.environment if name not in known.environment]:
        raise ConfigError(
            key=f"environment.{unknown[0]}",
            value=given.environment[unknown[0]],
            accepted=list(known.environment),
        )
    settings = read_section(Environment, OmegaConf.merge(known, given))
    splits = {"train": seeds_of(seeds, "--seeds"), "val": seeds_of(held_out, "--held-out")}
    text = prompt.read_text().strip() if prompt is not None else None
    with modules_from_here():
        counts = prepare_environment(settings, splits, out, prompt=text, options=options, overwrite=overwrite)
    for name, (rows, different) in counts.items():
        print(f"{name}.parquet: {rows} rows, {different} different first observations")
    print(f"{path} ready: {out}")


def prepare_check(
    file: Path,
    model: Annotated[str | None, Option(help="its chat template and tokens: a folder or hub name")] = None,
    no_search: Annotated[bool, Option("--no-search", help="for runs with search.max_searches=0")] = False,
    calls: Annotated[str, Option("--format", help="multi_turn.format of the run")] = "auto",
    corpus: Annotated[Path | None, Option(help="does it answer the questions? JSON lines, an index")] = None,
) -> int:
    """Prints a row in the policy's form and what is odd about the rows. Exit code 4, and one line, for what cannot train."""
    from verl_credit.recipe.doctor.data import Reads, read_rows
    from verl_credit.recipe.doctor.lengths import NotHere
    from verl_credit.recipe.doctor.rows import look_at
    from verl_credit.turns.rollout.reward.golds import gold_answers
    from verl_credit.turns.rollout.reward.qa import BOXED, answer_form

    try:
        reads = Reads(searches=not no_search, other_tools=True, calls=not no_search, format=calls)
        rows = read_rows(str(file), "prepare check", reads)
        odd = look_at(rows, "prepare check", reads)
        lines = [
            *odd,
            *_prompt(rows[0], model, not no_search and rows[0].task is None),
            *_answerable(file, corpus),
        ]
    except (PreflightError, NotHere) as error:
        print(error)
        return ExitCode.PREFLIGHT
    if (task := rows[0].task) is not None:
        print(
            f"{len(rows)} rows can train",
            *lines,
            f"the first row's environment: seed {task['seed']}",
            sep="\n",
        )
        return ExitCode.DONE
    form = "\\boxed{..}" if answer_form(rows[0].truth) == BOXED else "<answer>..</answer>"
    golds = ", ".join(map(repr, gold_answers(rows[0].truth)))
    print(f"{len(rows)} rows can train", *lines, f"gold answers, read from {form}: {golds}", sep="\n")
    return ExitCode.DONE


def _answerable(file: Path, corpus: Path | None) -> list[str]:
    """A line for the corpus, where it is given. Raises PreflightError."""
    from verl_credit.worlds.data.answerable import draw, in_corpus, pages_of

    if corpus is None:
        return []
    try:
        found = in_corpus(*draw([str(file)]), pages_of(corpus.expanduser()))
    except (OSError, ValueError) as error:
        raise PreflightError(str(error)) from error
    return [f"{corpus}: {found.line()}"]


def _prompt(row: Row, model: str | None, searches: bool) -> list[str]:
    from omegaconf import OmegaConf

    from verl_credit.recipe.doctor.lengths import PromptMeter, load_tokenizer, measured

    if model is None:
        title = f"{row.where}; its chat template and tokens: --model PATH_OR_NAME"
        return [title, *(f"{message['role']}: {message['content']}" for message in row.prompt)]
    policy = {"model": {"path": model}}
    config = {"data": {}, "search": {"max_searches": int(searches)}, "actor_rollout_ref": policy}
    config = OmegaConf.create(config)
    meter = PromptMeter(load_tokenizer(config.actor_rollout_ref.model), config)
    tool, tokens = "the search tool" if searches else "no tool", measured(row, meter.count)
    title = f"{row.where}, {tokens} tokens with the chat template of {model} and {tool}:"
    return [title, measured(row, meter.text)]


@ends("lab --dir {folder}", OSError)
def lab(
    folder: Annotated[Path, Option("--dir")],
    world_seed: int = 0,
    size: Literal["full", "tiny"] = "full",
    hops: Annotated[int | None, Option(help="searches of every question; else a mix of 1 to 3")] = None,
) -> None:
    from verl_credit.worlds.lab.build import build_lab

    paths = build_lab(folder, world_seed=world_seed, size=size, hops=hops, progress=Throttled(say_at_once))
    print(f"lab ready: {paths.root}")


@ends("doorkey --dir {folder}", OSError)
def doorkey(
    folder: Annotated[Path, Option("--dir")], world_seed: int = 0, size: Literal["full", "tiny"] = "full"
) -> None:
    from verl_credit.worlds.doorkey.build import build_doorkey

    build_doorkey(folder, world_seed=world_seed, size=size, progress=Throttled(say_at_once, "doorkey"))
    print(f"ready: {folder}")


@ends("real --dir {folder}")
def real(
    folder: Annotated[Path, Option("--dir")],
    task: Literal["arithmetic", "multihop"] = "multihop",
    questions: Annotated[str | None, Option(help="of multihop: HotpotQA's file, or OWNER/NAME")] = None,
    seed: Annotated[int, Option(help="of questions, of held-out ones, and of the supervised start")] = 0,
    size: Annotated[Literal["full", "tiny"], Option(help="tiny: two layers")] = "full",
    overrides: Overrides = (),
) -> None:
    from verl_credit.recipe.compose import load_config, quoted
    from verl_credit.recipe.world import missing_line, world_of

    given = [f"real.dir={quoted(str(folder.expanduser().resolve()))}", f"real.data_seed={seed}"]
    given += [f"real.questions={quoted(questions)}"] if questions is not None else []
    recipe = {"multihop": "real_cpu", "arithmetic": "real_math_cpu"}[task]
    config = load_config(recipe, [*given, f"real.size={size}", *overrides])
    if missing := missing_line(config):
        raise PreflightError(missing)
    world_of(config).build(Throttled(say_at_once, "real"))
    print(f"ready: {folder}")
