"""The notes at the start of a run: unread keys, features without effect, and settings that are probably mistakes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from verl_credit.config.fit import DEFAULT, MOST, turns_at_most
from verl_credit.config.keys import LOSS, Algorithm, PolicyLoss, chosen, read_section, reads
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.token.sepa_controller import auto_can_lead, first_auto_step, first_ramp_step
from verl_credit.credit.token.uncertainty import canonical_kind
from verl_credit.names import AGENT_NAME, AGENTS, ENV_AGENT, LOSS_MODE
from verl_credit.policy.families import SCORER
from verl_credit.precision import cpu_precision
from verl_credit.recipe.agent_loops import LISTED, MULTI_TURN, may_call, tools_given
from verl_credit.recipe.decisions import COMPUTES_IN, FULL, compute_dtype
from verl_credit.recipe.default_credit import LAM, NAMED_LAM
from verl_credit.recipe.family import chosen_scorer
from verl_credit.recipe.rules.engines import overlong_unread
from verl_credit.recipe.rules.known import handed_on
from verl_credit.recipe.rules.trainer_mode import correction_without_effect, rollouts_too_old
from verl_credit.recipe.step_size import StepSize

_PAGES = "returns pages alone, and search.max_page_chars cuts them"
SEARCH_ALONE = {
    MOST: (None, "has search.max_searches+1 turns"),
    f"{MULTI_TURN}.max_tool_response_length": (1_000_000, _PAGES),
    f"{MULTI_TURN}.tool_response_truncate_side": ("middle", _PAGES),
}
"""Keys that the search alone does not read: the default, and why."""
HELD_OUT = "actor_rollout_ref.rollout.val_kwargs"
DRAWN = {"temperature": 0, "top_p": 1.0, "top_k": -1, "do_sample": False}
"""verl's keys of held-out sampling, with their defaults: our modes of evaluation decide it (evaluation.modes)."""
UNCERTAINTY = Algorithm.model_fields["uncertainty_kind"].default
CHARACTERS = 4  # English has about so many per token
MEAN_RATIOS, WIDE_FOR_MEANS = ("turn", "sequence"), 0.1
"""The levels whose ratio is a mean over tokens, and the clip range from which on such a ratio is hardly ever clipped."""


def unused(config: DictConfig, settings: CreditSettings) -> list[str]:
    """Returns ``key=value`` for keys that differ from their default and that the chosen pipeline does not read."""
    decided = {
        SCORER: chosen_scorer(config),
        "algorithm.info_gain_template": select(config, "lab.template"),
        LAM: NAMED_LAM,
    }
    if canonical_kind(kind := settings.algorithm.uncertainty_kind) == UNCERTAINTY:
        decided["algorithm.uncertainty_kind"] = kind
    values = chosen(settings.algorithm, read_section(PolicyLoss, config), settings.search)
    idle = ((key, value) for key, value in values if not key.is_read(settings))
    return [key.written(value) for key, value in idle if value != decided.get(key.name, key.default)]


def without_effect(config: DictConfig, credit: CreditSettings) -> list[str]:
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
        idle.append("policy_loss.loss_mode=geo_mean: it averages the advantages of a trajectory's tokens")
    steps = config.trainer.total_training_steps
    if steps is not None:
        idle += without_effect_in(config, credit, steps, f"trainer.total_training_steps={steps}")
    if not config.search.max_searches and config.search.url:
        idle.append("search.url: with search.max_searches=0 nothing is searched")
    path, mode = select(config, "trainer.resume_from_path"), select(config, "trainer.resume_mode")
    if path and mode == "disable":
        idle.append(f"trainer.resume_from_path={path}: with trainer.resume_mode=disable nothing is resumed")
    drawn = {name: select(config, f"{HELD_OUT}.{name}") for name in DRAWN}
    idle += [
        f"{HELD_OUT}.{name}={value}: held-out answers are greedy, or drawn at temperature 1 from the whole distribution"
        for name, value in drawn.items()
        if value is not None and value != DRAWN[name]
    ]
    if not tools_given(config) and not select(config, LISTED):
        given = {key: select(config, key) for key in SEARCH_ALONE}
        set_ = {key: value for key, value in given.items() if value not in (None, 0, SEARCH_ALONE[key][0])}
        in_env = select(config, DEFAULT) == ENV_AGENT
        whys = {key: f"{AGENT_NAME} {why}" for key, (_, why) in SEARCH_ALONE.items()}
        in_env_why = f"{ENV_AGENT} calls no tool, and environment.max_steps limits its turns"
        idle += [f"{key}={value}: {in_env_why if in_env else whys[key]}" for key, value in set_.items()]
    return [*idle, *correction_without_effect(config), *overlong_unread(config)]


