"""The parts of `verl-credit bench`, measures of a turn mode that need no GPU, and their page: candidate, exact bias, true
advantages on two policies, learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_credit.credit import laws
from verl_credit.credit.laws.check import Finding
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import PreflightError, did_you_mean
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.rules.turn_mode import KEYS
from verl_credit.records.report.curves import panel_data_uri
from verl_credit.records.report.page import template
from verl_credit.records.run.progress_line import Throttled, say_at_once
from verl_credit.study.campaign.file import parse
from verl_credit.study.campaign.report import difference_format, interval, panels, value_format
from verl_credit.study.campaign.results import Results
from verl_credit.study.fidelity.credits import find_mode
from verl_credit.study.fidelity.exact.bias import bias_rows
from verl_credit.study.fidelity.exact.operators import Credit, outcome_credit_of, turn_credit_of
from verl_credit.study.fidelity.exact.question import QUESTIONS
from verl_credit.study.fidelity.gradients import REFERENCE
from verl_credit.study.fidelity.measure import Result, measure
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.result import shown
from verl_credit.study.fidelity.subject import Subject, load_policy, make_subject
from verl_credit.study.fidelity.workers import workers_of
from verl_credit.study.stats import Measure
from verl_credit.study.twin import Twin

GRPO = "grpo"
METRIC = "credit/outcome/em"
"""Exact match of a step's rollouts, before the policy is trained on them. 12 steps take 192 of 2,048 questions."""
LATER = 10
"""Steps of GRPO, after which the lab's policy answers about two thirds of the questions."""


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


def find_candidate(path: str, params: Mapping[str, Any] | None = None, option: str = "MODE") -> Candidate:
    """Raises PreflightError for a name that is neither registered nor importable, and for an option that the mode lacks."""
    mode, params = find_mode(path, option), dict(params or {})
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

    def lines(self) -> list[str]:
        lines = [
            f"{self.policy}, {self.prompts} prompts, reliability of A* {shown(self.reliability)}: "
            "correlation with A*; own cosine; own cosine minus GRPO's"
        ]
        for row in self.rows:
            cells = f"{_shown(row.pearson):<22} {_shown(row.own):<22} {_shown(row.own_difference)}"
            lines.append(f"  {row.name:<28} {cells}")
        return lines


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
    """``overrides`` of the recipe `lab`, whose world exists. The candidate's credit is computed as in a run of it."""
    config = load_config("lab", [*overrides, *candidate.overrides()])
    sizes = {"prompts": prompts, "continuations": continuations, "parallel": parallel}
    for name, result in on_two_policies(config, out, overrides, modes=["none", known.path], **sizes):
        yield Agreed(name, result.prompts, result.reliability, _rows(result, candidate))


def on_two_policies(
    config: DictConfig,
    out: Path,
    overrides: Sequence[str],
    *,
    modes: list[str],
    prompts: int,
    continuations: int,
    parallel: int | None,
    also: Mapping[str, DictConfig] = {},
) -> Iterator[tuple[str, Result]]:
    """Yields (policy, result) at the start and later, of ``config``'s run, of ``modes``, and of the runs ``also``.

    ``parallel``: processes that value contexts; None: one for each core.
    """
    start = Path(config.actor_rollout_ref.model.path)
    for step, name in ((0, "the warm start"), (LATER, f"after {LATER} steps of GRPO")):
        folder = _later_policy(out / "policy", overrides) if step else start
        load = partial(_subject, name, config, folder, prompts, step)
        with workers_of(load, prompts, parallel) as workers:
            request = Request(
                out=str(out / f"fidelity_{step}"),
                prompts=prompts,
                rollouts=config.actor_rollout_ref.rollout.n,
                continuations=continuations,
                modes=modes,
                gradient=True,
            )
            say = Throttled(say_at_once, f"bench, {name}")
            result = measure(load(), request, say=say, workers=workers, also=also)
        yield name, result


def _subject(name: str, config: DictConfig, folder: Path, prompts: int, step: int) -> Subject:
    lab = Path(config.lab.dir)
    policy, questions = load_policy(folder), Path(config.data.train_files)
    return make_subject(name, config, *policy, questions=questions, lab=lab, prompts=prompts, step=step)


def _later_policy(folder: Path, overrides: Sequence[str]) -> Path:
    """Trained by the twin, once."""
    if not (folder / "config.json").is_file():
        later = ["algorithm.info_gain_norm_mode=none", f"trainer.total_training_steps={LATER}"]
        twin = Twin(load_config("lab", [*overrides, *later]), folder, say_at_once)
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


@dataclass
class Bench:
    """The results so far; each part is filled once it has been measured."""

    name: str
    compared: list[str]
    findings: list[Finding] = field(default_factory=list)
    exact: list[dict] = field(default_factory=list)
    agreed: list[Agreed] = field(default_factory=list)
    learning: Results | None = None

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.wrong]

    def law_lines(self) -> list[str]:
        held = sum(finding.verdict == "holds" for finding in self.findings)
        lines = [f"{finding.name}: {finding.says} {finding.detail}".strip() for finding in self.broken]
        return [f"{held} laws hold, {len(lines)} broken" + (":" if lines else ""), *lines]

    def exact_lines(self) -> list[str]:
        """Lowest and highest cosine of each mode's E[g] with grad E[r]."""
        cosines: dict[str, list[float]] = {}
        for row in self.exact:
            cosines.setdefault(row["mode"], []).extend([] if row["cosine"] is None else [row["cosine"]])
        lines = []
        for name, of in cosines.items():
            span = f"cosine {min(of):.3f} to {max(of):.3f}" if of else "undefined: its expected gradient is 0"
            lines.append(f"{name:<28} {span}")
        return lines


def page(bench: Bench) -> str:
    learning, more = bench.learning, {}
    if learning is not None:
        more = {
            "panels": [panel for panel in panels(learning) if panel.lines],
            "value": value_format(learning),
            "difference": difference_format(learning),
            "interval": interval,
        }
    return template("bench.html").render(bench=bench, shown=_shown, picture=panel_data_uri, **more)


def _shown(measure: Measure | None) -> str:
    return "undefined" if measure is None else shown(measure)
