"""The trainer's part of the entropy probe: which updates, which rows, and the metrics ``credit/probe/*``.

The actors keep the parameters before update t. The update is measured at step t + 1, before that step's own, on rollouts
that the new parameters wrote; the metrics stand in step t + 1, with t as ``of_step``. Equations:
`verl_credit.credit.entropy_change`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from verl.utils import tensordict_utils as tu

from verl_credit.config.keys import Probe, read_section
from verl_credit.credit.entropy_change import entropy_change, predicted_change
from verl_credit.credit.entropy_gradient import Surrogate, Tokens, entropy_gradient
from verl_credit.host.step import store
from verl_credit.host.step.probe_rows import deal, group_prompts, padded_to, prompts_within, rows_for_actors
from verl_credit.records.run import events
from verl_credit.turns.rollout.book import TurnBatch

NAME = "credit/probe"
OF_STEP = f"{NAME}/of_step"


@dataclass(frozen=True)
class Sample:
    """The valid rows of a step, and the weights of the entropy's gradient on their tokens."""

    places: list[int]
    """Places of the rows in the step's batch."""
    prompt_B: torch.Tensor
    """Number of the row's prompt, in the order of prompt ids: rollouts cannot decide which prompts are left out."""
    tokens_B: torch.Tensor
    """Number of tokens of the row, prompt and observations included, float64."""
    written_B_T: torch.Tensor
    weights: Surrogate
    """Summed over the rows of a prompt: the surrogate of its mean row, with (ΣH - H̄ T) for the entropy."""
    rows_of_prompt_B: torch.Tensor

    @classmethod
    def of_step(cls, batch, turns: TurnBatch) -> Sample | None:
        """The sample of a step; None without a valid row. H̄ and the baselines are those of all the step's rows."""
        places = turns.row_valid_B.nonzero().squeeze(1).tolist()
        if not places:
            return None
        data = store.read(batch, "old_log_probs", "entropy").to_padded_tensor(padding=0)
        tokens = Tokens(data["old_log_probs"][places].double(), data["entropy"][places].double())
        ids = store.prompt_ids(batch)
        number = {name: n for n, name in enumerate(sorted({ids[place] for place in places}))}
        prompt_B = torch.tensor([number[ids[place]] for place in places])
        written_B_T = turns.turn_ids_B_T[places] >= 0
        gradient = entropy_gradient(tokens, written_B_T, prompt_B)
        rows_B = prompt_B.bincount()[prompt_B].double()
        score_B_T = gradient.numerator.score_B_T - gradient.per_token * gradient.length.score_B_T
        path_B_T = gradient.numerator.path_B_T * written_B_T
        lengths = [len(turns.prompt_ids[place]) + len(turns.response_ids[place]) for place in places]
        return cls(
            places=places,
            prompt_B=prompt_B,
            tokens_B=torch.tensor(lengths, dtype=torch.float64),
            written_B_T=written_B_T,
            weights=Surrogate(score_B_T / rows_B[:, None], path_B_T / rows_B[:, None]),
            rows_of_prompt_B=rows_B,
        )


