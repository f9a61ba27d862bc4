"""The encyclopedia: people, companies, towns and works with one-word names, and the relations among them; and questions of
one or several hops over it, which only the articles can answer.

Every entity has three articles, one per relation: a title line (the entity's name) and a sentence with the fact. A name
is one token of the lab's tokenizer, so that an answer can be copied in one step. Names are drawn at random, so that they
cannot be guessed.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

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

HOP_SHARES = {1: 0.3, 2: 0.5, 3: 0.2}

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
    per_kind = {"person": size.people, "company": size.companies, "town": size.towns, "work": size.works}
    names, ends = make_names(rng, sum(per_kind.values())), list(accumulate(SPLITS.values()))
    entities: dict[str, Entity] = {}
    for kind, count in per_kind.items():
        for position in range(count):
            name, split = names[len(entities)], list(SPLITS)[bisect(ends, (position + 0.5) / count)]
            entities[name] = Entity(name, kind, split)
    members: dict[tuple[str, str], list[str]] = {}
    for entity in entities.values():
        members.setdefault((entity.kind, entity.split), []).append(entity.name)
    articles = {}
    for entity in entities.values():
        for relation, value_kind in RELATIONS[entity.kind].items():
            value = rng.choice(members[value_kind, entity.split])
            fact, filler = f"ith {relation} {value}", f" {rng.choice(FILLER)} {entity.kind}"
            text = rng.choice((f"A{filler} w{fact}.", f"W{fact}, a{filler}."))
            own = f"{entity.name}-{relation}"
            articles[entity.name, relation] = Article(own, entity.name, relation, value, text)
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


@dataclass(frozen=True)
class Question:
    """``path`` is the start and every entity reached; ``relations[i]`` leads from path[i] to path[i + 1]."""

    path: tuple[str, ...]
    relations: tuple[str, ...]

    @property
    def text(self) -> str:
        chain = " of the ".join(reversed(self.relations))
        return f"What is the {chain} of {self.path[0]}?"

    @property
    def gold(self) -> str:
        return self.path[-1]

    @property
    def hops(self) -> int:
        return len(self.relations)

    @property
    def gold_ids(self) -> list[str]:
        """Ids of the needed articles in hop order; the last one contains the answer."""
        return [f"{name}-{relation}" for name, relation in zip(self.path, self.relations, strict=False)]


def make_questions(
    world: World,
    split: str,
    count: int,
    rng: random.Random,
    *,
    hop_shares: dict[int, float] = HOP_SHARES,
    repeat: bool = False,
) -> list[Question]:
    """``count`` questions over entities of one split, hops in the given shares, all different unless ``repeat``.

    No entity and no relation occurs twice on a path, so the question never contains the gold answer. Raises ValueError
    when the split has too few entities for that many different questions.
    """
    starts = world.names(split)
    hops_wanted = [hops for hops, share in hop_shares.items() for _ in range(round(count * share))]
    hops_wanted += [max(hop_shares, key=hop_shares.get)] * (count - len(hops_wanted))
    hops_wanted = hops_wanted[:count]
    rng.shuffle(hops_wanted)
    seen: set[Question] = set()
    questions = []
    for hops in hops_wanted:
        for _ in range(1000):
            question = _walk(world, rng.choice(starts), hops, rng)
            if question and (repeat or question not in seen):
                break
        else:
            raise ValueError(f"split {split!r} has too few entities ({len(starts)}) for {count} questions")
        seen.add(question)
        questions.append(question)
    return questions


def make_splits(
    world: World, size: WorldSize, seed: int, *, hop_shares: dict[int, float] = HOP_SHARES
) -> dict[str, list[Question]]:
    """The questions of train, dev and test."""
    return {
        split: make_questions(
            world, split, getattr(size, split), random.Random(f"{split} {seed}"), hop_shares=hop_shares
        )
        for split in SPLITS
    }


def _walk(world: World, start: str, hops: int, rng: random.Random) -> Question | None:
    path, relations = [start], []
    for _ in range(hops):
        relation = rng.choice(sorted(RELATIONS[world.entities[path[-1]].kind]))
        value = world.value(path[-1], relation)
        if value in path or relation in relations:
            return None
        relations.append(relation)
        path.append(value)
    return Question(tuple(path), tuple(relations))


def to_rows(questions: Iterable[Question], split: str) -> list[dict]:
    """Rows of verl's parquet format."""
    return [
        {
            "data_source": "lab",
            "prompt": [{"role": "user", "content": q.text}],
            "ability": "search",
            "reward_model": {"style": "rule", "ground_truth": {"target": [q.gold], "form": "tag"}},
            "extra_info": {"index": index, "split": split, "question": q.text}
            | {"hops": q.hops, "gold_ids": q.gold_ids},
        }
        for index, q in enumerate(questions)
    ]
