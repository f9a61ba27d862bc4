"""What follows from the trainer, where its keys say ``auto``."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.names import SEPARATE_MODE

MODE = "trainer.v1.trainer_mode"
HYBRID = "actor_rollout_ref.hybrid_engine"
UPDATES = "trainer.v1.separate_async.parameter_sync_step"
BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"


def decide_trainer(config: DictConfig) -> None:
    """``hybrid_engine``: training devices roll out too, but for a trainer that has others for that. ``parameter_sync_step``:
    as many updates between two syncs of weights as the batch has mini-batches, which verl demands."""
    if OmegaConf.select(config, HYBRID) == "auto":
        OmegaConf.update(config, HYBRID, OmegaConf.select(config, MODE) != SEPARATE_MODE)
    batch, mini = (OmegaConf.select(config, key) for key in (BATCH, MINI_BATCH))
    if (
        OmegaConf.select(config, UPDATES) == "auto"
        and isinstance(batch, int)
        and isinstance(mini, int)
        and mini > 0
    ):
        OmegaConf.update(config, UPDATES, max(batch // mini, 1))
