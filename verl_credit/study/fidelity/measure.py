"""One measurement: rollouts of a policy, values of their contexts, gains and credits of their turns, and the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.records.report.again import TurnTables
from verl_credit.records.run.files import append_json
from verl_credit.study.fidelity.about import check_about
from verl_credit.study.fidelity.controls import controls, first_brought
from verl_credit.study.fidelity.credit import Credit, find_modes, mode_credits
from verl_credit.study.fidelity.gradient.agreement import (
    gradient_agreement,
    replicate_groups,
    score_without_gains,
)
from verl_credit.study.fidelity.gradient.alignment import GradientAgreement
from verl_credit.study.fidelity.integrity import ZScore, martingale
from verl_credit.study.fidelity.measured import Measured
from verl_credit.study.fidelity.measures import Agreement, Agreements, Measure
from verl_credit.study.fidelity.run_credit import run_credit
from verl_credit.study.fidelity.scored import TURNS, ScoredTurn, by_second_half, score_turns
from verl_credit.study.fidelity.tables import tables_of
from verl_credit.study.fidelity.values import PROMPTS_AT_ONCE, VALUES, Value, states_of, values_of
from verl_credit.study.fidelity.workers import Workers
from verl_credit.worlds.rollouts.rollout import Start, Trajectory
from verl_credit.worlds.rollouts.sampler import digest


@dataclass(frozen=True)
class Result:
    """Of the prompts whose values are complete: the first ones, all of them unless time was short."""

    groups: list[list[Trajectory]]
    turns: list[ScoredTurn]
    credits: list[Credit]
    """Of the run, of every mode, of the controls."""
    gradients: dict[str, GradientAgreement]
    """By the names of credits, and of `REFERENCE`; empty where gradients were not asked for."""
    agreements: list[Agreement | None]
    """With the true advantages, of each credit; None where it could not be made."""
    of_prompts: int
    """How many were asked for."""
    reliability: Measure
    sure_pairs: tuple[int, int]
    """Of tool turns, and with the ending turn."""
    integrity: list[ZScore]
    contexts: int
    otherwise: float
    """Share of continuations on whose way a tool answered otherwise than in the rollout."""

    @property
    def prompts(self) -> int:
        return len(self.groups)


def measure(
    subject: Measured,
    out: Path,
    *,
    rollouts: int,
    continuations: int,
    seed: int,
    modes: Sequence[TurnMode] | None = None,
    gradient: bool = False,
    say: Callable[[float, str], None] = lambda share, text: None,
    enough: Callable[[], bool] = lambda: False,
    workers: Workers | None = None,
    prompts_at_once: int = PROMPTS_AT_ONCE,
) -> Result:
    """Writes ``values.jsonl`` as values come, and ``turns.jsonl`` at the end. Repeated with the same settings it goes on.

    ``modes``: None for every registered one. ``gradient``: their gradients, too (`gradient.agreement`), which takes other
    rollouts of the same prompts and their values. Once ``enough`` says so no more prompts are valued. ``workers`` value
    contexts; None: this process does.
    Raises PreflightError where ``out`` has the values of another policy or of other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    check_about(out, subject.about(), continuations=continuations, seed=seed)
    if workers is not None and not (out / VALUES).exists():
        workers.start()
    sampled = sample_groups(subject, rollouts=rollouts, seed=seed, say=say)
    again = replicate_groups(subject, rollouts=rollouts, seed=seed) if gradient else [[] for _ in sampled]
    values = values_of(
        states_of([*sampled, *again]),
        subject.roll,
        continuations=continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(0.1 + 0.5 * done / of, f"values of the contexts of {done} of {of} prompts"),
        enough=enough,
        prompts_at_once=prompts_at_once,
        elsewhere=None if workers is None else workers.values,
    )
    say(0.6, "gains and credit")
    count = _complete([[*one, *other] for one, other in zip(sampled, again, strict=True)], values)
    groups, again = sampled[:count], again[:count]
    contexts = {digest(state.ids) for state in states_of([*groups, *again])}
    values = {name: values[name] for name in contexts}
    tables, gold_B_K1, credits = _credits(subject, groups, find_modes(None) if modes is None else modes)
    gains, gold = (_by_group(groups, table_B.tolist()) for table_B in (tables.reward_B_K, gold_B_K1))
    turns = score_turns(groups, values, gains, gold, first_brought(groups, subject.data))
    _write_turns(out / TURNS, turns)
    agreements = Agreements(turns)
    second = Agreements(by_second_half(turns, values), one_half=True)
    credits += controls(tables, groups, values, subject.data, seed)
    gradients = {}
    if gradient:
        gradients = gradient_agreement(
            subject.model,
            groups,
            turns,
            credits,
            again,
            score_without_gains(again, values),
            batch_prompts=subject.config.data.train_batch_size,
            seed=seed,
            say=lambda done, of: say(0.65 + 0.35 * done / of, f"gradients of {done} of {of} distinct turns"),
        )
    return Result(
        groups,
        turns,
        credits,
        gradients,
        [_agreement(credit, turns, second if credit.held_out else agreements) for credit in credits],
        len(sampled),
        agreements.reliability,
        agreements.sure,
        martingale(turns),
        len(contexts),
        sum(v.otherwise for v in values.values()) / sum(v.continuations for v in values.values()),
    )


