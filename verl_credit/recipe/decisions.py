"""Replaces every ``auto`` of a composed recipe with a value, key by key; one needs the tokenizer and comes later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.config.engines import ENGINE, engine_of
from verl_credit.config.fit import MODEL_LEN, engine_tokens
from verl_credit.config.keys import AUTO, LOSS
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.credit.plugins import find_turn_mode
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.errors import PreflightError
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE, SEPARATE_MODE
from verl_credit.precision import cpu_precision
from verl_credit.recipe.default_credit import decide_credit
from verl_credit.recipe.family import decide_family
from verl_credit.recipe.step_size import BATCH, MINI_BATCH
from verl_credit.turns.rollout.header import answer_prefix, before_answer
from verl_credit.turns.rollout.thoughts import without_thoughts
from verl_credit.turns.score.requests import ANSWER_TAG, AnswerWriter
from verl_credit.worlds.lab.limits import MOST_HOPS, limits_of

COMPUTES_IN = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
FULL = ("fp32", "float32")
ENGINE_DTYPE = "actor_rollout_ref.rollout.dtype"
ENGINES = {"bf16": "bfloat16", "fp32": "float32"}

PREFIX = "algorithm.info_gain_prefix"
MODE = "trainer.v1.trainer_mode"
HYBRID = "actor_rollout_ref.hybrid_engine"
LAB_CACHE = "${oc.env:VERL_CREDIT_LAB,${oc.env:XDG_CACHE_HOME,${oc.env:HOME}/.cache}/verl_credit/lab}"
LAB_DIR = f"{LAB_CACHE}/${{lab.size}}-${{lab.world_seed}}"
UPDATES = "trainer.v1.separate_async.parameter_sync_step"


def decide_auto(config: DictConfig, policy: Mapping[str, Any]) -> DictConfig:
    """Decides every ``auto`` whose other keys have values, and names our extension of vLLM's worker where the recipe names
    none; a key that is wrong is refused later, by its name.

    ``policy``: its config.json (`policy_values`).
    """
    if all(isinstance(config.get(section), DictConfig) for section in ("algorithm", "data", "search")):
        of_policy = partial(decide_family, values=policy)
        for decide in (decide_credit, of_policy, _clip, _precision, _trainer, _model_len, _extension):
            with suppress(OmegaConfBaseException):
                decide(config)
    return config


def decide_lab(config: DictConfig) -> DictConfig:
    """Decides the lab's folder and the limits that follow from its hops. The model is in the folder, so this comes before
    `decide_auto`."""
    lab = config.get("lab")
    if not isinstance(lab, DictConfig):
        return config
    hops = lab.get("hops")
    hops = hops if hops in range(1, MOST_HOPS + 1) else None  # another value is refused later
    limits = limits_of(hops)
    of_key = {
        "search.max_searches": limits.max_searches,
        "data.max_response_length": limits.max_response_length,
        "lab.dir": LAB_DIR + ("" if hops is None else "-${lab.hops}hop"),
    }
    for key, value in of_key.items():
        with suppress(OmegaConfBaseException):
            if OmegaConf.select(config, key) == "auto":
                OmegaConf.update(config, key, value)
    return config


def compute_dtype(config: DictConfig) -> str:
    """verl's default is bfloat16."""
    return str(select(config, COMPUTES_IN) or "bf16")


def _clip(config: DictConfig) -> None:
    """``dynamic_clip`` is on where the turn mode scales clip ranges and the loss reads the scales."""
    loss, algorithm = OmegaConf.select(config, LOSS), config.algorithm
    if isinstance(loss, DictConfig) and loss.get("dynamic_clip") == "auto":
        mode = None if algorithm.get("algorithm_mode") is not None else _turn_mode(algorithm)
        loss.dynamic_clip = mode is not None and mode.scales_clip and loss.get("loss_mode") == LOSS_MODE


