"""`verl-credit fidelity lens RUN` measures A* of the turns in the credit lens of the run's report.

The rollouts of step N were written by the policy after step N - 1: their contexts are valued under that policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from verl_credit.cli.command import GOES_ON, Continuations, MovedLab, ends, terminate_as_interrupt
from verl_credit.cli.saved_run import CONFIG, checkpoints_of, run_config, saved_steps
from verl_credit.errors import PreflightError
from verl_credit.precision import one_thread
from verl_credit.records.run.files import DamagedFile, append_json
from verl_credit.records.run.progress_line import Throttled, say_at_once

if TYPE_CHECKING:
    from verl_credit.study.fidelity.subject import Subject


@ends("fidelity lens {folder}", DamagedFile, OSError, interrupted=GOES_ON)
def fidelity_lens(
    folder: Annotated[Path, Argument(help="a run, with keep_rollouts.steps and keep_checkpoints")],
    steps: Annotated[str | None, Option(help="5,10; all that can be measured if not given")] = None,
    continuations: Continuations = 64,
    lab: MovedLab = None,
    seed: Annotated[int, Option(help="of continuations")] = 0,
) -> None:
    from verl_credit.cli.fidelity.by_run import why_by_run
    from verl_credit.cli.fidelity.policies import policies_of, step_numbers
    from verl_credit.records.report.lens import stars_path

    run = folder.expanduser().resolve()
    with one_thread(), terminate_as_interrupt():
        for step in _measurable(run, step_numbers(steps)):
            (policy,) = policies_of(run, [step - 1], lab)
            if why := why_by_run(policy.config):
                raise PreflightError(f"{why}: the lens has true advantages of the lab's own search alone")
            subject = policy.load(lab=lab, split="train", prompts=None)
            turns, rows = _measure(run, step, subject, continuations, seed)
            say_at_once(f"A* of {turns} turns in {rows} rollouts of step {step}: {stars_path(run, step)}")
    print(f"the lens shows them: verl-credit report {run}")


def _measurable(folder: Path, steps: Sequence[int] | None) -> list[int]:
    """Returns the ``steps``, or all, whose rollouts and policy are saved. Raises PreflightError where there are none."""
    from verl_credit.records.run.rollouts import token_steps

    if not (folder / CONFIG).is_file():
        raise PreflightError(f"expected a run's folder, which has a {CONFIG}")
    stored = sorted(token_steps(folder))
    if not stored:
        use = "train with keep_rollouts.steps=N, which keeps those of the last N steps that are of one output each"
        raise PreflightError(f"tables/ has no step with rollouts: {use}")
    if unknown := sorted(set(steps or ()) - set(stored)):
        missing, accepted = (", ".join(map(str, some)) for some in (unknown, stored))
        raise PreflightError(f"--steps: tables/ has no rollouts of {missing}; accepted are {accepted}")
    saved = {0, *saved_steps(checkpoints_of(folder, run_config(folder)))}
    wanted = steps or stored
    if unsaved := [step for step in wanted if step - 1 not in saved]:
        numbers, before = (",".join(map(str, some)) for some in (unsaved, [step - 1 for step in unsaved]))
        use = f"train with keep_checkpoints=[{before}]"
        why = f"rollouts of step {numbers} are by the policy of the step before, which is not saved: {use}"
        if steps or len(unsaved) == len(wanted):
            raise PreflightError(why)
        say_at_once(why)
    return [step for step in wanted if step not in unsaved]


def _measure(folder: Path, step: int, subject: Subject, continuations: int, seed: int) -> tuple[int, int]:
    """Measures a step. Returns the numbers of turns and rollouts that have A*."""
    from verl_credit.records.report.lens import stars_path, text_digest
    from verl_credit.records.run.rollouts import read_tokens
    from verl_credit.records.run.table_files import ROLLOUTS, read_table, table_path
    from verl_credit.study.fidelity.request import check_about
    from verl_credit.study.fidelity.true_values import VALUES, score_turns, states_of, values_of
    from verl_credit.study.fidelity.turn_rows import kept_trajectories

    path = stars_path(folder, step)
    out = path.parent
    out.mkdir(parents=True, exist_ok=True)
    check_about(out, subject.about(), continuations=continuations, seed=seed, otherwise="delete that folder")
    table = table_path(folder, ROLLOUTS, step)
    kept, pieces = read_table(table).columns, read_tokens(table).columns["pieces"]
    trajectories = kept_trajectories(kept, subject.prompts, subject.protocol)
    groups = [[trajectory] for trajectory in trajectories.values()]
    say = Throttled(say_at_once, f"fidelity lens, step {step}")
    values = values_of(
        states_of(groups),
        subject.roll,
        continuations=continuations,
        seed=seed,
        path=out / VALUES,
        say=lambda done, of: say(done / of, f"values of the contexts of {done} of {of} prompts"),
    )
    texts = {row: text_digest(text) for row, text in zip(kept["row"], pieces, strict=True)}
    scored, rows = score_turns(groups, values), list(trajectories)
    path.unlink(missing_ok=True)
    names = ("turn", "kind", "before", "after", "value", "a_star", "se", "outcome")
    for turn in scored:
        row = rows[turn.prompt]
        append_json(path, {"row": row, "text": texts[row]} | {name: getattr(turn, name) for name in names})
    return len(scored), len(rows)
