"""What must be true before Ray starts: names known to verl, data readable, model there, server up."""

from __future__ import annotations

import asyncio
import difflib
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.host.answer_budget import answers_are_counted, answers_fit, parquet_rows
from verl_credit.host.compose import ConfigError
from verl_credit.host.redact import redact
from verl_credit.host.reward import answer_form, gold_answers
from verl_credit.host.search_client import SearchFault
from verl_credit.host.search_settings import client_for, token_of, urls_of
from verl_credit.host.served_index import ServedIndex, agreed, served_index


class PreflightError(RuntimeError):
    """The run cannot start; says what is missing and what would be right."""


def check_names(config: DictConfig) -> None:
    """Estimator, loss, agent loop, tool format and engine must be in verl's registries (imports verl)."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    estimators = {str(getattr(n, "value", n)) for n in ADV_ESTIMATOR_REGISTRY} | {
        e.value for e in AdvantageEstimator
    }
    rollout = config.actor_rollout_ref.rollout
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    _known("algorithm.adv_estimator", config.algorithm.adv_estimator, estimators)
    _known("actor_rollout_ref.actor.policy_loss.loss_mode", loss, set(POLICY_LOSS_REGISTRY))
    _known("actor_rollout_ref.rollout.name", rollout.name, {name for name, _ in _ROLLOUT_REGISTRY})
    _known(
        "actor_rollout_ref.rollout.multi_turn.format", rollout.multi_turn.format, set(ToolParser._registry)
    )
    default = rollout.agent.default_agent_loop
    _known("actor_rollout_ref.rollout.agent.default_agent_loop", default, set(_agent_loop_registry))


def check_model(path: str | None) -> None:
    """A local path must hold a model; anything else is left to the hub."""
    if not path:
        raise PreflightError(f"actor_rollout_ref.model.path={path}: give a model folder or a hub name")
    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", ".", "~")) or folder.exists()
    if looks_local and not (folder / "config.json").exists():
        raise PreflightError(
            f"actor_rollout_ref.model.path={path}: no config.json there; expected a model folder"
        )


def check_data(files, key: str, *, at_least: int = 1) -> int:
    """Every row has a prompt and a gold answer, and there are enough of them. Returns the number of rows."""
    import pyarrow
    import pyarrow.parquet as parquet

    if not files:
        raise PreflightError(f"{key}={files}: give a parquet file or a list of them")
    paths = [files] if isinstance(files, str) else list(files)
    total = 0
    for path in paths:
        if not Path(path).expanduser().exists():
            raise PreflightError(f"{key}: {path} does not exist")
        try:
            table = parquet.read_table(Path(path).expanduser())
        except pyarrow.ArrowException as error:
            raise PreflightError(f"{key}: {path} is not a parquet file: {error}") from error
        missing = {"prompt", "reward_model"} - set(table.column_names)
        if missing:
            raise PreflightError(
                f"{key}: {path} lacks the columns {sorted(missing)}; it has {table.column_names}"
            )
        for number, row in enumerate(table.select(["prompt", "reward_model"]).to_pylist()):
            _check_row(path, number, row)
        total += table.num_rows
    if total < at_least:
        raise PreflightError(
            f"{key}: {', '.join(paths)} holds {total or 'no'} rows; at least {at_least} are needed"
        )
    return total


def check_answers(config: DictConfig) -> str | None:
    """The answers that are scored with the training rows fit their micro-batches; what they need, None where none are.

    Loads the policy's tokenizer and counts (`answer_budget`).
    """
    if not answers_are_counted(config):
        return None
    model = config.actor_rollout_ref.model
    path = model.get("tokenizer_path") or model.path
    try:
        tokenizer = _tokenizer(path, model)
        return answers_fit(config, tokenizer, parquet_rows(config.data.train_files))
    except ConfigError as error:
        raise PreflightError(str(error)) from error
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"actor_rollout_ref.model.path={model.path}: the gold answers cannot be written with the tokenizer of {path}: "
            f"{error}"
        ) from error


def _tokenizer(path: str, model: DictConfig):
    """As verl's workers load it."""
    from verl.utils import hf_tokenizer
    from verl.utils.fs import copy_to_local

    tokenizer = hf_tokenizer(copy_to_local(path), trust_remote_code=model.get("trust_remote_code", False))
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def _check_row(path: str, number: int, row: dict) -> None:
    if not row["prompt"]:
        raise PreflightError(f"{path} row {number}: empty prompt")
    try:
        truth = (row["reward_model"] or {}).get("ground_truth")
        gold_answers(truth)
        answer_form(truth)
    except ValueError as error:
        raise PreflightError(f"{path} row {number}: {error}") from error


def check_server(settings) -> tuple[str | None, str]:
    """Every server of ``search.url`` answers a real query of the client that the tool uses, from one index.

    Returns (fingerprint of the index or None, what the servers say of it).
    """
    if not settings.url:
        raise PreflightError("search.url has no value: give the URL of a running retriever")
    try:
        indexes = asyncio.run(_ask(settings))
        return agreed(indexes, settings.index_fingerprint), "; ".join(map(str, indexes))
    except SearchFault as error:
        raise PreflightError(
            f"search.url={redact(settings.url)}: the retriever is not ready ({redact(error)}). Start it with "
            "'verl-credit-retriever serve --index DIR --encoder DIR' or mend the URL"
        ) from error
    except ValueError as error:
        raise PreflightError(redact(error)) from error


async def _ask(settings) -> list[ServedIndex]:
    client, token = client_for(settings), token_of(settings)
    try:
        await client.check()
    finally:
        await client.aclose()
    return [await served_index(url, token=token, timeout_s=settings.timeout_s) for url in urls_of(settings)]


def _known(key: str, value: str, accepted: set[str]) -> None:
    if value not in accepted:
        near = difflib.get_close_matches(str(value), accepted, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{key}={value!r}{hint}: accepted are {', '.join(sorted(accepted))}")
