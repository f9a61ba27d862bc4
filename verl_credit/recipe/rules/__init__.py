"""Checks combinations of our keys, and of our keys with verl's, before anything heavy starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.address import loopback, urls_of
from verl_credit.config.engines import ENGINE, engine_of
from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys import AUTO, LOSS, OURS, VERLS, PolicyLoss, read_section
from verl_credit.config.keys.section import Section, no_value
from verl_credit.config.resolved import Config, data, leaves, select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.modes import modes_that
from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE, TURN_AGENT
from verl_credit.recipe.agent_loops import may_call
from verl_credit.recipe.family import validate_family
from verl_credit.recipe.rules.engines import (
    validate_actor,
    validate_rollout,
    validate_rows_fit,
    validate_turns_fit,
)
from verl_credit.recipe.rules.estimator import validate_estimator
from verl_credit.recipe.rules.files import validate_files, validate_loop
from verl_credit.recipe.rules.known import validate_homes, validate_keys
from verl_credit.recipe.rules.older import validate_older
from verl_credit.recipe.rules.own import validate_loss
from verl_credit.recipe.rules.pipeline import validate_pipeline
from verl_credit.recipe.rules.refusals import Refusals, with_defaults
from verl_credit.recipe.rules.trainer_mode import (
    validate_correction,
    validate_entropy_probe,
    validate_trainer_mode,
)
from verl_credit.recipe.rules.turn_mode import MODE, validate_turn_mode, validate_turn_signals
from verl_credit.recipe.rules.turn_values import validate_turn_values
from verl_credit.recipe.world import WORLDS
from verl_credit.records.run.resume import STEP
from verl_credit.redact import redact

WORD = 63  # bits of a whole number that tensors and floating-point arithmetic take; verl does not check


def validate(config: Config, refused: Iterable[ConfigError] = ()) -> None:
    """Raises ConfigError for a fault, and ConfigErrors for several: of keys, then of values, then of combinations.

    ``refused``: what was wrong with the overrides, which ``config`` is composed without.
    """
    plain = data(config, resolve=False)
    found = Refusals(refused, plain)
    try:
        values = list(leaves(plain))
        found.collect(validate_older, values)
        found.collect(validate_keys, config)
        found.collect(validate_homes, values)
        for error in _too_long(values):
            found.add(error)
            found.finish()  # the other numbers may be made of it
        _resolve(config)
    except OmegaConfBaseException as error:  # a key is absent, is ???, or refers to nothing
        found.add(no_value(str(error.full_key), error))
        found.finish(error)
    except ConfigError as error:
        found.add(error)
        found.finish()
    found.collect(_wrong_values, config)
    config = with_defaults(config, found.errors)
    try:
        settings = CreditSettings.from_config(config)
    except ConfigError as error:
        found.add(error)
        found.finish()
    except (AttributeError, TypeError):  # a refused value stands in place of a section
        found.finish()
        raise
    for rule in RULES:
        found.collect(rule, config, settings)
    found.finish()


def _wrong_values(config: Config) -> Iterator[ConfigError]:
    for section in _sections(config):
        try:
            read_section(section, config)
        except ConfigError as error:
            yield error


def _too_long(values: list[tuple[str, Any]]) -> Iterator[ConfigError]:
    # The lengths in data come first, because max_model_len=auto is made of them.
    for key, value in sorted(values, key=lambda one: not one[0].startswith("data.")):
        if isinstance(value, int) and value.bit_length() > WORD:
            use = f"expected a whole number of at most {WORD} bits"
            shown = f"a number of {value.bit_length()} bits"
            yield ConfigError(key=key, value=value, accepted=use, shown=shown)
            return


def _resolve(config: Config) -> None:
    """Resolves every interpolation, because it must not fail later in a worker."""
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        for section in _sections(config):  # a declared key without a value comes before one that refers to it
            read_section(section, config)
        raise


def _sections(config: Config) -> list[type[Section]]:
    """Returns the sections to check, the world's first, because others refer to it; `PolicyLoss` is checked elsewhere."""
    own = [world.keys for world in WORLDS if world.section in config]
    return [section for section in (*own, *OURS, *VERLS) if section is not PolicyLoss]


def _reached_from_everywhere(config: Config, settings: CreditSettings) -> Iterator[ConfigError]:
    """Checks that every node reaches the search servers, because agent loops run on all nodes."""
    nodes = config.trainer.nnodes
    if nodes == 1 or config.search.url is None or not config.search.max_searches:
        return
    for url in filter(loopback, urls_of(config.search)):
        use = "agent loops search from every node, and that address is each node itself; give the address by which all of "
        use += "them reach the server, which has to listen there (verl-credit-retriever serve --host ADDRESS "
        use += "--allow-remote --token-file FILE)"
        beside = {"trainer.nnodes": nodes}
        yield ConfigError(key="search.url", value=redact(url), beside=beside, accepted=use)


