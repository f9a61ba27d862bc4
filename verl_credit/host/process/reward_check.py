"""Checks the run's reward function as verl's workers will load and call it."""

from __future__ import annotations

import inspect

from omegaconf import DictConfig, OmegaConf, open_dict
from verl.utils.import_utils import load_extern_object

from verl_credit.errors import ConfigError
from verl_credit.host.process.verl_checks import line_of
from verl_credit.recipe.rules.known import REWARD, REWARD_KWARGS

GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl's reward managers call a function with, by name."""
ANY = (inspect.Parameter.VAR_KEYWORD,)
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def check_reward_function(config: DictConfig) -> None:
    """Takes those of our defaults out of ``reward_kwargs`` that a user's function has no parameter for. Raises ConfigError
    for a function that cannot be loaded, has no parameter for a value of the user's, or has one without a value."""
    reward = OmegaConf.select(config, REWARD)
    if not reward or not reward.get("path"):
        return
    try:
        function = load_extern_object(module_path=reward.path, object_name=reward.name)
        parameters = inspect.signature(function).parameters
    except Exception as error:  # a user's module may raise any exception
        refusal = f"its function {reward.name} cannot be loaded: {line_of(error.__cause__ or error)[:300]}"
        raise ConfigError(key=f"{REWARD}.path", value=reward.path, accepted=refusal) from error
    named = {name: of for name, of in parameters.items() if of.kind not in (*POSITIONAL, *ANY)}
    takes_any = any(of.kind in ANY for of in parameters.values())
    kwargs = reward.get("reward_kwargs") or {}
    ours = {"format_penalty": 0.0, "include_reasoning": config.search.include_reasoning}
    for name in [name for name in kwargs if name not in named and not takes_any]:
        if kwargs[name] != ours.get(name):
            known = ", ".join(other for other in named if other not in GIVEN) or "no further parameter"
            takes = f"{reward.path}: {reward.name} has no parameter of that name; it takes {known}"
            raise ConfigError(key=f"{REWARD_KWARGS}.{name}", value=kwargs[name], accepted=takes)
        with open_dict(config):
            del kwargs[name]
    if config.reward.reward_manager.source != "register":  # a manager of one's own calls as it likes
        return
    lacks = [name for name in GIVEN if name not in named and not takes_any]
    empty = [name for name, of in named.items() if of.default is of.empty and name not in (*GIVEN, *kwargs)]
    wrong = f"has no parameter {lacks[0]}, which verl gives" if lacks else ""
    wrong = wrong or (f"has a parameter {empty[0]} without a value" if empty else "")
    if wrong:
        use = f"{reward.name} {wrong}; verl calls it with {', '.join(GIVEN)} and {REWARD_KWARGS}"
        raise ConfigError(key=f"{REWARD}.path", value=reward.path, accepted=use)
