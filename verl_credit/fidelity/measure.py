"""One measurement: rollouts of a policy, values of their contexts, gains and credits of their turns, and the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_credit.config.settings import CreditSettings
from verl_credit.errors import PreflightError
from verl_credit.fidelity.credit import PolicyForward, credits_of, tables_of
from verl_credit.fidelity.integrity import ZScore, martingale
from verl_credit.fidelity.measures import Agreement, Agreements, Measure
from verl_credit.fidelity.rollout import Start, Trajectory, roll
from verl_credit.fidelity.rows import turn_batch
from verl_credit.fidelity.subject import Subject
from verl_credit.fidelity.values import TURNS, VALUES, ScoredTurn, score_turns, states_of, values_of
from verl_credit.run.files import append_json, write_text

ABOUT = "about.json"


@dataclass(frozen=True)
class Result:
    turns: list[ScoredTurn]
    modes: list[tuple[str, Agreement | None, str]]
    """Name, agreement with the true advantages, and the reason where there is none."""
    reliability: Measure
    sure_pairs: tuple[int, int]
    """Of tool turns, and with the ending turn."""
    integrity: list[ZScore]
    contexts: int


def measure(
    subject: Subject,
    out: Path,
    *,
    rollouts: int,
    continuations: int,
    seed: int,
    say: Callable[[float, str], None] = lambda share, text: None,
) -> Result:
    """Writes ``values.jsonl`` as values come, and ``turns.jsonl`` at the end. Repeated with the same settings it goes on.

    Raises PreflightError where ``out`` has the values of another policy or of other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    _check_about(out / ABOUT, subject, continuations, seed)
    groups = sample_groups(subject, rollouts=rollouts, seed=seed, say=say)
    sampler = subject.sampler()
    values = values_of(
        states_of(groups),
        sampler,
        subject.protocol,
        continuations=continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(0.1 + 0.85 * done / of, f"values of the contexts of {done} of {of} prompts"),
    )
    say(0.96, "gains and credit")
    batch = turn_batch([row for group in groups for row in group], subject.truths)
    forward = PolicyForward(subject.model, subject.tokenizer.pad_token_id)
    tables = tables_of(batch, groups, CreditSettings.from_config(subject.config), forward, subject.tokenizer)
    gains, rows = tables.reward_B_K.tolist(), iter(range(len(tables.rows)))
    gain_of = [[gains[next(rows)] for _ in group] for group in groups]
    turns = score_turns(groups, values, gain_of)
    _write_turns(out / TURNS, turns)
    agreements, modes = Agreements(turns), []
    for credit in credits_of(tables, [len(group) for group in groups]):
        if credit.advantages is None:
            modes.append((credit.name, None, credit.reason))
        else:
            flat = [credit.advantages[turn.prompt][turn.trajectory][turn.turn] for turn in turns]
            modes.append((credit.name, agreements.of(flat), ""))
    return Result(turns, modes, agreements.reliability, agreements.sure, martingale(turns), len(values))


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
