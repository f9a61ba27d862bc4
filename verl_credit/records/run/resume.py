"""Which checkpoint a start goes on from, whether its files are whole and fit this run, and which old ones are deleted.

verl looks at these files after Ray is up, and starts again at step 1 without a word where its tracker names a folder that is
not there. A save ends with the tracker, and a step's metrics are recorded after it.
"""

import json
import re
import shutil
import zipfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open

from verl_credit.errors import PreflightError, printable, show_value
from verl_credit.records.run import events
from verl_credit.records.run.files import STATE, VALUES, read_json_lines
from verl_credit.records.run.state import CRITIC, TRACKER

STEP = re.compile(r"global_step_(\d+)")
DATA, SAVED_MODEL = "data.pt", "actor/huggingface/config.json"
FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}  # verl's contents: the files' names
SHARD = re.compile(r"(?:model|optim|extra_state)_world_size_(\d+)_rank_\d+\.pt")
LIMITS = {"actor": "max_actor_ckpt_to_keep", "critic": "max_critic_ckpt_to_keep"}
ONE = "remove_previous_ckpt_in_save"  # an older key of verl for a limit of 1
SHAPE = "model_type hidden_size num_hidden_layers intermediate_size num_attention_heads num_key_value_heads vocab_size"
MODEL, CHECKPOINT = "actor_rollout_ref.model", "actor_rollout_ref.actor.checkpoint"
TURN_VALUES = "algorithm.turn_values"
LAYOUT = (f"{MODEL}.lora_rank", "actor_rollout_ref.actor.strategy")
"""Keys under another value of which verl cannot load the weights."""


def resumes_from(config: DictConfig) -> Path | None:
    """The checkpoint that a start of this run goes on from; None where it begins at step 1. Raises PreflightError."""
    trainer = config.trainer
    mode, folder = trainer.get("resume_mode", "auto"), Path(trainer.default_local_dir)
    if mode == "disable":
        return None
    if mode == "resume_path":
        given = Path(trainer.resume_from_path).expanduser().absolute()
        wrong = fault(given, config, needs_data=False) if given.is_dir() else "there is no such folder"
        if wrong:
            raise _refusal(f"trainer.resume_from_path={given}: {wrong}", given.parent, config)
        return given
    tracker, done = folder / TRACKER, events.steps_done(config.run_dir)
    text, steps = _text(tracker), saved_steps(folder)
    named = folder / f"global_step_{int(text)}" if text.isdecimal() else None

    def whole(step: int) -> bool:
        return fault(folder / f"global_step_{step}", config) is None

    if named is not None and named.is_dir():
        if wrong := fault(named, config):
            raise _refusal(f"{tracker} names step {text}: {wrong}", folder, config)
        later = [step for step in steps if int(text) < step <= done]
        if any(map(whole, later)):
            raise _refusal(
                f"{tracker} names step {text}, and step {later[-1]} was saved later", folder, config
            )
        return named
    if text:
        raise _refusal(f"{tracker} says {text[:40]!r}, and there is no such step beside it", folder, config)
    if lost := [step for step in steps if step <= done or whole(step)]:
        state = "is empty" if tracker.is_file() else "is missing"
        raise _refusal(f"{tracker} {state}, and step {lost[-1]} was saved", folder, config)
    if done >= _first_save(config):
        what = f"{config.run_dir} has {done} steps, and {folder} no checkpoint of them"
        raise _refusal(what, folder, config)
    return None


def saved_steps(folder: Path) -> list[int]:
    """The steps of which ``folder`` has weights, whole or not."""
    found = (STEP.fullmatch(path.parent.name) for path in Path(folder).glob("global_step_*/actor"))
    return sorted(int(match[1]) for match in found if match)


def fault(checkpoint: Path, config: DictConfig, needs_data: bool = True) -> str | None:
    """Why this run cannot load ``checkpoint``, with the file; None where every file is whole and fits the run."""
    ranks, files = _ranks(config), (checkpoint / "actor").glob("*.pt")
    shards = {int(match[1]) for path in files if (match := SHARD.fullmatch(path.name))}
    if shards and ranks not in shards:
        folder, had = checkpoint / "actor", " or ".join(map(str, sorted(shards)))
        merge = f"python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir NEW"
        use = f"give it as many, or merge the weights ({merge}) and start another run from {MODEL}.path=NEW"
        return f"{folder} was saved by {had} ranks, and trainer.nnodes x trainer.n_gpus_per_node is {ranks}; {use}"
    return _unfinished(checkpoint, config, needs_data=needs_data) or _of_another_run(checkpoint, config)


def _roles(checkpoint: Path, config: DictConfig) -> list[Path]:
    wanted = {"actor"} | ({"critic"} if OmegaConf.select(config, CRITIC) else set())
    return [checkpoint / role for role in LIMITS if role in wanted or (checkpoint / role).is_dir()]


def _unfinished(
    checkpoint: Path, config: DictConfig, contents: list[str] | None = None, needs_data: bool = True
) -> str | None:
    """Returns which file is missing, or is cut short. ``contents``: verl's names of what it loads, else the run's."""
    wanted = contents or OmegaConf.select(config, f"{CHECKPOINT}.load_contents") or FILES
    ranks = _ranks(config)
    names = [f"{file}_world_size_{ranks}_rank_" for name, file in FILES.items() if name in wanted]
    files = [checkpoint / name for name in (STATE, VALUES, SAVED_MODEL) if (checkpoint / name).exists()]
    for folder in _roles(checkpoint, config):
        if not (folder.is_dir() and any(folder.iterdir())):
            return f"{folder} has no weights"
        files += [folder / f"{name}{rank}.pt" for name in names for rank in range(ranks)]
        files += sorted(folder.rglob("*.safetensors"))
    if needs_data or (checkpoint / DATA).exists():
        files.append(checkpoint / DATA)
    return next((wrong for path in files if (wrong := _cut(path))), None)


