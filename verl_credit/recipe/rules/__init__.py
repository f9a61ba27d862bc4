"""Checks combinations of our keys, and of our keys with verl's, before anything heavy starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.address import loopback
from verl_credit.config.fit import DEFAULT
from verl_credit.config.keys import LOSS, OURS, VERLS, PolicyLoss, read_section
from verl_credit.config.keys.section import Section, no_value
from verl_credit.config.resolved import Config, Tree, resolved, select, written
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.turn.modes import modes_that
from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE, ROLLOUT_NAME, TURN_AGENT
from verl_credit.recipe.agent_loops import may_call
from verl_credit.recipe.rules.correction import validate_correction
from verl_credit.recipe.rules.engines import validate_actor, validate_rollout
from verl_credit.recipe.rules.entropy_probe import validate_entropy_probe
from verl_credit.recipe.rules.fit import validate_rows_fit, validate_turns_fit
from verl_credit.recipe.rules.known import validate_keys
from verl_credit.recipe.rules.moved import validate_places
from verl_credit.recipe.rules.own_loss import validate_loss
from verl_credit.recipe.rules.pipeline import validate_pipeline
from verl_credit.recipe.rules.trainer_mode import validate_trainer_mode
from verl_credit.recipe.rules.turn_mode import validate_turn_mode
from verl_credit.recipe.rules.turn_signals import validate_turn_signals
from verl_credit.recipe.world import WORLDS
from verl_credit.redact import redact
from verl_credit.turns.search.client import urls_of

MODE = "algorithm.info_gain_norm_mode"
WORD = 63  # bits


def validate(config: DictConfig) -> None:
    """Raises ConfigError for the first wrong key, then for the first wrong combination of keys."""
    try:
        plain = written(config)
        validate_keys(config, plain)
        validate_places(plain)
        _whole_numbers("data", plain.get("data"))  # max_model_len=auto is made of its lengths
        _whole_numbers("", plain)
        tree = _resolved(config, plain)
    except OmegaConfBaseException as error:  # a key is absent, is ???, or refers to nothing
        raise no_value(str(error.full_key), error) from error
    for section in _sections(tree):
        read_section(section, tree)
    settings = CreditSettings.from_config(tree)
    for rule in RULES:
        rule(tree, settings)


def _resolved(config: DictConfig, plain: dict[str, Any]) -> Tree:
    """Resolves every interpolation, because it must not fail later in a worker."""
    try:
        return resolved(config, plain)
    except OmegaConfBaseException:
        for section in _sections(
            config
        ):  # names the declared key that has no value before one that refers to it
            read_section(section, config)
        OmegaConf.to_container(config, resolve=True)
        raise


def _sections(config: Config) -> list[type[Section]]:
    """Returns the sections to check, the world's first, because others refer to it; `PolicyLoss` is checked elsewhere."""
    own = [world.keys for world in WORLDS if world.keys.prefix in config]
    return [section for section in (*own, *OURS, *VERLS) if section is not PolicyLoss]


def _whole_numbers(prefix: str, node: Any) -> None:
    """Refuses longer whole numbers: tensors and floating-point arithmetic cannot take them, and verl does not check."""
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            _whole_numbers(f"{prefix}.{name}" if prefix else str(name), value)
    elif isinstance(node, int) and node.bit_length() > WORD:
        use = f"expected a whole number of at most {WORD} bits"
        shown = f"a number of {node.bit_length()} bits"
        raise ConfigError(key=prefix, value=node, accepted=use, shown=shown)


def _reached_from_everywhere(config: Tree, settings: CreditSettings) -> None:
    """Checks that every node reaches the search servers, because agent loops run on all nodes."""
    nodes = config.trainer.nnodes
    if nodes == 1 or config.search.url is None or not config.search.max_searches:
        return
    for url in urls_of(config.search):
        if loopback(url):
            raise ConfigError(
                key="search.url",
                value=redact(url),
                beside={"trainer.nnodes": nodes},
                accepted="agent loops search from every node, and that address is each node itself; give the address by "
                "which all of them reach the server, which has to listen there (verl-credit-retriever serve --host ADDRESS "
                "--allow-remote --token-file FILE)",
            )


