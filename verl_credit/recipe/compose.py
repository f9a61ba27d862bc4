"""Composes a recipe's name and overrides into a resolved configuration; mistakes are refused before Ray starts."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_credit.config.keys import LOSS, defaults_tree, place_of
from verl_credit.config.keys.run import REPLACED, replaced_key
from verl_credit.config.keys.section import no_value
from verl_credit.errors import ConfigError, did_you_mean, printable, unknown_key
from verl_credit.recipe.auto import decide_auto
from verl_credit.recipe.folders import RECIPES, folders, recipes_folder, shipped_recipes, verl_folder
from verl_credit.recipe.rules import validate
from verl_credit.recipe.yaml_files import circle, not_yaml
from verl_credit.redact import redact_value

GROUPS = ("hardware", "model")  # values chosen by these groups do not depart from a preset


def quoted(text: str) -> str:
    """A value of an override as Hydra reads it back: it may hold = and , which Hydra would take apart."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def load_config(name: str, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """A recipe with Hydra overrides, composed from the shipped recipes (or from ``config_dir``) and checked.

    Raises ConfigError for the first fault.
    """
    config = unchecked_config(name, overrides, config_dir)
    validate(config)
    return config


def unchecked_config(name: str, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Composes as `load_config` does, for callers that read a part of it or check it by other rules."""
    try:
        with _quiet():
            config = compose_recipe(name, overrides, config_dir)
            return decide(config, preset_of(config, name, overrides, config_dir))
    except (HydraException, OmegaConfBaseException) as error:
        raise _refusal(name, overrides, config_dir, error) from error
    except ConfigError:
        raise
    except YAMLError as error:
        raise not_yaml(error) from error
    except RecursionError as error:
        raise circle(name, folders(config_dir)) from error
    except OSError as error:  # the choice is not a valid file name
        reason = f"a file that is named there cannot be read ({error.strerror})"
        raise ConfigError(f"{' '.join([name, *overrides])}: {reason}"[:500], key="defaults") from error
    except ValueError as error:  # Hydra's: a group that is given a number, no list of defaults
        raise ConfigError(f"{' '.join(overrides) or name}: {error}") from error


def preset_of(
    config: DictConfig, name: str, overrides: Sequence[str], config_dir: str | None = None
) -> DictConfig | None:
    """Composes the chosen preset with the same recipe, hardware and model; the preset's values replace the recipe's."""
    try:
        if not config.get("credit_preset"):
            return None
    except OmegaConfBaseException as error:  # an interpolation refers to nothing
        raise no_value("credit_preset", error) from error
    files = [file for folder in folders(config_dir) for file in sorted((folder / "credit").glob("*.yaml"))]
    if config.credit_preset not in (names := [file.stem for file in files]):
        raise ConfigError(key="credit_preset", value=config.credit_preset, accepted=dict.fromkeys(names))
    composed = compose_recipe(name, [*_groups(overrides), f"credit={config.credit_preset}"], config_dir)
    preset = OmegaConf.load(next(file for file in files if file.stem == config.credit_preset))
    preset.pop("defaults", None)
    return OmegaConf.merge(composed, preset)


def decide(config: DictConfig, preset: DictConfig | None) -> DictConfig:
    """Decides every ``auto`` of a composed recipe and lists the keys that depart from the preset."""
    decide_auto(config)
    if preset is not None:
        config.credit_overrides = _changed(config, decide_auto(preset))
    return config


def _changed(config: DictConfig, preset: DictConfig) -> list[str]:
    """Returns ``key=value`` for every credit key that differs from the preset."""
    changed = []
    for root in ("algorithm", LOSS):
        ours, theirs = (_flat(root, OmegaConf.select(c, root)) for c in (config, preset))
        changed += [f"{key}={value}" for key, value in ours.items() if theirs.get(key) != value]
    return changed


def _flat(prefix: str, node) -> dict[str, str]:
    if not isinstance(node, DictConfig):
        return {prefix: str(node)}
    return {k: v for name in node for k, v in _flat(f"{prefix}.{name}", node[name]).items()}


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


