"""What must be true before Ray starts: names known to verl, data readable, model there, server up."""

from __future__ import annotations

import asyncio
import difflib
import json
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.config.compose import ConfigError
from verl_credit.doctor.inputs.hub import HubError, cached_config, refuse_absent
from verl_credit.reward.qa import answer_form, gold_answers, stated_form
from verl_credit.search.client import SearchFault
from verl_credit.search.index import ServedIndex, agreed, served_index
from verl_credit.search.redact import redact
from verl_credit.search.settings import client_for, token_of, urls_of


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
    """A local path must hold a model; a name must be one that the hub has, or its cache."""
    if not path or not isinstance(path, str):
        raise PreflightError(f"actor_rollout_ref.model.path={path}: give a model folder or a hub name")
    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", ".", "~")) or folder.exists()
    if looks_local and not (folder / "config.json").exists():
        raise PreflightError(
            f"actor_rollout_ref.model.path={path}: no config.json there; expected a model folder"
        )
    if looks_local or "://" in path:  # verl fetches hdfs:// itself
        return
    try:
        refuse_absent(path)
    except HubError as error:
        raise PreflightError(f"actor_rollout_ref.model.path={path}: {error}") from error


def model_values(path: str) -> dict | None:
    """The model's config.json, from its folder or the hub's cache; None where neither has it. Raises PreflightError."""
    file = Path(path).expanduser() / "config.json"
    found = str(file) if file.exists() else cached_config(path)
    try:
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreflightError(f"actor_rollout_ref.model.path={path}: {found} is not JSON ({error})") from error


def check_positions(config: DictConfig) -> None:
    """The model has a position for every token of the longest sequence; one whose config is not here is not asked."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    row = config.data.max_prompt_length + config.data.max_response_length
    length = rollout.max_model_len or row
    values = model_values(model.path) or {}
    positions = values.get("max_position_embeddings") or (values.get("text_config") or {}).get(
        "max_position_embeddings"
    )
    if positions is not None and length > positions:
        raise PreflightError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}, data.max_prompt_length + "
            f"data.max_response_length = {row}: {model.path} has {positions} positions (max_position_embeddings of its "
            f"config.json); shorten the rows to {positions - (length - row)} tokens, or take another model"
        )


def check_data(files, key: str, *, at_least: int = 1, searches: bool = True) -> int:
    """Every row has a prompt and a gold answer, and there are enough of them. Returns the number of rows.

    ``searches=False``: a run without the tool, whose prompts alone can say how an answer is written.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    paths = [files] if isinstance(files, str) else files
    if not files or isinstance(files, int | float) or not all(isinstance(path, str) for path in paths):
        raise PreflightError(f"{key}={files}: give a parquet file or a list of them")
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
            if not searches:
                _check_form(path, number, row)
        total += table.num_rows
    if total < at_least:
        raise PreflightError(
            f"{key}: {', '.join(paths)} holds {total or 'no'} rows; at least {at_least} are needed"
        )
    return total


def _check_row(path: str, number: int, row: dict) -> None:
    if not row["prompt"]:
        raise PreflightError(f"{path} row {number}: empty prompt")
    try:
        truth = (row["reward_model"] or {}).get("ground_truth")
        gold_answers(truth)
        answer_form(truth)
    except ValueError as error:
        raise PreflightError(f"{path} row {number}: {error}") from error


def _check_form(path: str, number: int, row: dict) -> None:
    """A row that does not say how it is answered, in a prompt that does not either."""
    truth = row["reward_model"]["ground_truth"]
    if stated_form(truth) is None and "<answer>" not in str(row["prompt"]):
        raise PreflightError(
            f"{path} row {number}: reward_model.ground_truth={truth!r} has no form, so that the answer is read from "
            "<answer>...</answer>, and the prompt asks for no such tag (search.max_searches=0): every reward would be 0. "
            "`verl-credit prepare` writes {'target': [...], 'form': 'boxed'} with a prompt that asks for \\boxed{}; "
            "'form': 'tag' is for a policy that writes the tag unasked"
        )


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