def _cut(path: Path) -> str | None:
    """Returns why the file cannot be loaded: it is missing, or its end is. Its other bytes are not read."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "np"):  # compares the header with the file's size
                return None
        if path.suffix == ".json":
            json.loads(path.read_bytes())
            return None
        with zipfile.ZipFile(path):  # torch's files are archives, whose list of contents stands at the end
            return None
    except FileNotFoundError:
        return f"{path} is missing"
    except (zipfile.BadZipFile, ValueError, SafetensorError):
        return f"{path} ({path.stat().st_size:,} bytes) is damaged: its end is missing"
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def without_limits(config: DictConfig) -> DictConfig:
    """The configuration with which verl deletes no checkpoint: it would do so before the tracker names the new one."""
    unlimited = config.copy()
    for key in (*LIMITS.values(), ONE):
        OmegaConf.update(unlimited, f"trainer.{key}", None, force_add=True)
    return unlimited


def delete_old(config: DictConfig, step: int) -> list[Path]:
    """Deletes the weights of old steps once ``step`` is saved and named by the tracker; returns the folders.

    The newest whole checkpoints stay, as many as the limit of their role says, and those that `keep_checkpoints` names, or
    named when they were saved. Steps after ``step`` stay too: they are of a run that was taken back. All are counted in the
    folder, so the limit holds over several starts.
    """
    folder, trainer, deleted = Path(config.trainer.default_local_dir), config.trainer, []
    saved = OmegaConf.select(config, f"{CHECKPOINT}.save_contents")
    steps = [one for one in saved_steps(folder) if one <= step and one not in config.keep_checkpoints]
    steps = [one for one in steps if not _json(folder / f"global_step_{one}" / STATE).get("kept")]
    others = (one for one in steps if one != step)
    lost = {one for one in others if _unfinished(folder / f"global_step_{one}", config, saved)}
    whole = [one for one in steps if one not in lost]
    for role, key in LIMITS.items():
        most = 1 if trainer.get(ONE) else trainer.get(key)
        if not most or most < 1:
            continue
        for old in sorted(set(steps) - set(whole[-most:])):
            path = folder / f"global_step_{old}" / role
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # leaves a link as it is
                deleted.append(path)
    return deleted


def _ranks(config: DictConfig) -> int:
    return config.trainer.get("nnodes", 1) * config.trainer.get("n_gpus_per_node", 1)


def _first_save(config: DictConfig) -> float:
    """The first step after which a checkpoint is there. A run that saves none has to have one only if it ended."""
    trainer, rows = config.trainer, read_json_lines(Path(config.run_dir) / events.EVENTS)
    ended = any(row.get("reason") in (events.Reason.DONE, events.Reason.TIME_LIMIT) for row in rows)
    due = [*config.get("keep_checkpoints", ()), *([1] if ended else [])]
    if (every := trainer.get("save_freq") or 0) > 0:
        due += [every, trainer.get("total_training_steps") or every]
    return min(due, default=float("inf"))


def _refusal(what: str, folder: Path, config: DictConfig) -> PreflightError:
    """``what``, with the newest whole step and how to go on from it, or how to begin again."""
    places = [folder / f"global_step_{step}" for step in reversed(saved_steps(folder))]
    whole_first = ((needs, place) for needs in (True, False) for place in places)
    good = next((at for needs, at in whole_first if fault(at, config, needs_data=needs) is None), None)
    whole = f"{folder} has no step that is whole"
    if good is not None:
        again = "" if (good / DATA).exists() else f", with the data begun again (it has no {DATA})"
        use = f"trainer.resume_mode=resume_path trainer.resume_from_path={good}"
        whole = f"the newest step that is whole goes on{again} with {use}"
    begins = f"trainer.resume_mode=disable begins again at step 1 and writes over what is in run_dir={config.run_dir}"
    return PreflightError(printable(f"{what}; {whole}; {begins}"))


def _of_another_run(checkpoint: Path, config: DictConfig) -> str | None:
    state = _json(checkpoint / STATE).get("config")
    before = state if isinstance(state, dict) else {}
    for key in LAYOUT:
        now = OmegaConf.select(config, key)
        if key in before and before[key] != str(now):
            return f"{checkpoint} is of a run with {key}={before[key]}, and this run has {show_value(now)}"
    before, now = before.get(TURN_VALUES, "None"), str(OmegaConf.select(config, TURN_VALUES))
    if "None" not in (before, now) and before != now:
        also = f"its values were fitted on other features; set {TURN_VALUES}={before}"
        return f"{checkpoint} is of a run with {TURN_VALUES}={before}, and this run has {now}: {also}"
    saved = _json(checkpoint / SAVED_MODEL)
    path = OmegaConf.select(config, f"{MODEL}.path")
    own = OmegaConf.select(config, f"{MODEL}.override_config") or {}
    now = {**_json(Path(str(path)).expanduser() / "config.json"), **own}
    for key in SHAPE.split():
        was, is_now = saved.get(key), now.get(key)
        if None not in (was, is_now) and was != is_now:
            return f"{checkpoint} is of a model with {key}={was}, and {MODEL}.path={path} has {is_now}"
    return None


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace").strip() if path.is_file() else ""


def _json(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
