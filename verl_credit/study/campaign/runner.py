"""Runs a campaign to its end, or until its budget is spent.

The runs' own files show what is done, so that the same command continues after any kill.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.errors import ConfigError, ExitCode
from verl_credit.recipe.compose import unchecked_config
from verl_credit.recipe.world import world_of
from verl_credit.records.run.events import steps_done
from verl_credit.records.run.files import METRICS, VALIDATION
from verl_credit.records.run.lock import run_lock
from verl_credit.records.run.progress_line import say_at_once as _say
from verl_credit.study.campaign.child import Children, run_child, run_command
from verl_credit.study.campaign.design import PlannedRun, composed, overrides_of, planned
from verl_credit.study.campaign.file import Campaign, read_campaign
from verl_credit.study.campaign.record import RECORD, keep_record
from verl_credit.study.campaign.state import RunState, State, state_of, states

LOG = "output.log"  # for parallel runs; a single run prints to our output
DEFAULT = Path("runs") / "campaigns"


def run_campaign(
    name: str, folder: Path | None = None, parallel: int = 1, extra: Sequence[str] = ()
) -> tuple[ExitCode, Path]:
    """Returns the exit code and the campaign's folder.

    ``name``: a file or a shipped campaign; ``extra``: overrides for all runs.

    DONE when all declared runs are done or the budget is spent, FAILED when one failed or is damaged, INTERRUPTED for
    Ctrl-C and SIGTERM. Raises ConfigError and PreflightError, before the first run.
    """
    campaign, _ = read_campaign(name)
    campaign = campaign.model_copy(update={"overrides": [*campaign.overrides, *extra]})
    folder = (folder or DEFAULT / campaign.name).expanduser().resolve()
    configs = composed(campaign, folder)
    _refuse_parallel(parallel, configs)
    with run_lock(folder, _say, "--dir"):
        others = sorted(path.name for path in folder.iterdir() if path.name != "run.lock")
        if others and RECORD not in others:
            use = f"it holds {', '.join(others[:3])}, and no campaign; give a new folder"
            raise ConfigError(key="--dir", value=folder, accepted=use)
        runs = states(campaign, folder)
        ended = sum(one.state is State.DONE for one in runs)
        news = keep_record(folder, campaign, configs, ended)
        lines = [f"added: {new}" for new in news]
        lines += [f"campaign {campaign.name}: {ended} of {len(runs)} runs done, {len(configs)} conditions"]
        if note := campaign.cannot_resolve():
            lines.append(f"note: {note}")
        for line in lines:
            _say(line)
        builds = world_of(next(iter(configs.values()))) is not None
        return _run_all(campaign, folder, parallel, builds), folder


def _refuse_parallel(parallel: int, configs: dict[str, DictConfig]) -> None:
    if parallel < 1:
        raise ConfigError(key="--parallel", value=parallel, accepted="expected a whole number of at least 1")
    for name, config in configs.items():
        if parallel > 1 and (device := config.trainer.device) != "cpu":
            use = f"runs of condition {name} would share trainer.device={device}, and each would take all of it; use 1"
            raise ConfigError(key="--parallel", value=parallel, accepted=use)


def _run_all(campaign: Campaign, folder: Path, parallel: int, builds: bool) -> ExitCode:
    runs = {run.folder: run for run in planned(campaign)}
    queue = [one.run for one in states(campaign, folder) if one.state is not State.DONE]
    begun, failures, reason = set(), 0, ""
    if parallel > 1 and builds and (code := _build_worlds(campaign, folder, queue)) is not ExitCode.DONE:
        return code
    with Children() as children:
        while True:
            while queue and len(children) < parallel and not children.stopped:
                run = queue.pop(0)
                now = state_of(run, folder / run.folder, campaign.metric)
                if now.state in (State.DAMAGED, State.RUNNING):
                    _say(f"{run.folder}: left alone: {now.state} {now.why}".rstrip())
                    continue
                if why := _spent(campaign, folder, now.state, begun, failures):
                    reason = why
                    continue
                _say(f"{run.folder}: run {list(runs).index(run.folder) + 1} of {len(runs)}")
                if campaign.engine == "twin" and (dropped := drop_partial(folder / run.folder)):
                    _say(f"{run.folder}: {dropped}")
                overrides = overrides_of(campaign, run, folder)
                log = folder / run.folder / LOG if parallel > 1 else None
                command = run_command(campaign.engine, campaign.recipe, overrides, campaign.config_dir)
                children.start(run.folder, command, log)
                begun.add(run.folder)
            if not len(children):
                break
            name, code = children.wait()
            now = state_of(runs[name], folder / name, campaign.metric)
            failures += now.state is not State.DONE and code != ExitCode.DONE and not children.stopped
            _say(f"{name}: exit code {code}, {now.why or now.state}")
    return _end(states(campaign, folder), children.stopped, reason)


def drop_partial(run_dir: Path) -> str:
    """Removes the measurements of an interrupted run of the twin, which has no checkpoint and so starts again at step 1. Its
    events stay, and so its hours. Returns the message about it; empty where there is nothing to remove."""
    steps = steps_done(run_dir)
    there = [path for name in (METRICS, VALIDATION) if (path := run_dir / name).exists()]
    for path in there:
        path.unlink()
    return f"a run of the twin does not go on: dropped after step {steps}, it starts again" if there else ""


def _build_worlds(campaign: Campaign, folder: Path, queue: Sequence[PlannedRun]) -> ExitCode:
    """Builds the worlds one after the other, so that parallel runs do not build the same world. Seeds share a world."""
    one_seed = {(run.condition, run.world): run for run in queue}.values()
    configs = (
        unchecked_config(campaign.recipe, overrides_of(campaign, run, folder), campaign.config_dir)
        for run in one_seed
    )
    for config in {world_of(config).identity(): config for config in configs}.values():
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "config.yaml"
            OmegaConf.save(config, file, resolve=True)
            code = run_child([sys.executable, "-m", "verl_credit.recipe.world", str(file)])
        if code != ExitCode.DONE:
            return ExitCode.INTERRUPTED if code == ExitCode.INTERRUPTED else ExitCode.PREFLIGHT
    return ExitCode.DONE


def _spent(campaign: Campaign, folder: Path, state: State, begun: set[str], failures: int) -> str:
    """Why a run in this state may not start; empty where it may. ``begun``: since this command was given."""
    runs, budget, most = states(campaign, folder), campaign.budget, campaign.stop.max_failures
    if most is not None and failures >= most:
        return f"stop.max_failures={most}: {failures} failed"
    if budget.hours is not None and (hours := sum(one.hours for one in runs)) >= budget.hours:
        return f"budget.hours={budget.hours:g} is spent: {hours:.2f} hours"
    ever = begun | {one.run.folder for one in runs if one.state is not State.WAITING}
    if budget.runs is not None and state is State.WAITING and len(ever) >= budget.runs:
        return f"budget.runs={budget.runs} is spent"
    return ""


def _end(runs: Sequence[RunState], stopped: bool, reason: str) -> ExitCode:
    if reason:
        _say(f"no further run starts: {reason}")
    count = Counter(one.state for one in runs)
    _say(", ".join(f"{count[state]} of {len(runs)} {state}" for state in State if count[state]))
    if stopped:
        _say("interrupted; the same command goes on")
        return ExitCode.INTERRUPTED
    faulty = count[State.FAILED] or count[State.DAMAGED]
    return ExitCode.DONE if not faulty and (reason or count[State.DONE] == len(runs)) else ExitCode.FAILED
