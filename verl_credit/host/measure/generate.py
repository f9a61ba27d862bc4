"""Rollouts of given prompts through the trainer's agent loops, engine and reward, without a step."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_credit.errors import IntegrityError
from verl_credit.host.measure.rows import Row
from verl_credit.host.rollout.replay import DRAW, REPLAY, replay_column
from verl_credit.host.step import store
from verl_credit.worlds.rollouts.sampler import Ids

PARTITION = "val"  # rows of an evaluation: no gain is scored while they are made
RIGHT = "em"
"""This value of the reward function is the outcome; the reward itself where the function returns no such value."""
TRIES = 4
"""A rollout that a tool's fault ends is made so many times."""


@dataclass(frozen=True)
class Wanted:
    """``count`` rollouts of a question after ``turns``. Their random numbers follow from ``name``."""

    question: int
    count: int
    name: str
    turns: Sequence[Ids]


class Generator:
    """``data[question]``: the row of the data set, as verl's loader has it."""

    def __init__(self, trainer, data: Sequence[dict]):
        self._trainer, self._data = trainer, data

    def __call__(self, wanted: Sequence[Wanted]) -> Iterator[list[Row]]:
        """The rollouts of each, as they come: as many at a time as a step of training has, which engine and search server
        can serve. One that a tool's fault ended is drawn again.

        Raises IntegrityError where one is missing, fails every time, or is neither right nor wrong.
        """
        config = self._trainer.config
        most = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        pieces = [piece for one in wanted for piece in pieces_of(one, most)]
        groups = (group for part in parts_of(pieces, most) for group in self._without_faults(part))
        for one in wanted:
            made: list[Row] = []
            while len(made) < one.count:
                made += next(groups)
            yield made

    def _without_faults(self, wanted: Sequence[Wanted]) -> list[list[Row]]:
        groups = self._made(wanted)
        for again in range(1, TRIES):
            failed = {n: sum(bool(row.fault) for row in group) for n, group in enumerate(groups)}
            failed = {n: count for n, count in failed.items() if count}
            if not failed:
                return groups
            names = [(n, f"{wanted[n].name}, again {again}") for n in failed]
            made = self._made([replace(wanted[n], count=failed[n], name=name) for n, name in names])
            for n, new in zip(failed, made, strict=True):
                groups[n] = [row for row in groups[n] if not row.fault] + new
        if faults := [row.fault for group in groups for row in group if row.fault]:
            raise IntegrityError(
                f"{len(faults)} rollouts failed {TRIES} times ({faults[0]}); finished ones stay, and the same call goes on"
            )
        return groups

    def _made(self, wanted: Sequence[Wanted]) -> list[list[Row]]:
        trainer, uids = self._trainer, [str(uuid.uuid5(uuid.NAMESPACE_OID, one.name)) for one in wanted]
        trainer.watch.begin(sum(one.count for one in wanted))
        store.announce_prompts(uids, PARTITION, trainer.global_steps)
        trainer.agent_loop_manager.generate_sequences(self._batch(wanted, uids))
        batch, _ = trainer.replay_buffer.sample(
            global_steps=trainer.global_steps, partition_id=PARTITION, batch_size=len(wanted)
        )
        trainer.watch.settle(len(batch.keys))
        rows = self._rows(batch)
        store.clear(batch)
        groups = []
        for one, uid in zip(wanted, uids, strict=True):
            found = rows.get(uid, {})
            if len(found) != one.count:
                raise IntegrityError(
                    f"{len(found)} rollouts of {one.count} arrived for question {one.question}"
                )
            groups.append([Row(question=one.question, **found[number]) for number in sorted(found)])
        return groups

    def _batch(self, wanted: Sequence[Wanted], uids: Sequence[str]):
        columns = collate_fn([self._data[one.question] for one in wanted]) | {
            "uid": _objects(uids),
            "sampling": _objects(["sampled"] * len(wanted)),
            "__rollout_n__": _objects([one.count for one in wanted]),
            DRAW: _objects([one.name for one in wanted]),
            REPLAY: _objects([replay_column(one.turns) for one in wanted]),
        }
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", self._trainer.global_steps)
        tu.assign_non_tensor_data(batch, "validate", True)
        return batch

    def _rows(self, batch) -> dict[str, dict[int, dict]]:
        """The columns of each row, by prompt and number."""
        turns = store.fetch_turn_batch(batch)
        rewards = store.read(batch, "rm_scores")["rm_scores"].unbind()
        found: dict[str, dict[int, dict]] = {}
        for place, key in enumerate(batch.keys):
            uid, number, part = key.rsplit("_", 2)
            if part != "0":
                raise IntegrityError(
                    f"rollout {key}: an agent loop that returns several rows is not measured"
                )
            response = turns.response_ids[place]
            found.setdefault(uid, {})[int(number)] = {
                "prompt_ids": turns.prompt_ids[place],
                "response_ids": response,
                "turn_ids": turns.turn_ids_B_T[place, : len(response)].tolist(),
                "record": turns.records[place],
                "scores": turns.scores[place],
                "turn_rewards": turns.turn_rewards[place],
                "outcome": outcome_of(turns.scores[place], float(rewards[place].double().sum())),
            }
        return found


def pieces_of(one: Wanted, most: int) -> list[Wanted]:
    """Cuts into parts of at most ``most`` rollouts; the first has the name."""
    counts = [min(most, one.count - begin) for begin in range(0, one.count, most)]
    return [
        replace(one, count=count, name=one.name if not number else f"{one.name}, part {number}")
        for number, count in enumerate(counts)
    ]


def parts_of(wanted: Sequence[Wanted], most: int) -> Iterator[list[Wanted]]:
    """Joins neighbours to at most ``most`` rollouts."""
    part: list[Wanted] = []
    for one in wanted:
        if part and sum(other.count for other in part) + one.count > most:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def outcome_of(scores: dict, reward: float) -> float:
    value = float(scores.get(RIGHT, reward))
    if value not in (0.0, 1.0):
        raise IntegrityError(
            f"a rollout's reward is {reward:g}: a value is the chance of a right answer, and that takes 0 or 1; let the "
            f"reward function return {RIGHT!r} with that, beside its score"
        )
    return value


def _objects(values: Sequence) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
