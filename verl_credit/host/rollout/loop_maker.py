"""Agent loops without a merge of configurations per rollout.

verl's worker asks hydra for a loop of every rollout. hydra copies the loop's entry, merges tokenizer, client and tools
into it and reads them back: a fifth of what the Python of a short rollout costs. An entry of a class and plain values
needs nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import hydra
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop

PLAIN = (str, int, float, bool, type(None))
TARGET = "_target_"


def make_loop(config: Mapping, **parts: Any) -> Any:
    """What ``hydra.utils.instantiate`` returns for a loop's entry and these parts. hydra itself makes loops whose entries
    hold mappings, lists, or instructions to hydra."""
    entry = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    values = {name: value for name, value in entry.items() if name != TARGET}
    if any(name.startswith("_") or not isinstance(value, PLAIN) for name, value in values.items()):
        return hydra.utils.instantiate(config=config, **parts)
    return hydra.utils.get_object(entry[TARGET])(**values | parts)


def make_loops_directly() -> None:
    """In this process verl's worker makes loops by `make_loop`: it has no method of its own for that."""
    agent_loop.hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=make_loop))
