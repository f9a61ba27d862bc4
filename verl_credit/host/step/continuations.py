"""A step's continuations by verl's trainer: while the engine is awake, and has the prefixes of the rollouts in its cache.

The same agent loops repeat a rollout's turns and tool calls (`host.rollout.engine_client`), and go on from there. verl keeps
them apart from the step's rows as it does rows of an evaluation.
"""

from __future__ import annotations

import time

from omegaconf import DictConfig
from tensordict import TensorDict

from verl_credit.config.keys import reads
from verl_credit.config.settings import CreditSettings
from verl_credit.host.rollout.agent_manager import RolloutWatch
from verl_credit.host.step import store
from verl_credit.host.step.measured_rows import Generator, Wanted, check_replayed
from verl_credit.turns.continuations import Continued, chosen_states, continues_at
from verl_credit.turns.requests import turn_spans
from verl_credit.worlds.rollouts.sampler import digest

WRITTEN = "rollout_log_probs"


class _Generator(Generator):
    def outcome(self, scores: dict, reward: float) -> float:
        """The reward is what the step's rows have as their outcome."""
        return reward


class Continuations:
    """One for a run. Its methods stand in the order in which a step calls them."""

    def __init__(self, config: DictConfig, settings: CreditSettings, watch: RolloutWatch) -> None:
        self._config, self._settings, self._watch = config, settings, watch
        self._data: dict[str, dict] = {}
        self._step, self._batch = 0, None

    def asked(self, batch: TensorDict) -> TensorDict:
        """Remembers the prompts that the agent loops get, by their ids."""
        if not reads.continued(self._settings):
            return batch
        columns = {name: [getattr(one, "data", one) for one in values] for name, values in batch.items()}
        for number, uid in enumerate(columns["uid"]):
            self._data[uid] = {name: values[number] for name, values in columns.items()}
        return batch

    def begin(self, step: int) -> None:
        self._step = step
        self._watch.seen = lambda batch: setattr(self, "_batch", batch)

    def made(self, loops, buffer) -> Continued | None:
        """The continuations from states of the rollouts that have just arrived; None in a step without any."""
        batch, data, self._watch.seen, self._data = self._batch, self._data, None, {}
        if not continues_at(self._settings, self._step):
            return None
        began, turns, uids = time.perf_counter(), store.fetch_turn_batch(batch), store.prompt_ids(batch)
        plan, log_prob_B_T = self._settings.algorithm.turn_continuations, None
        if plan.choose == "uncertainty":
            log_prob_B_T = store.read(batch, WRITTEN)[WRITTEN].to_padded_tensor(padding=0)
        name = f"{self._config.seed}/{self._step}"
        chosen = chosen_states(turns, uids, self._settings, name, log_prob_B_T)
        wanted = []
        for number, ((_, ids), (row, turn)) in enumerate(chosen.items()):
            spans = turn_spans(turns.turn_ids_B_T[row])[:turn]
            texts = [tuple(turns.response_ids[row][first:end]) for first, end in spans]
            name = f"value/{self._step}/{number}/{digest(ids)}"
            wanted.append(Wanted(number, plan.count, name, texts))
        rows = [data[uid] for uid, _ in chosen]
        watch = self._watch
        watch.settle(len(batch.keys))
        of_rollouts = watch.errors, watch.expected
        groups = _Generator(self._config, rows, watch, loops, buffer, step=self._step).once(wanted)
        watch.errors, watch.expected = of_rollouts
        outcomes, tokens = {}, 0
        for state, one, group in zip(chosen, wanted, groups, strict=True):
            sound = [row for row in group if not row.fault]
            check_replayed(sound, one.turns, self._config)
            there = [
                row for row in sound if (*row.prompt_ids, *row.response_ids)[: len(state[1])] == state[1]
            ]
            outcomes[state] = [row.outcome for row in there]
            tokens += sum(turn >= len(one.turns) for row in there for turn in row.turn_ids)
        left_out = plan.count * len(chosen) - sum(map(len, outcomes.values()))
        return Continued(outcomes, tokens, time.perf_counter() - began, left_out)
