"""`verl-credit fidelity lens RUN`: A* of the turns that the credit lens of the run's report shows.

The rollouts of step N were written by the policy after step N - 1: their contexts are valued under that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from verl_credit.cli.run.diff import run_config
from verl_credit.cli.run.train import terminate_as_interrupt
from verl_credit.cli.study.fidelity_policies import policies_of, step_numbers
from verl_credit.cli.study.fidelity_run import why_by_run
from verl_credit.cli.study.probe_rollouts import checkpoints_of, saved_steps
from verl_credit.cli.trials.row import CONFIG
from verl_credit.errors import ConfigError, ExitCode, PreflightError, one_line
from verl_credit.records.report.lens import stars_folder, stars_path, text_digest
from verl_credit.records.run.files import DamagedFile, append_json
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.records.run.rollouts import read_tokens, token_steps
from verl_credit.records.run.tables import ROLLOUTS, DamagedTable, read_table, table_path, tables_of
from verl_credit.study.fidelity.about import check_about
from verl_credit.study.fidelity.gradient.agreement import score_without_gains
from verl_credit.study.fidelity.kept import kept_trajectories
from verl_credit.study.fidelity.subject import Subject
from verl_credit.study.fidelity.values import VALUES, states_of, values_of

OF_TURN = ("turn", "kind", "before", "after", "value", "a_star", "se", "outcome")


def fidelity_lens(folder: Path, *, steps: str | None, continuations: int, lab: Path | None, seed: int) -> int:
    """``steps``: whose rollouts; all that can be measured where None. Exit code 4 for what is refused, in one line."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits for several threads longer than it computes
    try:
        folder = folder.expanduser().resolve()
        with terminate_as_interrupt():
            for step in _measurable(folder, step_numbers(steps)):
                (policy,) = policies_of(folder, [step - 1], lab)
                if why := why_by_run(policy.config):
                    raise PreflightError(f"{why}: the lens has true advantages of the lab's own search alone")
                subject = policy.load(lab=lab, split="train", prompts=None)
                turns, rows = _measure(folder, step, subject, continuations, seed)
                say_at_once(
                    f"A* of {turns} turns in {rows} rollouts of step {step}: {stars_path(folder, step)}"
                )
        print(f"the lens shows them: verl-credit report {folder}")
    except (ConfigError, PreflightError, DamagedFile, DamagedTable, OSError) as error:
        print(f"verl-credit fidelity lens {folder}: {one_line(str(error))}")
        return ExitCode.PREFLIGHT
    except KeyboardInterrupt:
        print("interrupted; the same command goes on")
        return ExitCode.INTERRUPTED
    finally:
        torch.set_num_threads(threads)
    return ExitCode.DONE


def _measurable(folder: Path, steps: Sequence[int] | None) -> list[int]:
    """Steps whose rollouts are kept and whose policy is saved. Raises PreflightError where there is none, or where one of
    ``steps`` is none."""
    if not (folder / CONFIG).is_file():
        raise PreflightError(f"expected a run's folder, which has a {CONFIG}")
    kept = sorted(token_steps(folder).keys() & tables_of(folder, ROLLOUTS).keys())
    if not kept:
        raise PreflightError(
            "tables/ has no step with rollouts: train with keep_rollouts.steps=N, which keeps those of the last N steps"
        )
    if unknown := [step for step in steps or () if step not in kept]:
        said = ", ".join(map(str, kept))
        raise PreflightError(
            f"--steps: tables/ has no rollouts of {', '.join(map(str, unknown))}; accepted are {said}"
        )
    saved = {0, *saved_steps(checkpoints_of(folder, run_config(folder)))}
    wanted = steps or kept
    lost = [step for step in wanted if step - 1 not in saved]
    if lost:
        why = (
            f"the policy that wrote the rollouts of step {', '.join(map(str, lost))} is that of the step before, and not "
            f"saved: train with keep_checkpoints=[{','.join(str(step - 1) for step in lost)}]"
        )
        if steps or len(lost) == len(wanted):
            raise PreflightError(why)
        say_at_once(why)
    return [step for step in wanted if step not in lost]


def _measure(folder: Path, step: int, subject: Subject, continuations: int, seed: int) -> tuple[int, int]:
    """(turns, rollouts) that have A* now."""
    out = stars_folder(folder, step)
    out.mkdir(parents=True, exist_ok=True)
    check_about(out, subject.about(), continuations=continuations, seed=seed, otherwise="delete that folder")
    tokens = read_tokens(token_steps(folder)[step]).columns
    rollouts = read_table(table_path(folder, ROLLOUTS, step)).columns
    written = dict(zip(rollouts["row"], rollouts["turn"], strict=True))
    for row, turns in zip(tokens["row"], tokens["turn"], strict=True):
        if [turn for turn in written.get(row, ()) if turn >= 0] != turns:
            raise PreflightError(
                f"the tables of step {step} are of other rollouts: row {row} has other turns"
            )
    found = kept_trajectories(rollouts, set(tokens["row"]), subject.prompts, subject.protocol)
    groups = [[trajectory] for trajectory in found.values()]
    say = Throttled(say_at_once, f"fidelity lens, step {step}")
    values = values_of(
        states_of(groups),
        subject.roll,
        continuations=continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(done / of, f"values of the contexts of {done} of {of} prompts"),
    )
    texts = {row: text_digest(text) for row, text in zip(tokens["row"], tokens["text"], strict=True)}
    scored, rows = score_without_gains(groups, values), list(found)
    path = stars_path(folder, step)
    path.unlink(missing_ok=True)
    for turn in scored:
        line = asdict(turn)
        row = rows[turn.prompt]
        append_json(path, {"row": row, "text": texts[row]} | {name: line[name] for name in OF_TURN})
    return len(scored), len(rows)