def _combinations(config: Config, settings: CreditSettings) -> Iterator[ConfigError]:
    estimator = select(config, "algorithm.adv_estimator")
    ours = select(config, f"{LOSS}.loss_mode") == LOSS_MODE
    dynamic = ours and select(config, f"{LOSS}.dynamic_clip")
    if dynamic and (estimator != ADV_ESTIMATOR or not settings.algorithm.turn_mode.scales_clip):
        use = f"only {modes_that('scales_clip')} give turns a clip scale; elsewhere the switch would do nothing. "
        use += f"Set {LOSS}.dynamic_clip=false"
        yield ConfigError.of(config, f"{LOSS}.dynamic_clip", "algorithm.adv_estimator", MODE, accepted=use)
    n = select(config, "actor_rollout_ref.rollout.n")
    if estimator == ADV_ESTIMATOR and n < 2:
        use = "group-relative credit needs groups of at least 2"
        yield ConfigError.of(config, "actor_rollout_ref.rollout.n", accepted=use)
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % mini:
        size = "actor_rollout_ref.actor.ppo_mini_batch_size"
        message = f"data.train_batch_size={batch} is not a multiple of {size}={mini}"
        yield ConfigError(message, key="data.train_batch_size", value=batch, accepted=f"a multiple of {mini}")
    if estimator == ADV_ESTIMATOR and not may_call(config) and select(config, MODE) != "none":
        use = "without a tool there is one turn, and none that could have a gain; set info_gain_norm_mode=none, or, for "
        use += f"tools of your own, {DEFAULT}={TURN_AGENT}"
        yield ConfigError.of(config, "search.max_searches", MODE, accepted=use)


def _steps(config: Config, settings: CreditSettings) -> Iterator[ConfigError]:
    if "total_training_steps" not in config.trainer:
        key = "trainer.total_training_steps"
        yield ConfigError(f"{key} is missing: set it to null to train for trainer.total_epochs", key=key)
    if config.max_hours is not None and config.trainer.save_freq <= 0:
        use = "the last step would be lost; set trainer.save_freq"
        yield ConfigError.of(config, "max_hours", "trainer.save_freq", accepted=use)
    if config.keep_checkpoints and config.trainer.get("del_local_ckpt_after_load"):
        use = "a resume from one of these steps would delete it; set it to false"
        yield ConfigError.of(config, "trainer.del_local_ckpt_after_load", "keep_checkpoints", accepted=use)


def _resume(config: Config, settings: CreditSettings) -> None:
    """Checks that verl would read the path, and that it can read a step's number from it."""
    key, mode = "trainer.resume_from_path", select(config, "trainer.resume_mode")
    path, use = select(config, key), ""
    if mode == "resume_path" and not (path and STEP.fullmatch(Path(path).name)):
        use = "expected the folder of a saved step, RUN/checkpoints/global_step_N"
    elif mode == "auto" and path:
        use = (
            "verl reads the path with resume_mode=resume_path alone, and would go on from the newest step in "
        )
        use += "trainer.default_local_dir; set that mode, or leave the path out"
    if use:
        raise ConfigError.of(config, key, "trainer.resume_mode", accepted=use)


def _weights(config: Config, settings: CreditSettings) -> Iterator[ConfigError]:
    """Checks that the rollout engine can take the actor's weights."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    engine = engine_of(config)
    if not engine.adapters and (model.get("lora_rank") or 0) > 0 and not select(model, "lora.merge"):
        rank = "actor_rollout_ref.model.lora_rank"
        use = f"that engine takes whole weights, no adapters; set {rank}=0, or actor_rollout_ref.model.lora.merge=true"
        yield ConfigError.of(config, rank, ENGINE, accepted=use)
    if not engine.splits and select(config, "trainer.device") != "cpu":
        for size in ("tensor_model", "data", "pipeline_model"):
            if (select(rollout, f"{size}_parallel_size") or 1) > 1:
                use = "that engine takes one GPU and leaves the others idle; set it to 1, and every GPU has an engine"
                size = f"actor_rollout_ref.rollout.{size}_parallel_size"
                yield ConfigError.of(config, size, ENGINE, accepted=use)


def _gains(config: Config, settings: CreditSettings) -> Iterator[ConfigError]:
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


RULES: tuple[Callable[[Config, CreditSettings], Iterable[ConfigError] | None], ...] = (
    validate_estimator,
    validate_files,
    validate_loop,
    validate_turn_mode,
    validate_turn_signals,
    validate_turn_values,
    validate_loss,
    _gains,
    _steps,
    _resume,
    _weights,
    _combinations,
    validate_turns_fit,
    _reached_from_everywhere,
    validate_family,
    validate_actor,
    validate_entropy_probe,
    validate_trainer_mode,
    validate_correction,
    validate_pipeline,
    validate_rollout,
    validate_rows_fit,
)
"""The rules in the order in which they are tried; each yields its refusals, or raises one."""
