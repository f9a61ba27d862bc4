"""What of a configuration is unread or without effect, with the settings that it gives."""

from omegaconf import DictConfig

from verl_credit.config.settings import CreditSettings
from verl_credit.recipe import unread


def unused(config: DictConfig) -> list[str]:
    return unread.unused(config, CreditSettings.from_config(config))


def without_effect(config: DictConfig) -> list[str]:
    return unread.without_effect(config, CreditSettings.from_config(config))


def idle_lines(config: DictConfig) -> list[str]:
    return unread.idle_lines(config, CreditSettings.from_config(config))
