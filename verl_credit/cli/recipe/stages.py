"""Describes the stages of a configuration's pipeline for `explain`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_credit.cli.train.trial_row import kept_when, store_folder
from verl_credit.config.keys import AUTO, Algorithm, reads
from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.credit import REGISTRY
from verl_credit.credit.operator import leave_one_out_factor
from verl_credit.credit.plugins.load import origin
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import canonical_kind
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import PreflightError, printable, show_value
from verl_credit.recipe.agent_loops import AT_ONCE, FORMAT
from verl_credit.recipe.compose import ABSENT, changed_values
from verl_credit.recipe.doctor.checks import before_training
from verl_credit.recipe.family import family_line
from verl_credit.recipe.rules.engines import STRATEGIES
from verl_credit.recipe.rules.own import own_loss, own_modules
from verl_credit.recipe.unread import idle_lines
from verl_credit.recipe.world import DATA, MODEL, with_expectations, without_value, world_of
from verl_credit.records.lineage.store import TABLE
from verl_credit.records.run.resume import resumes_from
from verl_credit.redact import redact_value
from verl_credit.turns.score.scorers import SCORERS
from verl_credit.turns.step.signals.known import find_signal
from verl_credit.turns.step.state_features import provider_of

PYTHON_LISTS = "Python lists, a call per prompt"


class Stage(NamedTuple):
    level: str
    name: str
    says: str
    reads: str
    cost: str = ""


def explanation(name: str, config: DictConfig, values: bool = False) -> str:
    """Returns the text of `explain`. ``values``: it lists every value that is not the default; else their number."""
    settings = CreditSettings.from_config(config)
    lines = [f"{name}: {settings.banner()}", ""]
    for number, stage in enumerate(stages(config, settings), 1):
        lines += [
            f"{number}. {stage.level}: {stage.name}",
            f"     {stage.says}",
            f"     reads {stage.reads}",
            *([f"     costs {stage.cost}"] if stage.cost else []),
        ]
    lines += ["", family_line(config), *value_lines(config, values), *idle_lines(config, settings)]
    lines += [f"trial: a row in {store_folder(config) / TABLE}, {kept_when(config)}"]
    lines += ["checked before the start: " + ", ".join(check.name for check in before_training(config))]
    if auto := [f"{key}={AUTO}" for key in (FORMAT, AT_ONCE) if OmegaConf.select(config, key) == AUTO]:
        lines += [f"decided before the start, by the model's chat template: {', '.join(auto)}"]
    lines += ["missing before it can run: " + (", ".join(missing(config)) or "nothing")]
    lines += goes_on(config)
    return "\n".join(map(printable, lines))


def stages(config: DictConfig, settings: CreditSettings) -> Iterator[Stage]:
    """Yields the stages in the order in which they act."""
    if not settings.turn_estimator:
        name = f"verl's {settings.algorithm.adv_estimator}"
        says = "verl's own estimator, one advantage for all turns of a trajectory or a critic's values; off: turn credit "
        says += "(turn signals, gains, modes, the clip by turn) and token transforms"
        yield Stage("advantage", name, says, "verl's batch")
    else:
        yield from _signals(config, settings)
        yield from _credit(config, settings)
    yield _loss(config, settings)


def value_lines(config: DictConfig, values: bool) -> list[str]:
    """The values that are neither verl's default nor, for our own keys, that of credit_defaults.yaml."""
    changed = changed_values(config)
    if not values:
        return [f"not the defaults of verl and verl_credit: {len(changed)} values (--values lists them)"]
    width = max((len(key) for key, _, _ in changed), default=0)
    lines = ["values that are not the default:"]
    for key, value, default in changed:
        own = default.value == ABSENT
        was = "a key of the recipe" if own else f"{default.of}: {show_value(default.value)}"
        named = (
            key.rpartition(".")[2] if own else ""
        )  # verl's prompt_key is not a secret, a user's api_key is
        lines.append(f"  {key:<{width}}  {show_value(redact_value(named, value))}   ({was})")
    return [*lines, ""]


def missing(config: DictConfig) -> list[str]:
    """Returns the inputs without a value and the absent files."""
    builds, empty = world_of(config) is not None, without_value(config)
    inputs = with_expectations(empty)
    for key in (*DATA, MODEL):
        value = None if key in empty else OmegaConf.select(config, key)
        for path in map(str, value) if OmegaConf.is_list(value) else [] if value is None else [str(value)]:
            # Data are files; a model may also be a name on the hub.
            local = key.startswith("data.") or path.startswith(("/", ".", "~"))
            if local and not builds and not os.path.exists(os.path.expanduser(path)):
                inputs.append(f"{key}={path} (not there)")
    return inputs


