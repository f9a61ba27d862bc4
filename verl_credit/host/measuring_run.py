"""The trainer that `verl-credit fidelity` starts, and the policy that it measures through the rollouts of its run.

The trainer loads a policy as a resumed run does, and makes no step: engine, agent loops, tools and reward are those of
training. A context is reached by its turns, which the agent loop repeats (`host.rollout.engine_client`). Where a tool gives
another answer than before, the turns are valued after that answer, and such rollouts are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

from omegaconf import DictConfig
from transformers import PreTrainedModel
from verl.trainer.ppo.v1.trainer_base import register_trainer

from verl_credit.errors import ConfigError, IntegrityError, PreflightError
from verl_credit.host.step.measured_rows import Generator, Row, Wanted, check_replayed, reaches, trajectory_of
from verl_credit.host.step.trainer import CreditTrainer
from verl_credit.names import MEASURE_MODE
from verl_credit.records.run import events
from verl_credit.records.run.files import append_json, read_json_lines, write_text
from verl_credit.records.run.progress_line import Throttled
from verl_credit.study.fidelity.measure import measure
from verl_credit.study.fidelity.request import REQUEST, RESULT, ROLLOUTS, TABLE, Request
from verl_credit.study.fidelity.result import as_dict, table, write_result
from verl_credit.study.fidelity.turn_rows import turn_batch
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.score.scorers import Forward
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Groups, Start, Trajectory
from verl_credit.worlds.rollouts.sampler import Ids, digest


@register_trainer(MEASURE_MODE)
class MeasuringTrainer(CreditTrainer):
    def fit(self, agent_loop_manager):
        run_dir = self.recorder.run_dir
        if (request := Request.read(run_dir)) is None:
            raise IntegrityError(
                f"trainer.v1.trainer_mode={MEASURE_MODE}: {run_dir} has no {REQUEST}; `verl-credit fidelity` starts it"
            )
        self._check_workers(agent_loop_manager)
        self.agent_loop_manager = agent_loop_manager
        sys.path.insert(0, request.folder)
        try:
            self._measure(request)
        except (ConfigError, PreflightError) as error:
            raise IntegrityError(str(error)) from error
        finally:
            self._shutdown_dump_executor()

    def _measure(self, request: Request) -> None:
        say = Throttled(partial(events.note, self.recorder.run_dir, "fidelity"), f"fidelity {request.name}")
        data = questions_of(request, self.config, self.train_dataset, self.val_dataset)
        parts = self.watch, self.agent_loop_manager, self.replay_buffer
        generate = Generator(self.config, data, *parts, step=self.global_steps)
        # Refused before anything is rolled out, if it is; verl's workers keep weights of their own.
        model = load_model(request) if request.gradient else None
        subject = RunSubject(request, self.config, self.tokenizer, data, generate, self._forward, say, model)
        out = Path(request.out)
        result = measure(subject, request, say=say, enough=request.timer(), prompts_at_once=1)
        write_text(out / TABLE, "\n".join(table(subject.name, result)) + "\n")
        write_result(out / RESULT, request.settings, [as_dict(subject, result)])

    def _forward(self) -> Forward:
        """The actor's workers; the engine sleeps from here on, as in training."""
        self.checkpoint_manager.sleep_replicas()
        return self._enter(None, {})


def questions_of(
    request: Request, config: DictConfig, train: Sequence[dict], test: Sequence[dict]
) -> list[dict]:
    """The first rows of the data that the request names. Raises IntegrityError where there are fewer."""
    key, rows = ("val_files", test) if request.split == "test" else ("train_files", train)
    if request.prompts > len(rows):
        raise IntegrityError(f"--prompts {request.prompts}: {config.data[key]} (data.{key}) has {len(rows)}")
    return [rows[number] for number in range(request.prompts)]


def load_model(request: Request) -> PreTrainedModel:
    """The request's policy in this process, on the CPU, in float32, for its gradients."""
    from verl_credit.study.fidelity.subject import load_checkpoint, load_policy  # needs the lab's packages

    model, _ = (load_checkpoint if request.step else load_policy)(Path(request.policy))
    return model


