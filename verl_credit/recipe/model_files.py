"""Checks the policy's model, a folder or a hub name, by its files; of a hub name one small file is requested."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from math import prod
from os.path import expanduser  # pathlib raises RuntimeError for a home that is not there
from pathlib import Path

from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open

from verl_credit.errors import ConfigError, PreflightError
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.world import MODEL

CONFIG = "config.json"
READ = (".json", ".txt", ".model", ".safetensors", ".bin")
"""Suffixes of configurations, tokenizers and weights."""
TIMEOUT_S = 10.0
FOREIGN = {
    b"version https://git-lfs": "a Git-LFS pointer: the file itself was not downloaded; run git lfs pull in its clone",
    b"<!doctype html": "a web page (HTML), such as a page to log in: download the file again",
    b"<html": "a web page (HTML), such as a page to log in: download the file again",
    b"<?xml": "an XML page, such as an error of a storage service: download the file again",
    b"\x1f\x8b\x08": "compressed with gzip: unpack it first",
    b"pk\x03\x04": "a ZIP archive: unpack it first",
}
"""What lies in the place of a model's file, by its first bytes in lower case."""


class Unreadable(PreflightError):
    """A file of the model cannot be read; the message names the file and the fault."""


class HubError(ValueError):
    """The model cannot be read; the message has the reason and the remedy."""


def read_model(folder: Path) -> str:
    """Returns a line that describes the model. Raises Unreadable."""
    return f"{read_json(folder / CONFIG).get('model_type', '?')}, {count_parameters(folder):,} parameters"


def count_parameters(folder: Path) -> int:
    """Reads the headers of the safetensors files. Raises Unreadable."""
    index = folder / "model.safetensors.index.json"
    named = read_json(index).get("weight_map", {}).values() if index.is_file() else ()
    files = sorted({folder / name for name in named} or folder.glob("*.safetensors"))
    if not files:
        raise Unreadable(f"{folder}: no *.safetensors; expected the model's weights")
    count = 0
    for path in files:
        try:
            with safe_open(path, "pt") as file:  # safe_open compares the header with the file's size
                count += sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            reason = f"not a whole safetensors file ({error})"
            reason = reason if isinstance(error, SafetensorError) else error.strerror or str(error)
            raise Unreadable(f"{path}: {reason}") from error
    return count


def read_json(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise Unreadable(f"{path} is {what_it_is(path) or f'not JSON: {error}'}") from error
    if not isinstance(values, dict):
        raise Unreadable(f"{path} holds {type(values).__name__}; expected an object")
    return values


def what_it_is(path: Path) -> str | None:
    """The name of a format that lies in the place of a model's file, and what to do; None for any other file."""
    with open(path, "rb") as file:
        start = file.read(64).lstrip().lower()
    return next((name for first, name in FOREIGN.items() if start.startswith(first)), None)


def parameters_of(path: str | None) -> int | None:
    """The number of the model's parameters, from its files, its name or its config.json in the hub's cache, if known."""
    if not path or not isinstance(path, str):
        return None
    folders = folders_of(path)
    for folder in folders:
        with suppress(Unreadable):
            return count_parameters(folder)
    for model in [path, *map(str, folders)]:
        with suppress(ConfigError):
            return shape_of(model).parameters
    return None


def model_values(path: str) -> dict | None:
    """The model's config.json, from its folder or the hub's cache; None where neither has it. Raises PreflightError."""
    file = next((folder / CONFIG for folder in folders_of(path) if (folder / CONFIG).exists()), None)
    try:
        return None if file is None else read_json(file)
    except Unreadable as error:
        raise wrong_model(path, error) from error


def require_model(path: str | None) -> None:
    """Checks that a local path holds a model, or that the hub or its cache has the name, and that no file of it that is here
    is of another format, as a download that failed leaves them."""
    if not path or not isinstance(path, str):
        raise wrong_model(path, "give a model folder or a hub name")
    folder = Path(expanduser(path))
    looks_local = path.startswith(("/", ".", "~")) or folder.exists()
    if looks_local and not (folder / CONFIG).exists():
        raise wrong_model(path, "no config.json there; expected a model folder")
    for file in (file for here in folders_of(path) for file in sorted(here.iterdir()) if file.suffix in READ):
        torch_s = file.suffix == ".bin" and zipfile.is_zipfile(file)
        if file.is_file() and not torch_s and (what := what_it_is(file)):
            raise wrong_model(path, f"{file.name} is {what}")
    if looks_local or "://" in path:  # verl fetches hdfs:// itself
        return
    from huggingface_hub import constants

    try:
        cache = Path(fetch_config(path)).parent
        if constants.HF_HUB_OFFLINE and not {".safetensors", ".bin"} & {f.suffix for f in cache.iterdir()}:
            raise HubError(
                f"HF_HUB_OFFLINE is set, and the cache has no weights of it ({cache}); {_fetch(path)}"
            )
    except HubError as error:
        raise wrong_model(path, error) from error


def wrong_model(path: object, why: object) -> PreflightError:
    return PreflightError(f"{MODEL}={path}: {why}")


def folders_of(path: str) -> list[Path]:
    """The folders of this machine that can have the model's files: the path itself, and the hub's cache of that name."""
    folders = [Path(expanduser(path))]
    if not path.startswith(("/", ".", "~")) and path.count("/") < 2:  # else it cannot be a name of the hub
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):
            file = try_to_load_from_cache(path, CONFIG)
            folders += [Path(file).parent] if isinstance(file, str) else []
    return [folder for folder in folders if folder.is_dir()]


