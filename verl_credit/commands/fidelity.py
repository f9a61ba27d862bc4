"""`verl-credit fidelity`: does each mode's credit agree with the true advantages of a policy's turns?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import DictConfig

from verl_credit.commands.diff import run_config
from verl_credit.commands.probe_rollouts import checkpoints_of, saved_step
from verl_credit.commands.trial_row import CONFIG
from verl_credit.errors import ConfigError, ExitCode, PreflightError, one_line
from verl_credit.fidelity.measure import Result, measure
from verl_credit.fidelity.measures import Measure
from verl_credit.fidelity.subject import Subject, load_checkpoint, load_policy, make_subject
from verl_credit.recipe.compose import load_config, quoted
from verl_credit.run.files import DamagedFile, plain, write_text
from verl_credit.run.finished import last_checkpoint
from verl_credit.run.progress import Throttled, say_at_once

RESULT = "fidelity.json"


def fidelity(
    folder: Path,
    out: Path,
    *,
    prompts: int,
    rollouts: int,
    continuations: int,
    step: int | None,
    lab: Path | None,
    split: str,
    seed: int,
) -> int:
    """Exit code 4 for what is refused, in one line."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits for several threads longer than it computes
    try:
        if rollouts < 2:
            raise PreflightError(f"--rollouts {rollouts}: expected at least 2, which a group compares")
        subject = _subject(folder, step=step, lab=lab, split=split, prompts=prompts)
        said = Throttled(say_at_once, "fidelity")
        result = measure(subject, out, rollouts=rollouts, continuations=continuations, seed=seed, say=said)
    except (ConfigError, PreflightError, DamagedFile, OSError) as error:
        print(f"verl-credit fidelity {folder}: {one_line(str(error))}")
        return ExitCode.PREFLIGHT
    finally:
        torch.set_num_threads(threads)
    write_text(out / RESULT, json.dumps(plain(_as_dict(subject, result)), indent=1) + "\n")
    print("\n".join(table(subject.name, result)))
    print(out / RESULT)
    return ExitCode.DONE


def _subject(folder: Path, *, step: int | None, lab: Path | None, split: str, prompts: int) -> Subject:
    """A run (its last checkpoint, or that of ``step``), a checkpoint of one, or a policy in Hugging Face format."""
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise PreflightError("no such folder; expected a run's, a checkpoint's, or a policy's")
    if (folder / "config.json").is_file():
        if step is not None:
            raise PreflightError(f"--step {step}: this is a policy, which has no steps")
        config = _lab_config(lab or folder.parent)
        model, tokenizer = load_policy(folder)
        name = str(folder)
    else:
        checkpoint = _checkpoint(folder, step)
        saved = saved_step(checkpoint)
        config, name = saved.config, str(saved.folder)
        if "lab" not in config:
            raise PreflightError(
                "a run without the lab: only the lab's search can be asked again in this process"
            )
        model, tokenizer = load_checkpoint(saved.folder)
    lab = Path(lab or config.lab.dir).expanduser().resolve()
    questions = lab / f"{split}.parquet"
    return make_subject(name, config, model, tokenizer, questions=questions, lab=lab, prompts=prompts)


def _lab_config(lab: Path) -> DictConfig:
    return load_config("lab", [f"lab.dir={quoted(str(lab.expanduser().resolve()))}"])


def _checkpoint(folder: Path, step: int | None) -> Path:
    if not (folder / CONFIG).is_file():
        if step is None or folder.name == f"global_step_{step}":
            return folder  # `saved_step` says what it lacks
        raise PreflightError(f"--step {step}: expected with a run's folder, which has a {CONFIG}")
    if step is None:
        checkpoints = checkpoints_of(folder, run_config(folder))
        step = last_checkpoint(checkpoints)
        if step is None:
            raise PreflightError(
                f"no checkpoint in {checkpoints}: the run saved none yet (trainer.save_freq)"
            )
    return folder / f"global_step_{step}"


def table(name: str, result: Result) -> list[str]:
    """A line per mode; those that could not be measured at the end, with the reason."""
    tools = sum(turn.kind == "tool" for turn in result.turns)
    lines = [
        f"{name}: {tools} tool turns of {len(result.turns)}, {result.contexts} distinct contexts, "
        f"{result.sure_pairs[0]} + {result.sure_pairs[1]} sure pairs, reliability of A* {_shown(result.reliability)}",
        f"{'mode':<34} {'pearson':<20} {'same turn':<20} {'pairs in order':<20} with the ending turn",
    ]
    for mode, found, _ in result.modes:
        if found is not None:
            cells = (found.pearson, found.same_turn, found.pairs, found.end_pairs)
            lines.append(f"{mode:<34} " + " ".join(f"{_shown(cell):<20}" for cell in cells).rstrip())
    lines += [f"{mode:<34} not measured: {reason}" for mode, found, reason in result.modes if found is None]
    scores = ", ".join(
        f"{s.name} {s.mean:+.3f} (z {'-' if s.z is None else f'{s.z:+.1f}'})" for s in result.integrity
    )
    return [*lines, f"0 on average: mean A* at {scores}"]


def _shown(measure: Measure) -> str:
    if measure.value is None:
        return "undefined"
    if measure.low is None:
        return f"{measure.value:.2f}"
    return f"{measure.value:.2f} [{measure.low:.2f}, {measure.high:.2f}]"


def _as_dict(subject: Subject, result: Result) -> dict:
    modes = {
        mode: {"reason": reason} if found is None else asdict(found) for mode, found, reason in result.modes
    }
    return {
        "policy": subject.name,
        "prompts": len(subject.prompts),
        "turns": len(result.turns),
        "contexts": result.contexts,
        "sure_pairs": result.sure_pairs,
        "reliability": asdict(result.reliability),
        "modes": modes,
        "integrity": [asdict(score) for score in result.integrity],
    }