def without_effect_in(config: DictConfig, credit: CreditSettings, steps: int, source: str) -> list[str]:
    """Returns the parts that begin after the last of ``steps``. ``source``: the source of that number.

    Where the data decide a run's length, the trainer calls this once the length is known.
    """
    idle, warm_up, every = [], credit.algorithm.info_gain_warmup_steps, credit.algorithm.info_gain_every
    if credit.scores_gain and warm_up >= steps:
        idle.append(f"algorithm.info_gain_warmup_steps={warm_up}: no gain is measured in {source}")
    elif credit.scores_gain and every > 1 and warm_up + every >= steps:
        only = f"gains are measured in step {warm_up + 1} alone of {source}"
        idle.append(f"algorithm.info_gain_every={every}: {only}")
    if reads.transform(credit).uses_sepa_controller:
        idle += _sepa_without_effect(credit.algorithm.sepa.model_dump(), steps, source)
    if config.probe.every >= steps:  # an update is measured in the next step, so the last update never is
        idle.append(f"probe.every={config.probe.every}: no update is measured in {source}")
    if beyond := [step for step in config.keep_checkpoints if step > steps]:
        steps_beyond = f"no step {', '.join(map(str, beyond))} in {source}"
        idle.append(f"keep_checkpoints={list(config.keep_checkpoints)}: {steps_beyond}")
    return idle


def _sepa_without_effect(sepa: dict, steps: int, source: str) -> list[str]:
    """Reports a lambda that stays 0, and a schedule=auto that equals the linear ramp."""
    auto = sepa["schedule"] == "auto"
    ramp, fall = first_ramp_step(sepa), first_auto_step(sepa) if auto else math.inf
    first = min(ramp, fall)
    if first == math.inf:
        return [f"algorithm.sepa.steps={sepa['steps']}, schedule={sepa['schedule']}: lambda is 0 for ever"]
    if first > steps:
        return [f"algorithm.sepa: lambda is 0 until step {first}, and {source}"]
    if auto and not auto_can_lead(sepa, steps):
        when = "never" if fall == math.inf else f"from step {fall} on"
        told = f"lambda is the linear ramp's in every step, and {source}; auto can act {when}"
        return [f"algorithm.sepa.schedule=auto: {told}"]
    return []


def idle_lines(config: DictConfig, settings: CreditSettings) -> list[str]:
    """Returns the run's notes: unread keys, parts without effect, keys that are handed on unread, and warnings."""
    keys = unused(config, settings)
    lines = [f"credit: {config.credit_reason}"] if config.credit_reason else []
    lines += [f"unused keys: {', '.join(keys)}"] if keys else []
    lines += [f"without effect: {line}" for line in without_effect(config, settings)]
    if others := handed_on(config):
        lines.append(f"handed on as they are, and nothing here reads them: {', '.join(others)}")
    found = [*warnings_of(config), *_of_filter(config, settings)]
    return lines + [f"warning: {line}" for line in found]


