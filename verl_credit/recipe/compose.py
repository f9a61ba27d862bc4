"""Composes a recipe's name and overrides into a configuration, and lists the values that are not the default.

Mistakes are refused before Ray starts.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_credit.config.keys import LOSS, defaults_tree
from verl_credit.config.keys.section import no_value
from verl_credit.config.resolved import flat_values, select
from verl_credit.errors import ConfigError, did_you_mean, joined
from verl_credit.recipe import recipe_files as files
from verl_credit.recipe.decisions import decide_auto, decide_lab
from verl_credit.recipe.family import policy_values
from verl_credit.recipe.overrides import unreadable, wrong_keys
from verl_credit.recipe.recipe_files import folders, recipes_folder, verl_folder
from verl_credit.recipe.rules import validate
from verl_credit.recipe.rules.known import verls_own
from verl_credit.recipe.step_size import BATCH, EACH, MINI_BATCH, StepSize, step_line
from verl_credit.recipe.step_size import KEYS as SIZE
from verl_credit.recipe.world import without_value
from verl_credit.redact import redact_value

GROUPS = ("hardware", "model")  # values chosen by these groups do not depart from a preset


def quoted(text: str) -> str:
    """A value of an override as Hydra reads it back: it may hold = and , which Hydra would take apart."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def load_config(
    name: str, overrides: Sequence[str], config_dir: str | None = None, *, may_fetch: bool = False
) -> DictConfig:
    """A recipe with Hydra overrides, composed from the shipped recipes (or from ``config_dir``) and checked.

    ``may_fetch``: the policy's config.json may come from the hub, once no required key is without a value. Raises
    ConfigError for a fault, and ConfigErrors for several of one kind: of overrides, then as `validate` does.
    """
    config = unchecked_config(name, overrides, config_dir, may_fetch=may_fetch)
    validate(config)
    return config


def unchecked_config(
    name: str,
    overrides: Sequence[str],
    config_dir: str | None = None,
    *,
    may_fetch: bool = False,
    set_later: Collection[str] = (),
) -> DictConfig:
    """Composes as `load_config` does, for callers that read a part of it or check it by other rules.

    ``set_later``: the required keys that the caller sets itself.
    """
    try:
        with _quiet():
            config = decide_lab(compose_recipe(name, overrides, config_dir))
            preset = _preset_of(config, name, overrides, config_dir)
            policy = {}
            with suppress(OmegaConfBaseException):  # a key refers to nothing, which is refused by its name
                policy = policy_values(config, may_fetch=may_fetch and _is_complete(config, set_later))
            decide_auto(config, policy)
            if preset is not None:
                config.credit_overrides = _departures(config, decide_auto(preset, policy))
                _keep_rollouts(config, name, overrides, config_dir)
            return config
    except (HydraException, OmegaConfBaseException) as error:
        raise _refusal(name, overrides, config_dir, error) from error
    except YAMLError as error:
        raise files.not_yaml(error) from error
    except RecursionError as error:
        raise files.circle(name, folders(config_dir)) from error


def _is_complete(config: DictConfig, set_later: Collection[str]) -> bool:
    """A run that lacks a value is refused for that, so nothing is fetched for it."""
    try:
        return set(without_value(config)) <= set(set_later)
    except (OmegaConfBaseException, AttributeError, TypeError):  # a wrong value, refused later by its name
        return False


def _preset_of(
    config: DictConfig, name: str, overrides: Sequence[str], config_dir: str | None
) -> DictConfig | None:
    """Composes the chosen preset with the same recipe, hardware and model; the preset's values replace the recipe's."""
    try:
        chosen = config.get("credit_preset")
    except OmegaConfBaseException as error:  # an interpolation refers to nothing
        raise no_value("credit_preset", error) from error
    if not chosen:
        return None
    presets = _presets(config_dir)
    if chosen not in presets:
        raise ConfigError(key="credit_preset", value=chosen, accepted=presets)
    composed = compose_recipe(name, [*_groups(overrides), f"credit={chosen}"], config_dir)
    return _with_values_of(presets[chosen], composed)


