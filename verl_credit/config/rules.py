"""Values and combinations of our keys, checked before anything heavy starts."""

from __future__ import annotations

import difflib
import math

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.config.budget import validate_budgets
from verl_credit.config.host_numbers import FOLDERS, HOST_NUMBERS, OR_NULL
from verl_credit.config.keys import AUTO, EVALUATION_MODES
from verl_credit.config.pipeline_rules import CHOICES as PIPELINE_CHOICES
from verl_credit.config.pipeline_rules import NUMBERS as PIPELINE_NUMBERS
from verl_credit.config.pipeline_rules import validate_pipeline
from verl_credit.config.rollout_rules import validate_rollout
from verl_credit.config.scorer_rules import SCORERS, validate_scorer
from verl_credit.credit.loss.policy_loss import RATIO_LEVELS
from verl_credit.credit.turn.info_gain import FIRST_TURN, INFO_GAIN_TYPES
from verl_credit.credit.turn.modes import ADAPTIVE, MODES
from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE, ROLLOUT_NAME, TRAINER_MODE
from verl_credit.search.settings import NUMBERS as SEARCH_NUMBERS
from verl_credit.search.settings import validate_search

LOSS = "actor_rollout_ref.actor.policy_loss"

CHOICES = {
    "algorithm.info_gain_norm_mode": tuple(MODES),
    "algorithm.info_gain_type": INFO_GAIN_TYPES,
    "algorithm.info_gain_first_turn": FIRST_TURN,
    "algorithm.info_gain_context": ("observation", "call"),
    "algorithm.info_gain_on_error": ("raise", "zero"),
    "algorithm.info_gain_aliases": ("max", "mean", "first"),
    "algorithm.info_gain_scorer": SCORERS,
    "trainer.v1.trainer_mode": (TRAINER_MODE,),
}
NUMBERS = {  # key: (smallest, largest, whole number?)
    "algorithm.gamma": (0.0, 1.0, False),
    "algorithm.adv_rescale_alpha": (0.0, math.inf, False),
    "algorithm.info_gain_every": (1, math.inf, True),
    "algorithm.info_gain_warmup_steps": (0, math.inf, True),
    "faults.max_failed_rollouts": (0.0, 1.0, False),
    "faults.max_tool_faults": (0.0, 1.0, False),
    "sample_trajectories": (0, 1000, True),
    "poll_interval_s": (1e-3, 60.0, False),
    "seed": (0, 2**31 - 1, True),
    "actor_rollout_ref.rollout.n": (1, math.inf, True),
    "data.train_batch_size": (1, math.inf, True),
}
FLAGS = ("algorithm.norm_adv_by_std_in_grpo", "search.require_schema")


def validate(config: DictConfig) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    for key, accepted in (CHOICES | PIPELINE_CHOICES).items():
        _one_of(config, key, accepted)
    for key, (low, high, whole) in (NUMBERS | HOST_NUMBERS | SEARCH_NUMBERS | PIPELINE_NUMBERS).items():
        _number(config, key, low, high, whole)
    for key, (low, high, whole) in OR_NULL.items():
        if _get(config, key) is not None:
            _number(config, key, low, high, whole, " or null")
    for key in FLAGS:
        _flag(config, key)
    for key in FOLDERS:
        _text(config, key)
    validate_search(config)
    if "lab" in config:
        _one_of(config, "lab.size", ("full", "tiny"))
    _evaluation_modes(config)
    _template(config)
    if _get(config, f"{LOSS}.loss_mode") == LOSS_MODE:
        _one_of(config, f"{LOSS}.ratio_level", RATIO_LEVELS)
        _flag(config, f"{LOSS}.dynamic_clip")
        _number(config, f"{LOSS}.clip_beta", 0.0, 1.0, False)
    _curriculum(config)
    _time_limit(config)
    _vllm_on_cpu(config)
    _lora_on_hf(config)
    _combinations(config)
    validate_scorer(config)
    _resolve(config)
    validate_pipeline(config)
    validate_rollout(config)
    validate_budgets(config)


def _combinations(config: DictConfig) -> None:
    estimator, mode = _get(config, "algorithm.adv_estimator"), _get(config, "algorithm.info_gain_norm_mode")
    ours = _get(config, f"{LOSS}.loss_mode") == LOSS_MODE
    dynamic = ours and _get(config, f"{LOSS}.dynamic_clip")
    if dynamic and (estimator != ADV_ESTIMATOR or mode not in ADAPTIVE):
        raise ConfigError(
            f"{LOSS}.dynamic_clip=true with algorithm.adv_estimator={estimator}, info_gain_norm_mode={mode}: only "
            f"{' and '.join(ADAPTIVE)} give turns a clip scale; elsewhere the switch would do nothing. "
            f"Set {LOSS}.dynamic_clip=false"
        )
    n = _get(config, "actor_rollout_ref.rollout.n")
    if estimator == ADV_ESTIMATOR and n < 2:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={n}: group-relative credit needs groups of at least 2"
        )
    batch, mini = (
        _get(config, "data.train_batch_size"),
        _get(config, "actor_rollout_ref.actor.ppo_mini_batch_size"),
    )
    if batch % mini:
        raise ConfigError(
            f"data.train_batch_size={batch} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}"
        )
    mode = _get(config, "algorithm.info_gain_norm_mode")
    if estimator == ADV_ESTIMATOR and _get(config, "search.max_searches") == 0 and mode != "none":
        raise ConfigError(
            f"search.max_searches=0 with algorithm.info_gain_norm_mode={mode}: without a tool there is one turn, and "
            "none that could have a gain; set info_gain_norm_mode=none"
        )
    turns, budget = _get(config, "search.max_searches") + 1, _get(config, "data.max_response_length")
    if turns * _get(config, "search.max_new_tokens") > budget:
        raise ConfigError(
            f"data.max_response_length={budget} cannot hold search.max_searches+1={turns} turns of "
            f"search.max_new_tokens={_get(config, 'search.max_new_tokens')}, what searches return not counted"
        )


