"""verl's v1 trainers with turns: what is added to each of their steps, and nothing else.

verl's own code samples, balances, computes log-probs, updates and saves; here rollouts are checked, gains are scored, the
estimator is given turns, and what happened is written down. None of this depends on when the rollouts were made, so it is
one mixin over verl's `PPOTrainer`.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
import torch
from omegaconf import open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from verl_credit.config.settings import CreditSettings
from verl_credit.host.actor.worker import CreditWorker
from verl_credit.host.registry import AGENT_LOOP, LOSS, require_registered
from verl_credit.host.rollout.agent_manager import CreditAgentLoopManager, RolloutWatch
from verl_credit.host.step import store
from verl_credit.host.step.entropy_probe import ProbingTrainer
from verl_credit.host.step.estimator import bring_turns
from verl_credit.host.step.metrics import (
    UnrewardedSteps,
    check_planning_has_signal,
    check_states_are_shared,
    check_tool_faults,
    credit_metrics,
    gain_metrics,
    row_metrics,
)
from verl_credit.host.step.recorded import RecordedTrainer
from verl_credit.host.step.rollouts import credited_rows
from verl_credit.host.step.store import TrainerForward
from verl_credit.host.step.tables import keep_turns
from verl_credit.names import CLIP_SCALE, LOSS_MODE, TRAINER_MODE
from verl_credit.recipe.unread import without_effect_in
from verl_credit.records.run import events
from verl_credit.records.run.events import (
    ROWS_LEFT_OUT,
    TURNS_CUT,
    cut_note,
    left_out_note,
    small_groups_note,
)
from verl_credit.records.run.files import PHASES, append_json
from verl_credit.turns.assign import CreditRun, step_inputs
from verl_credit.turns.gains import plan_gains


class CreditSteps(ProbingTrainer, RecordedTrainer):
    """This mixin stands before one of verl's trainers. The task runner process has one instance; workers are Ray actors."""

    VERL_MODE: str
    """verl's name of the trainer that it extends."""
    WORKER: type = CreditWorker

    def __init__(self, config):
        self.settings = CreditSettings.from_config(config)
        self.run_dir = Path(config.run_dir)
        self._states_checked = self._planning_checked = False
        note = partial(events.note, self.run_dir, "no_rewards")
        self._unrewarded = UnrewardedSteps(config.faults.max_unrewarded_steps, note)
        self._issued = (-1, 0)  # (step, prompts handed out in it)
        self.watch = RolloutWatch(config.faults.max_failed_rollouts)
        self._worker_notes: dict[str, str | None] = {}  # what the actor workers run
        super().__init__(config)

    trainer_mode = property(lambda self: self.VERL_MODE, lambda self, value: None)
    """verl reads the mode's section of trainer.v1 by its own name of the mode. Its assignment of our name is ignored."""

    # --- start -----------------------------------------------------------------------------------

    def _build_replay_buffer(self):
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = self.config.poll_interval_s
        self.watch.attach(buffer)
        return buffer

    def _init_tokenizer(self):
        super()._init_tokenizer()
        note = partial(events.note, self.run_dir, "lost_rewards")
        share = self.config.faults.max_lost_rewards
        self.credit = CreditRun.of(self.settings, self.tokenizer, tolerated_share=share, note=note)

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        # A worker gets this part of the configuration.
        with open_dict(self.config.actor_rollout_ref) as workers:
            workers.run_dir, workers.phase_memory = self.config.run_dir, self.config.phase_memory
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.WORKER)

    def _setup(self):
        super()._setup()
        for rank, names in enumerate(self.actor_rollout_wg.credit_probe()):
            self._worker_notes = {kind: names[kind] for kind in ("attention", "log_probs")}
            require_registered(f"actor worker {rank}", names, LOSS)
            ours = self.config.actor_rollout_ref.actor.policy_loss.loss_mode == LOSS_MODE
            if ours and names["actor_loss"] != "credit_ppo_loss":
                raise RuntimeError(
                    f"actor worker {rank} trains with {names['actor_loss']}, not credit_ppo_loss"
                )

    def fit(self, agent_loop_manager):
        self._check_workers(agent_loop_manager)
        if self.config.trainer.total_training_steps is None:
            steps = self.total_training_steps  # known only here, because they follow from the data
            length = f"{steps} steps (trainer.total_epochs={self.config.trainer.total_epochs})"
            for line in without_effect_in(self.config, self.settings, steps, length):
                events.note(self.run_dir, "idle", f"without effect: {line}")
        super().fit(agent_loop_manager)

    def _check_workers(self, agent_loop_manager) -> None:
        if not isinstance(agent_loop_manager, CreditAgentLoopManager):
            raise TypeError(
                "actor_rollout_ref.rollout.agent.agent_loop_manager_class must be "
                f"{CreditAgentLoopManager.__module__}.{CreditAgentLoopManager.__name__}, "
                f"got {type(agent_loop_manager).__name__}: failed rollouts would go unnoticed"
            )
        for number, names in enumerate(agent_loop_manager.probe()):
            require_registered(f"agent loop worker {number}", names, AGENT_LOOP)
        self.watch.drain = agent_loop_manager.drain_errors
        search = self.config.search
        index = (search.index_fingerprint or "not named by its server") if search.max_searches else "none"
        events.note(self.run_dir, "banner", f"{self.settings.banner()} | index={index}")
        rollouts = {"rollouts": self._of_rollout_server("start_line")}
        for kind, text in {**self._worker_notes, **rollouts}.items():
            if text:
                events.note(self.run_dir, kind, text)

    # --- one step --------------------------------------------------------------------------------

    def _fetch_one_gen_batch(self):
        """verl draws random prompt ids; ours follow from seed, step and place, so row order repeats."""
        batch = super()._fetch_one_gen_batch()
        step, issued = self._issued
        first = issued if step == self.global_steps else 0
        self._issued = (self.global_steps, first + len(batch))
        names = [f"{self.config.seed}/{self.global_steps}/{i}" for i in range(first, first + len(batch))]
        batch.pop("uid")
        tu.assign_non_tensor_stack(
            batch, "uid", [str(uuid.uuid5(uuid.NAMESPACE_OID, name)) for name in names]
        )
        return batch

    def on_sample_begin(self):
        super().on_sample_begin()
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        self.watch.begin(prompts * self.config.actor_rollout_ref.rollout.n)
        self._sampling_since = time.time()

    def on_sample_end(self):
        """The rollouts are finished; verl's trainer puts the rollout engine to sleep."""
        sampled = time.time()
        super().on_sample_end()
        self._stage("the first rollouts are finished")
        if self.config.phase_memory:
            spans = {"rollout": (self._sampling_since, sampled), "falling asleep": (sampled, time.time())}
            for phase, (start, end) in spans.items():
                row = {"step": self.global_steps, "phase": phase, "start": start, "end": end}
                append_json(self.run_dir / PHASES, row)

    def _balance_batch(self, batch, metrics, *args, **kwargs):
        """Orders the sampled rows and stops on failed rollouts, because no earlier hook sees these rows."""
        metrics["credit/rollouts_failed"] = self.watch.settle(len(batch.keys))
        batch.reorder(sorted(range(len(batch.keys)), key=lambda row: batch.keys[row]))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compute_old_log_prob(self, batch, metrics):
        with marked_timer("info_gain", self.timing_raw):
            self._turns = store.fetch_turn_batch(batch, self.credit.columns)
            batch = store.write_turn_ids(batch, self._turns)
            metrics.update(row_metrics(self._turns))
            pairs = zip(self._turns.records, self._turns.is_padding, strict=True)
            real = [record for record, pad in pairs if not pad]
            # verl's own estimators cannot leave out a row, so with them no fault is tolerated.
            tolerated = self.config.faults.max_tool_faults if self.settings.turn_estimator else 0.0
            faults = check_tool_faults(real, tolerated, self.config.search.url)
            self._note_once("tool_faults", faults and f"warning: in step {self.global_steps} {faults}")
            budget = self.config.search.max_new_tokens
            self._note_once("turn_length", cut_note(metrics[TURNS_CUT], self.global_steps, budget))
            scored = self.settings.scores_at(self.global_steps)
            plan = plan_gains(self._turns, self.settings, self.tokenizer, scored=scored)
            forward = TrainerForward(batch, self.actor_rollout_wg, self.config)
            if plan.scored:
                plan = plan.scorer.before_forward(plan, forward)
        start = time.perf_counter()
        forward.ran(super()._compute_old_log_prob(forward.batch, metrics))
        forward_s = time.perf_counter() - start
        with marked_timer("info_gain", self.timing_raw):
            at = {"step": self.global_steps, "planned_steps": self.planned_steps}
            self._inputs = step_inputs(self.credit, plan, forward, metrics, **at)
        if plan.scored:
            metrics.update(plan.scorer.cost(plan, self.timing_raw["info_gain"], forward_s))
        return forward.batch

    def _compute_advantage(self, batch, metrics):
        inputs, stage = self._inputs, self.credit.stage
        if stage is not None and stage.active:
            valid_B, mask_B_T = self._turns.row_valid_B, self._turns.response_mask_B_T
            entropy = not self._bypass
            tokens = store.token_inputs(batch, self.global_steps, valid_B, entropy=entropy, mask_B_T=mask_B_T)
            inputs = replace(inputs, tokens=tokens)
        with bring_turns(inputs) as brought:
            batch = super()._compute_advantage(batch, metrics)
        step, self._credited = brought.credit, None
        if step is None:  # another estimator with our loss: no gain, no adaptive clip
            ones_B_T = torch.ones(self._turns.turn_ids_B_T.shape)
            return store.write_tokens(batch, self._turns, CLIP_SCALE, ones_B_T)
        batch = store.write_tokens(batch, self._turns, CLIP_SCALE, step.clip_scale_B_T.float())
        metrics.update(gain_metrics(step))
        n = self.config.actor_rollout_ref.rollout.n
        metrics.update(credit_metrics(step, n))
        metrics.update(step.metrics)
        mode, left_out = self.settings.algorithm.turn_mode, metrics.get(ROWS_LEFT_OUT, 0.0)
        self._note_once("small_groups", small_groups_note(mode, metrics, self.global_steps, n))
        self._note_once("rows_left_out", left_out_note(left_out, self.global_steps, mode.name))
        self._unrewarded.see(step, self.global_steps)
        if not self._states_checked and inputs.rewarding:
            check_states_are_shared(step)
            self._states_checked = True
        if not self._planning_checked:
            check_planning_has_signal(step)
            self._planning_checked = True
        keep_turns(self.run_dir, batch, step, self.global_steps)
        keep = self.config.keep_rollouts
        self._credited = credited_rows(batch, step, self.global_steps, keep, entropy=not self._bypass)
        return batch

    @property
    def _bypass(self) -> bool:
        """True when verl makes no forward for old_log_probs and takes the rollout engine's."""
        return bool((self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))

    @property
    def controller(self):
        return None if self.credit.stage is None else self.credit.stage.controller

    @property
    def values(self):
        return self.credit.values


@register_trainer(TRAINER_MODE)
class CreditTrainer(CreditSteps, PPOTrainerSync):
    """Every step trains on rollouts of its own weights."""

    VERL_MODE = "sync"
