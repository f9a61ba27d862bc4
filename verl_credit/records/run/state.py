"""How far a run is, without verl: plugin state beside verl's checkpoint, whether a resume is exact, whether a start has work
to do, and the run's time limit."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.gone import gone_key, place_now
from verl_credit.config.resolved import flat_values
from verl_credit.names import ASYNC_MODES
from verl_credit.records.run.files import STATE, VALIDATION, VALUES, plain, read_json_lines, write_text
from verl_credit.redact import without_secrets

VERSION = 1
MODE = "trainer.v1.trainer_mode"
TRACKER = "latest_checkpointed_iteration.txt"  # verl's; names the last complete checkpoint

# Keys that do not change what a step computes.
FREE = (
    "run_dir", "keep_rollouts", "keep_checkpoints", "max_hours",
    "hardware.", "plan.", "evaluation.", "faults.", "lineage.", "probe.", "lab.dir", "doorkey.dir",
    "search.url", "search.timeout_s", "search.max_retries", "search.token_env",
    "algorithm.turn_judge.", "data.val_", "ray_kwargs.", "transfer_queue.", "global_profiler.",
    "trainer.total_", "trainer.save_freq", "trainer.test_freq", "trainer.val_", "trainer.logger", "trainer.project_name",
    "trainer.experiment_name", "trainer.default_local_dir", "trainer.resume_", "trainer.max_actor_ckpt_to_keep",
    "actor_rollout_ref.actor.optim.total_training_steps", "critic.optim.total_training_steps", "critic.profiler.",
    "trainer.max_critic_ckpt_to_keep",
)  # fmt: skip
CRITIC = "critic.enable"


def save_state(
    folder: Path, config, step: int, metrics: dict, sepa: dict | None = None, planned: int | None = None
) -> None:
    """Write the state, before verl's tracker file, so that every valid checkpoint has it.

    ``metrics`` are the step's: verl saves before it evaluates and logs, and a run killed in between would otherwise resume
    after a step that no file contains. ``sepa``: the controller's. ``planned``: steps of the whole run.
    """
    state = {
        "version": VERSION,
        "step": step,
        "config": deciding_keys(config),
        "metrics": plain(metrics),
        "sepa": sepa,
        "kept": step in config.get("keep_checkpoints", ()),
        "planned": {"steps": planned, "epochs": config.trainer.total_epochs},
    }
    write_text(Path(folder) / STATE, json.dumps(state, indent=1))


def planned_steps(folder: Path, config) -> int | None:
    """Steps of a run that counts epochs, from the checkpoint's state; None where it lacks them, or data or epochs differ."""
    try:
        state = json.loads((Path(folder) / STATE).read_text(encoding="utf-8"))
        before, steps, epochs = state["config"], state["planned"]["steps"], state["planned"]["epochs"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    both = (before, deciding_keys(config))
    then, now = ({k: v for k, v in keys.items() if k.startswith("data.")} for keys in both)
    return steps if epochs == config.trainer.total_epochs and then == now else None


CONTENTS = "actor_rollout_ref.actor.checkpoint.load_contents"
IN_OPTIMIZER = tuple(f"actor_rollout_ref.actor.optim.{key} was" for key in ("lr", "weight_decay", "betas"))
"""Keys whose values verl's optimizer state has, so that a new value changes nothing after a resume."""


def resumed_folder(config, step: int) -> Path:
    """The checkpoint that verl has loaded."""
    if config.trainer.resume_mode == "resume_path":
        return Path(config.trainer.resume_from_path)
    return Path(config.trainer.default_local_dir) / f"global_step_{step}"


def describe_resume(config, step: int) -> tuple[str, dict, dict | None]:
    """(``resume: exact ...`` or the reasons why not, the metrics saved with the step, SEPA's state).

    Raises ValueError for a state of another version or step.
    """
    folder = resumed_folder(config, step)
    path = folder / STATE
    if not path.exists():
        why = f"{path} is missing (a checkpoint of stock verl?)"
        return f"resume: from step {step}, not exact: {why}", {}, None
    state = json.loads(path.read_text(encoding="utf-8"))
    if state.get("version") != VERSION or state.get("step") != step:
        found = f"version {state.get('version')}, step {state.get('step')}"
        raise ValueError(f"{path} says {found}; expected {VERSION}, {step}")
    differences = _differences(state["config"], deciding_keys(config))
    if "optimizer" in (OmegaConf.select(config, CONTENTS) or ("optimizer",)):
        kept = f", but the checkpoint's value holds with its optimizer; {CONTENTS}=[model] begins a new one"
        differences = [line + (kept if line.startswith(IN_OPTIMIZER) else "") for line in differences]
    if not (folder / "data.pt").exists():
        differences.append(f"{folder / 'data.pt'} is missing: data order starts again")
    if OmegaConf.select(config, "algorithm.turn_values") and not (folder / VALUES).exists():
        differences.append(f"{folder / VALUES} is missing: the replay of the values starts again")
    if (before := state["config"].get(MODE)) in ASYNC_MODES:
        fate = "ahead of the step are left out"
        if OmegaConf.select(config, MODE) in ASYNC_MODES:
            fate = "that were under way begin again, by newer weights"
        differences.append(f"{MODE}={before}: rollouts {fate}")
    text = f"resume: exact, from step {step}"
    if differences:
        more = f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
        text = f"resume: from step {step}, not exact: {'; '.join(differences[:8])}{more}"
    return text, state["metrics"], state.get("sepa")


def deciding_keys(config) -> dict[str, str]:
    """Every resolved key that can change what a step computes, as text; secrets are hidden."""
    free = FREE if OmegaConf.select(config, CRITIC) else (*FREE, "critic.")
    values = {key: value for key, value in flat_values(config).items() if value != {}}
    values = {key: value for key, value in values.items() if not key.startswith(free)}
    flat = {key: str(without_secrets(key, value)) for key, value in values.items()}
    curriculum = config.algorithm.get("info_gain_curriculum") or {}
    if any(ends[0] != ends[1] for ends in curriculum.values()):  # its weights depend on where the run ends
        for key in ("total_training_steps", "total_epochs"):
            flat[f"trainer.{key}"] = str(config.trainer[key])
    return flat


def _differences(before: dict, now: dict) -> list[str]:
    """A line for each key with another value, and one for all keys that verl_credit has no more."""
    gone = [key for key in before if key not in now and before[key] != "None" and gone_key(key)]
    keys = (key for key in dict.fromkeys([*before, *now]) if key not in gone)
    pairs = ((k, place_now(str(before.get(k))), str(now.get(k))) for k in keys)  # a new key was None
    lines = [f"{k} was {old}, is {new}" for k, old, new in pairs if old != new]
    return lines + ([f"nothing reads {', '.join(gone)} any more"] if gone else [])


def nothing_left(config: DictConfig) -> str | None:
    """Why a start of this run would make no step and no evaluation; None when it would.

    Only for ``trainer.resume_mode=auto``. The number of steps is ``trainer.total_training_steps`` or, with epochs, the
    checkpoint's. A run that was killed before its last evaluation is not finished.
    """
    trainer, end = config.trainer, planned_in_all(config)
    step = last_checkpoint(Path(trainer.default_local_dir)) if trainer.resume_mode == "auto" else None
    if step is None or end is None or step < end:
        return None
    evaluated = {row.get("step") for row in read_json_lines(Path(config.run_dir) / VALIDATION)}
    if trainer.get("val_before_train", True) and step not in evaluated:
        return None
    key = "total_epochs" if trainer.total_training_steps is None else "total_training_steps"
    what = f"the checkpoint in {trainer.default_local_dir} is at step {step} of trainer.{key}={trainer[key]}"
    return f"nothing left to learn: {what}; raise that number, or give another run_dir"


def planned_in_all(config: DictConfig) -> int | None:
    """Steps of the whole run; with epochs None until a checkpoint has the number."""
    folder, total = Path(config.trainer.default_local_dir), config.trainer.total_training_steps
    if total is None and (step := last_checkpoint(folder)) is not None:
        total = planned_steps(folder / f"global_step_{step}", config)
    return total


def last_checkpoint(folder: Path) -> int | None:
    """Step of the checkpoint that a resume would load; None without one."""
    try:
        step = int((folder / TRACKER).read_text())
    except (OSError, ValueError):
        return None
    return step if (folder / f"global_step_{step}").is_dir() else None


class TimeLimit:
    """Decides after every step whether the next one must be the last.

    It must be when two more would not fit: elapsed + 2 s + tail > limit, with s the longest step so far and tail the
    longest saving plus the longest evaluation so far (s each until the first). A run ends within its limit unless its last
    step takes a whole step longer than all before. Seconds, except `hours`; `clock` is for tests.
    """

    def __init__(self, hours: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock, self._start = hours * 3600.0, clock, clock()
        self._longest: dict[str, float] = {}

    def next_is_last(self, timing_s: dict[str, float]) -> bool:
        """`timing_s`: seconds of the step that has ended: "step" (saving included), "save_checkpoint", "testing"."""
        for name, seconds in timing_s.items():
            self._longest[name] = max(seconds, self._longest.get(name, 0.0))
        step = self._longest["step"]
        tail = self._longest.get("save_checkpoint", step) + self._longest.get("testing", step)
        return self._clock() - self._start + 2 * step + tail > self._limit_s
