"""verl's V0 data plane as a host of a step's credit: a padded `DataProto`, advantages by V0's `compute_advantage`."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage

from kit.turn_rows import turn_batch
from verl_credit.host.step.estimator import bring_turns


class DataProtoHost:
    """A `turns.step.StepHost`. ``forward``: DataProto -> DataProto with ``old_log_probs`` and ``entropys``, as V0's workers
    give it; ``score_rows``: a forward of extra rows."""

    budget = None

    def __init__(
        self, rows, names, outcomes, tokenizer, forward, score_rows, algorithm, *, step, planned_steps
    ):
        self.step, self.planned_steps, self.last_step = step, planned_steps, planned_steps
        self.metrics, self.notes, self.state, self.score_rows = {}, {}, None, score_rows
        self._tokenizer, self._forward, self._algorithm = tokenizer, forward, algorithm
        turns = turn_batch(rows, tokenizer)
        responses = [torch.tensor(ids) for ids in turns.response_ids]
        padded_B_T = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)
        last_B = torch.tensor([len(ids) - 1 for ids in responses])
        rewards_B_T = torch.zeros(padded_B_T.shape)
        rewards_B_T[torch.arange(len(rows)), last_B] = torch.tensor(outcomes)
        fields = {
            "responses": padded_B_T,
            "response_mask": turns.response_mask_B_T,
            "token_level_rewards": rewards_B_T,
        }
        columns = {"uid": [name.split("_")[0] for name in names], "name": names, "row": rows}
        objects = {name: np.empty(len(rows), dtype=object) for name in columns}
        for name, values in columns.items():
            objects[name][:] = values
        self.data = DataProto(TensorDict(fields, batch_size=len(rows)), objects)

    def turns(self, columns=()):
        self._turns = turn_batch(list(self.data.non_tensor_batch["row"]), self._tokenizer)
        return self._turns

    def read(self, *names, rows=None):
        found = {name: self.data.batch[name] for name in names if name in self.data.batch}
        return found if rows is None else {name: values[rows] for name, values in found.items()}

    def write(self, name, values_B_T):
        self.data.batch[name] = values_B_T

    def order(self):
        self.data.reorder(torch.from_numpy(np.argsort(self.data.non_tensor_batch["name"], kind="stable")))

    def log_probs(self):
        output = self._forward(self.data)
        output.rename("entropys", "entropy")
        self.data = self.data.union(output)

    def estimate(self, inputs):
        with bring_turns(inputs) as brought:
            given = {"adv_estimator": self._algorithm.adv_estimator, "config": self._algorithm}
            self.data = compute_advantage(self.data, **given)
        return brought.credit

    def report(self, metrics):
        self.metrics.update(metrics)

    def note(self, kind, text):
        if text:
            self.notes.setdefault(kind, text)

    def keep(self, state):
        self.state = state

    def stop(self):
        self.last_step = self.step + 1
