"""Versions of the packages that a run computes with, saved beside its configuration; `verl-credit diff` compares them."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl_credit.records.run.files import write_text

VERSIONS = "versions.json"
PACKAGES = (
    "verl-credit", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue", "vllm", "flash-attn", "peft",
    "numpy",
)  # fmt: skip


def installed_version(package: str) -> str | None:
    """The version of a package, or None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """The versions of Python and of every installed package of PACKAGES."""
    found = {name: installed_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **{k: v for k, v in found.items() if v is not None}}


def write_versions(run_dir: Path) -> None:
    write_text(Path(run_dir) / VERSIONS, json.dumps(installed_versions(), indent=1))


def read_versions(run_dir: Path) -> dict[str, str] | None:
    """The saved versions, or None for a run without them. Raises ValueError naming a file that is malformed."""
    path = Path(run_dir) / VERSIONS
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}; expected an object of package: version")
    return {str(k): str(v) for k, v in found.items()}