def _of_filter(config: DictConfig, settings: CreditSettings) -> Iterator[str]:
    """verl's buffer drops a group whose metric is the same in all rollouts, before there are advantages."""
    key = "algorithm.filter_groups"
    if select(config, f"{key}.enable") and (reads.valued(settings) or settings.turn_signals):
        metric, mode = select(config, f"{key}.metric"), settings.algorithm.info_gain_norm_mode
        yield (
            f"{key}.enable=true throws away every question whose rollouts have the same {metric}, though their turns have "
            f"credit by algorithm.info_gain_norm_mode={mode}; training/filter_groups/evicted_samples counts them"
        )


def warnings_of(config: DictConfig) -> list[str]:
    """Returns a sentence with keys and values for every setting that is allowed and is probably a mistake."""
    return [*_of_updates(config), *_of_rollouts(config), *_of_precision(config), *rollouts_too_old(config)]


def _of_updates(config: DictConfig) -> Iterator[str]:
    actor, size = config.actor_rollout_ref.actor, StepSize.of(config)
    if size is not None and size.updates == 1:
        yield (
            f"the clip can never act: actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} and "
            f"ppo_epochs={actor.ppo_epochs} make one update a step of data.train_batch_size={size.questions}; "
            "every ratio is 1"
        )
    loss, high = actor.policy_loss, max(actor.clip_ratio_low, actor.clip_ratio_high)
    if loss.loss_mode == LOSS_MODE and loss.ratio_level in MEAN_RATIOS and high >= WIDE_FOR_MEANS:
        yield (
            f"actor_rollout_ref.actor.clip_ratio_low={actor.clip_ratio_low}, clip_ratio_high={actor.clip_ratio_high}: "
            f"with {LOSS}.ratio_level={loss.ratio_level} the ratio is a mean over many tokens, which hardly leaves that "
            f"range. Set .003 and .004, or {LOSS}.ratio_level=token"
        )


def _of_rollouts(config: DictConfig) -> Iterator[str]:
    rollout, search, tokens = config.actor_rollout_ref.rollout, config.search, config.data.max_response_length
    cut = [f"top_p={rollout.top_p}"] if rollout.top_p < 1 else []
    cut += [f"top_k={rollout.top_k}"] if rollout.top_k > 0 else []
    if cut:
        yield (
            f"actor_rollout_ref.rollout.{', '.join(cut)}: rollouts are drawn from a truncated distribution, and ratios are "
            "off by the mass that was cut. Unbiased: top_p=1, top_k=-1"
        )
    limit, most = turns_at_most(config)
    turns, searches = (most or 0) * search.max_new_tokens, search.max_searches
    results = searches * math.ceil(search.topk * search.max_page_chars / CHARACTERS)
    if select(config, DEFAULT) in (None, *AGENTS) and (most or 0) > 1 and turns + results > tokens:
        pages = f"search.topk={search.topk} pages of max_page_chars={search.max_page_chars}, {CHARACTERS} characters a token"
        more = f"results ({pages}) about {results} more" if searches else "observations come on top"
        yield (
            f"data.max_response_length={tokens} does not hold all turns at full length: {limit}={most} of "
            f"search.max_new_tokens={search.max_new_tokens} are {turns} tokens, and {more}. Rows that do not fit end "
            "without an answer (credit/stop/length)"
        )
    manager = config.reward.reward_manager
    if manager.source != "register" and may_call(config):
        yield (
            f"reward.reward_manager.source={manager.source}: a manager of yours has to hand tool_extra_fields to the reward "
            "function; without them an answer in what a tool returns counts as the policy's"
        )


def _of_precision(config: DictConfig) -> Iterator[str]:
    if (dtype := compute_dtype(config)) in FULL:
        return
    if config.probe.every:
        yield (
            f"probe.every={config.probe.every}: {COMPUTES_IN}={dtype}, whose rounding can be larger than the change of "
            "entropy that one update makes (credit/probe/delta_h); fp32 has less"
        )
    if config.trainer.device == "cpu" and cpu_precision() in FULL:
        yield (
            f"{COMPUTES_IN}={dtype}: this CPU computes many times slower in it than in fp32; set it to fp32, and "
            "actor_rollout_ref.rollout.dtype to float32"
        )
