"""Games of TextWorld, which the user installs (``textworld``; its jericho is GPL)."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from verl_credit.worlds.environments.interface import Step

WANTED = (
    "admissible_commands", "objective", "score", "won", "lost", "policy_commands", "description", "inventory",
)  # fmt: skip


class TextWorld:
    """A compiled game. ``game``, here or in the row's options, is its file. A step earns what the score rises by, and
    progress is the share of the winning walk that is done."""

    def __init__(self, game: str | None = None):
        self.game, self.env = game, None

    def reset(self, seed: int, options: dict) -> Step:
        textworld = import_module("textworld")

        if (game := options.get("game", self.game)) is None:
            raise ValueError(
                "options.game is missing: give each row, or environment.kwargs, the file of a game"
            )
        self.env = textworld.start(game, request_infos=textworld.EnvInfos(**dict.fromkeys(WANTED, True)))
        self.env.seed(seed)
        state = self.env.reset()
        self.score, self.walk = state.score or 0, len(state.policy_commands or ())
        told = (
            state.objective,
            state.description,
        )  # its first answer begins with a banner of 1,000 characters
        return self._seen(state, "\n".join(told) if all(told) else state.feedback)

    def step(self, action: str) -> Step:
        state, _, done = self.env.step(action)
        earned, self.score = (state.score or 0) - self.score, state.score or 0
        return self._seen(
            state, state.feedback, reward=float(earned), terminated=bool(done), success=bool(state.won)
        )

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def _seen(self, state: Any, text: str, **more: Any) -> Step:
        # A status line follows the answer, behind a prompt.
        text = re.sub(r"\n\s*\n+", "\n", text.split("\n>")[0]).strip()
        progress = None
        if self.walk and state.policy_commands is not None:
            progress = min(max(1 - len(state.policy_commands) / self.walk, 0.0), 1.0)
        name = f"{state.description}|{state.inventory}"
        return Step(
            text, actions=list(state.admissible_commands or ()), state=name, progress=progress, **more
        )
