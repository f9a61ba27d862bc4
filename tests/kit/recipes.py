"""A recipe composed and checked, and what recipes without data need to be."""

from __future__ import annotations

from verl_credit.config.compose import load_config
from verl_credit.config.rules import validate

OWN = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "search.url=http://x"]


def check(*overrides, recipe="lab"):
    config = load_config(recipe, list(overrides))
    validate(config)
    return config