def _agreement(credit: Credit, turns: list[ScoredTurn], agreements: Agreements) -> Agreement | None:
    if credit.advantages is None:
        return None
    return agreements.of([credit.advantages[t.prompt][t.trajectory][t.turn] for t in turns])


def _complete(sampled: list[list[Trajectory]], values: dict[str, Value]) -> int:
    """How many prompts come before one that lacks a value."""
    known = (all(digest(state.ids) in values for state in states_of([group])) for group in sampled)
    return sum(1 for _ in takewhile(bool, known))


def _credits(
    subject: Measured, groups: list[list[Trajectory]], modes: Sequence[TurnMode]
) -> tuple[TurnTables, torch.Tensor, list[Credit]]:
    settings = CreditSettings.from_config(subject.config)
    with subject.forward() as forward:
        tables, gold_B_K1 = tables_of(subject.batch(groups), groups, settings, forward, subject.tokenizer)
        of_run = [] if subject.step is None else [_of_run(subject, groups, settings, forward)]
    sizes = [len(group) for group in groups]
    return (
        tables,
        gold_B_K1,
        [*of_run, *mode_credits(tables, sizes, modes, subject.config.data.train_batch_size)],
    )


def _by_group(groups: list[list[Trajectory]], rows: list) -> list[list]:
    """A row for each trajectory."""
    of_row = iter(rows)
    return [[next(of_row) for _ in group] for group in groups]


def _of_run(subject: Measured, groups: list[list[Trajectory]], settings: CreditSettings, forward) -> Credit:
    """Batch by batch, as in training."""
    step, size = subject.step + 1, subject.config.data.train_batch_size
    made = []
    for begin in range(0, len(groups), size):
        part = groups[begin : begin + size]
        made.append(
            run_credit(
                subject.batch(part),
                part,
                settings,
                forward,
                subject.tokenizer,
                step=step,
                planned_steps=subject.config.trainer.total_training_steps or step,
            )
        )
    if failed := next((credit for credit in made if credit.advantages is None), None):
        return failed
    return replace(made[0], advantages=[of_prompt for credit in made for of_prompt in credit.advantages])


def sample_groups(
    subject: Measured,
    *,
    rollouts: int,
    seed: int,
    say: Callable[[float, str], None] = lambda share, text: None,
) -> list[list[Trajectory]]:
    """``rollouts`` trajectories of every prompt at temperature 1."""
    say(0.0, f"{rollouts} rollouts of {len(subject.prompts)} prompts")
    starts = [Start(state, rollouts, seed, "rollout") for state in subject.prompts]
    return subject.roll(starts)


def _write_turns(path: Path, turns: list[ScoredTurn]) -> None:
    path.unlink(missing_ok=True)
    for turn in turns:
        append_json(path, asdict(turn))
