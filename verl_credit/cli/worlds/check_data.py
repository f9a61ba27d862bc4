"""`verl-credit prepare check`: the checks of a file of rows, without a recipe, and one row as the policy sees it."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from verl_credit.errors import ExitCode, PreflightError
from verl_credit.recipe.doctor.inputs.data import read_rows
from verl_credit.recipe.doctor.inputs.prompt_lengths import NotHere, PromptMeter, load_tokenizer, measured
from verl_credit.recipe.doctor.inputs.row import Row
from verl_credit.turns.reward.qa import BOXED, answer_form, gold_answers


def check_data(file: Path, model: str | None, searches: bool) -> int:
    """Exit code 0, or 4 with one line for the first row that cannot train."""
    try:
        rows = read_rows(str(file), "prepare check", searches=searches, other_tools=True)
        lines = _prompt(rows[0], model, searches)
    except (PreflightError, NotHere) as error:
        print(error)
        return ExitCode.PREFLIGHT
    form = "\\boxed{..}" if answer_form(rows[0].truth) == BOXED else "<answer>..</answer>"
    golds = ", ".join(map(repr, gold_answers(rows[0].truth)))
    print("\n".join([f"{len(rows)} rows can train", *lines, f"gold answers, read from {form}: {golds}"]))
    return ExitCode.DONE


def _prompt(row: Row, model: str | None, searches: bool) -> list[str]:
    if model is None:
        said = f"{row.where}; its chat template and tokens: --model PATH_OR_NAME"
        return [said, *(f"{message['role']}: {message['content']}" for message in row.prompt)]
    meter = _meter(model, searches)
    tool = "the search tool" if searches else "no tool"
    return [
        f"{row.where}, {measured(row, meter.count)} tokens with the chat template of {model} and {tool}:",
        measured(row, meter.text),
    ]


def _meter(model: str, searches: bool) -> PromptMeter:
    policy = {"model": {"path": model}}
    config = OmegaConf.create(
        {"data": {}, "search": {"max_searches": int(searches)}, "actor_rollout_ref": policy}
    )
    return PromptMeter(load_tokenizer(config.actor_rollout_ref.model), config)
