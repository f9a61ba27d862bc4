"""Environments of gymnasium, with texts for actions and observations. They are in the extra ``env``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from verl_credit.worlds.environments.interface import Step

NAMES = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""The names of the actions 0, 1, ... in gymnasium's documentation."""
COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.)\x1b\[0m", re.DOTALL)
BRACKETS = {"34;1": "<>", "35": "()"}
"""Taxi's colours of the passenger and of the destination. Any other colour marks where the agent is: [ ]."""


class Gymnasium:
    """``gymnasium.make(id, **kwargs)``.

    ``actions``: the names of the actions 0, 1, ... of a discrete space, or a mapping of names to actions. Without them an
    action of another space is read as JSON. The observation is the drawn text where the environment draws one, with what it
    colours in brackets, and else the observation as JSON. ``success`` or ``is_success`` in its info is the success.
    """

    def __init__(self, id: str, actions: Sequence[str] | Mapping[str, Any] | None = None, **kwargs: Any):
        import gymnasium

        self.env = gymnasium.make(id, **kwargs)
        if "ansi" in (self.env.metadata.get("render_modes") or ()) and "render_mode" not in kwargs:
            self.env = gymnasium.make(id, render_mode="ansi", **kwargs)
        self.draws, space = self.env.render_mode == "ansi", self.env.action_space
        if actions is None and isinstance(space, gymnasium.spaces.Discrete):
            names, first = NAMES.get(id.rpartition("/")[2].partition("-")[0], ()), int(space.start)
            actions = names if len(names) == space.n else [str(first + n) for n in range(space.n)]
        if isinstance(actions, Mapping):
            self.actions = dict(actions)
        else:
            self.actions = {name: int(getattr(space, "start", 0)) + n for n, name in enumerate(actions or ())}
        if wrong := [name for name, action in self.actions.items() if not space.contains(action)]:
            raise ValueError(f"actions: {', '.join(wrong)} are no actions of {space}")

    def reset(self, seed: int, options: dict) -> Step:
        return self._seen(*self.env.reset(seed=seed, options=options or None))

    def step(self, action: str) -> Step:
        taken = self.actions.get(action)
        if not self.actions:
            taken = self._read(action)
        if taken is None:
            return Step(f"{action!r} is no action.", valid=False, actions=list(self.actions))
        observation, reward, terminated, truncated, info = self.env.step(taken)
        said = info.get("success", info.get("is_success"))
        success = None if said is None else bool(said)
        more = {"reward": float(reward), "terminated": bool(terminated), "truncated": bool(truncated)}
        return self._seen(observation, info, success=success, **more)

    def close(self) -> None:
        self.env.close()

    def _read(self, action: str) -> Any:
        """The action that JSON writes; None where the space has no such action."""
        space = self.env.action_space
        try:
            value = json.loads(action)
            value = value if space.dtype is None or not space.shape else numpy.asarray(value, space.dtype)
        except (ValueError, TypeError, OverflowError):
            return None
        return value if space.contains(value) else None

    def _seen(self, observation: Any, info: dict, **more: Any) -> Step:
        state = getattr(self.env.unwrapped, "s", None)
        # The place of a walk is an integer of numpy after a reset, and of Python after a step: `int` makes one name of both.
        name = str(int(state)) if isinstance(state, int | numpy.integer) else None
        return Step(self._text(observation), actions=list(self.actions), state=name, **more)

    def _text(self, observation: Any) -> str:
        if self.draws:
            return COLOURED.sub(_in_brackets, self.env.render()).strip("\n")
        return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def _in_brackets(found: re.Match) -> str:
    opening, closing = BRACKETS.get(found[1], "[]")
    return f"{opening}{found[2]}{closing}"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"the observation holds a {type(value).__name__}, which is no text; give an environment of your own"
    )
