"""Games of TextArena for one player, which the user installs (``textarena``)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from verl_credit.worlds.environments.interface import Step


class TextArena:
    """``textarena.make(id, **kwargs)``. Its wrapper writes the whole game into every observation: what is new is handed on.
    A game rewards its end alone, and a reward of 1 is the success. It counts the moves in a row that it did not take."""

    def __init__(self, id: str, **kwargs: Any):
        textarena = import_module("textarena")

        self.env, self.read = textarena.make(id, **kwargs), 0

    def reset(self, seed: int, options: dict) -> Step:
        self.env.reset(num_players=1, seed=seed, **options)
        return Step(self._new())

    def step(self, action: str) -> Step:
        done, _ = self.env.step(action)
        if not done:
            return Step(self._new(), valid=not self.env.state.error_count)
        reward, said = (self.env.state.rewards or {}).get(0), (self.env.state.game_info or {}).get(0, {})
        ends = {"terminated": True, "success": reward == 1, "valid": not said.get("invalid_move")}
        return Step(str(said.get("reason", "")), reward=reward, **ends)

    def close(self) -> None:
        pass

    def _new(self) -> str:
        _, text = self.env.get_observation()
        new, self.read = text[self.read :], len(text)
        return new.strip()
