"""Questions of one to three hops over the world, which only the articles can answer."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from verl_credit.worlds.lab.world import RELATIONS, SPLITS, World, WorldSize

HOP_SHARES = {1: 0.3, 2: 0.5, 3: 0.2}


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
    hops_wanted = _spread(count, hop_shares)
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


def make_splits(world: World, size: WorldSize, seed: int) -> dict[str, list[Question]]:
    """The questions of train, dev and test."""
    return {
        split: make_questions(world, split, getattr(size, split), random.Random(f"{split} {seed}"))
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


def _spread(count: int, shares: dict[int, float]) -> list[int]:
    hops = [h for h, share in shares.items() for _ in range(round(count * share))]
    hops += [max(shares, key=shares.get)] * (count - len(hops))
    return hops[:count]


def to_rows(questions: Iterable[Question], split: str) -> list[dict]:
    """Rows of verl's parquet format."""
    return [
        {
            "data_source": "lab",
            "prompt": [{"role": "user", "content": q.text}],
            "ability": "search",
            "reward_model": {"style": "rule", "ground_truth": {"target": [q.gold], "form": "tag"}},
            "extra_info": {
                "index": index,
                "split": split,
                "question": q.text,
                "hops": q.hops,
                "gold_ids": q.gold_ids,
            },
        }
        for index, q in enumerate(questions)
    ]
