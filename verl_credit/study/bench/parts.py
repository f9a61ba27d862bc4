"""The parts of `verl-credit bench`: candidate, exact bias, true advantages on two policies, learning curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_credit.credit import laws
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import ExitCode, PreflightError, did_you_mean
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.rules.turn_mode import KEYS
from verl_credit.records.run.files import write_text
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.campaign.file import parse
from verl_credit.study.campaign.runner import run_campaign
from verl_credit.study.fidelity.agreements import Measure
from verl_credit.study.fidelity.exact.bias import bias_rows
from verl_credit.study.fidelity.exact.operators import Credit, outcome_credit_of, turn_credit_of
from verl_credit.study.fidelity.exact.question import QUESTIONS
from verl_credit.study.fidelity.gradient.credited import REFERENCE
from verl_credit.study.fidelity.measure import Result, measure
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.subject import Subject, load_policy, make_subject
from verl_credit.study.fidelity.workers import workers_of
from verl_credit.study.twin.train import Twin


@dataclass(frozen=True)
class Candidate:
    """``params``: the options of the mode that differ from its defaults."""

    path: str
    mode: TurnMode
    params: Mapping[str, Any] = field(default_factory=dict)

    def subject(self) -> laws.Subject:
        """The operator for the laws."""
        if self.path in MODES:
            return laws.registered_subject("turn", self.path)
        return laws.own_subject(self.mode, self.path, kind="turn", params=dict(self.params))

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


GROUP_SIZES, STOPS = (2, 4, 8), (0.1, 0.3, 0.7)
TOGETHER = " and ".join(question.name for question in QUESTIONS.values())


def exact_rows(candidates: Sequence[Candidate]) -> list[dict[str, object]]:
    """Rows of `bias_rows` for both questions together; GRPO and RLOO first. Modes whose scope is the batch lack size 8."""
    credits = [outcome_credit_of("grpo"), outcome_credit_of("rloo"), *(c.exact() for c in candidates)]
    rows = bias_rows(credits, group_sizes=GROUP_SIZES, stops=STOPS)
    return [row for row in rows if row["questions"] == TOGETHER]


def cosine_span(rows: Sequence[dict], mode: str) -> tuple[float | None, float | None]:
    """Lowest and highest cosine of E[g] with grad E[r]; None where the mode's expected gradient is 0 everywhere."""
    cosines = [row["cosine"] for row in rows if row["mode"] == mode and row["cosine"] is not None]
    return (min(cosines), max(cosines)) if cosines else (None, None)


LATER = 10
"""Steps of GRPO, after which the lab's policy answers about two thirds of the questions."""


@dataclass(frozen=True)
class Row:
    """A credit on a policy."""

    name: str
    pearson: Measure
    own: Measure | None
    own_difference: Measure | None


@dataclass(frozen=True)
class Agreed:
    policy: str
    prompts: int
    reliability: Measure
    rows: list[Row]


def agreed(
    candidate: Candidate,
    known: Candidate,
    out: Path,
    overrides: Sequence[str],
    *,
    prompts: int,
    continuations: int,
    parallel: int | None = None,
) -> Iterator[Agreed]:
    """``overrides`` of the recipe `lab`, whose world exists. The candidate's credit is computed as in a run of it.

    ``parallel``: processes that value contexts; None: one for each core.
    """
    config = load_config("lab", [*overrides, *candidate.overrides()])
    start = Path(config.actor_rollout_ref.model.path)
    for step, name in ((0, "the warm start"), (LATER, f"after {LATER} steps of GRPO")):
        folder = later_policy(out / "policy", overrides) if step else start
        load = partial(_subject, name, config, folder, prompts, step)
        with workers_of(load, prompts, parallel) as workers:
            request = Request(
                out=str(out / f"fidelity_{step}"),
                prompts=prompts,
                rollouts=config.actor_rollout_ref.rollout.n,
                continuations=continuations,
                modes=["none", known.path],
                gradient=True,
            )
            result = measure(load(), request, say=Throttled(say_at_once, f"bench, {name}"), workers=workers)
        yield Agreed(name, result.prompts, result.reliability, _rows(result, candidate))


def _subject(name: str, config: DictConfig, folder: Path, prompts: int, step: int) -> Subject:
    lab = Path(config.lab.dir)
    policy, questions = load_policy(folder), lab / "train.parquet"
    return make_subject(name, config, *policy, questions=questions, lab=lab, prompts=prompts, step=step)


def later_policy(folder: Path, overrides: Sequence[str]) -> Path:
    """Trained by the twin, once."""
    if not (folder / "config.json").is_file():
        config = load_config(
            "lab",
            [*overrides, "algorithm.info_gain_norm_mode=none", f"trainer.total_training_steps={LATER}"],
        )
        twin = Twin(config, folder, say_at_once)
        for _ in twin.steps():
            pass
        twin.save(folder)
    return folder


def _rows(result: Result, candidate: Candidate) -> list[Row]:
    """Raises PreflightError where the candidate gave no credit."""
    rows = []
    for credit, agreement in result.credits:
        if credit.kind == "run" and agreement is None:
            raise PreflightError(f"{candidate.path} gave no credit: {credit.reason}")
        if credit.kind != "control" and agreement is not None:
            gradient = result.gradients[credit.name]
            name = candidate.path if credit.kind == "run" else credit.name
            rows.append(Row(name, agreement.pearson, gradient.own, gradient.own_difference))
    best = result.gradients[REFERENCE]
    return [*rows, Row("the true advantages", Measure(None), best.own, best.own_difference)]


GRPO = "grpo"
METRIC = "credit/outcome/em"
"""Exact match of a step's rollouts, before the policy is trained on them. 12 steps take 192 of 2,048 questions."""
FILE, FOLDER = "learning.yaml", "learning"


def declare(
    conditions: Mapping[str, Sequence[str]], *, seeds: int, steps: int, overrides: Sequence[str]
) -> dict:
    """The campaign's file: the first condition beside GRPO, compared with GRPO and with each of the others.

    Raises ConfigError for an override that runs of a campaign cannot share.
    """
    first, *others = (name for name in conditions if name != GRPO)
    campaign = {
        "name": "bench",
        "hypothesis": f"The turn mode {first} learns faster than {', '.join([GRPO, *others])}.",
        "engine": "twin",
        "recipe": "lab",
        "overrides": [
            f"trainer.total_training_steps={steps}",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",  # the same for all conditions
            "trainer.save_freq=-1",
            *overrides,
        ],
        "conditions": {name: list(of) for name, of in conditions.items()},
        "baseline": GRPO,
        "comparisons": [[first, GRPO], *([first, other] for other in others)],
        "seeds": list(range(1, seeds + 1)),
        "worlds": [0],
        "metric": {"name": METRIC, "window": [1, steps]},
    }
    parse(campaign, "bench")
    return campaign


def learn(out: Path, campaign: dict, *, parallel: int) -> tuple[ExitCode, Path]:
    """Runs what is missing. Raises ConfigError and PreflightError before the first run."""
    file = out / FILE
    write_text(file, json.dumps(campaign, indent=1))
    return run_campaign(str(file), out / FOLDER, parallel)
