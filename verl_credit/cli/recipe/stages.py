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
from verl_credit.credit.plugins.load import origin
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import canonical_kind
from verl_credit.errors import PreflightError, printable, show_value
from verl_credit.recipe.agent_loops import AT_ONCE, FORMAT
from verl_credit.recipe.compose import ABSENT, changed_values
from verl_credit.recipe.doctor.checks import before_training
from verl_credit.recipe.family import family_line
from verl_credit.recipe.rules.own import own_loss, own_modules
from verl_credit.recipe.unread import idle_lines
from verl_credit.recipe.world import DATA, MODEL, with_expectations, without_value, world_of
from verl_credit.records.lineage.trials import TABLE
from verl_credit.records.run.resume import resumes_from
from verl_credit.redact import redact_value
from verl_credit.turns.score.scorers import SCORERS
from verl_credit.turns.step.signals.built_in import find_signal
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
        yield Stage(
            "information gain",
            a.info_gain_type,
            f"what a search adds to p = exp(mean log-prob of the gold answer's tokens); aliases={a.info_gain_aliases} "
            f"context={a.info_gain_context} first_turn={a.info_gain_first_turn}",
            f"the {'reference' if scorer.frozen else 'policy'}; template={a.info_gain_template!r} "
            f"prefix={a.info_gain_prefix!r}",
            scorer.says(config, settings),
        )
    for name in settings.turn_signals:
        if name != INFO_GAIN:
            signal = find_signal(name, a.turn_signal_params)
            yield Stage(
                "turn signal",
                name,
                signal.says or _yours(name, a.turn_signal_params),
                signal.reads,
                signal.cost,
            )
    if len(settings.turn_signals) > 1:
        parts = " + ".join(f"{weight:g} {name}" for name, weight in settings.turn_signals.items())
        yield Stage(
            "turn reward", "sum", f"{parts}, each z-scored over its question's turns", "the turn signals"
        )


def _credit(config: DictConfig, settings: CreditSettings) -> Iterator[Stage]:
    pipeline = settings.algorithm
    if pipeline.algorithm_mode:
        sees = "rewards, log-probs, entropies, planning mask, sepa lambda"
        yield Stage(
            "whole pipeline",
            pipeline.algorithm_mode,
            _yours(pipeline.algorithm_mode, pipeline.algorithm_params),
            reads,
            PYTHON_LISTS,
        )
        return
    if pipeline.canonical_transform:
        yield _registered("canonical", pipeline.transform_mode)
        return
    if pipeline.advantage_mode == "grpo":
        says = "inside the turn level, which normalises outcomes itself"
        yield Stage("outcome", "grpo", says, "rewards, groups")
    else:
        yield _registered("outcome", pipeline.advantage_mode, pipeline.advantage_params)
    if reads.valued(settings):
        provider = provider_of(settings)
        yield Stage("values", provider.name, provider.says, "the rows", provider.cost)
    mode = pipeline.turn_mode
    says = mode.equation if ("turn", mode.name) in REGISTRY else origin(mode.name)
    yield Stage("turn", mode.name, f"{says}  [{_options(settings)}]", ", ".join(mode.reads))
    if pipeline.own_transform:
        sees = f"outcome advantages, {pipeline.uncertainty_kind}"
        yield Stage(
            "token",
            pipeline.transform_mode,
            _yours(pipeline.transform_mode, pipeline.transform_params),
            sees,
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


def _token(a: Algorithm) -> Iterator[Stage]:
    transform, kind = TRANSFORMS[a.transform_mode], canonical_kind(a.uncertainty_kind)
    if transform.weighted:
        source = "entropies" if kind == "shannon_entropy" else "old_log_probs"
        cost = "" if kind else PYTHON_LISTS
        yield Stage(
            "uncertainty", kind or a.uncertainty_kind, "h of every token the policy wrote", source, cost
        )
    if transform.needs_planning:
        says, text = "which tokens plan rather than execute", "the decoded text of every trajectory"
        yield Stage("planning mask", a.planning.detector, says, text)
    if transform.uses_sepa_controller:
        sepa = a.sepa
        says = f"lambda from 0 to 1 over {sepa.steps} steps after {sepa.delay_steps}; correct_rate_gate="
        says += f"{sepa.correct_rate_gate:g} ramp_from={sepa.ramp_from}"
        yield Stage("sepa controller", sepa.schedule, says, "the step, outcomes, h over execution tokens")
    notes = {
        f"beta={a.gtpo.beta:g}": transform.weighted,
        f"hicra alpha={a.hicra.alpha:g}": transform.amplified,
        f"rho={a.entropy_mask.rho:g}": transform.masked,
    }
    note = " ".join(text for text, applies in notes.items() if applies)
    yield _registered("token", a.transform_mode, note=note)


def _loss(config: DictConfig, settings: CreditSettings) -> Stage:
    if own := own_loss(config):
        modules = ", ".join(own_modules(config))
        says = f"yours, not verl's: `train` asks verl for it once {modules} is imported, or ends there"
        return Stage("loss", own, says, "log-probs, advantages")
    actor = config.actor_rollout_ref.actor
    says = f"ratio per {settings.ratio_level}, clip range [1 - {actor.clip_ratio_low}, 1 + {actor.clip_ratio_high}]"
    if settings.dynamic_clip:
        says += f", times the turn's scale in (1 - {settings.clip_beta:g}, 1 + {settings.clip_beta:g})"
    return Stage(
        "loss", actor.policy_loss.loss_mode, says, "log-probs, advantages, turn ids", "a pass over the logits"
    )


def _registered(level: str, name: str, params: dict | None = None, note: str = "") -> Stage:
    operator = REGISTRY.get((level, name))
    if operator is None:
        return Stage(level, name, _yours(name, params), "rewards of a prompt", PYTHON_LISTS)
    says = operator.equation + (f"  [{note}]" if note else "")
    return Stage(level, name, says, ", ".join(operator.reads) or "the turns' advantages")


def _yours(name: str, params: dict | None) -> str:
    return f"{origin(name)}; params={redact_value('', params)}"
