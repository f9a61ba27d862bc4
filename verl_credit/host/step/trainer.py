"""verl's v1 trainers with turns: every method of verl's that is extended, each of which calls a part.

Rollouts are checked, gains are scored, the estimator is given turns, and what happened is written down. None of it depends
on when the rollouts were made, so it is one mixin over verl's `PPOTrainer`.
"""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager
from functools import partial

import ray
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from verl_credit.config.settings import CreditSettings
from verl_credit.host.actor.worker import CreditWorker, CriticWorker
from verl_credit.host.rollout.agent_manager import ERRORS, HELD_OUT_FAULTS, RolloutWatch
from verl_credit.host.step import start
from verl_credit.host.step.ahead import RolloutsAhead
from verl_credit.host.step.entropy_probe import EntropyProbe
from verl_credit.host.step.held_out import Evaluation, with_means
from verl_credit.host.step.kept_tables import keep_turns
from verl_credit.host.step.mini_batches import WithRows, by_sessions
from verl_credit.host.step.recorded import Recorder
from verl_credit.host.step.v1_host import V1Host
from verl_credit.host.step.watch import credited_rows, keep_rollouts
from verl_credit.names import TRAINER_MODE
from verl_credit.records.run import events
from verl_credit.records.run.resume import without_limits
from verl_credit.turns.rollout.sessions import sessions_of
from verl_credit.turns.step.assign import CreditRun
from verl_credit.turns.step.step import credited, restore, scored
from verl_credit.turns.step.step_checks import StepChecks
from verl_credit.turns.step.step_metrics import score_metrics


