"""A policy that is measured through its run's own rollouts: engine, agent loops, tools and reward are those of training.

A context is reached by its turns: the agent loop says them again and calls their tools again (`host.rollout.replay`). Where
a tool answers otherwise than before, the value is that of the turns, on average over its answers; such rollouts are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from verl_credit.errors import IntegrityError
from verl_credit.fidelity.protocol import State
from verl_credit.fidelity.request import Request
from verl_credit.fidelity.rollout import Start, Trajectory
from verl_credit.fidelity.rows import turn_batch
from verl_credit.fidelity.sampler import Ids, digest
from verl_credit.host.measure.generate import Generator, Wanted
from verl_credit.host.measure.rows import Row, reaches, replayed, trajectory_of
from verl_credit.host.step.forward import TrainerForward
from verl_credit.run.files import append_json, read_json_lines
from verl_credit.turns.batch import TurnBatch

ROLLOUTS = "rollouts.jsonl"


class RunSubject:
    """``trainer`` has the policy loaded and its engine ready."""

    def __init__(self, trainer, request: Request):
        self.name, self.step, self.config = request.policy, request.step, trainer.config
        self.tokenizer, self._trainer = trainer.tokenizer, trainer
        self._path, self._overrides = Path(request.out) / ROLLOUTS, sorted(request.overrides)
        key, dataset = "train_files", trainer.train_dataset
        if request.split == "test":
            key, dataset = "val_files", trainer.val_dataset
        if request.prompts > len(dataset):
            raise IntegrityError(
                f"--prompts {request.prompts}: {self.config.data[key]} (data.{key}) has {len(dataset)}"
            )
        self.data = [dataset[number] for number in range(request.prompts)]
        self.truths = [row["reward_model"]["ground_truth"] for row in self.data]
        # Agent loops render the prompts: their tokens are known when a rollout is back.
        self.prompts = [State(question, 0, ()) for question in range(len(self.data))]
        self._generate = Generator(trainer, self.data)
        self._turns: dict[tuple[int, Ids], list[Ids]] = {}

    def about(self) -> dict:
        """What the values in a folder are of."""
        rollout = self.config.actor_rollout_ref.rollout
        loop = rollout.agent.default_agent_loop
        return {"policy": self.name, "engine": f"run, {rollout.name}, {loop}", "overrides": self._overrides}

    def roll(self, starts: Sequence[Start]) -> list[list[Trajectory]]:
        """From prompts, all of one name; or from contexts of such rollouts."""
        if all(start.state.ids for start in starts):
            return self._go_on(starts)
        groups = self._from_prompts(starts)
        for group in groups:
            for row in group:
                for number, state in enumerate(row.states()):
                    self._turns[state.question, state.ids] = row.texts[:number]
        return [[trajectory_of(row) for row in group] for group in groups]

    def batch(self, groups: Sequence[Sequence[Trajectory]]) -> TurnBatch:
        paths = [path for group in groups for path in group]
        batch = turn_batch(paths, self.truths, self.data)
        return replace(
            batch,
            records=[path.row.record for path in paths],
            scores=[path.row.scores for path in paths],
            turn_rewards=[path.row.turn_rewards for path in paths],
        )

    @contextmanager
    def forward(self) -> Iterator[TrainerForward]:
        """The actor's workers; the engine sleeps meanwhile, as in training."""
        self._trainer.checkpoint_manager.sleep_replicas()
        yield TrainerForward(None, self._trainer.actor_rollout_wg, self.config)

    def _from_prompts(self, starts: Sequence[Start]) -> list[list[Row]]:
        """Kept, because an engine without seeds would not make them again. A row that a tool's fault ended is left out."""
        kept = {
            (line["name"], line["question"]): [Row(**row) for row in line["rows"]]
            for line in read_json_lines(self._path)
        }
        new = [s for s in starts if len(kept.get((s.name, s.state.question), ())) != s.count]
        for start, rows in zip(new, self._generate([_wanted(start, ()) for start in new]), strict=True):
            question = start.state.question
            append_json(
                self._path, {"name": start.name, "question": question, "rows": [asdict(row) for row in rows]}
            )
            kept[start.name, question] = rows
        groups = [kept[start.name, start.state.question] for start in starts]
        for start, group in zip(starts, groups, strict=True):
            if all(row.fault for row in group):
                raise IntegrityError(
                    f"no rollout of question {start.state.question} counts ({group[0].fault}); they are in {self._path}: "
                    "delete that file, and the same call begins again"
                )
        return [[row for row in group if not row.fault] for group in groups]

    def _go_on(self, starts: Sequence[Start]) -> list[list[Trajectory]]:
        turns = [self._turns[start.state.question, start.state.ids] for start in starts]
        made = self._generate([_wanted(*one) for one in zip(starts, turns, strict=True)])
        for rows, before in zip(made, turns, strict=True):
            if faults := [row.fault for row in rows if row.fault]:
                raise IntegrityError(
                    f"a tool failed in {len(faults)} of {len(rows)} continuations of a context ({faults[0]}): its value is "
                    "not known. The same call goes on"
                )
            if not all(replayed(row, before) for row in rows):
                loop = self.config.actor_rollout_ref.rollout.agent.default_agent_loop
                raise IntegrityError(
                    f"the agent loop {loop} did not begin with the turns that it was given (credit_replay): it cannot go on "
                    "from a context; expected turn_agent, search_agent or a class of them"
                )
        return [
            [trajectory_of(row, otherwise=not reaches(row, start.state)) for row in rows]
            for start, rows in zip(starts, made, strict=True)
        ]


def _wanted(start: Start, turns: Sequence[Ids]) -> Wanted:
    name = f"{start.seed}/{start.name}/{start.state.question}/{digest(start.state.ids)}"
    return Wanted(start.state.question, start.count, name, turns)
