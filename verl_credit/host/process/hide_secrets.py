"""verl prints the whole configuration, and hands it to the trackers (wandb, MLflow, ...): here both lose its secrets."""

from __future__ import annotations

import functools

from verl.trainer import main_ppo
from verl.trainer.ppo.v1 import trainer_base

from verl_credit.redact import without_secrets


def hide_secrets() -> None:
    """In the process that runs verl's trainer. ``trainer`` reaches a tracker as it is: verl reads a proxy there."""
    show, tracking = main_ppo.pprint, trainer_base.Tracking

    @functools.wraps(tracking)
    def track(*args, config, **settings):
        kept = {"trainer": config["trainer"]} if "trainer" in config else {}
        return tracking(*args, config=without_secrets("", config) | kept, **settings)

    main_ppo.pprint = lambda value: show(without_secrets("", value))
    trainer_base.Tracking = track