class CreditSteps(PPOTrainer):
    """This mixin stands before one of verl's trainers. Its methods stand in the order in which a run calls them.

    The task runner process has one instance; workers are Ray actors.
    """

    VERL_MODE = "sync"
    """verl's name of the trainer that it extends."""
    WORKER: type = CreditWorker
    _update_rows: int | None = None
    """The rows of a mini-batch where rollouts have several outputs."""
    _scores: dict[str, float] = {}
    """Metrics of the score that take the place of verl's."""

    trainer_mode = property(lambda self: self.VERL_MODE, lambda self, value: None)
    """verl reads the mode's section of trainer.v1 by its own name of the mode. Its assignment of our name is ignored."""

    # --- start -----------------------------------------------------------------------------------

    def __init__(self, config):
        self.settings = CreditSettings.from_config(config)
        self.host = V1Host(config, super()._compute_old_log_prob, super()._compute_advantage)
        self.watch = RolloutWatch(config.faults.max_failed_rollouts)
        self.ahead = None
        if self.VERL_MODE != "sync":
            self.ahead = RolloutsAhead(config, self.VERL_MODE, self.settings.algorithm.info_gain_scorer)
        self.checks = StepChecks(config, self.settings)
        self.probe = EntropyProbe(config)
        self.recorder = Recorder(config)
        self.evaluation = Evaluation(config, self.watch)
        super().__init__(config)

    def _build_replay_buffer(self):
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = 0.1  # seconds between two looks for finished rollouts; verl: 2.0
        self.watch.attach(buffer)
        if self.ahead:
            self.ahead.attach(buffer)
        return buffer

    def _init_tokenizer(self):
        super()._init_tokenizer()
        note = partial(events.note, self.recorder.run_dir, "lost_rewards")
        share = self.config.faults.max_lost_rewards
        self.credit = CreditRun.of(self.settings, self.tokenizer, tolerated_share=share, note=note)

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        # A worker gets this part of the configuration.
        with open_dict(self.config.actor_rollout_ref) as workers:
            workers.run_dir = self.config.run_dir
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.WORKER)
        if Role.Critic in self.role_worker_mapping:
            self.role_worker_mapping[Role.Critic] = ray.remote(CriticWorker)

    def _load_checkpoint(self):
        super()._load_checkpoint()
        restore(self.credit, self.recorder.resumed(self.global_steps))

    def _setup(self):
        super()._setup()
        self.host.reference = getattr(self, "ref_policy_wg", None)
        self._worker_notes = start.check_actors(self.config, self.actor_rollout_wg.credit_probe())

    def on_init_end(self):
        self.recorder.stage("the rollout engine is up")
        super().on_init_end()
        self.recorder.stage("the rollout engine has the actor's weights")
        self.recorder.synced()

    def fit(self, agent_loop_manager):
        self._check_workers(agent_loop_manager)
        start.note_idle(self.config, self.settings, self.total_training_steps)
        super().fit(agent_loop_manager)

    def _check_workers(self, agent_loop_manager) -> None:
        self._drain = start.check_agent_loops(self.config, agent_loop_manager)
        self.watch.drain = partial(self._drain, ERRORS)
        start.note_engines(self.config, self.settings, self._worker_notes)
        if self.ahead:
            self.ahead.note()

    def on_train_begin(self):
        super().on_train_begin()
        self.recorder.restored(self.global_steps - 1)

    # --- one step --------------------------------------------------------------------------------

    def _fetch_one_gen_batch(self):
        return self.host.name_prompts(super()._fetch_one_gen_batch(), self.global_steps)

    def on_sample_begin(self):
        super().on_sample_begin()
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        self.watch.begin(prompts * self.config.actor_rollout_ref.rollout.n)

    def on_sample_end(self):
        """The rollouts are finished; verl's trainer puts the rollout engine to sleep."""
        super().on_sample_end()
        self.recorder.stage("the first rollouts are finished")

    def _balance_batch(self, batch, metrics, *args, **kwargs):
        """Orders the sampled rows and stops on failed rollouts, because no earlier hook sees these rows."""
        self._enter(batch, metrics).order()
        outputs_S, self._update_rows = sessions_of(batch.keys), None
        metrics["credit/rollouts_failed"] = self.watch.settle(len(outputs_S))
        if len(outputs_S) == len(batch.keys) or not self.settings.turn_estimator:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        ranks = max(self.actor_rollout_wg._query_dispatch_info("actor")) + 1
        of_run = self.config, ranks, self.tokenizer.eos_token_id
        batch, self._update_rows = by_sessions(batch, outputs_S, *of_run)
        return batch

    def _compute_old_log_prob(self, batch, metrics):
        began, host = time.perf_counter(), self._enter(batch, metrics)
        self._turns = host.turns(self.credit.columns)
        rollouts = self.checks.rows(host, self._turns)
        self._inputs, cost = scored(host, self.credit, self._turns, rollouts)
        host.report(cost)
        around_s = time.perf_counter() - began - host.forward_s
        self.timing_raw["info_gain"] = self.timing_raw.get("info_gain", 0.0) + around_s
        return host.batch

    def _compute_advantage(self, batch, metrics):
        host, self._credited, self._scores = self._enter(batch, metrics), None, {}
        if self.ahead:
            self.ahead.before_credit(host, self._turns)
        if step := credited(host, self._inputs):
            self.checks.credit(host, step)
            keep_turns(self.recorder.run_dir, host.batch, step, self.global_steps)
            self._credited = credited_rows(host, step, self.config.keep_rollouts)
            self._scores = score_metrics(step)
        if self.ahead:
            self.ahead.after_credit(host)
        return host.batch

    def _update_actor(self, batch, metrics):
        rows = self.recorder.run_dir, batch, self._turns, self._credited, self.global_steps
        last = self.global_steps >= self.total_training_steps
        probed = {"step": self.global_steps, "last": last}
        metrics |= self.probe.before_update(batch, self._turns, self.actor_rollout_wg, **probed)
        keep_rollouts(*rows, self.config, self.tokenizer)
        with self._rows_of_updates("actor_rollout_wg"):
            return super()._update_actor(batch, metrics)

    def _update_critic(self, batch, metrics):
        with self._rows_of_updates("critic_wg"):
            return super()._update_critic(batch, metrics)

    @contextmanager
    def _rows_of_updates(self, name: str):
        workers = getattr(self, name)
        if self._update_rows is not None:
            setattr(self, name, WithRows(workers, self._update_rows))
        try:
            yield
        finally:
            setattr(self, name, workers)

    def step(self, metrics, timing_raw):
        batch = super().step(metrics, timing_raw)
        self._trained, self._metrics_so_far = batch, metrics  # for the checkpoint
        return batch

    def _save_checkpoint(self):
        saved = self._metrics_to_save(), self.host.state, self.host.planned_steps
        self.recorder.save(self.global_steps, *saved)
        config, self.config = self.config, without_limits(self.config)
        try:
            super()._save_checkpoint()
        finally:
            self.config = config
        self.recorder.saved(self.global_steps)

    def on_step_end(self):
        """verl has just saved, where trainer.save_freq says so, and has not yet moved the weights to the rollout engine."""
        if self.recorder.to_save(self.global_steps):
            with marked_timer("save_checkpoint", self.timing_raw):
                self._save_checkpoint()
        super().on_step_end()
        if changed := self.recorder.synced():
            self._pending_sync_metrics = self._consume_sync_metrics() | changed

    def _validate(self):
        loader, verls = self.val_dataloader, super()._validate

        def evaluate(own):
            self.val_dataloader = own(loader)
            return verls()

        drain = partial(self._drain, HELD_OUT_FAULTS)
        try:
            rows = len(self.val_dataset)
            return self.evaluation.of_step(self.global_steps, evaluate, rows, self.tokenizer, drain)
        finally:
            self.val_dataloader = loader

    def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
        folder = self.evaluation.folder(dump_path)
        super()._dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, folder)

    def _val_metrics_update(self, sources, uids, infos, turns, **counts):
        named, counts = self.evaluation.named(sources), self.evaluation.counts(counts)
        metrics = super()._val_metrics_update(named, uids, with_means(infos), turns, **counts)
        return self.evaluation.renamed(metrics, named, uids)

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        self.probe.finished(metrics, global_steps, timing_raw["step"])
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics |= self._scores
        last = self.global_steps >= self.total_training_steps
        self.recorder.finished(self.host, metrics, timing_raw, last=last)
        self.total_training_steps = self.host.last_step

    # --- what the hooks share ----------------------------------------------------------------------

    def _enter(self, batch, metrics) -> V1Host:
        at_sync = bool(self.ahead) and self.ahead.scores_at_sync(self.local_trigger_step)
        place = {"step": self.global_steps, "last_step": self.total_training_steps}
        self.host.enter(batch, metrics, workers=self.actor_rollout_wg, at_sync=at_sync, **place)
        return self.host

    def _metrics_to_save(self) -> dict[str, float]:
        """The metrics of the step that is being saved: verl computes most of them later, and the run could end before."""
        metrics, counted = dict(self._metrics_so_far), self._rollout_moe_lb_metrics_accumulator
        self._rollout_moe_lb_metrics_accumulator = copy.deepcopy(counted)  # verl counts the step later
        try:
            epoch, unknown = (self.global_steps - 1) // self.steps_per_epoch, {"step": float("nan")}
            given = {"global_steps": self.global_steps, "epoch": epoch}
            super()._compute_metrics(self._trained, metrics, unknown, **given)
            metrics |= self._scores
        finally:
            self._rollout_moe_lb_metrics_accumulator = counted
        return metrics


@register_trainer(TRAINER_MODE)
class CreditTrainer(CreditSteps, PPOTrainerSync):
    """Every step trains on rollouts of its own weights."""
