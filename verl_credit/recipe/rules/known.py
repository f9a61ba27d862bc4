"""Refuses what would silently change nothing: keys that neither verl nor verl_credit reads, keys and values of before."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig

from verl_credit.config.gone import gone_value, longest
from verl_credit.config.keys import defaults_tree, place_of
from verl_credit.config.keys.run import no_home
from verl_credit.config.resolved import MISSING, Tree, data, leaves, select
from verl_credit.errors import ConfigError, unknown_key
from verl_credit.policy.families import is_random
from verl_credit.recipe.older_verl import MANAGER, OLDER, remedy_of
from verl_credit.recipe.recipe_files import recipes_folder, verl_folder

# verl's code reads these, and its configuration does not list them.
READ_BY_VERL = (
    "data.audio_key", "data.cache_dir", "data.filter_overlong_prompts_workers", "data.filter_prompts",
    "data.image_patch_size", "data.need_tools_kwargs", "reward.timeout", "trainer.checkpoint_callback_class",
)  # fmt: skip
REWARD = "reward.custom_reward_function"
REWARD_KWARGS = f"{REWARD}.reward_kwargs"
# These mappings take any key; so do mappings that are empty in verl's configuration and among our declared defaults.
OPEN = ("hardware", "plan", "ray_kwargs.ray_init", "reward.reward_kwargs")
# verl_credit reads these open mappings: `plan` refuses unknown keys, `unread` lists parameters that no operator takes.
OURS = (
    "hardware", "plan", "algorithm", "environment.kwargs", "ray_kwargs.ray_init", "reward.reward_kwargs", REWARD_KWARGS,
    "data.apply_chat_template_kwargs", "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls",
)  # fmt: skip
# Our rules read keys of these sections, so null is refused.
WITH_KEYS = (
    "data", "reward", MANAGER, "actor_rollout_ref.model", "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.rollout.multi_turn",
)  # fmt: skip


class Known(NamedTuple):
    names: dict[str, list[str]]
    """The keys below a mapping, by its full name ("" for the top)."""
    open: frozenset[str]
    """The mappings that take any key."""
    sections: frozenset[str]
    """verl's mappings with their own keys, where a value of another kind is refused."""

    def take(self, key: str) -> bool:
        """Is it a key, or below a mapping that takes any key?"""
        parent, _, name = key.rpartition(".")
        parts = key.split(".")
        sections = [".".join(parts[:n]) for n in range(1, len(parts))]
        return name in self.names.get(parent, ()) or any(one in self.open for one in sections)


def validate_older(config: DictConfig, written: Tree) -> Iterator[ConfigError]:
    """Yields a refusal for every key of an older verl, which verl 0.9.1 composes and nothing reads, and for every value
    that is gone. ``written``: with interpolations."""
    for key, value in leaves(written):
        if use := gone_value(key, value):
            yield ConfigError(key=key, value=value, accepted=use)
        if key == "trainer.use_v1" and value is not None and not value:
            use = "turns are trained by verl's v1 trainer alone; leave it out"
            yield ConfigError(key=key, value=value, accepted=use)
        if value is not None and (old := longest(OLDER, key)):
            now = OLDER[old] + key.removeprefix(old)
            there = known_keys(str(config.get("model_engine"))).take(now)
            use = f"a key of an older verl, which nothing reads now; {f'use {now}' if there else 'leave it out'}"
            yield ConfigError(key=key, value=value, accepted=use, meant=now)


def validate_keys(config: DictConfig, written: Tree) -> Iterator[ConfigError]:
    """Yields a refusal for every unknown key, and for a value in place of a section."""
    return (found for found in _unlisted(config, written) if isinstance(found, ConfigError))


def handed_on(config: DictConfig) -> list[str]:
    """Returns keys below verl's open mappings that verl_credit does not read, so that only their reader can check them."""
    found = [key for key in _unlisted(config, data(config, resolve=False)) if isinstance(key, str)]
    keys = [key for key in found if not is_random(key, 1)]  # dropouts: `recipe/family.py`
    return [key for key in keys if not any(f"{key}.".startswith(f"{ours}.") for ours in OURS)]


def _unlisted(config: DictConfig, written: Tree) -> Iterator[str | ConfigError]:
    """Yields the keys below open mappings, and a refusal for every other unknown key."""
    known = known_keys(str(config.get("model_engine")))

    def walk(prefix: str, node: dict[str, Any]) -> Iterator[str | ConfigError]:
        names = known.names.get(prefix, [])
        own = not str(node.get("_target_") or "verl.").startswith(("verl.", "verl_credit."))
        for key, value in zip(map(str, node), node.values(), strict=True):
            full = f"{prefix}.{key}" if prefix else key
            if key in names:
                if isinstance(value, dict):
                    yield from walk(full, value)
                elif isinstance(value, str) and (value == MISSING or "${" in value):
                    pass  # checked once it is resolved
                elif full in WITH_KEYS or (full in known.sections and value is not None):
                    yield ConfigError(key=full, value=value, accepted="expected a section with keys")
            elif (
                not names or prefix in known.open or own or read_by_own_code(prefix, partial(select, config))
            ):
                yield full
            elif not _referred_to(written, full):
                accepted = [*names, *_fields(str(node.get("_target_") or ""))]
                if key not in accepted:
                    yield from _unknown(prefix, key, value, accepted)

    yield from walk("", written)


