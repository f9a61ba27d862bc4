"""Finds the object that a dotted path names, and makes a spec of it."""

import importlib
import importlib.util
import inspect
import sys
import types as python_types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any

from verl_credit.credit.plugins import types
from verl_credit.credit.plugins.types import TransformSpec, UncertaintySpec
from verl_credit.credit.turn.mode import TurnMode, as_turn_mode
from verl_credit.credit.turn.modes import MODES
from verl_credit.errors import did_you_mean

# Plug-ins for retrain contain `from retrain import TransformOutput`.
PUBLISHED_HOME = "retrain"
METHODS = "verl_credit_recipes.methods"
"""The package of the project's own plug-ins: a function NAME in each module NAME."""
KINDS = ("outcome", "turn", "transform", "algorithm", "uncertainty")


def load(path: str, key: str) -> Any:
    """The object at ``pkg.mod.attribute`` (or ``pkg.mod:attribute``). Raises ValueError with key, path and what is wrong."""
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name or not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ValueError(
            f"{key}={path!r}: expected a built-in name or a dotted path such as my_module.my_function"
        )
    with _published_types():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            why = f"importing {module_name!r} raised {type(error).__name__}: {error}"
            if isinstance(error, ImportError):
                why = f"cannot import {module_name!r} ({error})"
            raise ValueError(f"{key}={path!r}: {why}") from error
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [name for name in vars(module) if name[0] != "_"], repr)
        raise ValueError(f"{key}={path!r}: module {module_name!r} has no {attribute!r}{hint}")
    value = getattr(module, attribute)
    if not callable(value) and type(value).__name__ not in ("TransformSpec", "UncertaintySpec"):
        raise ValueError(f"{key}={path!r} is a {type(value).__name__}; expected a function or a spec")
    return value


@lru_cache(maxsize=64)
def plugin_path(name: str) -> str:
    """Returns the dotted path of an operator that is not built in: a path itself, or the path of a plug-in in `METHODS`.

    "" for other names. A plug-in is found by its name alone: nothing else in the package knows it.
    """
    if {".", ":"} & set(name):
        return name
    home = f"{METHODS}.{name}"
    try:
        found = name.isidentifier() and importlib.util.find_spec(home) is not None
    except ModuleNotFoundError:  # without the recipes
        found = False
    return f"{home}.{name}" if found else ""


def origin(name: str) -> str:
    """Returns the words of `explain` about an operator that is not built in."""
    package, _, own = plugin_path(name).partition(f"{METHODS}.")
    return f"plug-in recipes/methods/{own.partition('.')[0]}.py" if own and not package else "yours"


@lru_cache(maxsize=64)
def find_turn_mode(name: str, key: str = "algorithm.info_gain_norm_mode") -> TurnMode:
    """Returns the mode. Raises ValueError where no mode, no plug-in and no importable function has that name."""
    return MODES[name] if name in MODES else as_turn_mode(load(plugin_path(name) or name, key), name)


CONTEXTS = {"Tables": "turn", "TransformContext": "transform", "AlgorithmContext": "algorithm",
            "UncertaintyContext": "uncertainty"}  # fmt: skip
FIRST = {"tables": "turn", "rewards": "outcome", "rewards_G": "outcome", "outcomes": "outcome"}


def kind_of(operator: Any, name: str) -> str:
    """The kind of an operator, from its spec, or from the annotation or the name of its first argument."""
    for kind, spec in (("transform", TransformSpec), ("uncertainty", UncertaintySpec), ("turn", TurnMode)):
        if isinstance(operator, spec):
            return kind
    parameters = list(inspect.signature(operator).parameters.values()) if callable(operator) else []
    if not parameters and callable(operator):
        return kind_of(operator(), name)
    for first in parameters[:1]:
        annotation = getattr(first.annotation, "__name__", str(first.annotation)).strip("'\"")
        annotated = (kind for context, kind in CONTEXTS.items() if annotation.endswith(context))
        if told := next(annotated, FIRST.get(first.name)):
            return told
    raise ValueError(f"{name}: cannot tell what kind of operator this is; give --kind {'|'.join(KINDS)}")


def as_uncertainty_spec(operator: Any, name: str) -> UncertaintySpec:
    """A spec, a factory of one, or a function ``f(context) -> list``."""
    operator = _converted(operator, UncertaintySpec)
    spec = operator if isinstance(operator, UncertaintySpec) else UncertaintySpec(name, operator)
    if spec.needs_distributions:
        raise ValueError(
            f"algorithm.uncertainty_kind={name!r} needs whole token distributions, which are not kept; "
            "precomputed_entropy holds their entropies"
        )
    return spec


def as_transform_spec(operator: Any, name: str) -> TransformSpec:
    """A spec, a factory of one, or a function of a context (its needs are attributes of the function)."""
    operator = _converted(operator, TransformSpec)
    if isinstance(operator, TransformSpec):
        return operator
    if not callable(operator):
        raise ValueError(
            f"algorithm.transform_mode={name!r} gave a {type(operator).__name__}; expected a TransformSpec"
        )
    needs = ("needs_planning", "uses_sepa_controller", "uses_turn_advantages")
    declared: dict[str, Any] = {need: bool(getattr(operator, need, False)) for need in needs}
    return TransformSpec(name, compute_context=operator, **declared)


def on_lists(function: Callable[..., Any], name: str, params: dict) -> Callable[[list[float]], Any]:
    """The function with one argument: its rewards."""
    if not callable(function):
        raise ValueError(f"advantage_mode={name!r} is a {type(function).__name__}; expected a function")
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        return on_lists(function(), name, params)
    required = _required_arguments(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.name == "params" and p.kind is p.KEYWORD_ONLY for p in parameters):
        return lambda rewards: function(rewards, params=dict(params))
    if len(positional) >= 2 and (positional[1].name == "params" or len(required) == 2):
        return lambda rewards: function(rewards, dict(params))
    if len(required) > 1:
        raise ValueError(
            f"advantage_mode={name!r} takes {required}; expected f(rewards) or f(rewards, params)"
        )
    if params:
        raise ValueError(f"advantage_params={params} were given, but advantage_mode={name!r} takes none")
    return lambda rewards: function(rewards)


def _converted(operator: Any, spec: type) -> Any:
    """The result of a factory; another package's spec of the same name (such as retrain's) becomes ours."""
    if inspect.isroutine(operator) and not _required_arguments(operator):
        operator = operator()
    if isinstance(operator, spec) or type(operator).__name__ != spec.__name__:
        return operator
    return spec(**{f.name: getattr(operator, f.name) for f in fields(spec) if hasattr(operator, f.name)})


def _required_arguments(function: Any) -> list[str]:
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


@contextmanager
def _published_types() -> Iterator[None]:
    if PUBLISHED_HOME in sys.modules or importlib.util.find_spec(PUBLISHED_HOME) is not None:
        yield
        return
    stand_in = python_types.ModuleType(PUBLISHED_HOME, types.__doc__)
    vars(stand_in).update({name: value for name, value in vars(types).items() if inspect.isclass(value)})
    sys.modules[PUBLISHED_HOME] = stand_in
    try:
        yield
    finally:
        del sys.modules[PUBLISHED_HOME]