def goes_on(config: DictConfig) -> list[str]:
    """Returns a line about the checkpoint from which a start would go on; none where it begins at step 1."""
    if OmegaConf.is_missing(config, "run_dir"):
        return []
    try:
        place = resumes_from(config)
    except PreflightError as error:
        return [f"refused before the start: {error}"]
    return [] if place is None else [f"goes on from {place}"]


def _signals(config: DictConfig, settings: CreditSettings) -> Iterator[Stage]:
    """Yields the turn signals, and the rule that combines several into a turn reward."""
    a = settings.algorithm
    if settings.scores_gain:
        scorer = SCORERS[a.info_gain_scorer]
        by_row = "\\boxed{answer} or <answer>{answer}</answer>, by the row (auto)"
        written = by_row if a.info_gain_template == AUTO else repr(a.info_gain_template)
        before = "what the chat template writes there (auto)"
        if a.info_gain_prefix:
            written += f" after {before if a.info_gain_prefix == AUTO else repr(a.info_gain_prefix)}"
        yield Stage(
            "information gain",
            a.info_gain_type,
            f"p = exp(mean log-prob of the gold answer's tokens; aliases: {a.info_gain_aliases}), before the first search "
            f"and after each; gain = what a search added ({a.info_gain_context}, first_turn={a.info_gain_first_turn})",
            f"the gold answers as {written}, the {'reference' if scorer.frozen else 'policy'}",
            scorer.says(config, settings),
        )
    for name in settings.turn_signals:
        if name != INFO_GAIN:
            signal = find_signal(name, a.turn_signal_params)
            says = (
                signal.says or f"{origin(name)}; turn_signal_params={redact_value('', a.turn_signal_params)}"
            )
            yield Stage("turn signal", name, says, signal.reads, signal.cost)
    if len(settings.turn_signals) > 1:
        parts = " + ".join(f"{weight:g} {name}" for name, weight in settings.turn_signals.items())
        yield Stage(
            "turn reward", "sum", f"{parts}, each z-scored over its question's turns", "the turn signals"
        )


def _credit(config: DictConfig, settings: CreditSettings) -> Iterator[Stage]:
    pipeline = settings.algorithm
    if pipeline.algorithm_mode:
        yield Stage(
            "whole pipeline",
            pipeline.algorithm_mode,
            f"yours; algorithm_params={redact_value('', pipeline.algorithm_params)}",
            "rewards, log-probs, entropies, planning mask, sepa lambda",
            PYTHON_LISTS,
        )
        return
    if pipeline.canonical_transform:
        yield _registered("canonical", pipeline.transform_mode)
        return
    if not pipeline.turn_mode.any_outcome_operator:
        says = "inside the turn level, which normalises outcomes itself"
        yield Stage("outcome", "grpo", says, "rewards, groups")
    elif pipeline.advantage_mode == "grpo" and (
        says := outcome_formula(pipeline.turn_mode, settings.turn_options)
    ):
        yield Stage("outcome", "grpo", says, "rewards, groups")
    else:
        own = f"f(rewards, {redact_value('', pipeline.advantage_params)})"
        yield _registered("outcome", pipeline.advantage_mode, own)
    if reads.valued(settings):
        provider = provider_of(settings)
        yield Stage("values", provider.name, provider.says, "the rows", provider.cost)
    turn = _registered("turn", pipeline.info_gain_norm_mode, note=_options(settings))
    if ("turn", pipeline.info_gain_norm_mode) not in REGISTRY:
        mode = pipeline.turn_mode
        turn = Stage("turn", mode.name, f"{origin(mode.name)}  [{_options(settings)}]", ", ".join(mode.reads))
    yield turn
    if pipeline.own_transform:
        yield Stage(
            "token",
            pipeline.transform_mode,
            f"yours; transform_params={redact_value('', pipeline.transform_params)}",
            f"outcome advantages, {pipeline.uncertainty_kind}",
            PYTHON_LISTS,
        )
    elif pipeline.transform_mode != "none":
        yield from _token(pipeline)