def _presets(config_dir: str | None) -> dict[str, Path]:
    """The files of all presets; the user's own replace the shipped ones."""
    found = (
        file for folder in reversed(folders(config_dir)) for file in sorted(folder.glob("credit/*.yaml"))
    )
    return {file.stem: file for file in found}


def _keep_rollouts(config: DictConfig, name: str, overrides: Sequence[str], config_dir: str | None) -> None:
    """A preset that sets the rollouts of a question changes the number of questions, so that a step has the rollouts and
    updates of the recipe. Overrides of the step's size win."""
    preset = OmegaConf.create(files.read_tree(_presets(config_dir)[config.credit_preset]))
    keys = [one.lstrip("+~").partition("=")[0] for one in overrides]
    if select(preset, EACH) is None or set(keys) & set(SIZE):
        return
    others = [one for one, key in zip(overrides, keys, strict=True) if key != "credit"]
    recipe = compose_recipe(name, others, config_dir)
    if recipe.get("credit_preset") == config.credit_preset:  # the recipe itself chooses the preset
        recipe = compose_recipe(name, [*others, "credit=null"], config_dir)
    before, now = StepSize.of(recipe), StepSize.of(config)
    if before and now and before.each % now.each == 0:
        for key in (BATCH, MINI_BATCH):
            OmegaConf.update(config, key, select(recipe, key) * (before.each // now.each))


def step_size_line(
    config: DictConfig, name: str, overrides: Sequence[str], config_dir: str | None = None
) -> str:
    """Returns the size of a step beside that of the recipe without its overrides."""
    recipe = unchecked_config(name, [], config_dir) if overrides else config
    return step_line(config, recipe, name)


def _with_values_of(file: Path, config: DictConfig) -> DictConfig:
    """Returns ``config`` with the values of a file in place of its own; the file's list of defaults is not followed."""
    values = {key: value for key, value in files.read_tree(file).items() if key != "defaults"}
    return DictConfig(OmegaConf.merge(config, values))


def _departures(config: DictConfig, preset: DictConfig) -> list[str]:
    """Returns ``key=value`` for every credit key that differs from the preset."""

    def values(config: DictConfig) -> dict[str, str]:
        sections = {name: select(config, name) for name in (LOSS, "algorithm")}
        flat = [flat_values(at, name) for name, at in sections.items() if isinstance(at, DictConfig)]
        return {key: str(value) for one in flat for key, value in one.items()}

    theirs = values(preset)
    return [f"{key}={value}" for key, value in values(config).items() if theirs.get(key) != value]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences verl's warnings about every absent GPU platform and engine, which composing triggers by importing verl.

    The recipe names its device and engine, and both are checked where they start.
    """
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


ConfigStore.instance().store("credit_keys", node=defaults_tree(), package="_global_", provider="verl_credit")


class _SearchPath(SearchPathPlugin):
    """Adds the shipped recipes and verl's configuration to the folders in which Hydra looks for recipes and their parts.

    verl's folder is a path, because ``pkg://verl.trainer.config`` would import verl, which takes several seconds.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("verl_credit", f"file://{recipes_folder()}")
        search_path.append("verl", f"file://{verl_folder()}")


Plugins.instance().register(_SearchPath)


def compose_recipe(name: str, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Composes files and overrides; ``auto`` is not decided yet."""
    with initialize_config_dir(str(folders(config_dir)[0]), version_base=None):
        try:
            config = compose(name, list(overrides))
        except (HydraException, OmegaConfBaseException, ConfigError):
            raise
        except (AssertionError, OSError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error.strerror if isinstance(error, OSError) else error}"[:300]
            places = ", ".join(["its defaults, or those of a file that they list", *_groups(overrides)])
            use = f"expected NAME, GROUP: CHOICE, or _self_ by itself in {places}"
            message = f"recipe {name} cannot be composed ({why}): {use}"
            raise ConfigError(message[:700], key="defaults") from error
    for key in ("actor_rollout_ref", "trainer"):
        if key not in config:
            start = "begin it with `defaults: [lab, _self_]`"
            raise ConfigError(f"recipe {name} starts from no other: {start}", key="defaults")
        if not isinstance(config[key], DictConfig):
            raise ConfigError(key=key, value=config[key], accepted="expected a section with keys")
    return config


def _refusal(name: str, overrides: Sequence[str], config_dir: str | None, error: Exception) -> ConfigError:
    """Adds the accepted keys to Hydra's message."""
    if isinstance(error, MissingConfigException):
        return _missing(name, config_dir, error)
    if wrong := unreadable(overrides):
        return joined(wrong)
    message = " ".join(str(error).split())
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ else ""
    match = re.search(r"Could not (?:override '|append to config. An item is already at ')([^']+)'", message)
    if match is None:
        # Without this, the error of an interpolation in a list of defaults would not name the recipe.
        where = "" if name in message else name
        return ConfigError(": ".join(part for part in (where, message, cause) if part))
    key = match.group(1)
    try:
        base = compose_recipe(name, _groups(overrides), config_dir)
    except HydraException:  # the override is in a file's defaults, not on the command line
        return ConfigError(message, key=key)
    if wrong := wrong_keys(base, overrides, [*folders(config_dir), verl_folder()]):
        return joined(wrong)
    value = next((o.partition("=")[2] for o in overrides if o.lstrip("+~").partition("=")[0] == key), None)
    use = f"a new key below it is added with +{key}.NAME=VALUE"
    return ConfigError(key=key, value=redact_value(key, value), accepted=use)


def _groups(overrides: Sequence[str]) -> list[str]:
    return [o for o in overrides if o.partition("=")[0] in GROUPS]


def _missing(name: str, config_dir: str | None, error: MissingConfigException) -> ConfigError:
    """The error for a recipe, an entry of its ``defaults``, or a group's choice that is in none of the folders."""
    group, _, choice = str(error.missing_cfg_file or name).rpartition("/")
    if error.options:
        return ConfigError(key=group, value=choice, accepted=error.options)
    shipped = files.shipped_recipes()
    own = [] if config_dir is None else sorted(file.stem for file in Path(config_dir).glob("*.yaml"))
    message = f"{name}: its defaults list {choice!r}, and " if choice != name else ""
    message += f"no recipe is called {choice!r}{did_you_mean(choice, [*own, *shipped])}; shipped: {', '.join(shipped)}"
    message += f"; in {config_dir}: {', '.join(own)}" if own else ""
    key = "defaults" if choice != name else ""
    return ConfigError(message, key=key, value=choice, accepted=[*own, *shipped])


ABSENT = "(not there)"


class Default(NamedTuple):
    value: object
    of: str
    """"verl", or "verl_credit" for a key that verl does not have."""


@lru_cache(maxsize=1)
def defaults() -> dict[str, Default]:
    """Returns every default by its flattened key."""
    verl = {"model_engine": "dp"} | flat_values(OmegaConf.create(verls_own("dp")))
    own = _with_values_of(recipes_folder() / f"{files.DEFAULTS}.yaml", OmegaConf.create(defaults_tree()))
    known = {key: Default(value, "verl_credit") for key, value in flat_values(own).items()}
    return known | {key: Default(value, "verl") for key, value in verl.items()}


def changed_values(config: DictConfig) -> list[tuple[str, object, Default]]:
    """Returns (key, value, default) for every key whose value is not its default, in the recipe's order.

    Keys without a default (``lab.*`` and keys that a recipe adds) have the value ABSENT and belong to "the recipe".
    """
    known, absent = defaults(), Default(ABSENT, "the recipe")
    rows = [(key, value, known.get(key, absent)) for key, value in flat_values(config).items()]
    return [(key, value, default) for key, value, default in rows if value != default.value]