def _unknown(prefix: str, key: str, value: Any, accepted: list[str]) -> Iterator[ConfigError]:
    """Yields the refusals of an unknown key; for a section of another project those of its keys."""
    below = [f"{key}.{name}" for name, _ in leaves(value)] if isinstance(value, dict) else []
    remedies = {name: remedy_of(f"{prefix}.{name}" if prefix else name) for name in (*below, key)}
    place = place_of(key)
    for name in [name for name in below if remedies[name]] or [key]:
        yield unknown_key(prefix, name, dict.fromkeys(accepted), elsewhere=place, remedy=remedies[name])


def _referred_to(written: Tree, key: str) -> bool:
    """Does any value refer to the key, or to a key below it, as ``${key}``?"""
    texts = (value for _, value in leaves(written) if isinstance(value, str))
    others = (name for text in texts for name in re.findall(r"\$\{([\w.]+)", text))
    return any(f"{other}.".startswith(f"{key}.") for other in others)


def read_by_own_code(section: str, value: Callable[[str], Any]) -> bool:
    """Does the user's dataset, sampler or reward function, which may read any key, get the section?"""
    if section == "data":
        return bool(value("data.custom_cls.path") or value("data.sampler.class_path"))
    return section == REWARD_KWARGS and "verl_credit." not in str(value(f"{REWARD}.path"))


@cache
def verls_own(engine: str) -> dict[str, Any]:
    """Returns verl's configuration with ``model_engine=engine``, which is one file of its package."""
    file = verl_folder() / f"_generated_ppo_{engine}_trainer.yaml"
    return _read(file if file.is_file() else verl_folder() / "_generated_ppo_trainer.yaml")


@cache
def known_keys(engine: str) -> Known:
    """Returns verl's keys with ``model_engine=engine``, those of every shipped recipe, and our declared keys."""
    names: dict[str, dict[str, None]] = {"": {"model_engine": None}}

    def add(prefix: str, tree: Mapping[str, Any]) -> None:
        below = names.setdefault(prefix, {})
        for key, value in tree.items():
            below[key] = None
            if isinstance(value, Mapping):
                add(f"{prefix}.{key}" if prefix else key, value)

    add("", verls_own(engine))
    of_verl = frozenset(names)
    add("", defaults_tree())
    taking_any = {*OPEN, *(name for name, below in names.items() if not below)}
    sections = of_verl - taking_any - {""}
    for file in sorted(recipes_folder().rglob("*.yaml")):
        add("", {key: value for key, value in _read(file).items() if key != "defaults"})
    for key in (*READ_BY_VERL, *OPEN):
        parent, _, leaf = key.rpartition(".")
        names.setdefault(parent, {})[leaf] = None
    return Known({name: list(below) for name, below in names.items()}, frozenset(taking_any), sections)


def _read(file) -> dict[str, Any]:
    return yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def _fields(target: str) -> list[str]:
    """Reads the fields of a verl class and its bases from the source, because importing verl takes seconds."""
    module, _, name = target.rpartition(".")
    class_node = _classes(module).get(name) if module.startswith("verl.") else None
    if class_node is None:
        return []
    fields = [ast.unparse(line.target) for line in class_node.body if isinstance(line, ast.AnnAssign)]
    bases = [base.id for base in class_node.bases if isinstance(base, ast.Name)]
    return fields + [field for base in bases for field in _fields(f"{module}.{base}")]


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    place = verl_folder().parents[1].joinpath(*module.split(".")[1:])
    files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    parsed = [ast.parse(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    return {node.name: node for tree in parsed for node in tree.body if isinstance(node, ast.ClassDef)}


PATHS = re.compile(r"(path|_files|dir)(\.\d+)?$")
"""What the names of keys end with that hold paths, also several."""


def validate_homes(config: DictConfig, written: Tree) -> Iterator[ConfigError]:
    """Yields a refusal for every path below a home that is not there, where pathlib raises RuntimeError."""
    for key, value in leaves(written):
        if isinstance(value, str) and PATHS.search(key) and (wrong := no_home(value)):
            yield ConfigError(key=key, value=value, accepted=f"{wrong}; expected a path")
