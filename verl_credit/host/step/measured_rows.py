"""Makes rollouts of given prompts with the trainer's agent loops, engine and reward, which are no rows of a step."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
from omegaconf import DictConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_credit.config.keys import AUTO
from verl_credit.errors import IntegrityError
from verl_credit.host.rollout.agent_manager import RolloutWatch
from verl_credit.host.rollout.engine_client import DRAW, REPLAY, replay_column
from verl_credit.host.step import store
from verl_credit.turns.score.requests import turn_spans
from verl_credit.worlds.rollouts.protocol import Call, State, Step
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import Ids

PARTITION = "val"  # rows of an evaluation: no gain is scored while they are made
RIGHT = "em"
"""The reward function's value that says whether an answer is right; without it the reward itself does."""
TRIES = 4
"""Number of tries of a rollout that a tool's fault ends."""


@dataclass(frozen=True)
class Row:
    """A rollout as its agent loop left it. ``turn_ids``: per response token, -1 where the policy did not write it."""

    question: int
    prompt_ids: list[int]
    response_ids: list[int]
    turn_ids: list[int]
    record: dict
    scores: dict
    turn_rewards: list
    outcome: float

    @property
    def fault(self) -> str:
        """The reason why the row is not valid; empty where it is."""
        empty = max(self.turn_ids, default=-1) < 0
        return self.record["tool_fault"] or ("no token of the policy's" if empty else "")

    @property
    def texts(self) -> list[Ids]:
        """The token ids of its turns."""
        return [tuple(self.response_ids[first:end]) for first, end in turn_spans(self.turn_ids)]

    def states(self) -> list[State]:
        """The state before each turn."""
        start, ids = len(self.prompt_ids), (*self.prompt_ids, *self.response_ids)
        spans = enumerate(turn_spans(self.turn_ids))
        return [State(self.question, start, ids[: start + first], turn) for turn, (first, _) in spans]


@dataclass(frozen=True)
class Wanted:
    """``count`` rollouts of a question after ``turns``. Their random numbers follow from ``name``."""

    question: int
    count: int
    name: str
    turns: Sequence[Ids]


class Generator:
    """Makes rollouts. ``data[question]`` is the row of the data set, as verl's loader has it; ``loops`` and ``buffer`` are
    the trainer's agent loops and replay buffer, ``step`` its step."""

    def __init__(
        self, config: DictConfig, data: Sequence[dict], watch: RolloutWatch, loops, buffer, *, step: int
    ):
        self._config, self._data, self._step = config, data, step
        self._watch, self._loops, self._buffer = watch, loops, buffer
        self._most = config.data.train_batch_size * config.actor_rollout_ref.rollout.n

    def __call__(self, wanted: Sequence[Wanted]) -> Iterator[list[Row]]:
        """Yield the rollouts of each, as they come, as many at a time as a step of training has, which engine and search
        server can bear. A rollout that a tool's fault ended is drawn again.

        Raises IntegrityError where one is missing, fails every time, or is neither right nor wrong.
        """
        pieces = [piece for one in wanted for piece in pieces_of(one, self._most)]
        groups = (group for part in parts_of(pieces, self._most) for group in self._without_faults(part))
        for one in wanted:
            rows: list[Row] = []
            while len(rows) < one.count:
                rows += next(groups)
            yield rows

    def _without_faults(self, wanted: Sequence[Wanted]) -> list[list[Row]]:
        groups = self._made(wanted)
        for again in range(1, TRIES + 1):
            faults = {n: [row.fault for row in group if row.fault] for n, group in enumerate(groups)}
            faulty = {n: texts for n, texts in faults.items() if texts}
            if not faulty:
                break
            if again == TRIES:
                count, (text, *_) = sum(map(len, faulty.values())), next(iter(faulty.values()))
                more = "what was made stays, and the same call goes on"
                raise IntegrityError(f"{count} rollouts failed {TRIES} times ({text}); {more}")
            names = {n: f"{wanted[n].name}, again {again}" for n in faulty}
            made = self._made([replace(wanted[n], count=len(faulty[n]), name=names[n]) for n in faulty])
            for n, new in zip(faulty, made, strict=True):
                groups[n] = [row for row in groups[n] if not row.fault] + new
        return groups

    def _made(self, wanted: Sequence[Wanted]) -> list[list[Row]]:
        uids = [str(uuid.uuid5(uuid.NAMESPACE_OID, one.name)) for one in wanted]
        self._watch.begin(sum(one.count for one in wanted))
        store.announce_prompts(uids, PARTITION, self._step)
        self._loops.generate_sequences(self._batch(wanted, uids))
        sampled = {"global_steps": self._step, "partition_id": PARTITION, "batch_size": len(wanted)}
        batch, _ = self._buffer.sample(**sampled)
        self._watch.settle(len(batch.keys))
        questions = {uid: one.question for uid, one in zip(uids, wanted, strict=True)}
        rows = rows_of(batch, questions, self._config.algorithm.turn_ids)
        store.clear(batch)
        for one, found in zip(wanted, rows, strict=True):
            if len(found) != one.count:
                share = f"{len(found)} rollouts of {one.count}"
                raise IntegrityError(f"{share} arrived for question {one.question}")
        return rows

    def _batch(self, wanted: Sequence[Wanted], uids: Sequence[str]):
        columns = collate_fn([self._data[one.question] for one in wanted])
        given = {
            "uid": uids,
            "sampling": ["sampled"] * len(wanted),
            "__rollout_n__": [one.count for one in wanted],
            DRAW: [one.name for one in wanted],
            REPLAY: [replay_column(one.turns) for one in wanted],
        }
        for name, values in given.items():
            columns[name] = np.empty(len(wanted), dtype=object)
            columns[name][:] = values
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", self._step)
        tu.assign_non_tensor_data(batch, "validate", True)
        return batch


