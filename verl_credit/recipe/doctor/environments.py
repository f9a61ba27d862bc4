"""Plays the environment of a recipe once before Ray starts: equal seeds and actions have to give equal steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from verl_credit.config.keys import Environment
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import TRAIN
from verl_credit.recipe.doctor.lengths import NotHere
from verl_credit.recipe.doctor.status import Result, passed, skipped, warned
from verl_credit.turns.rollout.reward.env_record import outcome_record
from verl_credit.worlds.environments.interface import Step, shown_step
from verl_credit.worlds.environments.pool import Fault, Pool

INSTALL = dict.fromkeys(("gymnasium", "minigrid", "openenv"), "'verl-credit[env]'")
"""What brings an adapter's package; the other packages are called as their adapters are."""


def check_reset(context: Context) -> Result:
    """Plays the first row with a task in two processes, with the same drawn actions. Raises PreflightError."""
    given = context.settings.environment
    if given.path is None:
        return skipped("no rollout is in an environment")
    try:
        task = next((row.task for row in context.rows(TRAIN) if row.task), None)
    except NotHere as error:
        return warned(f"{error}: environment.path={given.path} was not tried")
    if task is None:
        return skipped(f"no row of {TRAIN} is in an environment")
    where = f"environment.path={given.path}, seed {task['seed']}"
    try:
        one, other = asyncio.run(_twice(given, task))
        said, ended = one[-1].success, one[-1].terminated
        rewards = [step.reward for step in one[1:]]
        outcome_record(rewards, said=said, ended=ended, outcome=given.outcome, success_at=given.success_at)
    except Fault as fault:
        package = INSTALL.get(given.path, given.path)
        use = f"; pip install {package}" if "ModuleNotFoundError" in fault.detail else ""
        raise PreflightError(f"{where}: {fault}{use}") from fault
    except ValueError as error:
        raise PreflightError(f"{where}: {error}") from error
    for number, (step, again) in enumerate(zip(one, other, strict=False)):
        if step != again:
            use = "expected equal steps: everything that is random has to follow from the seed"
            raise PreflightError(
                f"{where}: step {number} was {_differing(step, again)} with equal actions; {use}"
            )
    written, first = task.get("observation"), shown_step(one[0], given.list_actions)
    if written not in (None, first):
        use = "write the rows again with `verl-credit prepare env` and the run's keys environment.*"
        raise PreflightError(f"{where} begins with {first!r:.120}, and its row says {written!r:.120}: {use}")
    return passed(f"environment {given.path}: {what_it_gives(one)}")


def what_it_gives(steps: list[Step]) -> str:
    """Says which parts of a `Step` a rollout of drawn actions had."""
    first, rest = steps[0], steps[1:]
    if not (first.done or first.actions):
        return "no list of actions: resets alone were compared"
    named = f"{len(first.actions)} actions" if first.actions else "no list of actions"
    gives = {
        "rewards": any(step.reward is not None for step in rest),
        "names of states": first.state is not None,
        "progress": first.progress is not None,
        "success": any(step.success is not None for step in rest),
    }
    missing = [name for name, there in gives.items() if not there]
    found = [name for name, there in gives.items() if there]
    return f"{named}, {', '.join(found) or 'nothing else'}" + (
        f"; no {', no '.join(missing)}" if missing else ""
    )


async def _twice(given: Environment, task: Mapping) -> list[list[Step]]:
    limits = {name: getattr(given, name) for name in ("deadline_s", "start_s", "max_chars")}
    pool = Pool(given.path or "", given.kwargs, processes=2, **limits)
    options = {name: value for name, value in (task.get("options") or {}).items() if value is not None}
    try:
        opened = [await pool.reset(int(task["seed"]), options) for _ in range(2)]
        draws, played = random.Random(0), [[first] for _, first in opened]
        for _ in range(given.max_steps):
            last = played[0][-1]
            if last.done or not last.actions:
                break
            action = draws.choice(list(last.actions))
            for (rollout, _), steps in zip(opened, played, strict=True):
                if not steps[-1].done:
                    steps.append(await pool.step(rollout, action))
        return played
    finally:
        await pool.end()


def _differing(step: Step, again: Step) -> str:
    pairs = ((name, getattr(step, name), getattr(again, name)) for name in vars(step))
    name, one, other = next(entry for entry in pairs if entry[1] != entry[2])
    return f"{name}={one!r:.100} and then {other!r:.100}"
