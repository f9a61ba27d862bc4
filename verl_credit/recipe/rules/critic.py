"""Checks verl's critic beside turn credit: it is trained where its values are read, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

from verl_credit.config.keys import reads
from verl_credit.config.resolved import Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import TRAINER_MODE
from verl_credit.recipe.decisions import MODE as TRAINER
from verl_credit.turns.state_features import CRITIC, KEY

ENABLE, WARM_UP, LORA = "critic.enable", "trainer.critic_warmup", "critic.model.lora_rank"


def validate_critic(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault. With verl's own estimators the critic is verl's alone."""
    if not settings.turn_estimator:
        return
    asked, enabled = reads.by_critic(settings), bool(select(config, ENABLE))
    if asked != enabled:
        use = "those are the critic's values; set it to true"
        if enabled:
            use = "no turn mode reads its values, and it would learn advantages; set it to false, or "
            use += f"{KEY}={CRITIC} with algorithm.info_gain_norm_mode=turn_gae"
        yield ConfigError.of(config, ENABLE, KEY, accepted=use)
    if select(config, WARM_UP):
        use = "steps without an update of the policy are not built; set it to 0"
        yield ConfigError.of(config, WARM_UP, accepted=use)
    if asked and select(config, LORA):
        use = "an adapter leaves the value head as it is, 0 at first, so that nothing is learned; set it to 0"
        yield ConfigError.of(config, LORA, KEY, accepted=use)
    if asked and select(config, TRAINER) != TRAINER_MODE:
        use = f"a critic beside rollouts of older weights has not been tried; set it to {TRAINER_MODE}"
        yield ConfigError.of(config, TRAINER, KEY, accepted=use)
