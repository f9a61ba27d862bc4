"""Checks combinations of our keys, and of our keys with verl's, before anything heavy starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl_credit.address import loopback, urls_of
from verl_credit.config.engines import ENGINE, engine_of
from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys import AUTO, LOSS, OURS, VERLS, PolicyLoss, read_section, reads
from verl_credit.config.keys.section import Section
from verl_credit.config.resolved import Tree, data, leaves, select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.modes import modes_that
from verl_credit.errors import ConfigError
from verl_credit.names import TURN_AGENT
from verl_credit.recipe.agent_loops import may_call
from verl_credit.recipe.family import validate_family
from verl_credit.recipe.rules.engines import (
    validate_actor,
    validate_files,
    validate_loop,
    validate_rollout,
    validate_rows_fit,
    validate_turns_fit,
)
from verl_credit.recipe.rules.environment import validate_environment
from verl_credit.recipe.rules.estimator import validate_estimator
from verl_credit.recipe.rules.known import validate_homes, validate_keys, validate_older
from verl_credit.recipe.rules.own import validate_loss
from verl_credit.recipe.rules.pipeline import validate_pipeline
from verl_credit.recipe.rules.refusals import refuse
from verl_credit.recipe.rules.trainer_mode import (
    validate_correction,
    validate_entropy_probe,
    validate_trainer_mode,
)
from verl_credit.recipe.rules.turn_mode import MODE, validate_turn_mode, validate_turn_signals
from verl_credit.recipe.rules.turn_values import validate_turn_values
from verl_credit.recipe.step_size import BATCH, EACH, MINI_BATCH
from verl_credit.recipe.world import WORLDS
from verl_credit.records.run.resume import STEP
from verl_credit.redact import redact

WORD = 63  # bits of a whole number that tensors and floating-point arithmetic take; verl does not check


def validate(config: DictConfig) -> None:
    """Raises ConfigError for a fault, and ConfigErrors for several of one kind: of keys, then of values, then of
    combinations."""
    written = data(config, resolve=False)
    refuse((validate_older, validate_keys, validate_homes, _too_long), config, written)
    values = _resolved(config)
    refuse((_wrong_values,), config, values)
    refuse(RULES, config, CreditSettings.from_config(values))


def _too_long(config: DictConfig, written: Tree) -> Iterator[ConfigError]:
    # The lengths in data come first, because max_model_len=auto is made of them.
    values = sorted(leaves(written), key=lambda one: not one[0].startswith("data."))
    for key, value in values:
        if isinstance(value, int) and (bits := value.bit_length()) > WORD:
            use = f"expected a whole number of at most {WORD} bits"
            yield ConfigError(key=key, value=value, accepted=use, shown=f"a number of {bits} bits")
            return  # the other numbers may be made of it


def _wrong_values(config: DictConfig, values: Tree) -> Iterator[ConfigError]:
    for section in _sections(config):
        try:
            read_section(section, values)
        except ConfigError as error:
            yield error


def _resolved(config: DictConfig) -> Tree:
    """Resolves every interpolation, once, because none must fail later in a worker."""
    try:
        return data(config)
    except OmegaConfBaseException as error:
        refuse((_no_value,), config, error)
        raise


def _no_value(config: DictConfig, error: OmegaConfBaseException) -> None:
    for section in _sections(config):  # a declared key without a value comes before one that refers to it
        read_section(section, config)
    raise error


def _sections(config: DictConfig) -> list[type[Section]]:
    """Returns the sections to check, the world's first, because others refer to it; `PolicyLoss` is checked elsewhere."""
    own = [world.keys for world in WORLDS if world.section in config]
    return [section for section in (*own, *OURS, *VERLS) if section is not PolicyLoss]


