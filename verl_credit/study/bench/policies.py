"""The candidate's credit beside the true one, on two policies: the lab's warm start, and after some steps of GRPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.errors import PreflightError
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.bench.candidate import Candidate
from verl_credit.study.bench.page import Agreed, Row
from verl_credit.study.fidelity.credit import find_modes
from verl_credit.study.fidelity.gradient.agreement import REFERENCE
from verl_credit.study.fidelity.measure import Result, measure
from verl_credit.study.fidelity.measures import Measure
from verl_credit.study.fidelity.subject import Subject, load_policy, make_subject
from verl_credit.study.fidelity.workers import workers_of
from verl_credit.study.twin.train import Twin

LATER = 10
"""Steps of GRPO, after which the lab's policy answers about two thirds of the questions."""


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
    """``overrides``: of the recipe `lab`, whose world is there. The candidate's credit is made as in a run of it.

    ``parallel``: processes that value contexts; as many as there are cores for None.
    """
    config = load_config("lab", [*overrides, *candidate.overrides()])
    start = Path(config.actor_rollout_ref.model.path)
    modes = [*find_modes(["none"]), known.mode]
    for step, name in ((0, "the warm start"), (LATER, f"after {LATER} steps of GRPO")):
        folder = later_policy(out / "policy", overrides) if step else start
        load = partial(_subject, name, config, folder, prompts, step)
        with workers_of(load, prompts, parallel) as workers:
            result = measure(
                load(),
                out / f"fidelity_{step}",
                rollouts=config.actor_rollout_ref.rollout.n,
                continuations=continuations,
                seed=0,
                modes=modes,
                gradient=True,
                say=Throttled(say_at_once, f"bench, {name}"),
                workers=workers,
            )
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
    for credit, agreement in zip(result.credits, result.agreements, strict=True):
        if credit.kind == "run" and agreement is None:
            raise PreflightError(f"{candidate.path} gave no credit: {credit.reason}")
        if credit.kind != "control" and agreement is not None:
            gradient = result.gradients[credit.name]
            name = candidate.path if credit.kind == "run" else credit.name
            rows.append(Row(name, agreement.pearson, gradient.own, gradient.own_difference))
    best = result.gradients[REFERENCE]
    return [*rows, Row("the true advantages", Measure(None), best.own, best.own_difference)]
