"""verl's asynchronous trainers with turns: a step trains on what is finished, while other rollouts go on."""

from __future__ import annotations

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils.device import get_device_name

from verl_credit.host import compat
from verl_credit.host.actor.worker import CreditWorker
from verl_credit.host.step import store
from verl_credit.host.step.trainer import CreditSteps
from verl_credit.names import COLOCATE_MODE, SEPARATE_MODE
from verl_credit.recipe.rules.trainer_mode import compares_with_the_writer
from verl_credit.records.run import events
from verl_credit.turns.scorers.scorer import RowScorer
from verl_credit.turns.staleness import staleness_metrics


class AsyncSteps(CreditSteps):
    """Credit is assigned as in every step, by the weights of the step; the loss compares with those that wrote a token.

    Departure from verl: without a correction its ratio is to the weights before the update, whichever wrote the token.
    """

    def _build_replay_buffer(self):
        """Sorts the finished prompts: verl takes the first of a set, whose order differs from process to process."""
        buffer = super()._build_replay_buffer()
        select = buffer._select_prompt_uids
        buffer._select_prompt_uids = lambda partition, uids, size: select(partition, sorted(uids), size)
        return buffer

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if rows := store.narrow_turn_ids("train"):
            events.note(
                self.run_dir,
                "resume",
                f"resume: {rows} rollouts of an older version have turn ids of int16 now",
            )

    def _check_workers(self, agent_loop_manager) -> None:
        super()._check_workers(agent_loop_manager)
        writer = compares_with_the_writer(self.config)
        weights = "that wrote the token" if writer else "of the step (algorithm.rollout_correction)"
        text = f"trainer: {self.VERL_MODE}; the ratio of a token is to the weights {weights}"
        events.note(self.run_dir, "trainer", text)

    def _compute_advantage(self, batch, metrics):
        # With bypass_mode no forward was made, and old_log_probs are the writer's already: there is nothing to compare.
        fields = () if self._bypass else ("old_log_probs", "rollout_log_probs")
        padded = store.read(batch, *fields).to_padded_tensor(padding=0) if fields else {}
        metrics |= staleness_metrics(
            self._turns,
            step=self.global_steps,
            now_B_T=padded.get("old_log_probs"),
            written_B_T=padded.get("rollout_log_probs"),
        )
        batch = super()._compute_advantage(batch, metrics)
        if compares_with_the_writer(self.config):
            written = store.read(batch, "rollout_log_probs")["rollout_log_probs"]
            batch = store.write(batch, {"old_log_probs": written})
        return batch


NOW, AT_SYNC = "now", 0
"""Copies of the weights: verl numbers its own, the first is that of the last sync."""


@register_trainer(COLOCATE_MODE)
class CreditColocateAsync(AsyncSteps, PPOTrainerColocateAsync):
    """Rollouts and updates take turns on the same devices. Rollouts that are not finished when a step has enough of them
    wait, and go on with the next weights."""

    VERL_MODE = "colocate_async"


class DetachedCreditWorker(CreditWorker, DetachActorWorker):
    """Uses verl's copies of the weights: all updates between two syncs have log-probs and gains of the last sync."""

    @property
    def copy_handler(self):
        """verl's copy of FSDP2's weights. On a CPU that is no copy: it would change with the weights."""
        copy = super().copy_handler

        def apart(module):
            weights, spec = copy(module)
            return {name: (weight.clone(), its) for name, (weight, its) in weights.items()}, spec

        return apart if get_device_name() == "cpu" else copy


@register_trainer(SEPARATE_MODE)
class CreditSeparateAsync(AsyncSteps, PPOTrainerSeparateAsync):
    """Rollouts have devices of their own, and go on while others are trained on.

    A step has ``parameter_sync_step`` updates, each with credit of its own; then the weights are sent. The tables of a step
    are those of its last update.
    """

    VERL_MODE = "separate_async"
    WORKER = DetachedCreditWorker

    def _compute_old_log_prob(self, batch, metrics):
        """verl computes log-probs with the weights of the last sync. So does a scorer by the forwards that it adds."""
        adds_forwards = self.settings.algorithm.info_gain_scorer == RowScorer.name
        if not self.local_trigger_step or self._bypass or not adds_forwards:
            return super()._compute_old_log_prob(batch, metrics)
        workers = self.actor_rollout_wg
        workers.save_model_to_cpu(NOW)
        workers.restore_model_from_cpu(AT_SYNC)
        try:
            return super()._compute_old_log_prob(batch, metrics)
        finally:
            workers.restore_model_from_cpu(NOW)
            workers.clear_cpu_model(NOW)

    def _setup(self):
        compat.quiet_separate_async()
        super()._setup()