def _options(settings: CreditSettings) -> str:
    """The options of the turn mode as this run sets them, the state that defines its anchors, and its values."""
    a, mode = settings.algorithm, settings.algorithm.turn_mode
    chosen = {**mode.options, **settings.turn_options}
    elsewhere = ("outcome_operator", "gain_scale", "outcome_scale")
    options = [f"{name}={value}" for name, value in redact_value("", chosen).items() if name not in elsewhere]
    if "anchor_B_K1" in mode.tables:
        options += [f"turn_anchor={a.turn_anchor}"]
    if "value_B_K1" in mode.tables:
        options += [f"turn_values={a.turn_values}"]
    return " ".join([*options, f"tied_groups={a.tied_groups}"])


def _token(pipeline: Algorithm) -> Iterator[Stage]:
    transform = TRANSFORMS[pipeline.transform_mode]
    kind = canonical_kind(pipeline.uncertainty_kind)
    if transform.weighted:
        yield Stage(
            "uncertainty",
            kind or pipeline.uncertainty_kind,
            "h of every token the policy wrote",
            "entropies that come with old_log_probs" if kind == "shannon_entropy" else "old_log_probs",
            PYTHON_LISTS if kind is None else "",
        )
    if transform.needs_planning:
        says, cost = "which tokens plan rather than execute", "one pass over the text (evidence/credit)"
        text = "the decoded text of every trajectory"
        yield Stage("planning mask", pipeline.planning.detector, says, text, cost)
    if transform.uses_sepa_controller:
        sepa = pipeline.sepa
        yield Stage(
            "sepa controller",
            sepa.schedule,
            f"lambda from 0 to 1 over {sepa.steps} steps after {sepa.delay_steps}, 0 until the correct rate was once "
            f"{sepa.correct_rate_gate:g}; ramp_from={sepa.ramp_from}",
            "the step, outcomes, the variance of h over execution tokens",
        )
    notes = {
        f"beta={pipeline.gtpo.beta:g}": transform.weighted,
        f"hicra alpha={pipeline.hicra.alpha:g}": transform.amplified,
        f"rho={pipeline.entropy_mask.rho:g}": transform.masked,
    }
    note = " ".join(text for text, applies in notes.items() if applies)
    yield _registered("token", pipeline.transform_mode, note=note)


def _loss(config: DictConfig, settings: CreditSettings) -> Stage:
    if own := own_loss(config):
        modules = ", ".join(own_modules(config))
        says = f"yours, not verl's: `train` asks verl for it once {modules} is imported, or ends there"
        return Stage("loss", own, says, "log-probs, advantages")
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    clip = f"clip range [1 - {actor.clip_ratio_low}, 1 + {actor.clip_ratio_high}]"
    if settings.dynamic_clip:
        clip += f", times the turn's scale in (1 - {settings.clip_beta:g}, 1 + {settings.clip_beta:g})"
    if actor.strategy not in STRATEGIES:
        by = f"verl's {actor.strategy} engine (ours are for {' and '.join(STRATEGIES)})"
    elif model.get("use_fused_kernels", False):
        by = "verl's fused head"
    elif config.trainer.device == "cpu":
        by = "the project's log-probs"
    else:  # the run's machine is not known yet
        by = "flash-attn's loss where flash-attn is installed, else the project's log-probs; the start says which"
    says, reads = f"ratio per {settings.ratio_level}, {clip}", "log-probs, advantages, turn ids"
    return Stage("loss", actor.policy_loss.loss_mode, says, reads, f"a pass over the logits, by {by}")


def _registered(level: str, name: str, own: str = "", note: str = "") -> Stage:
    operator = REGISTRY.get((level, name))
    if operator is None:
        return Stage(level, name, f"yours; {own}", "rewards of a prompt", PYTHON_LISTS)
    says = operator.equation + (f"  [{note}]" if note else "")
    return Stage(level, name, says, ", ".join(operator.reads) or "the turns' advantages")


def outcome_formula(mode: TurnMode, given: dict) -> str | None:
    """The formula of R under a turn mode when ``advantage_mode`` is grpo; None where the mode declares none."""
    if mode.without_gains.factor is leave_one_out_factor:
        return "R_i = r_i - mean of the others' r; nothing is divided by a std"
    options = {**mode.options, **given}
    if not {"norm_by_std", "ddof", "variance_floor", "eps"} <= set(options):
        return None
    if not options["norm_by_std"]:
        return "R_i = r_i - mean(r); nothing is divided by a std"
    floor = f" + {options['variance_floor']:g}" if options["variance_floor"] else ""
    over = f"n - {options['ddof']}" if options["ddof"] else "n"
    return (
        f"R_i = (r_i - mean(r)) / (sqrt(sum((r - mean(r))^2) / ({over}){floor}) + {options['eps']:g}), n rows"
    )