class EntropyProbe:
    """Keeps parameters before an update, and compares with them in the next step; one for a run."""

    def __init__(self, config: DictConfig) -> None:
        self.config, self.settings = config, read_section(Probe, config)
        self._kept_step: int | None = None  # the update before which the actors have kept their parameters
        self._probe_s = 0.0  # of this step
        self._step_s: float | None = None  # of the last step, without the probe
        self._token_s: float | None = None  # per token of the last measurement, prompts included
        self._over_noted = False

    def before_update(self, batch, turns: TurnBatch, workers, *, step: int, last: bool) -> dict[str, float]:
        """Measures the update of the step before, and keeps the parameters where this one is to be measured."""
        start, metrics = time.perf_counter(), {}
        if self._kept_step is not None:
            metrics = self._measure_update(batch, turns, workers, step)
            self._kept_step = None
        if self.settings.every and step % self.settings.every == 0 and not last:
            workers.keep_parameters()
            self._kept_step = step
        self._probe_s = time.perf_counter() - start
        return metrics

    def finished(self, metrics: dict, step: int, step_s: float) -> None:
        """Adds the probe's share of the time to the metrics of a step that it has measured in."""
        if OF_STEP in metrics:
            share = self._probe_s / step_s
            metrics |= {f"{NAME}/time_s": self._probe_s, f"{NAME}/time_share": share}
            self._note_over(metrics, step, share)
        self._step_s, self._probe_s = step_s - self._probe_s, 0.0

    def _measure_update(self, batch, turns: TurnBatch, workers, step: int) -> dict[str, float]:
        start = time.perf_counter()
        sample, groups = Sample.of_step(batch, turns), self.settings.groups
        available, prompt_s = 0, None
        if sample is not None:
            available = int(sample.prompt_B.max()) + 1
            if self._token_s is not None:
                prompt_s = self._token_s * float(sample.tokens_B.sum()) / available
        n = prompts_within(self.settings.budget, groups, available, self._step_s, prompt_s)
        if n == 0:
            text = f"the update of step {self._kept_step} is not measured: step {step} has valid rows of "
            text += f"{available} prompts, and probe.groups={groups}"
            events.note(Path(self.config.run_dir), "entropy_probe", text)
            return {}
        rows_G = group_prompts(sample.prompt_B, list(range(n)), groups)
        metrics = self._measured(batch, sample, rows_G, workers)
        rows = [row for group in rows_G for row in group]
        self._token_s = (time.perf_counter() - start) / float(sample.tokens_B[rows].sum())
        return metrics | {f"{NAME}/prompts": n, f"{NAME}/rows": len(rows), OF_STEP: self._kept_step}

    def _measured(self, batch, sample: Sample, rows_G: list[list[int]], workers) -> dict[str, float]:
        config = self.config.actor_rollout_ref
        ranks = max(workers._dispatch_info["actor"]) + 1
        micro = 1 if config.actor.use_dynamic_bsz else config.actor.ppo_micro_batch_size_per_gpu
        dealt = deal(rows_G, ranks, micro)
        data = rows_for_actors(batch, sample.places, sample.weights, dealt)
        tu.assign_non_tensor(data, temperature=config.rollout.temperature)
        output = workers.measure_update(data)
        place = {row: at for at, (row, _, counts) in enumerate(dealt) if counts}
        rows = [row for group in rows_G for row in group]
        order, written_B_T = [place[row] for row in rows], sample.written_B_T[rows]

        def tokens(prefix: str) -> Tokens:
            values = (output[f"{prefix}{name}"] for name in ("log_probs", "entropy"))
            return Tokens(*(padded_to(value, order, written_B_T) for value in values))

        written_B = sample.written_B_T.sum(1) / sample.rows_of_prompt_B
        tokens_G = torch.stack([written_B[group].sum() for group in rows_G])
        along_G_2 = output["along"][0]
        delta_h1, se = predicted_change(along_G_2[:, 0].diff(prepend=torch.zeros(1)), tokens_G)
        change = entropy_change(tokens(""), tokens("old_"), written_B_T, sample.prompt_B[rows])
        return {
            f"{NAME}/delta_h1": delta_h1,
            f"{NAME}/delta_h1_se": se,
            f"{NAME}/delta_h": -change.change,  # the other parameters are the earlier ones
            f"{NAME}/delta_h_se": change.se,
            f"{NAME}/ess": change.ess,
            f"{NAME}/clipped": change.clipped,
            f"{NAME}/grad_norm": float(along_G_2[-1, 1].sqrt() / tokens_G.sum()),
        }

    def _note_over(self, metrics, step: int, share: float) -> None:
        """Write an event the first time that the probe takes more than its budget; the metric has every time."""
        if share <= self.settings.budget or self._over_noted:
            return
        self._over_noted = True
        prompts = int(metrics[f"{NAME}/prompts"])
        least = ", the least that it can measure (probe.groups)" if prompts == self.settings.groups else ""
        text = f"the entropy probe took {share:.1%} of step {step}, more than probe.budget="
        text += f"{self.settings.budget:g}: it measured {prompts} prompts{least}"
        events.note(Path(self.config.run_dir), "entropy_probe", text)