def _turn_mode(algorithm: DictConfig) -> TurnMode | None:
    """The turn mode of a run with our estimator; None for a mode that is refused later, with the reason."""
    name = algorithm.get("info_gain_norm_mode")
    with suppress(ValueError):
        if algorithm.get("adv_estimator") == ADV_ESTIMATOR and isinstance(name, str):
            return find_turn_mode(name)
    return None


def _precision(config: DictConfig) -> None:
    """``param_dtype`` is the dtype that the device multiplies fastest; an engine with ``dtype=auto`` then takes the same."""
    if select(config, COMPUTES_IN) != "auto":
        return
    dtype = cpu_precision() if select(config, "trainer.device") == "cpu" else "bf16"
    OmegaConf.update(config, COMPUTES_IN, dtype)
    if select(config, ENGINE_DTYPE) == "auto":
        OmegaConf.update(config, ENGINE_DTYPE, ENGINES[dtype])


def _trainer(config: DictConfig) -> None:
    """``hybrid_engine`` is on, except in a trainer whose rollouts have devices of their own. ``parameter_sync_step`` is
    the number of mini-batches in the batch, which verl demands."""
    if OmegaConf.select(config, HYBRID) == "auto":
        OmegaConf.update(config, HYBRID, OmegaConf.select(config, MODE) != SEPARATE_MODE)
    batch, mini = (OmegaConf.select(config, key) for key in (BATCH, MINI_BATCH))
    numbers = isinstance(batch, int) and isinstance(mini, int) and mini > 0
    if numbers and OmegaConf.select(config, UPDATES) == "auto":
        OmegaConf.update(config, UPDATES, max(batch // mini, 1))


def _model_len(config: DictConfig) -> None:
    """``max_model_len`` is the length of the longest sequence that a run sends to the engine."""
    lengths = [config.data.get(key) for key in ("max_prompt_length", "max_response_length")]
    if OmegaConf.select(config, MODEL_LEN) == "auto" and all(isinstance(length, int) for length in lengths):
        engine = str(OmegaConf.select(config, ENGINE))
        OmegaConf.update(config, MODEL_LEN, engine_tokens(sum(lengths), engine))


def _extension(config: DictConfig) -> None:
    """vLLM's worker gets our extension, on a GPU and on a CPU, because verl's own cannot load a tied model in several
    buckets since vLLM 0.29, and none on a CPU since oneDNN packs weights."""
    engine = engine_of(config)
    key = f"actor_rollout_ref.rollout.engine_kwargs.{engine.name}.worker_extension_cls"
    if engine.extension and select(config, key) is None:
        OmegaConf.update(config, key, engine.extension, force_add=True)


def decide_prefix(tokenizer: Any, settings: CreditSettings) -> tuple[str, str, bool]:
    """Decides ``info_gain_prefix=auto`` by the chat template. Returns the text before a scored answer, a sentence about
    it, and whether the template itself writes another text there, or the answer would be a part of a thought.

    Raises PreflightError for a template that cannot write an answer.
    """
    given, arguments = settings.algorithm.info_gain_prefix, settings.chat_template_kwargs
    try:
        writer = AnswerWriter(tokenizer, settings)
        header, expected = before_answer(tokenizer, arguments), answer_prefix(tokenizer, arguments)
    except Exception as error:  # a template may raise any exception
        raise PreflightError(f"the chat template cannot write an answer: {error}") from error
    ids = tokenizer(header, add_special_tokens=False)["input_ids"]
    before = header + writer.prefix_at(ids, after_turn=False)
    scored = before + (ANSWER_TAG if writer.template == AUTO else writer.template)
    told = f"a gold answer is scored as {scored!r} after a question ({PREFIX}={given!r})"
    odd = given != AUTO and expected.strip() != "" and before != header + expected
    if odd := odd or "{answer}" not in without_thoughts(scored):
        told += f"; the chat template itself writes {header + expected!r} before an answer: {PREFIX}=auto takes that text"
    return writer.prefix, told, odd
