"""What an asynchronous trainer adds to a step: it trains on what is finished, while other rollouts go on."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from verl_credit.host.step import store
from verl_credit.host.step.v1_host import V1Host
from verl_credit.recipe.rules.trainer_mode import compares_with_the_writer
from verl_credit.records.run import events
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.score.scorers.scorer import RowScorer
from verl_credit.turns.step.staleness import staleness_metrics


class RolloutsAhead:
    """Rollouts of earlier weights. Credit is assigned by the weights of the step; the loss compares with those that wrote a
    token.

    Departure from verl: without a correction its ratio is to the weights before the update, whichever wrote the token.
    """

    def __init__(self, config: DictConfig, mode: str, scorer: str) -> None:
        self.config, self._mode = config, mode
        self._adds_forwards = scorer == RowScorer.name
        correction = config.algorithm.get("rollout_correction") or {}
        self._bypass = bool(correction.get("bypass_mode", False))  # verl makes no forward for old_log_probs

    def attach(self, buffer) -> None:
        """Sorts the finished prompts: verl takes the first of a set, whose order differs from process to process."""
        select = buffer._select_prompt_uids
        buffer._select_prompt_uids = lambda partition, uids, size: select(partition, sorted(uids), size)

    def note(self) -> None:
        """Notes the trainer, and the weights that a token's ratio is to."""
        writer = compares_with_the_writer(self.config)
        weights = "that wrote the token" if writer else "of the step (algorithm.rollout_correction)"
        text = f"trainer: {self._mode}; the ratio of a token is to the weights {weights}"
        events.note(Path(self.config.run_dir), "trainer", text)

    def scores_at_sync(self, update: int) -> bool:
        """Whether extra rows of an update between two syncs need the weights of the last sync, as verl's forward does."""
        return self._mode == "separate_async" and update > 0 and self._adds_forwards and not self._bypass

    def before_credit(self, host: V1Host, turns: TurnBatch) -> None:
        # With bypass_mode old_log_probs are the writer's already: there is nothing to compare.
        fields = () if self._bypass else ("old_log_probs", "rollout_log_probs")
        found = host.read(*fields) if fields else {}
        now_B_T, written_B_T = found.get("old_log_probs"), found.get("rollout_log_probs")
        host.report(staleness_metrics(turns, step=host.step, now_B_T=now_B_T, written_B_T=written_B_T))

    def after_credit(self, host: V1Host) -> None:
        if compares_with_the_writer(self.config):
            written = store.read(host.batch, "rollout_log_probs")["rollout_log_probs"]
            host.batch = store.write(host.batch, {"old_log_probs": written})