def rows_of(batch, question_of: dict[str, int], ids: str = AUTO) -> list[list[Row]]:
    """The rollouts of each prompt id, in the order of their numbers."""
    turns = store.fetch_turn_batch(batch, ids=ids)
    rewards = store.read(batch, "rm_scores")["rm_scores"].unbind()
    found: dict[str, dict[int, Row]] = {uid: {} for uid in question_of}
    for place, key in enumerate(batch.keys):
        uid, number, part = key.rsplit("_", 2)
        if part != "0":
            raise IntegrityError(f"rollout {key}: an agent loop that returns several rows is not measured")
        response, scores = turns.response_ids[place], turns.scores[place]
        found[uid][int(number)] = Row(
            question=question_of[uid],
            prompt_ids=turns.prompt_ids[place],
            response_ids=response,
            turn_ids=turns.turn_ids_B_T[place, : len(response)].tolist(),
            record=turns.records[place],
            scores=scores,
            turn_rewards=turns.turn_rewards[place],
            outcome=outcome_of(scores, float(rewards[place].double().sum())),
        )
    return [[rows[number] for number in sorted(rows)] for rows in found.values()]


def pieces_of(one: Wanted, most: int) -> list[Wanted]:
    """The request in pieces of at most ``most`` rollouts; the first keeps the name."""
    pieces = []
    for number, begin in enumerate(range(0, one.count, most)):
        name = f"{one.name}, part {number}" if number else one.name
        pieces.append(replace(one, count=min(most, one.count - begin), name=name))
    return pieces


def parts_of(wanted: Sequence[Wanted], most: int) -> list[list[Wanted]]:
    """The requests in order, in parts of at most ``most`` rollouts."""
    parts: list[list[Wanted]] = []
    for one in wanted:
        if not parts or sum(other.count for other in parts[-1]) + one.count > most:
            parts.append([])
        parts[-1].append(one)
    return parts


def outcome_of(scores: dict, reward: float) -> float:
    value = float(scores.get(RIGHT, reward))
    if value not in (0.0, 1.0):
        raise IntegrityError(
            f"a rollout's reward is {reward:g}: a value is the chance of a right answer, and that takes 0 or 1; let the "
            f"reward function return {RIGHT!r} with that, beside its score"
        )
    return value


@dataclass(frozen=True)
class RanTrajectory(Trajectory):
    row: Row | None = field(default=None, compare=False)


def trajectory_of(row: Row, *, otherwise: bool = False) -> RanTrajectory:
    searched: dict[int, tuple] = {}  # turn -> its calls, and the ids of the pages that they returned
    for search in row.record["searches"]:
        calls, pages = searched.get(search["turn"], ((), ()))
        call = Call(search["query"], None)
        searched[search["turn"]] = (*calls, call), (*pages, tuple(map(str, search["pages"])))
    states = row.states()
    steps = [
        Step(state, text, after, None if after else row.outcome, *searched.get(number, ()))
        for number, (state, text, after) in enumerate(zip_longest(states, row.texts, states[1:]))
    ]
    return RanTrajectory(steps, otherwise, row)


def replayed(row: Row, turns: Sequence[Ids]) -> bool:
    """Returns whether the agent loop began with ``turns``. A row that was full before their end has only those that fit."""
    texts, turns = row.texts, list(turns)
    if row.record["replayed"] != len(turns):
        return False
    if len(texts) > len(turns):
        return texts[: len(turns)] == turns
    *before, last = texts
    return before == turns[: len(before)] and turns[len(before)][: len(last)] == last


def check_replayed(rows: Sequence[Row], turns: Sequence[Ids], config: DictConfig) -> None:
    if not all(replayed(row, turns) for row in rows):
        loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
        raise IntegrityError(
            f"an agent loop ({loop}, or a row's agent_name) did not begin with the turns that it was given "
            "(credit_replay): it cannot go on from a context; expected turn_agent, search_agent or a class of them"
        )


def reaches(row: Row, state: State) -> bool:
    """Returns whether the row passes through ``state``. It does not where a tool gave another answer than before."""
    return (*row.prompt_ids, *row.response_ids)[: len(state.ids)] == state.ids