def fetch_config(name: str, download: Callable[..., str] | None = None) -> str:
    """Returns the path of the model's config.json, fetched when the cache lacks it, with the environment's token.

    Raises HubError when the model does not exist or may not be read, and when the cache lacks it and the hub is unreachable.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise HubError("no folder here, and no name that the hub could have (OWNER/NAME)") from error
    if isinstance(file := try_to_load_from_cache(name, CONFIG), str):
        return file
    if constants.HF_HUB_OFFLINE:
        raise HubError(
            f"HF_HUB_OFFLINE is set, and it is not in the cache {constants.HF_HUB_CACHE}; {_fetch(name)}"
        )
    try:
        ask_hub(name)
        return (download or hf_hub_download)(name, CONFIG, etag_timeout=TIMEOUT_S)
    except Exception as error:  # the client's transport raises what its version of httpx does
        reason = " ".join(str(error).split())[:300]
        raise HubError(
            f"the hub gives no {CONFIG} ({type(error).__name__}: {reason}); {_fetch(name)}"
        ) from error


def ask_hub(name: str) -> None:
    """Asks the hub once, because without a network its client repeats a download's first request for 23 seconds.

    Raises what the client's transport raises. A status of an error is an answer too: the download says what it means.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    with suppress(HfHubHTTPError):
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=TIMEOUT_S)


def _fetch(name: str) -> str:
    return f"fetch it where there is a network (hf download {name}), with hf auth login for a private or gated one"


def require_positions(config: DictConfig) -> str:
    """Checks that the model has a position for every token of the longest sequence, where its config is known."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    row = config.data.max_prompt_length + config.data.max_response_length
    length = rollout.max_model_len or row
    values = model_values(model.path) or {}
    # A multimodal model's config.json has the text model's keys in a section.
    positions = (values | (values.get("text_config") or {})).get("max_position_embeddings")
    if positions is not None and length > positions:
        shorter = positions - (length - row)
        ways = ["set actor_rollout_ref.rollout.max_model_len=auto"] * (row <= positions)
        ways += [f"shorten the rows to {shorter} tokens"] * (shorter > 0)
        raise PreflightError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}, data.max_prompt_length + "
            f"data.max_response_length = {row}: {model.path} has {positions} positions (max_position_embeddings of its "
            f"config.json); {', '.join(ways)}, or take another model"
        )
    return f"{length} tokens at most, {positions or 'an unknown number of'} positions"
