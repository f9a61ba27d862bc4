"""The record in a campaign's folder: the declared file, the configuration of every condition, and what was added later.

A campaign may grow; what its runs were started for does not change under them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.errors import ConfigError
from verl_credit.records.run.files import plain, write_text
from verl_credit.redact import override_without_secrets
from verl_credit.study.campaign.design import flat
from verl_credit.study.campaign.file import Campaign, parse

RECORD, CONDITION = "campaign.json", "condition.json"
VERSION = 1
FIXED = (
    *("name", "hypothesis", "expected_delta", "engine", "recipe", "config_dir", "overrides", "baseline"),
    "metric",
)


@dataclass(frozen=True)
class Record:
    campaign: Campaign
    added: list[dict]
    """``time``, ``what`` was added, and how many runs had ``ended`` by then: who added after looking can be seen."""


def read_record(folder: Path) -> Record:
    """Raises FileNotFoundError where no campaign was started; ConfigError for a record that cannot be read."""
    path = folder / RECORD
    if not path.exists():
        start = f"`verl-credit campaign run FILE --dir {folder}` starts a campaign"
        raise FileNotFoundError(f"{path} does not exist: {start}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, tree = content["version"], content["campaign"]
        added = [row for row in content["added"] if isinstance(row, dict)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is damaged ({why}); restore it or take another --dir") from error
    if version != VERSION:
        raise ConfigError(f"{path}: version={version}; this verl_credit reads version {VERSION}")
    return Record(parse(tree, str(path)), added)


def keep_record(folder: Path, campaign: Campaign, configs: dict[str, DictConfig], ended: int) -> list[str]:
    """Write the record, or compare it with the existing record; returns the additions.

    Raises ConfigError, which names what has changed, because runs of the old and the new would be compared.
    """
    hidden = {
        name: list(map(override_without_secrets, overrides))
        for name, overrides in {**campaign.conditions, "": campaign.overrides}.items()
    }
    campaign = campaign.model_copy(update={"overrides": hidden.pop(""), "conditions": hidden})
    flats = {
        name: json.loads(json.dumps(plain(flat(config)), default=str)) for name, config in configs.items()
    }
    added: list[dict] = []
    news: list[str] = []
    if (folder / RECORD).exists():
        record = read_record(folder)
        changed, news = _differences(record.campaign, campaign)
        for name in record.campaign.conditions:
            changed += _config_changes(folder, name, flats.get(name))
        if changed:
            more = f" (and {len(changed) - 5} more)" if len(changed) > 5 else ""
            use = (
                "runs may be added, budget and stop may change; restore it, or give the new one another --dir"
            )
            raise ConfigError(f"{folder} holds another campaign: {'; '.join(changed[:5])}{more}; {use}")
        added = record.added
        if news:
            added = [*added, {"time": time.time(), "what": "; ".join(news), "ended": ended}]
    for name, keys in flats.items():
        if not (path := folder / name / CONDITION).exists():
            write_text(path, json.dumps(keys, indent=1))
    content = {"version": VERSION, "campaign": campaign.model_dump(), "added": added}
    write_text(folder / RECORD, json.dumps(content, indent=1))
    return news


def _differences(before: Campaign, now: Campaign) -> tuple[list[str], list[str]]:
    """(what is refused, what was added)"""
    refused = [
        f"{key} was {getattr(before, key)!r:.200} and is {getattr(now, key)!r:.200}"
        for key in FIXED
        if getattr(before, key) != getattr(now, key)
    ]
    if (before.worlds is None) != (now.worlds is None):
        refused.append(f"worlds was {before.worlds} and is {now.worlds}")
    old, new = (_declared(one, before.conditions) for one in (before, now))
    for key, (name, value) in old.items():
        if key not in new:
            refused.append(f"{name} is gone")
        elif new[key][1] != value:
            refused.append(f"{name} was {value} and is {new[key][1]}")
    return refused, [name for key, (name, _) in new.items() if key not in old]


def _declared(campaign: Campaign, conditions: Collection[str]) -> dict[Hashable, tuple[str, object]]:
    """Whatever may be added later: its name, and the value that stays. Factors have the levels of ``conditions``."""
    declared: dict[Hashable, tuple[str, object]] = {}
    for name, overrides in campaign.conditions.items():
        declared["condition", name] = f"condition {name}", overrides
    for key, values in (("seed", campaign.seeds), ("world", campaign.worlds or [])):
        declared |= {(key, value): (f"{key} {value}", None) for value in values}
    declared |= {
        frozenset(pair): (f"comparison {pair[0]} against {pair[1]}", None) for pair in campaign.pairs()
    }
    for factor, of in campaign.levels().items():
        levels = {name: of.get(name) for name in conditions}
        declared["factor", factor] = f"factor {factor}", levels
    return declared


def _config_changes(folder: Path, name: str, now: dict | None) -> list[str]:
    """The keys whose value in the recipe has changed. New keys are no change: a later version has more keys."""
    path = folder / name / CONDITION
    if now is None or not path.exists():
        return []
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it or take another --dir") from error
    return [
        f"condition {name}: {key} was {value!r:.80} and is {now.get(key)!r:.80}"
        for key, value in before.items()
        if now.get(key) != value
    ]
