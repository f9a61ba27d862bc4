"""Requests one small file of a model on the Hugging Face hub, to see whether the model exists and may be read."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

CONFIG = "config.json"
TIMEOUT_S = 10.0


class HubError(ValueError):
    """The model cannot be read; the message has the reason and the remedy."""


def cached_config(name: str) -> str | None:
    """The path of the model's config.json in the hub's cache; None when it is absent."""
    try:
        file = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:
        return None
    return file if isinstance(file, str) else None


def refuse_absent(name: str, download=hf_hub_download) -> Path:
    """Returns the cache folder with the model's config.json; the run may fetch the model's other files.

    Raises HubError as `fetch_config`, and when the run could not fetch the weights.
    """
    folder = Path(fetch_config(name, download)).parent
    if constants.HF_HUB_OFFLINE and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise HubError(
            f"HF_HUB_OFFLINE is set, and the cache has no weights of it ({folder}); {_fetch(name)}"
        )
    return folder


def fetch_config(name: str, download=hf_hub_download) -> str:
    """Returns the path of the model's config.json, fetched when the cache lacks it, with the environment's token.

    Raises HubError when the model does not exist or may not be read, and when the cache lacks it and the hub is unreachable.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise HubError("no folder here, and no name that the hub could have (OWNER/NAME)") from error
    if file := cached_config(name):
        return file
    fetch, where = _fetch(name), f"in the cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"HF_HUB_OFFLINE is set, and it is not {where}; {fetch}")
    try:
        return download(name, CONFIG, etag_timeout=TIMEOUT_S)
    except Exception as error:  # the client's transport raises what its version of httpx does
        reason = " ".join(str(error).split())[:300]
        unknown = f"the hub cannot be asked ({type(error).__name__}: {reason}); {fetch}"
        answers = {
            GatedRepoError: f"gated: accept its terms at https://huggingface.co/{name}, then hf auth login or HF_TOKEN",
            RepositoryNotFoundError: "no such model on the hub, or a private one and no token (hf auth login, HF_TOKEN)",
            LocalEntryNotFoundError: f"the hub does not answer, and it is not {where}; {fetch}",
            EntryNotFoundError: f"the hub has it without a {CONFIG}: not a model that transformers loads",
        }
        raise HubError(
            next((text for kind, text in answers.items() if isinstance(error, kind)), unknown)
        ) from error


def _fetch(name: str) -> str:
    return f"fetch it where there is a network (hf download {name})"
