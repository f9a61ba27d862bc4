"""A measurement: rollouts of a policy, values of their contexts, gains and credits of their turns, and the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.records.run.files import append_json
from verl_credit.study.fidelity.agreements import Agreement, Agreements
from verl_credit.study.fidelity.credits import Credit, controls, find_modes, first_brought, mode_credits
from verl_credit.study.fidelity.gradients import gradient_agreement
from verl_credit.study.fidelity.headroom import MODE, headroom, true_values
from verl_credit.study.fidelity.request import Request, check_about
from verl_credit.study.fidelity.result import Result
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.true_values import (
    PROMPTS_AT_ONCE,
    TURNS,
    VALUES,
    by_second_half,
    score_turns,
    states_of,
    values_of,
)
from verl_credit.study.fidelity.turn_rows import run_credit, tables_of
from verl_credit.study.fidelity.turn_tables import TurnTables
from verl_credit.study.fidelity.workers import Workers
from verl_credit.worlds.rollouts.rollout import Groups, Start, Trajectory
from verl_credit.worlds.rollouts.sampler import digest


def measure(
    subject: Subject,
    request: Request,
    *,
    say: Callable[[float, str], None] = lambda share, text: None,
    enough: Callable[[], bool] = lambda: False,
    workers: Workers | None = None,
    prompts_at_once: int = PROMPTS_AT_ONCE,
    also: Mapping[str, DictConfig] = {},
) -> Result:
    """Writes ``values.jsonl`` as values come, and ``turns.jsonl`` at the end. A second call with the same request continues.

    A gradient takes other rollouts of the same prompts and their values, too. Once ``enough`` is true no more prompts are
    valued. ``workers`` value contexts; None: this process does. ``also``: further runs, whose credit of the same rollouts is
    measured under their names.
    Raises PreflightError where the folder has the values of another policy or of other settings.
    """
    out, seed = Path(request.out), request.seed
    out.mkdir(parents=True, exist_ok=True)
    check_about(out, subject.about(), continuations=request.continuations, seed=seed)
    if workers is not None and not (out / VALUES).exists():
        workers.start()
    say(0.0, f"{request.rollouts} rollouts of {len(subject.prompts)} prompts")
    sampled = sample_groups(subject, request)
    again = sample_groups(subject, request, "replicate") if request.gradient else [[] for _ in sampled]
    values = values_of(
        states_of([*sampled, *again]),
        subject.roll,
        continuations=request.continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(0.1 + 0.5 * done / of, f"values of the contexts of {done} of {of} prompts"),
        enough=enough,
        prompts_at_once=prompts_at_once,
        elsewhere=None if workers is None else workers.values,
    )
    say(0.6, "gains and credit")
    both = [[*one, *other] for one, other in zip(sampled, again, strict=True)]
    complete = (all(digest(state.ids) in values for state in states_of([group])) for group in both)
    count = sum(1 for _ in takewhile(bool, complete))  # prompts before the first one without a value
    groups, again = sampled[:count], again[:count]
    values = {name: values[name] for name in {digest(state.ids) for state in states_of([*groups, *again])}}
    modes = [mode for mode in find_modes(request.modes) if mode.name != MODE]  # it has the true values
    tables, gains, gold, credits = _credits(subject, groups, modes, also)
    turns = score_turns(groups, values, gains, gold, first_brought(groups, subject.data))
    (out / TURNS).unlink(missing_ok=True)
    for turn in turns:
        append_json(out / TURNS, asdict(turn))
    agreements = Agreements(turns)
    second = Agreements(by_second_half(turns, values), one_half=True)

    def agreement(credit: Credit) -> Agreement | None:
        of = second if credit.held_out else agreements
        return None if credit.advantage_N is None else of.of(credit.advantage_N)

    credits += controls(tables, groups, values, subject.data, seed)
    credits += true_values(tables, groups, values)
    gradients = {}
    if request.gradient:
        gradients = gradient_agreement(
            subject.model,
            groups,
            turns,
            credits,
            again,
            score_turns(again, values),
            batch_prompts=subject.config.data.train_batch_size,
            seed=seed,
            say=lambda done, of: say(0.65 + 0.35 * done / of, f"gradients of {done} of {of} distinct turns"),
        )
    return Result(
        groups,
        turns,
        values,
        [(one, agreement(one)) for one in credits],
        gradients,
        headroom(gradients, subject.config.data.train_batch_size, request.continuations),
        len(sampled),
        agreements.reliability,
        agreements.sure,
    )


def sample_groups(subject: Subject, request: Request, name: str = "rollout") -> list[list[Trajectory]]:
    """Trajectories of every prompt at temperature 1. Another ``name`` gives independent trajectories."""
    return subject.roll([Start(state, request.rollouts, request.seed, name) for state in subject.prompts])


def _credits(
    subject: Subject, groups: Groups, modes: Sequence[TurnMode], also: Mapping[str, DictConfig]
) -> tuple[TurnTables, np.ndarray, np.ndarray, list[Credit]]:
    """The tables that modes read, gains and the gold answer's probability by turn, and the credit of the run and modes."""
    settings, size = CreditSettings.from_config(subject.config), subject.config.data.train_batch_size
    with subject.forward() as forward:
        tables, gold_B_K1 = tables_of(subject.batch(groups), groups, settings, forward, subject.tokenizer)
        of_run = [] if subject.step is None else [_of_run(subject, groups, settings, forward)]
        for name, config in also.items():
            other = replace(subject, config=config)
            of_run.append(
                replace(_of_run(other, groups, CreditSettings.from_config(config), forward), name=name)
            )
    gain_B_K1 = torch.nn.functional.pad(tables.batch.reward_B_K, (0, 1))
    by_turn = tables.per_turn(gain_B_K1), tables.per_turn(gold_B_K1)
    return tables, *by_turn, [*of_run, *mode_credits(tables, modes, size)]


def _of_run(subject: Subject, groups: Groups, settings: CreditSettings, forward) -> Credit:
    """Batch by batch, as in training."""
    step, size = subject.step + 1, subject.config.data.train_batch_size
    steps = {"step": step, "planned_steps": subject.config.trainer.total_training_steps or step}
    credits = []
    for begin in range(0, len(groups), size):
        part = groups[begin : begin + size]
        credits.append(run_credit(subject.batch(part), part, settings, forward, subject.tokenizer, **steps))
    if missing := next((credit for credit in credits if credit.advantage_N is None), None):
        return missing
    return replace(credits[0], advantage_N=np.concatenate([credit.advantage_N for credit in credits]))