def _combinations(config: Tree, settings: CreditSettings) -> None:
    estimator = select(config, "algorithm.adv_estimator")
    ours = select(config, f"{LOSS}.loss_mode") == LOSS_MODE
    dynamic = ours and select(config, f"{LOSS}.dynamic_clip")
    if dynamic and (estimator != ADV_ESTIMATOR or not settings.algorithm.turn_mode.scales_clip):
        use = f"only {modes_that('scales_clip')} give turns a clip scale; elsewhere the switch would do nothing. "
        use += f"Set {LOSS}.dynamic_clip=false"
        raise ConfigError.of(config, f"{LOSS}.dynamic_clip", "algorithm.adv_estimator", MODE, accepted=use)
    n = select(config, "actor_rollout_ref.rollout.n")
    if estimator == ADV_ESTIMATOR and n < 2:
        use = "group-relative credit needs groups of at least 2"
        raise ConfigError.of(config, "actor_rollout_ref.rollout.n", accepted=use)
    batch, mini = (
        select(config, "data.train_batch_size"),
        select(config, "actor_rollout_ref.actor.ppo_mini_batch_size"),
    )
    if batch % mini:
        raise ConfigError(
            f"data.train_batch_size={batch} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
            key="data.train_batch_size",
            value=batch,
            accepted=f"a multiple of {mini}",
        )
    mode = select(config, "algorithm.info_gain_norm_mode")
    if estimator == ADV_ESTIMATOR and not may_call(config) and mode != "none":
        use = "without a tool there is one turn, and none that could have a gain; set info_gain_norm_mode=none, or, for "
        use += f"tools of your own, {DEFAULT}={TURN_AGENT}"
        raise ConfigError.of(config, "search.max_searches", MODE, accepted=use)


def _time_limit(config: Tree, settings: CreditSettings) -> None:
    if "total_training_steps" not in config.trainer:
        key = "trainer.total_training_steps"
        raise ConfigError(f"{key} is missing: set it to null to train for trainer.total_epochs", key=key)
    if config.max_hours is not None and config.trainer.save_freq <= 0:
        use = "the last step would be lost; set trainer.save_freq"
        raise ConfigError.of(config, "max_hours", "trainer.save_freq", accepted=use)


def _named_checkpoints(config: Tree, settings: CreditSettings) -> None:
    if config.keep_checkpoints and config.trainer.get("del_local_ckpt_after_load"):
        use = "a resume from one of these steps would delete it; set it to false"
        raise ConfigError.of(config, "trainer.del_local_ckpt_after_load", "keep_checkpoints", accepted=use)


def _vllm_on_cpu(config: Tree, settings: CreditSettings) -> None:
    rollout = config.actor_rollout_ref.rollout
    extension = select(rollout, "engine_kwargs.vllm.worker_extension_cls")
    if select(config, "trainer.device") == "cpu" and rollout.name == "vllm" and extension is None:
        use = (
            "with vLLM's own CPU products the first sync of weights waits for ever; add "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls="
            "verl_credit.host.cpu.vllm_extension.CPUWorkerExtension (docs/host.md)"
        )
        raise ConfigError.of(config, "actor_rollout_ref.rollout.name", "trainer.device", accepted=use)


def _lora_on_hf(config: Tree, settings: CreditSettings) -> None:
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    rank = model.get("lora_rank") or 0
    if rollout.name == ROLLOUT_NAME and rank > 0 and not select(model, "lora.merge"):
        use = "that engine takes whole weights, no adapters; set actor_rollout_ref.model.lora_rank=0"
        raise ConfigError.of(
            config, "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.rollout.name", accepted=use
        )


def _template(config: Tree, settings: CreditSettings) -> None:
    prefix, template = settings.algorithm.info_gain_prefix, settings.algorithm.info_gain_template
    if prefix.strip() and prefix.strip() in template:
        raise ConfigError(
            key="algorithm.info_gain_prefix",
            value=prefix,
            shown=repr(prefix),
            beside={"algorithm.info_gain_template": repr(template)},
            accepted="the prefix would be written twice; leave it out of the template, or set "
            "algorithm.info_gain_prefix=''",
        )


def _curriculum(config: Tree, settings: CreditSettings) -> None:
    algorithm = settings.algorithm
    for name, ends in algorithm.info_gain_curriculum:
        if ends != (1, 1) and not algorithm.turn_mode.curriculum:
            use = "that mode normalises gains and outcome together; use another mode"
            raise ConfigError.of(config, f"algorithm.info_gain_curriculum.{name}", MODE, accepted=use)


RULES: tuple[Callable[[Tree, CreditSettings], None], ...] = (
    validate_turn_mode,
    validate_turn_signals,
    validate_loss,
    _template,
    _curriculum,
    _time_limit,
    _named_checkpoints,
    _vllm_on_cpu,
    _lora_on_hf,
    _combinations,
    validate_turns_fit,
    _reached_from_everywhere,
    validate_actor,
    validate_entropy_probe,
    validate_trainer_mode,
    validate_correction,
    validate_pipeline,
    validate_rollout,
    validate_rows_fit,
)
"""The rules in the order in which they are tried; each raises ConfigError for the first fault."""
