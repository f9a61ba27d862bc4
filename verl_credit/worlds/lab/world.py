"""The encyclopedia: people, companies, towns and works with one-word names, and the relations among them.

Every entity has three articles, one per relation: a title line (the entity's name) and a sentence with the fact. A name
is one token of the lab's tokenizer, so that an answer can be copied in one step. Names are drawn at random, so that they
cannot be guessed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# kind -> relation -> kind of the value. All relations are single words, so that no length reveals one. The three values
# of an entity have three different kinds, none of them its own: the relation determines the kind of name to look for.
RELATIONS = {
    "person": {"birthplace": "town", "employer": "company", "debut": "work"},
    "company": {"founder": "person", "base": "town", "product": "work"},
    "town": {"mayor": "person", "mill": "company", "anthem": "work"},
    "work": {"author": "person", "publisher": "company", "setting": "town"},
}
FILLER = ("quiet", "famous", "small", "modern", "proud", "busy", "rich", "strange", "gentle", "bold")
SPLITS = {"train": 0.70, "dev": 0.15, "test": 0.15}

_ONSETS = (*"bdfghjklmnprstvwz", "br", "dr", "gl", "kr", "pl", "tr", "st")
_VOWELS = tuple("aeiou")
_CODAS = (*"klmnprstx", "sk", "rn", "nd")


@dataclass(frozen=True)
class WorldSize:
    """Entities per kind and questions per split."""

    people: int = 480
    companies: int = 240
    towns: int = 240
    works: int = 240
    train: int = 2048
    dev: int = 384
    test: int = 512

    def per_kind(self) -> dict[str, int]:
        return {"person": self.people, "company": self.companies, "town": self.towns, "work": self.works}


@dataclass(frozen=True)
class Entity:
    name: str
    kind: str
    split: str


@dataclass(frozen=True)
class Article:
    """A page: ``contents`` is the title, a newline, and the text; ``value`` is the fact's answer."""

    id: str
    title: str
    relation: str
    value: str
    text: str

    @property
    def contents(self) -> str:
        return f"{self.title}\n{self.text}"


@dataclass(frozen=True)
class World:
    """Entities by name and articles by (name, relation)."""

    entities: dict[str, Entity]
    articles: dict[tuple[str, str], Article]

    def value(self, name: str, relation: str) -> str:
        return self.articles[name, relation].value

    def names(self, split: str | None = None, kind: str | None = None) -> list[str]:
        """Names of all entities, or of the entities of a split, a kind, or both."""
        return [e.name for e in self.entities.values() if split in (None, e.split) and kind in (None, e.kind)]


def make_world(seed: int, size: WorldSize) -> World:
    """The world of one seed: equal arguments give equal worlds on every machine.

    Relations stay inside a split (train, dev, test), so no article about a held-out entity is ever needed
    to answer a training question.
    """
    rng = random.Random(f"world {seed}")
    per_kind = size.per_kind()
    names = make_names(rng, sum(per_kind.values()))
    entities: dict[str, Entity] = {}
    for kind, count in per_kind.items():
        for position in range(count):
            name = names[len(entities)]
            entities[name] = Entity(name, kind, _split_at((position + 0.5) / count))
    members: dict[tuple[str, str], list[str]] = {}
    for entity in entities.values():
        members.setdefault((entity.kind, entity.split), []).append(entity.name)
    articles = {}
    for entity in entities.values():
        for relation, value_kind in RELATIONS[entity.kind].items():
            value = rng.choice(members[value_kind, entity.split])
            articles[entity.name, relation] = _write(rng, entity, relation, value)
    return World(entities, articles)


def make_names(rng: random.Random, count: int) -> list[str]:
    """Two-syllable names, none a prefix of another (the tokenizer matches the longest added token)."""
    names: set[str] = set()
    prefixes: set[str] = set()
    while len(names) < count:
        first, second = (rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(2))
        name = (first + second).capitalize()
        own = {name[:i] for i in range(1, len(name))}
        if name in names or name in prefixes or own & names:
            continue
        names.add(name)
        prefixes |= own
    ordered = sorted(names)
    rng.shuffle(ordered)
    return ordered


def _split_at(fraction: float) -> str:
    edge = 0.0
    for split, share in SPLITS.items():
        edge += share
        if fraction < edge:
            return split
    return split


def _write(rng: random.Random, entity: Entity, relation: str, value: str) -> Article:
    fact, filler = f"ith {relation} {value}", f" {rng.choice(FILLER)} {entity.kind}"
    text = rng.choice((f"A{filler} w{fact}.", f"W{fact}, a{filler}."))
    return Article(f"{entity.name}-{relation}", entity.name, relation, value, text)
