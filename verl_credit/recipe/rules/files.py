"""Checks that the files of a user's reward function and tools are there, and that the agent loop is known."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from os.path import isfile  # pathlib raises OSError for a name that no file system takes
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.config.fit import DEFAULT
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import AGENT_NAME, AGENTS, TURN_AGENT
from verl_credit.recipe.agent_loops import LISTED, own_loops, tools_given
from verl_credit.recipe.recipe_files import verl_folder
from verl_credit.recipe.rules.own import own_modules

CODE = (
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
    "data.custom_cls.path",
)
VERLS_LOOPS = ("single_turn_agent", "tool_agent", "diffusion_single_turn_agent")


def validate_files(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every file of the user's that verl would not find."""
    for key in CODE:
        path = select(config, key)
        if path and not _module_there(str(path)):
            use = "there is no such file; give a Python file, or pkg://MODULE for a module to import"
            yield ConfigError(key=key, value=path, accepted=use)
    verl = verl_folder().parents[1]
    for key, path in tools_given(config).items():
        roots = (Path(), verl.parent, verl)  # as verl looks for it
        if not isinstance(path, str) or not any(isfile(root / path) for root in roots):
            use = "there is no such file, neither from here nor in verl's package"
            yield ConfigError(key=key, value=path, accepted=use)


def _module_there(path: str) -> bool:
    if path.startswith("pkg://"):
        try:
            return find_spec(path.removeprefix("pkg://").replace("/", ".")) is not None
        except (ImportError, ValueError):
            return False
        except Exception:  # the user's package raises when it is imported, which `train` reports
            return True
    return isfile(path.removeprefix("file://"))


def validate_loop(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for an agent loop that nothing here or in the user's file has. A module may register others."""
    name, known = select(config, DEFAULT), (*AGENTS, *own_loops(config))
    if name in VERLS_LOOPS and name not in known:
        ours = AGENT_NAME if name == "single_turn_agent" else TURN_AGENT
        use = f"verl's own loops do not write which token belongs to which turn; take {ours}, or {AGENT_NAME} for the search"
        yield ConfigError(key=DEFAULT, value=name, accepted=use)
    elif name not in known and not own_modules(config):
        own = f"or a loop of yours that {LISTED} lists (docs/agent-loops.md)"
        yield ConfigError(key=DEFAULT, value=name, accepted=[*known, own])
