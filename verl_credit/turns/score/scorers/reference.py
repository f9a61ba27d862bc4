"""Scores by the frozen reference model, which training does not move. Sources: TRACE 2607.13988, CIGPO 2607.16244."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.config.fit import reference_in_actor
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.lazy import torch
from verl_credit.policy.families import SCORER
from verl_credit.turns.score.scorers.scorer import Forward, GainPlan, RowScorer

KL_LOSS, KL_REWARD = "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"


class ReferenceScorer(RowScorer):
    """`RowScorer` by the reference: the policy without its adapter where it trains one, else a model of its own."""

    name = "reference"
    frozen = True

    def needs(self, config: DictConfig) -> None:
        if not (reference_in_actor(config) or select(config, KL_LOSS) or select(config, KL_REWARD)):
            use = f"this run loads no reference; set {KL_LOSS}=true, with actor_rollout_ref.actor.kl_loss_coef=0 where "
            use += f"it is to score alone, or {SCORER}=rows for the policy's own scores"
            raise ConfigError.of(config, SCORER, KL_LOSS, KL_REWARD, accepted=use)

    def answers_behind_row(self, config: DictConfig) -> int:
        return int(reference_in_actor(config))  # else they are in the reference's micro-batches

    def score(self, plan: GainPlan, forward: Forward) -> torch.Tensor:
        return forward.score_by_reference(self.rows(plan))

    def says(self, config: DictConfig, settings: CreditSettings) -> str:
        by = "compute_log_prob without the adapter" if reference_in_actor(config) else "compute_ref_log_prob"
        return super().says(config, settings).replace("compute_log_prob", by)
