"""Describes the stages of a configuration's pipeline for `explain`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_credit.cli.train.trial_row import kept_when, store_folder
from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys import AUTO, Algorithm, reads
from verl_credit.config.settings import INFO_GAIN, CreditSettings
from verl_credit.credit import REGISTRY
from verl_credit.credit.plugins.load import origin
from verl_credit.credit.token.token_transforms import TRANSFORMS
from verl_credit.credit.token.uncertainty import canonical_kind
from verl_credit.errors import PreflightError, printable, show_value
from verl_credit.names import ENV_AGENT
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


def explanation(name: str, config: DictConfig, values: bool = False, size: str = "") -> str:
    """Returns the text of `explain`. ``values``: it lists every value that is not the default; else their number. ``size``:
    the line about a step's rollouts (`step_size_line`)."""
    settings = CreditSettings.from_config(config)
    lines = [f"{name}: {settings.banner()}", ""]
    for number, stage in enumerate(stages(config, settings), 1):
        lines += [f"{number}. {stage.level}: {stage.name}", f"     {stage.says}", f"     reads {stage.reads}"]
        lines += [f"     costs {stage.cost}"] if stage.cost else []
    lines += [
        "",
        *first_prompt(config),
        *filter(None, [size]),
        family_line(config),
        *value_lines(config, values),
        *idle_lines(config, settings),
    ]
    lines += [f"trial: a row in {store_folder(config) / TABLE}, {kept_when(config)}"]
    lines += ["checked before the start: " + ", ".join(check.name for check in before_training(config))]
    if auto := [f"{key}={AUTO}" for key in (FORMAT, AT_ONCE) if OmegaConf.select(config, key) == AUTO]:
        lines += [f"decided before the start, by the model's chat template: {', '.join(auto)}"]
    lines += ["missing before it can run: " + (", ".join(missing(config)) or "nothing")]
    return "\n".join(map(printable, [*lines, *goes_on(config)]))


def first_prompt(config: DictConfig) -> list[str]:
    """The messages of the first row, where rollouts are in an environment and the rows are here."""
    named = OmegaConf.select(config, DATA[0]) or [""]
    file = Path(named if isinstance(named, str) else named[0]).expanduser()
    if OmegaConf.select(config, DEFAULT) != ENV_AGENT or not file.is_file():
        return []
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile  # here, because other commands need none of it

    key = config.data.prompt_key
    try:
        first = next(ParquetFile(file).iter_batches(1, columns=[key]), None)
    except (OSError, ArrowException) as error:
        return [f"{file} cannot be read as parquet: {error}"]
    messages = (
        first.to_pylist()[0].get(key) if first else None
    )  # without it, the checks before a start name the file
    said = [
        f"    {line}"
        for message in messages or ()
        for line in f"{message['role']}: {message['content']}".splitlines()
    ]
    return [f"the first prompt of {file}:", *said] if said else []


def stages(config: DictConfig, settings: CreditSettings) -> Iterator[Stage]:
    """Yields the stages in the order in which they act."""
    if (given := settings.environment).path is not None:
        kwargs = " ".join(f"{name}={value}" for name, value in redact_value("", given.kwargs).items())
        rows = "" if given.window is None else f", each a row with the last {given.window} in its prompt"
        says = f"{kwargs}  [action={given.action} outcome={given.outcome}; at most {given.max_steps} steps{rows}]"
        yield Stage("environment", given.path, says, "the policy's turns, each of which is a step")
    if settings.turn_estimator:
        yield from _signals(config, settings)
        yield from _credit(settings)
    else:
        says = "verl's own estimator, one advantage for all turns of a trajectory or a critic's values; off: turn credit "
        says += "(turn signals, gains, modes, the clip by turn) and token transforms"
        yield Stage("advantage", f"verl's {settings.algorithm.adv_estimator}", says, "verl's batch")
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
        # verl's prompt_key is not a secret, a user's api_key is
        shown = redact_value(key.rpartition(".")[2] if own else "", value)
        lines.append(f"  {key:<{width}}  {show_value(shown)}   ({was})")
    return [*lines, ""]


def missing(config: DictConfig) -> list[str]:
    """Returns the inputs without a value and the absent files."""
    empty = without_value(config)
    inputs = with_expectations(empty)
    for key in () if world_of(config) is not None else (*DATA, MODEL):
        value = None if key in empty else OmegaConf.select(config, key)
        for path in map(str, value) if OmegaConf.is_list(value) else [] if value is None else [str(value)]:
            # Data are files; a model may also be a name on the hub.
            local = key in DATA or path.startswith(("/", ".", "~"))
            if local and not os.path.exists(os.path.expanduser(path)):
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
    a, signals = settings.algorithm, settings.turn_signals
    if settings.scores_gain:
        scorer = SCORERS[a.info_gain_scorer]
        says = f"what a search adds to p = exp(mean log-prob of the gold answer's tokens); aliases={a.info_gain_aliases} "
        says += f"context={a.info_gain_context} first_turn={a.info_gain_first_turn}"
        form = f"template={a.info_gain_template!r} prefix={a.info_gain_prefix!r}"
        sees = f"the {'reference' if scorer.frozen else 'policy'}; {form}"
        yield Stage("information gain", a.info_gain_type, says, sees, scorer.says(config, settings))
    for name in signals:
        if name != INFO_GAIN:
            signal = find_signal(name, a.turn_signal_params)
            says = signal.says or _yours(name, a.turn_signal_params)
            yield Stage("turn signal", name, says, signal.reads, signal.cost)
    if len(signals) > 1:
        parts = " + ".join(f"{weight:g} {name}" for name, weight in signals.items())
        says = f"{parts}, each z-scored over its question's turns"
        yield Stage("turn reward", "sum", says, "the turn signals")