def compose_recipe(name: str, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Composes files and overrides; ``auto`` is not decided yet."""
    with initialize_config_dir(str(folders(config_dir)[0]), version_base=None):
        try:
            config = compose(name, list(overrides))
        except (AssertionError, TypeError) as error:
            if not _of_defaults(error):
                raise
            places = ", ".join(["its defaults, or those of a file that they list", *_groups(overrides)])
            raise ConfigError(f"{name}: a group or its choice is no text: see {places}") from error
    for key in ("actor_rollout_ref", "trainer"):
        if key not in config:
            start = "begin it with `defaults: [lab, _self_]`"
            raise ConfigError(f"recipe {name} starts from no other: {start}", key="defaults")
        if not isinstance(config[key], DictConfig):
            raise ConfigError(key=key, value=config[key], accepted="expected a section with keys")
    return config


def _of_defaults(error: Exception) -> bool:
    """Was the error raised where Hydra reads lists of defaults? Hydra takes a group's name and choice for texts."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals["__name__"] in (
        "hydra._internal.config_repository",
        "hydra._internal.defaults_list",
    )


class SearchPath(SearchPathPlugin):
    """Adds the shipped recipes and verl's configuration to the folders where a recipe's parts are searched.

    verl's folder is a path, because ``pkg://verl.trainer.config`` would import verl, which takes several seconds.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for provider, folder in ((RECIPES, recipes_folder()), ("verl", verl_folder())):
            search_path.append(provider, f"file://{folder}")


Plugins.instance().register(SearchPath)


def _refusal(name: str, overrides: Sequence[str], config_dir: str | None, error: Exception) -> ConfigError:
    """Adds the accepted keys to Hydra's message."""
    if isinstance(error, MissingConfigException):
        return _missing(name, config_dir, error)
    if isinstance(error, OverrideParseException):
        return _unparsed(error)
    message = " ".join(str(error).split())
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ else ""
    match = re.search(r"Could not override '([^']+)'", message)
    if match is None:
        # Without this, the error of an interpolation in a list of defaults would not name the recipe.
        where = "" if name in message else name
        return ConfigError(": ".join(part for part in (where, message, cause) if part))
    key = match.group(1)
    try:
        base = compose_recipe(name, _groups(overrides), config_dir)
    except HydraException:  # the override is in a file's defaults, not on the command line
        return ConfigError(message, key=key)
    value = next((o.partition("=")[2] for o in overrides if o.lstrip("+~").partition("=")[0] == key), None)
    if key in REPLACED:
        return replaced_key(key, value)
    if isinstance(OmegaConf.select(base, key), DictConfig):
        return ConfigError(
            key=key, value=value, accepted=f"a new key below it is added with +{key}.NAME=VALUE"
        )
    parent, names = _nearest_parent(base, key)
    below = key.removeprefix(f"{parent}.")
    return unknown_key(parent, below, names, redact_value(key, value), place_of(below))


def _groups(overrides: Sequence[str]) -> list[str]:
    return [o for o in overrides if o.partition("=")[0] in GROUPS]


def _missing(name: str, config_dir: str | None, error: MissingConfigException) -> ConfigError:
    """The error for a recipe, an entry of its ``defaults``, or a group's choice that is in none of the folders."""
    group, _, choice = str(error.missing_cfg_file or name).rpartition("/")
    if error.options:
        return ConfigError(key=group, value=choice, accepted=error.options)
    shipped = shipped_recipes()
    own = [] if config_dir is None else sorted(file.stem for file in Path(config_dir).glob("*.yaml"))
    message = f"{name}: its defaults list {choice!r}, and " if choice != name else ""
    message += f"no recipe is called {choice!r}{did_you_mean(choice, [*own, *shipped])}; shipped: {', '.join(shipped)}"
    message += f"; in {config_dir}: {', '.join(own)}" if own else ""
    return ConfigError(
        message, key="defaults" if choice != name else "", value=choice, accepted=[*own, *shipped]
    )


def _unparsed(error: OverrideParseException) -> ConfigError:
    """The error that names the override; Hydra's message does not always name it and refers to Hydra's documentation."""
    key, _, value = error.override.partition("=")
    reason = error.message.partition("\nSee ")[0].replace(error.override, "").rstrip(" ^\n:")
    return ConfigError(
        key=printable(key.lstrip("+~")),
        value=value,
        accepted=f"Hydra cannot read that override ({reason}); quote the value",
    )


def _nearest_parent(config: DictConfig, key: str) -> tuple[str, list[str]]:
    """The longest parent of ``key`` that exists, and the keys below it."""
    parent, _, _ = key.rpartition(".")
    while parent and not isinstance(OmegaConf.select(config, parent), DictConfig):
        parent, _, _ = parent.rpartition(".")
    return parent, [str(name) for name in (OmegaConf.select(config, parent) if parent else config)]
