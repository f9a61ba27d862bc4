"""A turn mode that is benched: a registered one by its name, or one of the user's by MODULE:NAME."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_credit.credit.laws import Subject, own_subject, registered_subject
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import PreflightError, did_you_mean
from verl_credit.recipe.rules.turn_mode import KEYS
from verl_credit.study.fidelity.exact.subjects import Credit, turn_credit_of


@dataclass(frozen=True)
class Candidate:
    """``params``: options of the mode, others than its defaults."""

    path: str
    mode: TurnMode
    params: Mapping[str, Any] = field(default_factory=dict)

    def subject(self) -> Subject:
        """For the laws."""
        if self.path in MODES:
            return registered_subject("turn", self.path)
        return own_subject(self.mode, self.path, kind="turn", params=dict(self.params))

    def exact(self) -> Credit:
        """For the exact world."""
        return turn_credit_of(self.mode, self.path, **self.params)

    def overrides(self) -> list[str]:
        """Of a recipe. An option that has a key of its own is given by it."""
        keys = {name: KEYS.get(name, f"+algorithm.turn_params.{name}") for name in self.params}
        given = [f"{keys[name]}={value}" for name, value in self.params.items()]
        return [f"algorithm.info_gain_norm_mode={self.path.replace(':', '.')}", *given]


def find_candidate(path: str, params: Mapping[str, Any] | None = None) -> Candidate:
    """Raises PreflightError for a name that is neither registered nor importable, and for an option that the mode lacks."""
    if path not in MODES and not {".", ":"} & set(path):
        raise PreflightError(
            f"{path}{did_you_mean(path, MODES)}: expected my_module:my_mode, or one of {', '.join(MODES)}"
        )
    try:
        mode = find_turn_mode(path, "MODE")
    except ValueError as error:
        raise PreflightError(str(error)) from error
    for name in params or {}:
        if name not in mode.options:
            raise PreflightError(
                f"--params {name}{did_you_mean(name, mode.options)}: {path} has {', '.join(mode.options) or 'no options'}"
            )
    return Candidate(path, mode, dict(params or {}))
