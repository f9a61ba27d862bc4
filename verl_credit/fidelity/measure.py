"""One measurement: rollouts of a policy, values of their contexts, gains and credits of their turns, and the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import PreflightError
from verl_credit.fidelity.controls import controls
from verl_credit.fidelity.credit import Credit, find_modes, mode_credits, tables_of
from verl_credit.fidelity.forward import PolicyForward
from verl_credit.fidelity.integrity import ZScore, martingale
from verl_credit.fidelity.measures import Agreement, Agreements, Measure
from verl_credit.fidelity.rollout import Start, Trajectory, roll
from verl_credit.fidelity.rows import turn_batch
from verl_credit.fidelity.run_credit import run_credit
from verl_credit.fidelity.sampler import digest
from verl_credit.fidelity.subject import Subject
from verl_credit.fidelity.values import (
    TURNS,
    VALUES,
    ScoredTurn,
    Value,
    by_second_half,
    score_turns,
    states_of,
    values_of,
)
from verl_credit.report.again import TurnTables
from verl_credit.run.files import append_json, write_text

ABOUT, VERSION = "about.json", 2


@dataclass(frozen=True)
class Result:
    """Of the prompts whose values are complete: the first ones, all of them unless time was short."""

    groups: list[list[Trajectory]]
    turns: list[ScoredTurn]
    credits: list[Credit]
    """Of the run, of every mode, of the controls."""
    agreements: list[Agreement | None]
    """With the true advantages, of each credit; None where it could not be made."""
    of_prompts: int
    """How many were asked for."""
    reliability: Measure
    sure_pairs: tuple[int, int]
    """Of tool turns, and with the ending turn."""
    integrity: list[ZScore]
    contexts: int

    @property
    def prompts(self) -> int:
        return len(self.groups)


def measure(
    subject: Subject,
    out: Path,
    *,
    rollouts: int,
    continuations: int,
    seed: int,
    modes: Sequence[TurnMode] | None = None,
    say: Callable[[float, str], None] = lambda share, text: None,
    enough: Callable[[], bool] = lambda: False,
) -> Result:
    """Writes ``values.jsonl`` as values come, and ``turns.jsonl`` at the end. Repeated with the same settings it goes on.

    ``modes``: None for every registered one. Once ``enough`` says so no more prompts are valued.
    Raises PreflightError where ``out`` has the values of another policy or of other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    _check_about(out / ABOUT, subject, continuations, seed)
    sampled = sample_groups(subject, rollouts=rollouts, seed=seed, say=say)
    values = values_of(
        states_of(sampled),
        subject.sampler(),
        subject.protocol,
        continuations=continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(0.1 + 0.85 * done / of, f"values of the contexts of {done} of {of} prompts"),
        enough=enough,
    )
    say(0.96, "gains and credit")
    groups = _complete(sampled, values)
    contexts = {digest(state.ids) for state in states_of(groups)}
    values = {name: values[name] for name in contexts}
    tables, credits = _credits(subject, groups, find_modes(None) if modes is None else modes)
    gains, rows = tables.reward_B_K.tolist(), iter(range(len(tables.rows)))
    gain_of = [[gains[next(rows)] for _ in group] for group in groups]
    turns = score_turns(groups, values, gain_of)
    _write_turns(out / TURNS, turns)
    agreements = Agreements(turns)
    second = Agreements(by_second_half(turns, values), one_half=True)
    credits += controls(tables, groups, values, subject.data, seed)
    return Result(
        groups,
        turns,
        credits,
        [_agreement(credit, turns, second if credit.held_out else agreements) for credit in credits],
        len(sampled),
        agreements.reliability,
        agreements.sure,
        martingale(turns),
        len(contexts),
    )


def _agreement(credit: Credit, turns: list[ScoredTurn], agreements: Agreements) -> Agreement | None:
    if credit.advantages is None:
        return None
    return agreements.of([credit.advantages[t.prompt][t.trajectory][t.turn] for t in turns])


def _complete(sampled: list[list[Trajectory]], values: dict[str, Value]) -> list[list[Trajectory]]:
    """The first prompts, up to one of whose contexts a value is missing."""
    return list(takewhile(lambda group: all(digest(s.ids) in values for s in states_of([group])), sampled))


def _credits(
    subject: Subject, groups: list[list[Trajectory]], modes: Sequence[TurnMode]
) -> tuple[TurnTables, list[Credit]]:
    batch = turn_batch([row for group in groups for row in group], subject.truths, subject.data)
    forward = PolicyForward(subject.model, subject.tokenizer.pad_token_id)
    settings = CreditSettings.from_config(subject.config)
    tables = tables_of(batch, groups, settings, forward, subject.tokenizer)
    sizes, of_run = [len(group) for group in groups], []
    if subject.step is not None:
        step = subject.step + 1
        planned = subject.config.trainer.total_training_steps or step
        of_run = [
            run_credit(batch, groups, settings, forward, subject.tokenizer, step=step, planned_steps=planned)
        ]
    return tables, [*of_run, *mode_credits(tables, sizes, modes)]


def sample_groups(
    subject: Subject,
    *,
    rollouts: int,
    seed: int,
    say: Callable[[float, str], None] = lambda share, text: None,
) -> list[list[Trajectory]]:
    """``rollouts`` trajectories of every prompt at temperature 1."""
    say(0.0, f"{rollouts} rollouts of {len(subject.prompts)} prompts")
    starts = [Start(state, rollouts, seed, "rollout") for state in subject.prompts]
    return roll(subject.sampler(), subject.protocol, starts)


def _check_about(path: Path, subject: Subject, continuations: int, seed: int) -> None:
    about = {
        "version": VERSION,
        "policy": _fingerprint(subject),
        "limits": asdict(subject.protocol.limits),
        "topk": int(subject.config.search.topk),
        "continuations": continuations,
        "seed": seed,
    }
    if not path.exists():
        write_text(path, json.dumps(about, indent=1) + "\n")
        return
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise PreflightError(f"{path} is not JSON ({error}); expected what this command writes") from error
    for name, value in about.items():
        if not isinstance(found, dict) or found.get(name) != value:
            there = found.get(name) if isinstance(found, dict) else found
            raise PreflightError(
                f"{path}: {name} is {there!r}, wanted {value!r}; give a new --dir, or the settings of this one"
            )


def _fingerprint(subject: Subject) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for name, weight in sorted(subject.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _write_turns(path: Path, turns: list[ScoredTurn]) -> None:
    path.unlink(missing_ok=True)
    for turn in turns:
        append_json(path, asdict(turn))
