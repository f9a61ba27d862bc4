"""Held-out evaluation: once per sampling mode of ``evaluation.modes``, and its trajectories as rows of JSON
(`evaluation.keep_trajectories`). verl clears a batch once it has its metrics, therefore the rows are read as soon as the
batch is sampled.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from verl_credit.config.keys import AUTO
from verl_credit.errors import EvaluationOverrun, IntegrityError
from verl_credit.host.rollout.agent_manager import RolloutWatch
from verl_credit.host.step import store
from verl_credit.host.step.watch import texts_of_turns
from verl_credit.records.run import events
from verl_credit.records.run.files import VALIDATION, append_json, plain, read_json_lines
from verl_credit.records.run.validation import write_held_out
from verl_credit.turns.rollout.reward.env_record import golds_of
from verl_credit.turns.rollout.sessions import joined
from verl_credit.turns.step.step_checks import check_evaluation_faults

Loader = Iterable[dict]


class Evaluation:
    """Evaluates with verl's own method, once per sampling mode; ``mode`` is the one of the present evaluation."""

    def __init__(self, config: DictConfig, watch: RolloutWatch) -> None:
        self.config, self.run_dir, self._watch = config, Path(config.run_dir), watch
        self.mode: str | None = None

    def of_step(
        self,
        step: int,
        evaluate: Callable[[Callable[[Loader], Loader]], dict],
        questions: int,
        tokenizer,
        drain_faults: Callable[[], list],
    ) -> dict:
        """The metrics of all modes. A step that was evaluated before a resume is not evaluated again.

        ``evaluate``: verl's evaluation of a loader that the argument makes of its own.
        """
        for row in read_json_lines(self.run_dir / VALIDATION):
            if row["step"] == step:
                return {name: value for name, value in row.items() if name != "step"}
        hours, began = self.config.evaluation.max_hours, time.monotonic()

        def in_time() -> None:
            if hours is not None and time.monotonic() - began > 3600 * hours:
                text = f"evaluation.max_hours={hours:g}: the evaluation after step {step} takes longer"
                events.note(self.run_dir, events.EVALUATION_OVERRUN, text)
                raise EvaluationOverrun(text)

        merged: dict = {}
        keep, kept = self.config.evaluation.keep_trajectories, []
        try:
            for mode in self.config.evaluation.modes:
                self.mode = mode
                samples = 1 if mode == "greedy" else self.config.actor_rollout_ref.rollout.val_kwargs.n
                self._watch.begin(rows := questions * samples)
                if keep:
                    self._watch.seen = lambda batch, mode=mode: kept.extend(
                        held_out_rows(batch, mode, tokenizer, self.config.algorithm.turn_ids)
                    )
                merged |= evaluate(lambda own, one=(mode, samples): with_mode(own, *one, in_time))
                self._watch.settle(rows - len(self._watch.errors))
        finally:
            self.mode = self._watch.seen = None
        faults = self.config.faults.max_tool_faults
        check_evaluation_faults(merged, faults, self.config.search.url, drain_faults())
        if keep:
            write_held_out(self.run_dir, step, kept)
        append_json(self.run_dir / VALIDATION, {"step": step, **merged})
        in_time()
        return merged

    def folder(self, dump_path: str) -> str:
        """verl names the file by the step alone: each mode has a folder, or the last one would overwrite the others."""
        return str(Path(dump_path) / self.mode) if self.mode else dump_path

    def named(self, sources: Sequence[str]) -> list[str]:
        """The data sources with the mode ("lab" becomes "lab-greedy"), in the metrics' names only: reward functions see the
        source as it is."""
        return [f"{source}-{self.mode}" for source in sources]

    def counts(self, given: dict[str, dict | None]) -> dict[str, dict | None]:
        """Names counts by (source, uid) so, too. verl 0.9.1 gives expected_acc_counts, releases before it give none."""
        return {
            key: of and {(f"{source}-{self.mode}", uid): n for (source, uid), n in of.items()}
            for key, of in given.items()
        }

    def renamed(self, metrics: dict, named: Sequence[str], uids: Sequence[str]) -> dict:
        """The metrics with the number of questions of each source, and turns by mode."""
        for source in set(named):
            questions = {uid for uid, of in zip(uids, named, strict=True) if of == source}
            metrics[f"val-aux/{source}/questions"] = len(questions)
        turns = f"val-aux/num_turns-{self.mode}/"
        return {name.replace("val-aux/num_turns/", turns): value for name, value in metrics.items()}


def with_means(infos: dict[str, list]) -> dict[str, list]:
    """The values of the reward function that have a mean: verl averages all of them, and a list per turn (`column:NAME`)
    has none."""
    several = (list, tuple, dict, set, np.ndarray)
    return {
        name: values
        for name, values in infos.items()
        if not any(isinstance(value, several) for value in values)
    }


def with_mode(loader: Loader, mode: str, samples: int, before_batch: Callable[[], None]) -> Iterator[dict]:
    """The validation data with a sampling mode and a number of samples on every row.

    verl fixes validation sampling once for all workers. Therefore our workers read the mode from the row, and so do our
    agent loops under another manager, so that greedy and sampled accuracy come from the same weights. verl's workers read
    the number of samples from the row, too.
    """
    for batch in loader:
        before_batch()
        given = {}
        for name, value in (("sampling", mode), ("__rollout_n__", samples)):
            given[name] = np.empty(len(batch["raw_prompt"]), dtype=object)
            given[name][:] = value
        yield {**batch, **given}


def held_out_rows(batch, mode: str, tokenizer, ids: str = AUTO) -> list[dict]:
    """A row per trajectory, with the scores of the reward function, which are those of the last of several outputs.

    ``id`` names the question by its data source, prompt, gold answers and extra_info, so that every policy has the same one,
    whichever other rows there are. The rows of an environment differ in extra_info alone, which has the seed of the state.
    """
    turns = joined(store.fetch_turn_batch(batch, ("raw_prompt", "data_source"), ids))
    data = store.read(batch, "rm_scores")
    if "rm_scores" not in data:
        raise IntegrityError(
            "evaluation.keep_trajectories=true: the held-out rows have no score when they are sampled, because a reward "
            "model on the trainer's devices gives it later; set reward.reward_model.enable_resource_pool=true, or "
            "evaluation.keep_trajectories=false"
        )
    outcomes = [float(values.double().sum()) for values in data["rm_scores"].unbind()]
    last = turns.sessions.last_S.tolist() if turns.sessions else range(len(outcomes))
    rows = []
    for row, texts in enumerate(texts_of_turns(turns, range(len(last)), tokenizer.decode)):
        record, info, columns = turns.records[row], turns.extra_infos[row], turns.columns[row]
        golds = list(map(str, golds_of(record, turns.ground_truths[row])))
        source, prompt = str(columns.get("data_source", "unknown")), plain(columns["raw_prompt"])
        rows.append(
            {
                "id": _digest([source, prompt, golds, plain(info)]),
                "source": source,
                "mode": mode,
                "question": str((info or {}).get("question") or prompt[-1]["content"]),
                "golds": golds,
                "outcome": outcomes[last[row]],
                "scores": {
                    name: float(value) for name, value in turns.scores[row].items() if isinstance(value, Real)
                },
                "stop_reason": record["stop_reason"],
                "tool_fault": record["tool_fault"],
                "in_environment": bool(record["environment"]),
                "calls": record["n_searches"] + record["n_other_calls"],
                "searches": record["searches"],
                "turns": [{"text": written, "observation": seen} for written, seen in texts],
            }
        )
    return rows


def _digest(value) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
