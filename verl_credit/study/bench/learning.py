"""Learning curves of the twin: a campaign of the candidate, GRPO and a published mode, which goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_credit.errors import ExitCode
from verl_credit.records.run.files import write_text
from verl_credit.study.campaign.file import parse
from verl_credit.study.campaign.runner import run_campaign

GRPO = "grpo"
METRIC = "credit/outcome/em"
"""Of a step's rollouts, before the policy is trained on them. 12 steps ask 192 of the lab's 2,048 questions, each once."""
FILE, FOLDER = "learning.yaml", "learning"


def declare(
    conditions: Mapping[str, Sequence[str]], *, seeds: int, steps: int, overrides: Sequence[str]
) -> dict:
    """The campaign's file: the first condition beside GRPO, compared with GRPO and with each of the others.

    Raises ConfigError for an override that runs of a campaign cannot share.
    """
    first, *others = (name for name in conditions if name != GRPO)
    campaign = {
        "name": "bench",
        "hypothesis": f"The turn mode {first} learns faster than {', '.join([GRPO, *others])}.",
        "engine": "twin",
        "recipe": "lab",
        "overrides": [
            f"trainer.total_training_steps={steps}",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",  # the same for all conditions
            "trainer.save_freq=-1",
            *overrides,
        ],
        "conditions": {name: list(of) for name, of in conditions.items()},
        "baseline": GRPO,
        "comparisons": [[first, GRPO], *([first, other] for other in others)],
        "seeds": list(range(1, seeds + 1)),
        "worlds": [0],
        "metric": {"name": METRIC, "window": [1, steps]},
    }
    parse(campaign, "bench")
    return campaign


def learn(out: Path, campaign: dict, *, parallel: int) -> tuple[ExitCode, Path]:
    """Runs what is missing. Raises ConfigError and PreflightError before the first run."""
    file = out / FILE
    write_text(file, json.dumps(campaign, indent=1))
    return run_campaign(str(file), out / FOLDER, parallel)