def _evaluation_modes(config: DictConfig) -> None:
    modes = _get(config, "evaluation.modes")
    if not OmegaConf.is_list(modes) or not modes or any(mode not in EVALUATION_MODES for mode in modes):
        raise ConfigError(f"evaluation.modes={modes}: expected a list of {list(EVALUATION_MODES)}, not empty")


def _time_limit(config: DictConfig) -> None:
    hours = _get(config, "max_hours")
    if hours is None:
        return
    _number(config, "max_hours", 1e-3, math.inf, False)
    if _get(config, "trainer.save_freq") <= 0:
        raise ConfigError(
            f"max_hours={hours} with trainer.save_freq={_get(config, 'trainer.save_freq')}: the last step would be lost; "
            "set trainer.save_freq"
        )


def _vllm_on_cpu(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    extension = OmegaConf.select(rollout, "engine_kwargs.vllm.worker_extension_cls")
    if _get(config, "trainer.device") == "cpu" and rollout.name == "vllm" and extension is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm with trainer.device=cpu: with vLLM's own CPU products the first sync of "
            "weights waits for ever; add +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
            "verl_credit.host.cpu.vllm_extension.CPUWorkerExtension (docs/host.md)"
        )


def _lora_on_hf(config: DictConfig) -> None:
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    rank = model.get("lora_rank") or 0
    if rollout.name == ROLLOUT_NAME and rank > 0 and not OmegaConf.select(model, "lora.merge"):
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={rank} with actor_rollout_ref.rollout.name={ROLLOUT_NAME}: that engine "
            "takes whole weights, no adapters; set actor_rollout_ref.model.lora_rank=0"
        )


def _curriculum(config: DictConfig) -> None:
    for name in ("gain", "outcome"):
        key = f"algorithm.info_gain_curriculum.{name}"
        value = _get(config, key)
        ends = list(value) if OmegaConf.is_list(value) else []
        good = [
            e for e in ends if isinstance(e, int | float) and not isinstance(e, bool) and 0 <= e < math.inf
        ]
        if len(ends) != 2 or len(good) != 2:
            raise ConfigError(f"{key}={value}: expected [first step, last step], two numbers of at least 0")
        if ends != [1, 1] and _get(config, "algorithm.info_gain_norm_mode") == "turn-group":
            raise ConfigError(
                f"{key}={value} with algorithm.info_gain_norm_mode=turn-group: that mode normalises gains and outcome "
                "together; use another mode"
            )


def _template(config: DictConfig) -> None:
    template = _get(config, "algorithm.info_gain_template")
    if template != AUTO and "{answer}" not in str(template):
        raise ConfigError(
            f"algorithm.info_gain_template={template!r}: it must contain {{answer}}, or be {AUTO}"
        )
    prefix = _get(config, "algorithm.info_gain_prefix")
    if not isinstance(prefix, str) or "{answer}" in prefix:
        raise ConfigError(
            f"algorithm.info_gain_prefix={prefix!r}: expected the text between a context and algorithm.info_gain_template, "
            'or "" for none'
        )
    if prefix.strip() and prefix.strip() in template:
        raise ConfigError(
            f"algorithm.info_gain_prefix={prefix!r} with algorithm.info_gain_template={template!r}: the prefix would be "
            f"written twice; leave it out of the template, or set algorithm.info_gain_prefix=''"
        )


def _one_of(config: DictConfig, key: str, accepted) -> None:
    value = _get(config, key)
    if value not in accepted:
        near = difflib.get_close_matches(str(value), accepted, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{key}={value!r}{hint}: accepted are {', '.join(accepted)}")


def _number(config: DictConfig, key: str, low, high, whole: bool, others: str = "") -> None:
    value = _get(config, key)
    kind = int if whole else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kind)
        or not (low <= value <= high and math.isfinite(value))
    ):
        name = "a whole number" if whole else "a number"
        range_ = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
        raise ConfigError(f"{key}={value!r}: expected {name} {range_}{others}")


def _flag(config: DictConfig, key: str) -> None:
    value = _get(config, key)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r}: expected true or false")


def _text(config: DictConfig, key: str) -> None:
    value = _get(config, key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}={value!r}: expected a folder's name (put digits in quotes)")


def _get(config: DictConfig, key: str):
    try:
        return OmegaConf.select(config, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key} has no value: {error}") from error


def _resolve(config: DictConfig) -> None:
    """Every interpolation must resolve now, not in a worker."""
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
