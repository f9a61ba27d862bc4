"""The versions of a run's packages and the commit of its code, which `verl-credit diff` compares."""

import json
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import verl_credit
from verl_credit.records.run.files import write_text

VERSIONS = "versions.json"
PACKAGES = (
    "verl-credit", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue", "vllm", "flash-attn", "peft",
    "numpy",
)  # fmt: skip


COMMIT = "verl-credit's commit"


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, of every installed package of PACKAGES, and the commit of a checkout."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    folder = Path(verl_credit.__file__).parent
    with suppress(OSError, subprocess.SubprocessError):  # an installation, or no git
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        versions[COMMIT] = _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return versions


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=20).stdout.strip()


def write_versions(run_dir: Path) -> None:
    write_text(Path(run_dir) / VERSIONS, json.dumps(installed_versions(), indent=1))


def read_versions(run_dir: Path) -> dict[str, str] | None:
    """The saved versions, or None for a run without them. Raises ValueError naming a file that is malformed."""
    path = Path(run_dir) / VERSIONS
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(saved, dict):
        raise ValueError(f"{path} holds {type(saved).__name__}; expected an object of package: version")
    return {str(k): str(v) for k, v in saved.items()}
