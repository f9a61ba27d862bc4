"""What must be true before Ray starts: names known to verl, data readable, model there, server up."""

from __future__ import annotations

import difflib
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.host.compose import ConfigError
from verl_credit.host.reward import gold_answers


class PreflightError(RuntimeError):
    """The run cannot start; says what is missing and what would be right."""


def check_names(config: DictConfig) -> None:
    """Estimator and loss must be in verl's registries (imports verl)."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator

    estimators = {str(getattr(n, "value", n)) for n in ADV_ESTIMATOR_REGISTRY} | {
        e.value for e in AdvantageEstimator
    }
    _known("algorithm.adv_estimator", config.algorithm.adv_estimator, estimators)
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    _known("actor_rollout_ref.actor.policy_loss.loss_mode", loss, set(POLICY_LOSS_REGISTRY))


def check_model(path: str) -> None:
    """A local path must hold a model; anything else is left to the hub."""
    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", ".", "~")) or folder.exists()
    if looks_local and not (folder / "config.json").exists():
        raise PreflightError(
            f"actor_rollout_ref.model.path={path}: no config.json there; expected a model folder"
        )


def check_data(files, key: str) -> int:
    """Every row has a prompt and a gold answer. Returns the number of rows."""
    import pyarrow.parquet as parquet

    paths = [files] if isinstance(files, str) else list(files)
    total = 0
    for path in paths:
        if not Path(path).expanduser().exists():
            raise PreflightError(f"{key}: {path} does not exist")
        table = parquet.read_table(Path(path).expanduser())
        missing = {"prompt", "reward_model"} - set(table.column_names)
        if missing:
            raise PreflightError(
                f"{key}: {path} lacks the columns {sorted(missing)}; it has {table.column_names}"
            )
        for number, row in enumerate(table.select(["prompt", "reward_model"]).to_pylist()):
            _check_row(path, number, row)
        total += table.num_rows
    if total == 0:
        raise PreflightError(f"{key}: {', '.join(paths)} holds no rows")
    return total


def _check_row(path: str, number: int, row: dict) -> None:
    if not row["prompt"]:
        raise PreflightError(f"{path} row {number}: empty prompt")
    try:
        gold_answers((row["reward_model"] or {}).get("ground_truth"))
    except ValueError as error:
        raise PreflightError(f"{path} row {number}: {error}") from error


def check_server(urls: str | Sequence[str], timeout_s: float) -> None:
    """Each retriever answers its readiness check (a canary query), or, where it has none, a real query."""
    for url in [urls] if isinstance(urls, str) else urls:
        try:
            _ready(url, timeout_s)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise PreflightError(
                f"search.url={url}: the retriever is not ready ({error}). Start it with "
                "'verl-credit-retriever serve --index DIR --encoder DIR' or mend the URL"
            ) from error


def _ready(url: str, timeout_s: float) -> None:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/readyz", timeout=timeout_s):
            return
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
    body = json.dumps({"queries": ["ready?"], "topk": 1, "return_scores": True}).encode()
    request = urllib.request.Request(
        f"{url.rstrip('/')}/retrieve", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        if "result" not in json.load(response):
            raise ValueError("POST /retrieve returned no 'result'")


def _known(key: str, value: str, accepted: set[str]) -> None:
    if value not in accepted:
        near = difflib.get_close_matches(str(value), accepted, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{key}={value!r}{hint}: accepted are {', '.join(sorted(accepted))}")
