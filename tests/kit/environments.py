"""Small environments for tests: a corridor whose end is the goal, and one that does wrong what its options say."""

import os
import random
import time

from verl_credit.worlds.environments.interface import Step

CORRIDOR, FAULTY = f"{__name__}.Corridor", f"{__name__}.Faulty"


class Corridor:
    """Rooms 0 to ``length`` in a row. ``left`` and ``right`` move, the last room ends it. With ``slip`` a move may fail, by
    the global random numbers."""

    def __init__(self, length=2, slip=0.0, says=True):
        self.length, self.slip, self.says = length, slip, says

    def reset(self, seed, options):
        self.at = options.get("start", seed % self.length)
        return self._seen()

    def step(self, action):
        if random.random() >= self.slip:
            self.at = max(self.at + {"left": -1, "right": 1}[action], 0)
        done = self.at == self.length
        return self._seen(
            reward=1.0 if done else -0.125, terminated=done, success=done if self.says else None
        )

    def _seen(self, **more):
        text, progress = f"room {self.at} of {self.length}", self.at / self.length
        return Step(text, actions=["left", "right"], state=f"s{self.at}", progress=progress, **more)

    def close(self):
        pass


class Faulty(Corridor):
    """``options.fault``: what happens at the action ``right`` (or at the reset, with ``options.at_reset``)."""

    def reset(self, seed, options):
        self.fault, first = options.get("fault"), super().reset(seed, options)
        self.once = options.get("once")
        return self._wrong(first) if options.get("at_reset") else first

    def step(self, action):
        seen = super().step(action)
        return self._wrong(seen) if action == "right" else seen

    def _wrong(self, seen):
        if self.once:  # the fault happens until this file is there
            if os.path.exists(self.once):
                return seen
            open(self.once, "w").close()
        match self.fault:
            case "raises":
                raise KeyError("no such door")
            case "exits":
                raise SystemExit(3)
            case "hangs":
                time.sleep(60)
            case "dies":
                os._exit(7)
            case "none":
                return None
            case "prints":
                print("hello")
                os.write(1, b"hello\n")
            case "pid":
                return Step(f"{os.getpid()}")
            case "set":
                return Step(" ".join({"key", "door", "lamp", "rope", "coin", "book", "ring", "map"}))
            case {"fields": fields}:
                return Step(**{"observation": "x", **fields})
        return seen


def either(text):
    """``left`` or ``right``, whatever the policy wrote: a policy that knows no action walks, too."""
    return ("left", "right")[len(text) % 2]
