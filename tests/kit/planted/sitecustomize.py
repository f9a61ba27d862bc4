"""Python loads this at its start where the folder is on PYTHONPATH: every process of a run under test (kit/faults.py).

It carries out the one fault that VERL_CREDIT_PLANTED describes, when some function is called for the nth time in a process:
it kills a process of the run, or lets the call fail (as on a full disk), or cuts the file that the call has written.
"""

import errno
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

PLANTED = "VERL_CREDIT_PLANTED"
gc.set_threshold(50_000, 20, 20)  # as kit/quick_start, in whose place this file is loaded


class Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as the others would, and replaces the function once the module has run."""

    def __init__(self, planted: dict):
        self.planted = planted
        self.module, _, self.function = planted["at"].partition(":")

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_plant(module):
            execute(module)
            *owners, attribute = self.function.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, attribute, with_fault(getattr(owner, attribute), self.planted))

        spec.loader.exec_module = execute_and_plant
        return spec


def with_fault(function, planted: dict):
    calls = 0

    @functools.wraps(function)
    def called(*args, **kwargs):
        nonlocal calls
        # torch.save also packs messages: only what writes a file counts
        writes = any(isinstance(arg, str | Path) for arg in (*args, *kwargs.values()))
        calls += writes or planted["do"] not in ("full_disk", "cut_file")
        if calls != planted["call"] or not first(planted):
            return function(*args, **kwargs)
        if planted["do"] == "full_disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if planted["do"] == "fail":
            raise ValueError("a planted failure")
        if planted["do"] == "cut_file":  # killed in the middle of writing it
            function(*args, **kwargs)
            path = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, str | Path))
            os.truncate(path, os.path.getsize(path) // 2)
        kill(planted)
        return function(*args, **kwargs)

    return called


def first(planted: dict) -> bool:
    """In the run, not in this process alone."""
    try:
        Path(planted["fired"]).open("x").close()
    except FileExistsError:
        return False
    return True


def kill(planted: dict) -> None:
    """The command, this process, or the first one whose command line holds ``who``."""
    import psutil

    command = psutil.Process(int(os.environ[f"{PLANTED}_COMMAND"]))
    if planted["who"] == "self":
        chosen = [psutil.Process()]
    elif planted["who"] == "command":
        chosen = [command]
    else:
        chosen = [p for p in command.children(recursive=True) if planted["who"] in " ".join(p.cmdline()[:3])]
    if not chosen:
        sys.exit(f"no process {planted['who']!r} to kill")
    for process in chosen[:1]:
        process.send_signal(signal.SIGTERM if planted["do"] == "SIGTERM" else signal.SIGKILL)


if PLANTED in os.environ:
    os.environ.setdefault(f"{PLANTED}_COMMAND", str(os.getpid()))
    sys.meta_path.insert(0, Finder(json.loads(os.environ[PLANTED])))
