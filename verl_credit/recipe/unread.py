"""Lists keys that are set and not read, and features that are switched on without effect."""

from __future__ import annotations

import math
from collections.abc import Sequence

from omegaconf import DictConfig

from verl_credit.config.fit import MOST
from verl_credit.config.keys import LOSS, Algorithm, PolicyLoss, Search, keys_of, read_section, reads
from verl_credit.config.resolved import Config, resolved, select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.token.sepa_controller import auto_can_lead, first_auto_step, first_ramp_step
from verl_credit.credit.token.uncertainty import canonical_kind
from verl_credit.names import AGENT_NAME
from verl_credit.recipe.agent_loops import LISTED, tools_given
from verl_credit.recipe.rules.correction import correction_without_effect
from verl_credit.recipe.rules.known import handed_on
from verl_credit.recipe.rules.reward import overlong_unread
from verl_credit.recipe.rules.trainer_mode import trainer_mode_without_effect
from verl_credit.recipe.warnings import warnings_of
from verl_credit.redact import redact_value

# model=qwen3_* set these for their models, so they are not the author's choice and are not listed.
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def unused(config: Config, settings: CreditSettings) -> list[str]:
    """Returns ``key=value`` for keys that differ from their default and that the chosen pipeline does not read."""
    lines = []
    for section in (Algorithm, PolicyLoss, Search):
        chosen = read_section(section, config)
        for key in keys_of(section):
            value = chosen
            for part in key.path:
                value = getattr(value, part)
            if key.read is None or key.read(settings) or not _chosen(config, key.name, value, key.default):
                continue
            lines.append(f"{key.name}={key.shown(value) if key.shown else redact_value('', value)}")
    return lines


def _chosen(config: Config, name: str, value, default) -> bool:
    """Did the run's author set the value?"""
    if name == "algorithm.info_gain_template":
        return value not in (default, select(config, "lab.template"))
    if name == "algorithm.info_gain_prefix":
        return value not in (default, EMPTY_THOUGHT)
    if name == "algorithm.uncertainty_kind":
        return (canonical_kind(value) or value) != default
    return value != default


def without_effect(config: Config, credit: CreditSettings) -> list[str]:
    """Returns the parts that are switched on and, with these settings, change no number of this run."""
    a, transform, idle = credit.algorithm, reads.transform(credit), []
    if transform.weighted and a.gtpo.beta == 0:
        idle.append("algorithm.gtpo.beta=0: every token has weight 1")
    if transform.amplified and a.hicra.alpha == 0:
        idle.append("algorithm.hicra.alpha=0: planning tokens are not amplified")
    if transform.masked and not 0 < a.entropy_mask.rho < 1:
        idle.append(f"algorithm.entropy_mask.rho={a.entropy_mask.rho:g}: no token is masked")
    where = "the clip range only" if credit.dynamic_clip else "nothing"
    if credit.scores_gain and reads.rescaled(credit) and a.adv_rescale_alpha == 0:
        idle.append(f"algorithm.adv_rescale_alpha=0: gains act on {where}")
    if credit.scores_gain and a.info_gain_curriculum.gain == (0, 0):
        idle.append(f"algorithm.info_gain_curriculum.gain=[0, 0]: gains act on {where}")
    if credit.dynamic_clip and credit.clip_beta == 0:
        idle.append("policy_loss.clip_beta=0: every turn has the same clip range")
    if select(config, f"{LOSS}.loss_mode") == "geo_mean" and (a.turn_mode.name != "none" or a.token_level):
        idle.append(
            "policy_loss.loss_mode=geo_mean: it averages the advantages of a trajectory's tokens; where in the trajectory "
            "credit falls changes nothing"
        )
    steps = config.trainer.total_training_steps
    if steps is not None:
        idle += without_effect_in(credit, steps, f"trainer.total_training_steps={steps}")
        idle += probe_without_effect(config.probe.every, steps, f"trainer.total_training_steps={steps}")
        idle += keep_without_effect(config.keep_checkpoints, steps, f"trainer.total_training_steps={steps}")
    if not config.search.max_searches and config.search.url:
        idle.append("search.url: with search.max_searches=0 nothing is searched")
    if (column := config.data.get("reward_fn_key")) != "data_source":
        idle.append(f"data.reward_fn_key={column}: verl reads the column data_source all the same")
    if select(config, MOST) and not tools_given(config) and not select(config, LISTED):
        idle.append(f"{MOST}={select(config, MOST)}: {AGENT_NAME} has search.max_searches+1 turns")
    return [
        *idle,
        *correction_without_effect(config),
        *trainer_mode_without_effect(config),
        *overlong_unread(config),
    ]


