"""The hash of a manifest inside the manifest: a changed value is found, whichever it is."""

import hashlib
import json
import logging
from pathlib import Path

SEAL = "manifest_sha256"
SEALED_FROM = 3  # the first format that has one
log = logging.getLogger("verl_credit_retriever")


def sealed(manifest: dict) -> dict:
    """The manifest with the hash of all else in it."""
    rest = {key: value for key, value in manifest.items() if key != SEAL}
    return {**rest, SEAL: hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def broken_seal(manifest: dict) -> str | None:
    """What is wrong with the hash; None when it is right, or when the format is older than it."""
    if SEAL not in manifest and manifest.get("format") in range(1, SEALED_FROM):
        return None
    said, found = manifest.get(SEAL), sealed(manifest)[SEAL]
    return None if said == found else f"{SEAL}={said!r}, but its values have {found!r}: one was changed"


def warn_if_unsealed(folder: Path, manifest: dict) -> None:
    """An index written before there was a hash is read, so that nobody encodes for days again, but not in silence."""
    if SEAL not in manifest:
        log.warning(
            "%s: manifest.json (format %s) has no %s: a changed prefix, pooling or length in it would go unnoticed; "
            "an index built now has one",
            *(folder, manifest["format"], SEAL),
        )
