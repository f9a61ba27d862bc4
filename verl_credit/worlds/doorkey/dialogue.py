"""The dialogue of a rollout in DoorKey, as `env_agent` makes it, and a tokenizer that has a token for each phrase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from verl_credit.worlds.data.env_rows import PROMPTS
from verl_credit.worlds.doorkey.moves import ACTIONS
from verl_credit.worlds.environments.interface import NO_ACTION, shown_step
from verl_credit.worlds.environments.minigrid import MiniGrid
from verl_credit.worlds.lab.protocol import TURN_END, make_tokenizer

THINGS = ("yellow key", "locked yellow door", "closed yellow door", "open yellow door", "green goal")
FAR = [f"{n} {side}" for n in range(1, 5) for side in ("ahead", "behind", "left", "right")]
PHRASES = (
    PROMPTS["text"], "Task: use the key to open the door and then get to the goal.\n", f"Actions: {', '.join(ACTIONS)}",
    "system\n", "user\n", "assistant\n", *(f"You carry {held}.\nWalls: " for held in ("nothing", THINGS[0])), "none", ".\n",
    *(thing + mark for thing in THINGS for mark in (": ", ":")), *ACTIONS, "ahead", ", ", NO_ACTION,
    *(text for far in FAR for text in (far, f"{far}\n", f", {far}\n")),
)  # fmt: skip
"""What minigrid's adapter and the chat template write."""


class Dialogue:
    """A rollout of the seed's task. ``segments``: texts, and whether the policy wrote them."""

    def __init__(self, size: int, seed: int, tokenizer: PreTrainedTokenizerFast):
        self._env = MiniGrid(f"MiniGrid-DoorKey-{size}x{size}-v0", tuple(ACTIONS))
        self.now = self._env.reset(seed, {})
        messages = [("system", PROMPTS["text"]), ("user", shown_step(self.now, True))]
        self._template = tokenizer.apply_chat_template
        self.segments = [(self._shown([{"role": role, "content": text} for role, text in messages]), False)]

    def act(self, text: str, ended: bool = True) -> None:
        """A turn of the policy, and what it reads next. ``ended``: it wrote its end."""
        if ended and text in ACTIONS:
            self.now = self._env.step(text)
        else:
            self.now = replace(self.now, observation=NO_ACTION, valid=False)
        self.segments.append((text + TURN_END * ended, True))
        if not self.now.done:
            observed = self._shown([{"role": "user", "content": shown_step(self.now, True)}])
            self.segments.append(("\n" + observed, False))

    def _shown(self, messages: Sequence[dict]) -> str:
        return self._template(messages, tokenize=False, add_generation_prompt=True)


def doorkey_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(
        ACTIONS, pieces=PHRASES
    )  # the lab's own words have some of these with a space before them
