"""`verl-credit train -m` starts a run for every combination of comma-separated values, one after the other."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from verl_credit.config.keys.run import LONGEST_NAME
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.recipe.compose import load_config, unchecked_config
from verl_credit.study.campaign.child import in_folder, run_child, run_command

DONE = (ExitCode.DONE, ExitCode.NOTHING_LEFT)
ENDS_ALL = (ExitCode.PREFLIGHT, ExitCode.INTERRUPTED)  # other exit codes end only their run


def expand(overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns (name, overrides) for every run, the last key varying fastest, in Hydra's grammar for sweeps.

    `a=1,2 b=x` gives two runs, called "a=1" and "a=2": names hold the swept keys, shortened where that is unambiguous.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        swept = [list(o.sweep_string_iterator()) if o.is_sweep_override() else None for o in parsed]
    except HydraException as error:
        raise ConfigError(f"overrides: {error}") from error
    _refuse_twice(parsed, swept)
    keys = [o.get_key_element().lstrip("+~") for o, values in zip(parsed, swept, strict=True) if values]
    short = [key.rpartition(".")[2] for key in keys]
    labels = [last if short.count(last) == 1 else key for key, last in zip(keys, short, strict=True)]
    runs = []
    for values in itertools.product(*(v for v in swept if v)):
        chosen = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        places = iter(chosen)
        filled = [text if v is None else next(places) for text, v in zip(overrides, swept, strict=True)]
        name = ",".join(f"{label}={value}" for label, value in zip(labels, values, strict=True))
        runs.append((re.sub(r"[^\w=.,+-]", "_", name), filled))
    _refuse_names([label for label, _ in runs], keys)
    return runs


def _refuse_twice(parsed: Sequence[Override], swept: Sequence[list[str] | None]) -> None:
    """Refuses a key given twice: Hydra takes the last, so a run would be named after a value that it does not have."""
    given: dict[str, list[str]] = {}
    for override, values in zip(parsed, swept, strict=True):
        if not override.is_delete():
            value = ",".join(values or [override.get_value_element_as_str()])
            given.setdefault(override.key_or_group, []).append(value)
    for key in [override.key_or_group for override, values in zip(parsed, swept, strict=True) if values]:
        if len(all_of := given[key]) > 1:
            use = f"expected all its values in one place: {key}={','.join(all_of)}"
            raise ConfigError(key=key, value=" and ".join(all_of), accepted=use)


def _refuse_names(names: Sequence[str], keys: Sequence[str]) -> None:
    """Refuses runs that would share a folder, and names that are too long for the file system."""
    for name, times in Counter(names).items():
        use, size = "", len(os.fsencode(name))
        if times > 1:
            use = f"{times} runs would be in the folder {name}; give values that letters, digits or .,+- tell apart"
        elif size > LONGEST_NAME:
            use = f"a run's folder would have a name of {size} bytes, and the file system takes {LONGEST_NAME}; sweep fewer "
            use += "keys or shorter values at once"
        if use:
            raise ConfigError(f"sweep of {', '.join(keys)}: {use}", key=keys[-1], value=name, accepted=use)


def sweep(name: str, overrides: list[str], config_dir: str | None = None) -> int:
    """Runs write into `run_dir`/NAME. All are checked before the first starts; a finished run is skipped.

    A failed run does not stop the others. Exit code: 0 when all are done, now or earlier, else that of the first unfinished
    run; 4 when a run cannot start, before the first run where its configuration is wrong; 130 for Ctrl-C.
    """
    runs, taken = [], {}
    for label, chosen in expand(overrides):
        try:
            config = load_config(name, chosen, config_dir)
        except ConfigError as error:
            raise ConfigError(f"{label or name}: {error}") from error
        run_dir = Path(config.run_dir).expanduser().resolve() / label
        chosen = in_folder(chosen, run_dir)
        config = unchecked_config(name, chosen, config_dir)
        folder = Path(config.trainer.default_local_dir).expanduser().resolve()
        if folder in taken:  # a run would resume another's checkpoint
            use = f"{taken[folder]} and {label} would share their checkpoints; write ${{run_dir}} in it, or leave it out"
            raise ConfigError(key="trainer.default_local_dir", value=folder, accepted=use)
        taken[folder] = label
        runs.append((label or name, run_dir, chosen))
    codes = {}
    for number, (label, run_dir, chosen) in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {label} in {run_dir}", flush=True)
        codes[label] = run_child(run_command("train", name, chosen, config_dir))
        if codes[label] in ENDS_ALL:
            return codes[label]
    for label, code in codes.items():
        print(f"{label}: exit code {code}", flush=True)
    return next((code for code in codes.values() if code not in DONE), ExitCode.DONE)