def _credit(settings: CreditSettings) -> Iterator[Stage]:
    a = settings.algorithm
    if a.algorithm_mode:
        sees = "rewards, log-probs, entropies, planning mask, sepa lambda"
        says = _yours(a.algorithm_mode, a.algorithm_params)
        yield Stage("whole pipeline", a.algorithm_mode, says, sees, PYTHON_LISTS)
        return
    if a.canonical_transform:
        yield _registered("canonical", a.transform_mode)
        return
    if a.advantage_mode == "grpo" and a.turn_mode.compares:
        says = "inside the turn level, which normalises outcomes itself"
        yield Stage("outcome", "grpo", says, "rewards, groups")
    elif a.turn_mode.compares:
        yield _registered("outcome", a.advantage_mode, a.advantage_params)
    if reads.valued(settings):
        provider = provider_of(settings)
        yield Stage("values", provider.name, provider.says, "the rows", provider.cost)
    mode = a.turn_mode
    says = mode.equation if ("turn", mode.name) in REGISTRY else origin(mode.name)
    yield Stage("turn", mode.name, f"{says}  [{_options(settings)}]", ", ".join(mode.reads))
    if a.own_transform:
        sees, says = f"outcome advantages, {a.uncertainty_kind}", _yours(a.transform_mode, a.transform_params)
        yield Stage("token", a.transform_mode, says, sees, PYTHON_LISTS)
    elif a.transform_mode != "none":
        yield from _token(a)


def _options(settings: CreditSettings) -> str:
    """The options of the turn mode as this run sets them, the state that defines its anchors, and its values."""
    a, mode = settings.algorithm, settings.algorithm.turn_mode
    chosen = redact_value("", {**mode.options, **settings.turn_options})
    for elsewhere in ("outcome_operator", "gain_scale", "outcome_scale"):
        chosen.pop(elsewhere, None)
    chosen |= {"turn_anchor": a.turn_anchor} if reads.anchored(settings) else {}
    chosen |= {"turn_values": a.turn_values} if "value_B_K1" in mode.tables else {}
    chosen |= {"tied_groups": a.tied_groups}
    return " ".join(f"{name}={value}" for name, value in chosen.items())


def _token(a: Algorithm) -> Iterator[Stage]:
    transform, kind, notes = TRANSFORMS[a.transform_mode], canonical_kind(a.uncertainty_kind), []
    if transform.weighted:
        source = "entropies" if kind == "shannon_entropy" else "old_log_probs"
        cost = "" if kind else PYTHON_LISTS
        says = "h of every token the policy wrote"
        yield Stage("uncertainty", kind or a.uncertainty_kind, says, source, cost)
        notes.append(f"beta={a.gtpo.beta:g}")
    if transform.needs_planning:
        says, text = "which tokens plan rather than execute", "the decoded text of every trajectory"
        yield Stage("planning mask", a.planning.detector, says, text)
    if transform.uses_sepa_controller:
        sepa = a.sepa
        says = f"lambda from 0 to 1 over {sepa.steps} steps after {sepa.delay_steps}; correct_rate_gate="
        says += f"{sepa.correct_rate_gate:g} ramp_from={sepa.ramp_from}"
        yield Stage("sepa controller", sepa.schedule, says, "the step, outcomes, h over execution tokens")
    notes += [f"hicra alpha={a.hicra.alpha:g}"] if transform.amplified else []
    notes += [f"rho={a.entropy_mask.rho:g}"] if transform.masked else []
    yield _registered("token", a.transform_mode, note=" ".join(notes))


def _loss(config: DictConfig, settings: CreditSettings) -> Stage:
    if own := own_loss(config):
        modules = ", ".join(own_modules(config))
        says = f"yours, not verl's: `train` asks verl for it once {modules} is imported, or ends there"
        return Stage("loss", own, says, "log-probs, advantages")
    actor, beta = config.actor_rollout_ref.actor, settings.clip_beta
    level = "verl's own ratio" if settings.loss is None else f"ratio per {settings.ratio_level}"
    says = f"{level}, clip range [1 - {actor.clip_ratio_low}, 1 + {actor.clip_ratio_high}]"
    says += f", times the turn's scale in (1 - {beta:g}, 1 + {beta:g})" if settings.dynamic_clip else ""
    sees = "log-probs, advantages, turn ids"
    return Stage("loss", actor.policy_loss.loss_mode, says, sees, "a pass over the logits")


def _registered(level: str, name: str, params: dict | None = None, note: str = "") -> Stage:
    operator = REGISTRY.get((level, name))
    if operator is None:
        return Stage(level, name, _yours(name, params), "rewards of a prompt", PYTHON_LISTS)
    says = operator.equation + (f"  [{note}]" if note else "")
    return Stage(level, name, says, ", ".join(operator.reads) or "the turns' advantages")


def _yours(name: str, params: dict | None) -> str:
    return f"{origin(name)}; params={redact_value('', params)}"
