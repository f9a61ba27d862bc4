"""Runs checks in a separate process, because verl and Ray take seconds to import and may end the process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable

from omegaconf import OmegaConf

from verl_credit.recipe.doctor.result import Result, Status, failed
from verl_credit.recipe.machine.gather import in_a_process

WITH_VERL = "verl_credit.cli.train.with_verl"
PROBE_S = 180.0


def answer_of(code: int | None, printed: str) -> dict | str:
    """Returns the JSON of the last line, or a text with the error."""
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    if code is None:
        return f"no answer in {PROBE_S:g} s"
    if code == 0 and lines:
        try:
            return json.loads(lines[-1])
        except ValueError:
            pass
    return lines[-1][:300] if lines else f"it ended with exit code {code} and printed nothing"


class VerlProcess:
    """Makes all checks that need verl in one process, which starts at the first of them."""

    def __init__(self, run: Callable = in_a_process) -> None:
        self._run = run
        self._found: dict | str | None = None

    def __call__(self, name: str, context) -> Result:
        if self._found is None:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                OmegaConf.save(context.config, file.name)
                self._found = answer_of(*self._run(["-m", WITH_VERL, file.name], PROBE_S))
        if isinstance(self._found, str):
            return failed(f"a process with verl: {self._found}", "a verl that imports", "see requirements")
        found = self._found[name]
        return Result(**{**found, "status": Status(found["status"])})
