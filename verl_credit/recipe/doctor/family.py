"""Checks, once the model's files are here, that the policy's family is exact with the recipe's keys."""

from __future__ import annotations

from pathlib import Path

from verl_credit.config.resolved import resolved
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.model import read_json
from verl_credit.recipe.doctor.result import Result, passed, skipped
from verl_credit.recipe.family import EVALUATED, family_line, validate_family
from verl_credit.recipe.world import MODEL

ADAPTER = "actor_rollout_ref.model.lora_adapter_path"


def check_family(context: Context) -> Result:
    """The recipe was checked when it was composed; by now a world may have been built, or a config.json fetched."""
    if unbuilt := context.unbuilt(context.value(MODEL)):
        return skipped(unbuilt)
    validate_family(resolved(context.config), context.settings)
    _adapter_without_dropout(context.value(ADAPTER))
    return passed(family_line(context.config))


def _adapter_without_dropout(path: object) -> None:
    """verl makes adapters without dropout; one that it loads trains with that of its file, which no key changes."""
    file = Path(str(path)).expanduser() / "adapter_config.json"
    dropout = read_json(file).get("lora_dropout") if path and file.is_file() else None
    if dropout:
        raise PreflightError(
            f"{ADAPTER}={path}: lora_dropout={dropout} in its adapter_config.json; {EVALUATED}; set it to 0 there"
        )
