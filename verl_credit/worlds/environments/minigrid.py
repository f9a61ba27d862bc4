"""Environments of minigrid as texts: where each thing stands, as seen from the agent. They are in the extra ``env``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from verl_credit.worlds.environments.interface import Step

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle")


class MiniGrid:
    """``gymnasium.make(id, **kwargs)`` of an environment of minigrid. ``actions``: those that may be taken.

    The whole grid is observed. A rollout that ends with a reward has succeeded. Where doors are locked, progress is the
    share of done halves: the agent has the key of a door, and the door is unlocked.
    """

    def __init__(self, id: str, actions: Sequence[str] = ACTIONS, **kwargs: Any):
        import gymnasium
        import minigrid  # noqa: F401  (the import registers its environments)

        self.env = gymnasium.make(id, **kwargs)
        self.grid, self.actions = self.env.unwrapped, list(actions)
        known = [action.name for action in self.grid.actions]
        if unknown := [name for name in actions if name not in known]:
            raise ValueError(f"actions: {', '.join(unknown)} are none of {', '.join(known)}")

    def reset(self, seed: int, options: dict) -> Step:
        self.env.reset(seed=seed, options=options or None)
        self.locked = [thing for thing, _ in self._things() if getattr(thing, "is_locked", False)]
        return self._seen(f"Task: {self.grid.mission}.\n")

    def step(self, action: str) -> Step:
        if action not in self.actions:
            return Step(f"{action!r} is no action.", valid=False, actions=self.actions)
        _, reward, terminated, truncated, _ = self.env.step(self.grid.actions[action])
        success = terminated and reward > 0
        ends = {"terminated": bool(terminated), "truncated": bool(truncated), "success": bool(success)}
        return self._seen(reward=float(reward), **ends)

    def close(self) -> None:
        self.env.close()

    def _things(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Everything that is no wall, with its place."""
        grid = self.grid.grid
        for place in ((x, y) for y in range(grid.height) for x in range(grid.width)):
            thing = grid.get(*place)
            if thing is not None and thing.type != "wall":
                yield thing, place

    def _seen(self, before: str = "", **more: Any) -> Step:
        grid, held = self.grid, self.grid.carrying
        x, y = map(int, grid.agent_pos)
        ahead = tuple(map(int, grid.dir_vec))
        right = -ahead[1], ahead[0]
        lines = [f"You carry {named(held) if held else 'nothing'}."]
        around = {"ahead": ahead, "left": (-right[0], -right[1]), "right": right}
        walls = [side for side, step in around.items() if self._is_wall(x + step[0], y + step[1])]
        lines.append(f"Walls: {', '.join(walls) or 'none'}.")
        for thing, place in self._things():
            apart = place[0] - x, place[1] - y
            forward, sideways = (apart[0] * axis[0] + apart[1] * axis[1] for axis in (ahead, right))
            apart = [_far(forward, "ahead", "behind"), _far(sideways, "right", "left")]
            lines.append(f"{named(thing)}: {', '.join(filter(None, apart)) or 'here'}")
        # minigrid's own hash leaves out what is carried, and names one place in two ways.
        state = f"{grid.grid.encode().tobytes().hex()} {x} {y} {int(grid.agent_dir)} {named(held) if held else ''}"
        return Step(
            before + "\n".join(lines), actions=self.actions, state=state, progress=self._progress(), **more
        )

    def _is_wall(self, x: int, y: int) -> bool:
        thing = self.grid.grid.get(x, y)
        return thing is not None and thing.type == "wall"

    def _progress(self) -> float | None:
        if not self.locked:
            return None
        held = self.grid.carrying
        keyed = (held is not None and held.type == "key" and held.color == door.color for door in self.locked)
        done = [1.0 if not door.is_locked else has / 2 for door, has in zip(self.locked, keyed, strict=True)]
        return sum(done) / len(done)


def named(thing: Any) -> str:
    """The thing in words: ``locked yellow door``."""
    state = ""
    if thing.type == "door":
        state = "open " if thing.is_open else "locked " if thing.is_locked else "closed "
    return f"{state}{thing.color} {thing.type}"


def _far(steps: int, there: str, back: str) -> str:
    return f"{abs(steps)} {there if steps > 0 else back}" if steps else ""
