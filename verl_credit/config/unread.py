"""What a configuration sets and nothing reads, and what it switches on to no effect: said, so that nobody is misled."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.compose import LOSS
from verl_credit.config.correction import correction_without_effect
from verl_credit.config.keys import AUTO
from verl_credit.config.pipeline_settings import PipelineSettings
from verl_credit.config.reward_rules import overlong_unread
from verl_credit.config.sepa_effect import sepa_without_effect
from verl_credit.config.settings import CreditSettings
from verl_credit.config.warnings import doubts
from verl_credit.credit.outcome.outcome import OUTCOME_OPERATORS
from verl_credit.credit.token.token_transforms import TRANSFORMS, TokenTransform
from verl_credit.credit.token.uncertainty import canonical_kind
from verl_credit.names import LOSS_MODE

RESCALED = ("turn-group-v1d", "turn-group-unbiased")
SEPA_DEFAULTS = {
    "steps": 500,
    "schedule": "linear",
    "delay_steps": 50,
    "correct_rate_gate": 0.1,
    "ema_decay": 0.99,
    "var_threshold": 0.2,
    "warmup": 50,
    "ramp_from": "start",
}

# What model=qwen3_* say of their models, no choice of the run's author.
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
SEARCH_DEFAULTS = {
    "topk": 3,
    "max_page_chars": 1000,
    "timeout_s": 20.0,
    "max_retries": 2,
    "breaker_failures": 5,
    "breaker_pause_s": 5.0,
    "token_env": None,
    "index_fingerprint": None,
    "shuffle_seed": None,
}


def unused(config: DictConfig) -> list[str]:
    """``key=value`` of keys that differ from their default and that nothing of the chosen pipeline reads."""
    credit = CreditSettings.from_config(config)
    settings, transform = credit.pipeline, _transform(credit.pipeline)
    own = settings.algorithm_mode is not None or settings.own_transform
    gains, sepa = credit.scores_gain, own or transform.uses_sepa_controller
    ours = credit.turn_estimator
    kind = canonical_kind(settings.uncertainty_kind)
    divides = not settings.replaces_turns and (gains or settings.advantage_mode == "grpo")
    weighted, planned = own or transform.weighted, own or transform.needs_planning
    keys = [  # key, value, default, read?
        ("gtpo.beta", settings.gtpo_beta, 0.1, weighted),
        ("hicra.alpha", settings.hicra_alpha, 0.2, own or transform.amplified),
        ("entropy_mask.rho", settings.entropy_mask_rho, 0.2, transform.masked),
        ("uncertainty_kind", kind or settings.uncertainty_kind, "surprisal", weighted or settings.canonical),
        ("planning.detector", settings.detector, "grams", planned),
        ("planning.model", settings.planning_model, None, planned and settings.detector == "anchors"),
        ("planning.threshold", settings.planning_threshold, 0.02, planned and settings.detector == "anchors"),
        ("strategic_grams", settings.strategic_grams, None, planned and settings.detector == "grams"),
        ("canonical.population", settings.population, "all", settings.transform_mode == "gtpo_canonical"),
        ("canonical.entropy_clip", settings.entropy_clip, None, settings.canonical),
        ("advantage_params", settings.advantage_params, {}, settings.advantage_mode not in OUTCOME_OPERATORS),
        ("transform_params", settings.transform_params, {}, settings.own_transform or kind is None),
        ("algorithm_params", settings.algorithm_params, {}, settings.algorithm_mode is not None),
        ("tied_groups", settings.tied_groups, "keep", ours and not settings.replaces_turns),
        ("info_gain_on_error", credit.info_gain_on_error, "raise", gains),
        ("info_gain_scorer", credit.info_gain_scorer, "branch", gains),
        ("info_gain_aliases", credit.info_gain_aliases, "max", gains),
        ("info_gain_every", credit.info_gain_every, 1, gains),
        ("info_gain_warmup_steps", credit.info_gain_warmup_steps, 0, gains),
        ("info_gain_curriculum.gain", credit.curriculum_gain, (1.0, 1.0), gains),
        ("info_gain_curriculum.outcome", credit.curriculum_outcome, (1.0, 1.0), gains),
        ("info_gain_type", credit.info_gain_type, "prob_diff", gains),
        ("info_gain_first_turn", credit.info_gain_first_turn, "prior", gains),
        ("info_gain_context", credit.info_gain_context, "observation", gains),
        (
            "info_gain_template",
            credit.info_gain_template,
            OmegaConf.select(config, "lab.template") or AUTO,
            gains,
        ),
        ("info_gain_prefix", credit.info_gain_prefix.replace(EMPTY_THOUGHT, ""), "", gains),
        ("norm_adv_by_std_in_grpo", credit.norm_adv_by_std_in_grpo, True, not ours or divides),
        ("gamma", credit.gamma, 1.0, gains or not ours),
        ("adv_rescale_alpha", credit.adv_rescale_alpha, 0.3, credit.info_gain_norm_mode in RESCALED),
    ]
    for name, default, reader in (
        ("alpha_1", 1.0, "gtpo_canonical"),
        ("alpha_2", 0.1, "gtpo_canonical"),
        ("beta_1", 1.0, "grpo_s"),
        ("beta_2", 0.1, "grpo_s"),
    ):
        read = settings.transform_mode == reader
        keys.append((f"canonical.{name}", getattr(settings, name), default, read))
    keys += [(f"sepa.{name}", settings.sepa[name], default, sepa) for name, default in SEPA_DEFAULTS.items()]
    keys = [(f"algorithm.{key}", *rest) for key, *rest in keys] + [*_loss_keys(config), *_search_keys(config)]
    return [f"{key}={value}" for key, value, default, read in keys if not read and value != default]


def _loss_keys(config: DictConfig) -> Iterator[tuple]:
    loss = config.actor_rollout_ref.actor.policy_loss
    ours = loss.loss_mode == LOSS_MODE
    yield f"{LOSS}.ratio_level", loss.get("ratio_level"), "turn", ours
    yield f"{LOSS}.clip_beta", loss.get("clip_beta"), 0.3, ours and loss.dynamic_clip


def _search_keys(config: DictConfig) -> Iterator[tuple]:
    for name, default in SEARCH_DEFAULTS.items():
        yield f"search.{name}", config.search[name], default, config.search.max_searches > 0


def without_effect(config: DictConfig) -> list[str]:
    """Parts that are switched on and, as they are set, change no number of this run."""
    credit = CreditSettings.from_config(config)
    settings, transform, found = credit.pipeline, _transform(credit.pipeline), []
    if transform.weighted and settings.gtpo_beta == 0:
        found.append("algorithm.gtpo.beta=0: every token has weight 1")
    if transform.amplified and settings.hicra_alpha == 0:
        found.append("algorithm.hicra.alpha=0: planning tokens are not amplified")
    if transform.masked and not 0 < settings.entropy_mask_rho < 1:
        found.append(f"algorithm.entropy_mask.rho={settings.entropy_mask_rho:g}: no token is masked")
    where = "the clip range only" if credit.dynamic_clip else "nothing"
    if credit.scores_gain and credit.info_gain_norm_mode in RESCALED and credit.adv_rescale_alpha == 0:
        found.append(f"algorithm.adv_rescale_alpha=0: gains act on {where}")
    if credit.scores_gain and credit.curriculum_gain == (0, 0):
        found.append(f"algorithm.info_gain_curriculum.gain=[0, 0]: gains act on {where}")
    if credit.dynamic_clip and credit.clip_beta == 0:
        found.append("policy_loss.clip_beta=0: every turn has the same clip range")
    steps = config.trainer.total_training_steps
    if steps is not None:
        found += without_effect_in(credit, steps, f"trainer.total_training_steps={steps}")
    if not config.search.max_searches and config.search.url:
        found.append("search.url: with search.max_searches=0 nothing is searched")
    return [*found, *correction_without_effect(config), *overlong_unread(config)]


def without_effect_in(credit: CreditSettings, steps: int, said: str) -> list[str]:
    """Parts that begin only after the last of ``steps``. ``said``: where that number comes from.

    For runs whose length follows from their data the trainer asks, once it knows it.
    """
    found, warm_up = [], credit.info_gain_warmup_steps
    if credit.scores_gain and warm_up >= steps:
        found.append(f"algorithm.info_gain_warmup_steps={warm_up}: no gain is measured in {said}")
    elif credit.scores_gain and credit.info_gain_every > 1 and warm_up + credit.info_gain_every >= steps:
        found.append(
            f"algorithm.info_gain_every={credit.info_gain_every}: gains are measured in step {warm_up + 1} alone of {said}"
        )
    if _transform(credit.pipeline).uses_sepa_controller:
        found += sepa_without_effect(credit.pipeline.sepa, steps, said)
    return found


def idle_lines(config: DictConfig) -> list[str]:
    """Both, and what may not have been meant, as sentences for the run's notes."""
    keys = unused(config)
    lines = [f"set, and read by nothing here: {', '.join(keys)}"] if keys else []
    lines += [f"without effect: {line}" for line in without_effect(config)]
    return lines + [f"warning: {line}" for line in doubts(config)]


def _transform(settings: PipelineSettings) -> TokenTransform:
    return TRANSFORMS.get(settings.transform_mode, TokenTransform())
