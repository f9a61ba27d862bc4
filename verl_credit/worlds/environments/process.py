"""A process of environments: requests come in as JSON lines, and each is answered with one.

`pool.Pool` starts it. It imports neither torch nor verl, and what an environment prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import sys
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from queue import SimpleQueue
from threading import Thread
from traceback import format_exception_only
from typing import Any

import numpy

from verl_credit.worlds.environments.interface import BadAnswer, checked

ADAPTERS = {
    "gymnasium": "Gymnasium",
    "minigrid": "MiniGrid",
    "textworld": "TextWorld",
    "textarena": "TextArena",
    "openenv": "OpenEnv",
}
"""The values of environment.path that name an adapter of ours: its file here, and its class."""


def load(path: str) -> type:
    """The class of an adapter of ours, or of ``my_module.MyEnvironment``."""
    if path in ADAPTERS:
        return getattr(import_module(f"{__package__}.{path}"), ADAPTERS[path])
    module, _, name = path.replace(":", ".").rpartition(".")
    return getattr(import_module(module), name)


class Rollouts:
    """The open environments of this process. Each has the global random numbers of ``random`` and numpy for itself, so that
    a package which seeds them for the whole process disturbs no other rollout."""

    def __init__(self, max_chars: int):
        self._max_chars = max_chars
        self._open: dict[int, Any] = {}
        self._random: dict[int, tuple] = {}

    def answer(self, row: int, call: str, *given: Any) -> dict | None:
        """Raises BadAnswer, and whatever the environment raises."""
        with self._random_numbers_of(row):
            if call == "close":
                environment = self._open.pop(row, None)
                return environment and environment.close()
            if call == "step":
                return asdict(checked(self._open[row].step(*given), self._max_chars))
            path, kwargs, seed, options = given
            made = load(path)  # its import may draw random numbers
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            self._open[row] = made(**kwargs)
            try:
                return asdict(checked(self._open[row].reset(seed, options), self._max_chars))
            except BaseException:
                with suppress(BaseException):
                    self._open[row].close()
                del self._open[row]
                raise

    @contextmanager
    def _random_numbers_of(self, row: int):
        if row in self._random:
            pythons, numpys = self._random[row]
            random.setstate(pythons)
            numpy.random.set_state(numpys)
        try:
            yield
        finally:
            self._random[row] = random.getstate(), numpy.random.get_state()
            if row not in self._open:
                del self._random[row]


def main(max_chars: int) -> None:
    """Answers until stdin ends, which it also does when the parent dies, however long an environment takes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)

    Thread(target=read, daemon=True).start()
    rollouts = Rollouts(max_chars)
    while True:
        try:
            answer = {"step": rollouts.answer(*json.loads(requests.get()))}
        except BadAnswer as error:
            answer = {"fault": "env_bad_answer", "detail": str(error)}
        except ConnectionError as error:  # the environment is elsewhere, and gone
            answer = {"fault": "env_lost", "detail": str(error)[:300]}
        except BaseException as error:  # an environment may raise anything, SystemExit included
            text = "".join(format_exception_only(error)).strip()
            answer = {"fault": "env_raised", "detail": text.encode("utf-8", "replace").decode()[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
