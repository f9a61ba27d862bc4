"""`verl-credit prepare` writes question sets as verl's parquet files; `prepare check` checks that a file can train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from verl_credit.cli.command import ends
from verl_credit.errors import PreflightError
from verl_credit.worlds.data.records import PrepareError

if TYPE_CHECKING:
    from verl_credit.recipe.doctor.data import Row


@ends("prepare", PrepareError, OSError)
def prepare(
    data_set: Annotated[
        str,
        Argument(
            help="hotpotqa, nq, musique, 2wiki, triviaqa, popqa, bamboogle, gsm8k; qa: questions of your own"
        ),
    ],
    source: Annotated[str, Option(help="a file, a folder, or OWNER/NAME on the Hugging Face hub")],
    out: Annotated[Path, Option(help="a folder that is new or empty")],
    splits: Annotated[str | None, Option(help="of the source: train,val,test; all where not given")] = None,
    limit: Annotated[int | None, Option(parser=int, help="rows per split, the first ones")] = None,
    val_size: Annotated[
        int | None, Option(parser=int, help="rows of a single split drawn into val.parquet")
    ] = None,
    seed: Annotated[int, Option(parser=int, help="of --val-size")] = 0,
    subset: Annotated[str | None, Option(help="which part of a data set on the hub")] = None,
    revision: Annotated[str | None, Option(help="commit, branch or tag on the hub")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace what prepare wrote there before")] = False,
) -> None:
    from verl_credit.worlds.data import prepare as data

    tally = data.prepare(
        data_set,
        source,
        out,
        splits=[name.strip() for name in splits.split(",")] if splits else None,
        limit=limit,
        val_size=val_size,
        seed=seed,
        subset=subset,
        revision=revision,
        overwrite=overwrite,
    )
    print(tally.table())
    print(f"{data_set} ready: {out}")


def prepare_check(
    file: Path,
    model: Annotated[
        str | None, Option(help="whose chat template and tokens: a folder or a hub name")
    ] = None,
    no_search: Annotated[bool, Option("--no-search", help="for runs with search.max_searches=0")] = False,
) -> int:
    """Prints a row in the policy's form. Exit code 4, and one line, for the first row that cannot train."""
    from verl_credit.errors import ExitCode
    from verl_credit.recipe.doctor.data import read_rows
    from verl_credit.recipe.doctor.lengths import NotHere
    from verl_credit.turns.reward.qa import BOXED, answer_form, gold_answers

    try:
        rows = read_rows(str(file), "prepare check", searches=not no_search, other_tools=True)
        lines = _prompt(rows[0], model, not no_search)
    except (PreflightError, NotHere) as error:
        print(error)
        return ExitCode.PREFLIGHT
    form = "\\boxed{..}" if answer_form(rows[0].truth) == BOXED else "<answer>..</answer>"
    golds = ", ".join(map(repr, gold_answers(rows[0].truth)))
    print("\n".join([f"{len(rows)} rows can train", *lines, f"gold answers, read from {form}: {golds}"]))
    return ExitCode.DONE


def _prompt(row: Row, model: str | None, searches: bool) -> list[str]:
    from omegaconf import OmegaConf

    from verl_credit.recipe.doctor.lengths import PromptMeter, load_tokenizer, measured

    if model is None:
        title = f"{row.where}; its chat template and tokens: --model PATH_OR_NAME"
        return [title, *(f"{message['role']}: {message['content']}" for message in row.prompt)]
    policy = {"model": {"path": model}}
    config = OmegaConf.create(
        {"data": {}, "search": {"max_searches": int(searches)}, "actor_rollout_ref": policy}
    )
    meter = PromptMeter(load_tokenizer(config.actor_rollout_ref.model), config)
    tool = "the search tool" if searches else "no tool"
    return [
        f"{row.where}, {measured(row, meter.count)} tokens with the chat template of {model} and {tool}:",
        measured(row, meter.text),
    ]
