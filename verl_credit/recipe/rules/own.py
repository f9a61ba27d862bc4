"""Checks a user's code: operators, called once on a small random batch with the run's params, and policy losses.

A user's module registers a loss with verl (``register_policy_loss``). `train` imports these modules before Ray and looks
into verl's registry (`host.process.verl_checks`). Without verl, only the names of verl 0.9.1 and the modules are known.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_credit.config.keys import LOSS, Algorithm
from verl_credit.config.keys.reads import is_path
from verl_credit.config.keys.verl import TARGET, VERLS_LOSSES
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import TransformSpec, UncertaintySpec, load
from verl_credit.credit.plugins.load import kind_of
from verl_credit.errors import ConfigError
from verl_credit.lazy import torch
from verl_credit.names import LOSS_MODE

AsSpec = Callable[[Any, str], Any]
OWN = "or a dotted path to your own (my_module.my_name)"
PARAMS = {  # kind of operator: the key of its params
    "outcome": "advantage_params",
    "transform": "transform_params",
    "uncertainty": "transform_params",
    "algorithm": "algorithm_params",
    "turn": "turn_params",
}
INSTALLED = {"site-packages", "dist-packages"}
MODULES, IN_ENVIRONMENT = "actor_rollout_ref.model.external_lib", "VERL_USE_EXTERNAL_MODULES"


def load_own(key: str, value: str, names: Iterable[str] = (), as_spec: AsSpec | None = None) -> Any:
    """Loads a dotted path; returns None for a built-in name. Raises ConfigError for another name."""
    if value in names:
        return None
    if names and not is_path(value):
        raise ConfigError(key=key, value=value, accepted=[*names, OWN], shown=repr(value))
    try:
        loaded = load(value, key)
        refuse_what_is_no_operator(loaded, key, value)
        return as_spec(loaded, value) if as_spec else loaded
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error), key=key, value=value, accepted=OWN) from error


def refuse_what_is_no_operator(found: Any, key: str, value: str) -> None:
    """Refuses Python's own and compiled functions, because a later check calls factories and os.abort looks like one."""
    home = _home(found) or "builtins"
    pythons = home.partition(".")[0] in sys.stdlib_module_names
    if pythons or (inspect.isbuiltin(found) and not _of_the_user(found)):
        origin = f"that is Python's own ({home})" if pythons else f"that is compiled code of {home}"
        use = f"{origin}; expected a dotted path to your own (my_module.my_name)"
        raise ConfigError(key=key, value=value, accepted=use)


def try_operator(config: DictConfig, algorithm: Algorithm, found: Any, key: str, kind: str) -> None:
    """Raises ConfigError when the operator raises, or returns a wrong result."""
    from verl_credit.credit.laws import own_subject
    from verl_credit.credit.laws.drawn_world import make_world

    name, params_key = config.algorithm[key.removeprefix("algorithm.")], f"algorithm.{PARAMS[kind]}"
    params = getattr(algorithm, PARAMS[kind])
    if _may_be_called(found, kind):
        with trial(key, name, "a call with a small batch", {params_key: params}):
            own_subject(found, name, kind=kind, params=params).run(make_world(0))


def try_detector(found: Callable, key: str, name: str) -> None:
    """Raises ConfigError when the detector raises, or returns no mask of the same shape."""
    from verl_credit.credit.laws.drawn_world import make_world

    if not _of_the_user(found):
        return
    with trial(key, name, "a call with a small batch"):
        world = make_world(0)
        token_ids_B_T, wanted = world.turn_ids_B_T.clamp(min=0), tuple(world.mask_B_T.shape)
        mask = torch.as_tensor(found(token_ids_B_T, world.mask_B_T, lambda ids: [f" word{i}" for i in ids]))
        if mask.shape != wanted:
            raise ValueError(f"it returned the shape {tuple(mask.shape)} for a mask of {wanted}")


@contextmanager
def trial(key: str, value: str, call: str, beside: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Refuses the user's code that ``key`` names where it raises an error in this one ``call``."""
    try:
        yield
    except (Exception, SystemExit) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(key=key, value=value, beside=beside, accepted=f"{call} raised {message}") from error


def _may_be_called(found: Any, kind: str) -> bool:
    """May the check call it? A user's code, yes; an installed package's only where it is declared as such an operator."""
    if isinstance(found, TransformSpec | UncertaintySpec):
        found = found.compute_context if isinstance(found, TransformSpec) else found.compute
    if found is None or _of_the_user(found):
        return True
    try:
        declared = inspect.isfunction(found) and inspect.signature(found).parameters and kind_of(found, "")
    except ValueError:
        return False
    return declared == kind


def _of_the_user(found: Any) -> bool:
    file = getattr(sys.modules.get(_home(found) or ""), "__file__", None)
    return file is not None and not INSTALLED & set(Path(file).parts)


def _home(found: Any) -> str | None:
    """The module that defines an operator, which may differ from the module in its dotted path."""
    while isinstance(found, partial):
        found = found.func
    named = inspect.isroutine(found) or inspect.isclass(found)
    return getattr(found if named else type(found), "__module__", None)


def own_loss(config: DictConfig) -> str | None:
    """The name of a user's loss; None for a loss of verl's or ours."""
    name = select(config, f"{LOSS}.loss_mode")
    return None if name in (LOSS_MODE, *VERLS_LOSSES) else name


def own_modules(config: DictConfig) -> list[str]:
    """The modules that verl imports in all processes of a run, or in the processes that read the model's config."""
    given = select(config, MODULES) or []
    modules = [given] if isinstance(given, str) else given
    return [module for module in (*modules, *os.environ.get(IN_ENVIRONMENT, "").split(",")) if module]


def validate_loss(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal of a loss that no module registers, or that does not support the setting of another key."""
    loss, name, key = select(config, LOSS), own_loss(config), f"{LOSS}._target_"
    if (given := loss.get("_target_")) != TARGET:
        yield ConfigError(key=key, value=given, accepted=f"it has to take our keys beside it; use {TARGET}")
    if loss.loss_mode != LOSS_MODE and select(config, f"{LOSS}.dynamic_clip") is True:
        use = f"{loss.loss_mode} would clip every turn alike; set it to false, or loss_mode to {LOSS_MODE}"
        yield ConfigError.of(config, f"{LOSS}.dynamic_clip", f"{LOSS}.loss_mode", accepted=use)
    if loss.loss_mode == "dro" and not loss.get("dro_beta"):
        use = "that loss needs its quadratic penalty: a number above 0"
        yield ConfigError.of(config, f"{LOSS}.dro_beta", f"{LOSS}.loss_mode", accepted=use)
    if name is not None and not own_modules(config):
        own = f"or a loss of yours that a module in {MODULES} registers with verl (docs/plugins.md)"
        yield ConfigError(key=f"{LOSS}.loss_mode", value=name, accepted=[LOSS_MODE, *VERLS_LOSSES, own])