def _reached_from_everywhere(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    nodes = config.trainer.nnodes
    if nodes == 1 or config.search.url is None or not config.search.max_searches:
        return
    for url in filter(loopback, urls_of(config.search)):
        use = "agent loops search from every node, and that address is each node itself; give the address by which all of "
        use += "them reach the server (verl-credit-retriever serve --host ADDRESS --allow-remote --token-file FILE)"
        yield ConfigError(key="search.url", value=redact(url), beside={"trainer.nnodes": nodes}, accepted=use)


def _combinations(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    ours, clip = settings.turn_estimator, f"{LOSS}.dynamic_clip"
    if settings.dynamic_clip and not (ours and settings.algorithm.turn_mode.scales_clip):
        use = f"only {modes_that('scales_clip')} give turns a clip scale; elsewhere it would do nothing. Set {clip}=false"
        yield ConfigError.of(config, clip, "algorithm.adv_estimator", MODE, accepted=use)
    if ours and select(config, EACH) < 2 and reads.grouped(settings):
        use = "that credit compares the rollouts of a question, at least 2; turn_gae with turn_values=features compares none"
        yield ConfigError.of(config, EACH, MODE, "algorithm.advantage_mode", accepted=use)
    batch, mini = (select(config, key) for key in (BATCH, MINI_BATCH))
    if batch % mini:
        message = f"{BATCH}={batch} is not a multiple of {MINI_BATCH}={mini}"
        yield ConfigError(message, key=BATCH, value=batch, accepted=f"a multiple of {mini}")
    if ours and not may_call(config) and select(config, MODE) != "none":
        use = "without a tool there is one turn, and none that could have a gain; set info_gain_norm_mode=none, or, for "
        use += f"tools of your own, {DEFAULT}={TURN_AGENT}"
        yield ConfigError.of(config, "search.max_searches", MODE, accepted=use)


def _steps(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    steps, save = "trainer.total_training_steps", "trainer.save_freq"
    if "total_training_steps" not in config.trainer:
        yield ConfigError(f"{steps} is missing: set it to null to train for trainer.total_epochs", key=steps)
    if config.max_hours is not None and config.trainer.save_freq <= 0:
        yield ConfigError.of(config, "max_hours", save, accepted=f"the last step would be lost; set {save}")
    if config.keep_checkpoints and config.trainer.get("del_local_ckpt_after_load"):
        use = "a resume from one of these steps would delete it; set it to false"
        yield ConfigError.of(config, "trainer.del_local_ckpt_after_load", "keep_checkpoints", accepted=use)


def _resume(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Checks that verl would read the path, and that it can read a step's number from it."""
    key, mode = "trainer.resume_from_path", select(config, "trainer.resume_mode")
    path, use = select(config, key), ""
    if mode == "resume_path" and not (path and STEP.fullmatch(Path(path).name)):
        use = "expected the folder of a saved step, RUN/checkpoints/global_step_N"
    elif mode == "auto" and path:
        use = "verl would go on from the newest step in trainer.default_local_dir; set resume_mode=resume_path, or no path"
    if use:
        yield ConfigError.of(config, key, "trainer.resume_mode", accepted=use)


def _weights(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Checks that the rollout engine can take the actor's weights."""
    model, engine, rank = "actor_rollout_ref.model", engine_of(config), "actor_rollout_ref.model.lora_rank"
    if not engine.adapters and (select(config, rank) or 0) > 0 and not select(config, f"{model}.lora.merge"):
        use = f"that engine takes whole weights, no adapters; set {rank}=0, or {model}.lora.merge=true"
        yield ConfigError.of(config, rank, ENGINE, accepted=use)
    megatrons = f"{model}.lora.rank"  # with which vLLM and the reference expect an adapter that is not there
    if (select(config, megatrons) or 0) > 0 and not (select(config, rank) or 0) > 0:
        use = f"verl's FSDP engine does not read it, and would train all weights; set {rank}"
        yield ConfigError.of(config, megatrons, rank, accepted=use)


def _gains(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    algorithm = settings.algorithm
    prefix, template = algorithm.info_gain_prefix, algorithm.info_gain_template
    if prefix != AUTO and prefix.strip() and prefix.strip() in template:
        key, beside = "algorithm.info_gain_prefix", {"algorithm.info_gain_template": repr(template)}
        use = f"the prefix would be written twice; leave it out of the template, or set {key}=''"
        yield ConfigError(key=key, value=prefix, shown=repr(prefix), beside=beside, accepted=use)
    for name, ends in algorithm.info_gain_curriculum:
        if ends != (1, 1) and not algorithm.turn_mode.curriculum:
            use = "that mode normalises gains and outcome together; use another mode"
            yield ConfigError.of(config, f"algorithm.info_gain_curriculum.{name}", MODE, accepted=use)


RULES: tuple[Callable[[DictConfig, CreditSettings], Iterable[ConfigError] | None], ...] = (
    validate_estimator, validate_files, validate_loop, validate_environment, validate_turn_mode,
    validate_turn_signals, validate_turn_values, validate_loss, _gains, _steps, _resume, _weights, _combinations,
    validate_turns_fit, _reached_from_everywhere, validate_family, validate_actor, validate_entropy_probe,
    validate_trainer_mode, validate_correction, validate_pipeline, validate_rollout, validate_rows_fit,
)  # fmt: skip
"""The rules in the order in which they are tried; each yields its refusals, or raises one."""