class RunSubject:
    """The policy that a trainer has loaded, and whose engine is ready. ``data``: the rows of its questions; ``forward``: the
    trainer's log-probs, for which the engine sleeps; ``say`` gets the progress of rollouts; ``model``: for gradients."""

    def __init__(
        self,
        request: Request,
        config: DictConfig,
        tokenizer,
        data: list[dict],
        generate: Callable[[Sequence[Wanted]], Iterable[list[Row]]],
        forward: Callable[[], Forward],
        say: Callable[[float, str], None] = lambda share, text: None,
        model: PreTrainedModel | None = None,
    ):
        self.model = model
        self.name, self.step, self.config, self.data = request.policy, request.step, config, data
        self.tokenizer, self._generate, self._forward, self._say = tokenizer, generate, forward, say
        self._path, self._about = Path(request.out) / ROLLOUTS, request.about
        self.engine = request.about["engine"]
        # Agent loops render the prompts: their tokens are known when a rollout is back.
        self.prompts = [State(question, 0, ()) for question in range(len(data))]
        self._turns: dict[Ids, list[Ids]] = {}
        self._question: dict[Ids, int] = {}

    def about(self) -> dict:
        return self._about

    def roll(self, starts: Sequence[Start]) -> list[list[Trajectory]]:
        """Rollouts from prompts, all of one name, or from contexts of such rollouts."""
        if all(start.state.ids for start in starts):
            return self._go_on(starts)
        groups = self._from_prompts(starts)
        for row in chain(*groups):
            self._check_prompt(row)
            for number, state in enumerate(row.states()):
                self._turns[state.ids] = row.texts[:number]
        return [[trajectory_of(row) for row in group] for group in groups]

    def batch(self, groups: Groups) -> TurnBatch:
        paths = [*chain(*groups)]
        batch = turn_batch(paths, self.data)
        return replace(
            batch,
            records=[path.row.record for path in paths],
            scores=[path.row.scores for path in paths],
            turn_rewards=[path.row.turn_rewards for path in paths],
        )

    @contextmanager
    def forward(self) -> Iterator[Forward]:
        yield self._forward()

    def _from_prompts(self, starts: Sequence[Start]) -> list[list[Row]]:
        """Rollouts are written as they come, because an engine without seeds would not make the same ones again."""
        kept = {
            (line["name"], line["question"]): [Row(**row) for row in line["rows"]]
            for line in read_json_lines(self._path)
        }
        new = [s for s in starts if len(kept.get((s.name, s.state.question), ())) != s.count]
        groups = self._generate([_wanted(start, ()) for start in new])
        for done, (start, rows) in enumerate(zip(new, groups, strict=True), start=1):
            check_replayed(rows, (), self.config)
            name, question = start.name, start.state.question
            line = {"name": name, "question": question, "rows": [asdict(row) for row in rows]}
            append_json(self._path, line)
            kept[name, question] = rows
            self._say(0.1 * done / len(new), f"rollouts of {done} of {len(new)} prompts")
        return [kept[start.name, start.state.question] for start in starts]

    def _go_on(self, starts: Sequence[Start]) -> list[list[Trajectory]]:
        turns = [self._turns[start.state.ids] for start in starts]
        groups = list(self._generate([_wanted(*one) for one in zip(starts, turns, strict=True)]))
        for rows, before in zip(groups, turns, strict=True):
            check_replayed(rows, before, self.config)
        return [
            [trajectory_of(row, otherwise=not reaches(row, start.state)) for row in rows]
            for start, rows in zip(starts, groups, strict=True)
        ]

    def _check_prompt(self, row: Row) -> None:
        """A context is identified by its tokens; therefore they have to identify the question."""
        other = self._question.setdefault(tuple(row.prompt_ids), row.question)
        one, same = self.data[row.question], self.data[other]
        if any(one.get(name) != same.get(name) for name in ("reward_model", "tools_kwargs")):
            raise IntegrityError(
                f"questions {other} and {row.question} of the data have one prompt and not one answer (reward_model, "
                "tools_kwargs): a context does not show which of them it belongs to; expected prompts that differ"
            )


def _wanted(start: Start, turns: Sequence[Ids]) -> Wanted:
    name = f"{start.seed}/{start.name}/{start.state.question}/{digest(start.state.ids)}"
    return Wanted(start.state.question, start.count, name, turns)
