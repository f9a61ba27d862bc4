"""The size of a step: its questions, the rollouts of each, and its updates."""

from __future__ import annotations

from typing import NamedTuple

from omegaconf import DictConfig

from verl_credit.config.resolved import select

BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
EACH, EPOCHS = "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.ppo_epochs"
KEYS = (BATCH, EACH, MINI_BATCH, EPOCHS)
"""The keys that decide the size. verl counts a mini-batch in questions."""


class StepSize(NamedTuple):
    questions: int
    each: int
    updates: int

    @classmethod
    def of(cls, config: DictConfig) -> StepSize | None:
        """Returns None where a key has no whole number above 0, which is refused elsewhere."""
        numbers = [select(config, key) for key in KEYS]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            return None
        questions, each, mini, epochs = numbers
        return cls(questions, each, questions // mini * epochs)

    def __str__(self) -> str:
        rollouts = f"{self.questions * self.each} rollouts, {self.each} of each of {self.questions} questions"
        return f"{rollouts}, in {self.updates} updates"


def step_line(config: DictConfig, recipe: DictConfig, name: str) -> str:
    """Returns the size of a step beside that of the ``recipe`` without overrides, so that an unequal comparison is seen."""
    size, own = StepSize.of(config), StepSize.of(recipe)
    if size is None or own is None:
        return ""
    beside = "as in the recipe" if size == own else f"recipe {name} without overrides: {own}"
    return f"a step: {size}; {beside}"


def twice(config: DictConfig, grouped: bool) -> str:
    """Returns overrides for twice the rollouts in as many updates: of each question, or of more questions where the credit
    compares no rollouts of a question (not ``grouped``)."""
    keys = (EACH,) if grouped else (BATCH, MINI_BATCH)
    return " ".join(f"{key}={2 * select(config, key)}" for key in keys)
