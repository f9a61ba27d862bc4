"""The settings that a reader of the report asks for first, from the run's resolved configuration."""

from __future__ import annotations

import re
from pathlib import Path

SHOWN = (
    "seed",
    "actor_rollout_ref.model.path",
    "algorithm.adv_estimator",
    "algorithm.info_gain_norm_mode",
    "algorithm.info_gain_type",
    "algorithm.info_gain_first_turn",
    "algorithm.info_gain_context",
    "algorithm.gamma",
    "algorithm.adv_rescale_alpha",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.policy_loss.ratio_level",
    "actor_rollout_ref.actor.policy_loss.dynamic_clip",
    "actor_rollout_ref.actor.policy_loss.clip_beta",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "data.train_batch_size",
)
# A key may be quoted: YAML 1.1 reads a bare `n` as a truth value, so writers put it in quotes.
_ENTRY = re.compile(r"( *)(['\"]?)([^\s:#'\"-][^\s:'\"]*)\2:(?: (.*))?")


def read_settings(path: Path) -> dict[str, str]:
    """The keys of ``SHOWN`` that the file has, by dotted name. Missing file: empty.

    Reads nested ``key: value`` lines, which is all that these keys need of YAML (a resolved configuration has
    one per line); lists and other keys are passed over.
    """
    if not path.exists():
        return {}
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _ENTRY.fullmatch(line)
        if not match:
            continue
        indent, key, value = len(match[1]), match[3], match[4]
        while parents and parents[-1][0] >= indent:
            parents.pop()
        parents.append((indent, key))
        if value:
            found[".".join(name for _, name in parents)] = value.strip().strip("'\"")
    return {name: found[name] for name in SHOWN if name in found}
