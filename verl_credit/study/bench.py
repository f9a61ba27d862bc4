"""A turn mode as a candidate of `verl-credit bench`, its exact bias, and credits on two policies of the lab."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import PreflightError, did_you_mean
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.rules.turn_mode import KEYS
from verl_credit.records.run.progress_line import Throttled, say_at_once
from verl_credit.study.fidelity.credits import find_mode
from verl_credit.study.fidelity.exact.bias import bias_rows
from verl_credit.study.fidelity.exact.operators import Credit, outcome_credit_of, turn_credit_of
from verl_credit.study.fidelity.exact.question import QUESTIONS
from verl_credit.study.fidelity.measure import Result, measure
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.subject import Subject, load_policy, make_subject
from verl_credit.study.fidelity.workers import workers_of
from verl_credit.study.twin import Twin

LATER = 10
"""Steps of GRPO, after which the lab's policy answers about two thirds of the questions."""


@dataclass(frozen=True)
class Candidate:
    """``params``: the options of the mode that differ from its defaults."""

    path: str
    mode: TurnMode
    params: Mapping[str, Any] = field(default_factory=dict)

    def exact(self) -> Credit:
        """The credit in the exact world."""
        return turn_credit_of(self.mode, self.path, **self.params)

    def overrides(self) -> list[str]:
        """Overrides of a recipe. An option that has a key of its own is given by that key."""
        keys = {name: KEYS.get(name, f"+algorithm.turn_params.{name}") for name in self.params}
        given = [f"{keys[name]}={value}" for name, value in self.params.items()]
        return [f"algorithm.info_gain_norm_mode={self.path.replace(':', '.')}", *given]


def find_candidate(path: str, params: Mapping[str, Any] | None = None) -> Candidate:
    """Raises PreflightError for a name that is neither registered nor importable, and for an option that the mode lacks."""
    mode, params = find_mode(path, "MODE"), dict(params or {})
    if unknown := next((name for name in params if name not in mode.options), None):
        has = f"{path} has {', '.join(mode.options) or 'no options'}"
        raise PreflightError(f"--params {unknown}{did_you_mean(unknown, mode.options)}: {has}")
    return Candidate(path, mode, params)


def exact_rows(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    """Rows of `bias_rows` for both questions together; GRPO and RLOO first. Modes whose scope is the batch lack size 8."""
    credits = [outcome_credit_of("grpo"), outcome_credit_of("rloo"), *(c.exact() for c in candidates)]
    together = " and ".join(question.name for question in QUESTIONS.values())
    rows = bias_rows(credits, group_sizes=(2, 4, 8), stops=(0.1, 0.3, 0.7))
    return [row for row in rows if row["questions"] == together]


def on_two_policies(
    config: DictConfig, out: Path, *, prompts: int, continuations: int, also: Mapping[str, DictConfig]
) -> Iterator[tuple[str, Result]]:
    """Yields (policy, result) at the start and later, of ``config``'s run, of GRPO, and of the runs ``also``."""
    start = Path(config.actor_rollout_ref.model.path)
    for step, name in ((0, "the warm start"), (LATER, f"after {LATER} steps of GRPO")):
        folder = _later_policy(out / "policy") if step else start
        load = partial(_subject, name, config, folder, prompts, step)
        with workers_of(load, prompts, 1) as workers:
            request = Request(
                out=str(out / f"fidelity_{step}"),
                prompts=prompts,
                rollouts=config.actor_rollout_ref.rollout.n,
                continuations=continuations,
                modes=["none"],
                gradient=True,
            )
            say = Throttled(say_at_once, f"bench, {name}")
            result = measure(load(), request, say=say, workers=workers, also=also)
        yield name, result


def _subject(name: str, config: DictConfig, folder: Path, prompts: int, step: int) -> Subject:
    lab = Path(config.lab.dir)
    policy, questions = load_policy(folder), Path(config.data.train_files)
    return make_subject(name, config, *policy, questions=questions, lab=lab, prompts=prompts, step=step)


def _later_policy(folder: Path) -> Path:
    """Trained by the twin, once."""
    if not (folder / "config.json").is_file():
        later = ["algorithm.info_gain_norm_mode=none", f"trainer.total_training_steps={LATER}"]
        twin = Twin(load_config("lab", later), folder, say_at_once)
        for _ in twin.steps():
            pass
        twin.save(folder)
    return folder
