"""Calls a user's operators once before the start, on a small random batch with the run's params."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_credit.config.keys import Algorithm
from verl_credit.config.resolved import Tree
from verl_credit.credit.laws import own_subject
from verl_credit.credit.laws.world import World, make_world
from verl_credit.credit.plugins import TransformSpec, UncertaintySpec
from verl_credit.credit.plugins.load import kind_of
from verl_credit.errors import ConfigError

PARAMS = {  # kind of operator: the key of its params
    "outcome": "advantage_params",
    "transform": "transform_params",
    "uncertainty": "transform_params",
    "algorithm": "algorithm_params",
    "turn": "turn_params",
}
INSTALLED = {"site-packages", "dist-packages"}


def refuse_what_is_no_operator(found: Any, key: str, value: str) -> None:
    """Refuses Python's own and compiled functions, because a later check calls factories and os.abort looks like one."""
    home = _home(found)
    if home is None or home.partition(".")[0] in sys.stdlib_module_names:
        origin = f"that is Python's own ({home or 'builtins'})"
    elif inspect.isbuiltin(found) and not _of_the_user(found):
        origin = f"that is compiled code of {home}"
    else:
        return
    use = f"{origin}; expected a dotted path to your own (my_module.my_name)"
    raise ConfigError(key=key, value=value, accepted=use)


def try_operator(config: Tree, algorithm: Algorithm, found: Any, key: str, kind: str) -> None:
    """Raises ConfigError when the operator raises, or returns a wrong result."""
    name, params_key = config.algorithm[key.removeprefix("algorithm.")], f"algorithm.{PARAMS[kind]}"
    params = getattr(algorithm, PARAMS[kind])
    if _may_be_called(found, kind):
        subject = partial(own_subject, found, name, kind=kind, params=params)
        _try(lambda world: subject().run(world), key, name, {params_key: params})


def try_detector(found: Callable, key: str, name: str) -> None:
    """Raises ConfigError when the detector raises, or returns no mask of the same shape."""

    def run(world: World) -> None:
        token_ids_B_T = world.turn_ids_B_T.clamp(min=0)
        mask = torch.as_tensor(found(token_ids_B_T, world.mask_B_T, lambda ids: [f" word{i}" for i in ids]))
        if mask.shape != world.mask_B_T.shape:
            raise ValueError(
                f"it returned the shape {tuple(mask.shape)} for a mask of {tuple(world.mask_B_T.shape)}"
            )

    if _of_the_user(found):
        _try(run, key, name, {})


def _try(run: Callable[[World], Any], key: str, value: str, beside: dict[str, Any]) -> None:
    try:
        run(make_world(0))
    except (Exception, SystemExit) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        use = f"a call with a small batch raised {message}"
        raise ConfigError(key=key, value=value, beside=beside, accepted=use) from error


def _may_be_called(found: Any, kind: str) -> bool:
    """May the check call it? A user's code, yes; an installed package's only where it is declared as such an operator."""
    if isinstance(found, TransformSpec | UncertaintySpec):
        found = found.compute_context if kind == "transform" else found.compute
    if found is None or _of_the_user(found):
        return True
    if not inspect.isfunction(found) or not inspect.signature(found).parameters:
        return False
    try:
        return kind_of(found, "") == kind
    except ValueError:
        return False


def _of_the_user(found: Any) -> bool:
    file = getattr(sys.modules.get(_home(found) or ""), "__file__", None)
    return file is not None and not INSTALLED & set(Path(file).parts)


def _home(found: Any) -> str | None:
    """The module that defines an operator, which may differ from the module in its dotted path."""
    while isinstance(found, partial):
        found = found.func
    named = inspect.isroutine(found) or inspect.isclass(found)
    return getattr(found if named else type(found), "__module__", None)
