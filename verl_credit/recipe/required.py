"""The keys that a user has to set. Without this check verl's defaults would apply: GSM8K and its authors' model."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.recipe.world import serves_search, world_of

DATA = ("data.train_files", "data.val_files")
MODEL, SERVER = "actor_rollout_ref.model.path", "search.url"
HOW = {
    **dict.fromkeys(DATA, "parquet files; `verl-credit prepare` writes them"),
    MODEL: "a folder or a name on the hub",
    SERVER: "a server with POST /retrieve",
    "real.questions": "HotpotQA's questions with their paragraphs: a file, or OWNER/NAME on the hub",
}


def without_value(config: DictConfig) -> list[str]:
    """The required keys that are null, ??? or empty, in the order of HOW. A recipe's own world has a search server."""
    world = world_of(config)
    world_keys = world.asks() if world else ()
    missing = [key for key in (*DATA, MODEL, *world_keys) if _empty(config, key)]
    searches = config.search.max_searches and not serves_search(config)
    return missing + ([SERVER] if searches and _empty(config, SERVER) else [])


def with_expectations(keys: list[str]) -> list[str]:
    """``KEY, KEY (what is expected)``, one text for keys that expect the same."""
    ways: dict[str, list[str]] = {}
    for key in keys:
        ways.setdefault(HOW[key], []).append(key)
    return [f"{', '.join(names)} ({how})" for how, names in ways.items()]


def missing_line(config: DictConfig) -> str | None:
    """A line that names all missing keys; None where no key is missing."""
    keys = without_value(config)
    if not keys:
        return None
    return f"no value for {'; '.join(with_expectations(keys))}: give KEY=VALUE on the command line or in a recipe"


def _empty(config: DictConfig, key: str) -> bool:
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(config, parent)
    if node is None or OmegaConf.is_missing(node, leaf):
        return True
    value = node.get(leaf)
    return value is None or value in ("", [])  # a number is a wrong value, refused where the key is read