def without_effect_in(credit: CreditSettings, steps: int, source: str) -> list[str]:
    """Returns the parts that begin after the last of ``steps``. ``source``: the source of that number.

    Where the data decide a run's length, the trainer calls this once the length is known.
    """
    idle, warm_up, every = [], credit.algorithm.info_gain_warmup_steps, credit.algorithm.info_gain_every
    if credit.uses_scorer and warm_up >= steps:
        idle.append(f"algorithm.info_gain_warmup_steps={warm_up}: no gain is measured in {source}")
    elif credit.uses_scorer and every > 1 and warm_up + every >= steps:
        idle.append(
            f"algorithm.info_gain_every={every}: gains are measured in step {warm_up + 1} alone of {source}"
        )
    if reads.transform(credit).uses_sepa_controller:
        idle += sepa_without_effect(credit.algorithm.sepa.model_dump(), steps, source)
    return idle


def probe_without_effect(every: int, steps: int, source: str) -> list[str]:
    """Reports a probe without a measurement: an update is measured in the next step, so the last update never is."""
    return [f"probe.every={every}: no update is measured in {source}"] if every >= steps else []


def keep_without_effect(named: Sequence[int], steps: int, source: str) -> list[str]:
    """Reports named steps that the run does not have."""
    beyond = [step for step in named if step > steps]
    return (
        [f"keep_checkpoints={list(named)}: no step {', '.join(map(str, beyond))} in {source}"]
        if beyond
        else []
    )


def sepa_without_effect(sepa: dict, steps: int, source: str) -> list[str]:
    """Reports a lambda that stays 0, and a schedule=auto that equals the linear ramp."""
    auto = sepa["schedule"] == "auto"
    ramp, fall = first_ramp_step(sepa), first_auto_step(sepa) if auto else math.inf
    first = min(ramp, fall)
    if first == math.inf:
        return [f"algorithm.sepa.steps={sepa['steps']}, schedule={sepa['schedule']}: lambda is 0 for ever"]
    if first > steps:
        return [f"algorithm.sepa: lambda is 0 until step {first}, and {source}"]
    if auto and not auto_can_lead(sepa, steps):
        when = "never" if fall == math.inf else f"from step {fall} on at the earliest"
        return [
            f"algorithm.sepa.schedule=auto: lambda is the linear ramp's in every step, and {source}; with warmup="
            f"{sepa['warmup']}, ema_decay={sepa['ema_decay']:g} and var_threshold={sepa['var_threshold']:g} the fall of the "
            f"variance can act {when}, and counts only above the ramp. A smaller decay or warm-up, or steps=0"
        ]
    return []


def idle_lines(config: DictConfig, settings: CreditSettings) -> list[str]:
    """Returns the run's notes: unread keys, parts without effect, keys that are handed on unread, and warnings."""
    tree = resolved(config)
    keys = unused(tree, settings)
    lines = [f"unused keys: {', '.join(keys)}"] if keys else []
    lines += [f"without effect: {line}" for line in without_effect(tree, settings)]
    if others := handed_on(config):
        lines.append(f"handed on as they are, and nothing here reads them: {', '.join(others)}")
    return lines + [f"warning: {line}" for line in warnings_of(tree)]
