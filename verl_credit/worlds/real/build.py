"""Builds the policy, the encoder and the data of the recipes with trained weights, each in a folder that is reused."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from verl_credit.built_folder import Progress, read_manifest, reuse_or_build, sha256_of
from verl_credit.worlds.real.arithmetic import WORKED, write_arithmetic
from verl_credit.worlds.real.multihop import View, WarmStart, write_questions, write_start
from verl_credit.worlds.real.packages import ENCODER, INSTALL, POLICY, RealError, folder_of

VERSION = 2  # increased whenever a build would give other files than before
LAYERS = {"full": None, "tiny": 2}
ARITHMETIC = {"train": 600, "test": 256}
POLICY_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)
# The names that a build may replace in each folder.
PARTS = {
    "policy": POLICY_FILES,
    "encoder": tuple(name.partition("/")[0] for name in ENCODER.files),
    "arithmetic": ("train.parquet", "test.parquet"),
    "multihop": ("data", "index"),
    "start": (*POLICY_FILES, "demonstrations.jsonl"),
}


class RealPaths:
    """The folders below ``root``."""

    def __init__(self, root: Path):
        self.policy, self.encoder, self.arithmetic = root / "policy", root / "encoder", root / "arithmetic"
        self.multihop = root / "multihop"
        self.index, self.start = self.multihop / "index", root / "start"


def build_real(
    directory: Path,
    *,
    task: str,
    size: str = "full",
    questions: str | None = None,
    view: View | None = None,
    seed: int = 0,
    progress: Progress = lambda share, text: None,
) -> RealPaths:
    """Build the folders of this task's recipes in ``directory``; multihop needs ``questions`` and ``view``. Raises
    RealError, and FileExistsError for a folder that holds other files."""
    paths = RealPaths(Path(directory).expanduser().resolve())
    build_policy(paths, size, progress)
    if task == "arithmetic":
        build_arithmetic(paths, seed, progress)
    else:
        build_encoder(paths, progress)
        build_multihop(paths, questions, view, seed, progress)
    return paths


def build_policy(paths: RealPaths, size: str, progress: Progress) -> None:
    def fill(folder: Path) -> Mapping[str, object]:
        progress(0.0, f"the policy, from {POLICY.name}")
        (gguf,) = POLICY.files
        write_policy(folder_of(POLICY) / gguf, folder, LAYERS[size])
        return {"what": POLICY.what}

    _part(paths.policy, {"package": POLICY.named, "size": size}, fill, progress)


def build_encoder(paths: RealPaths, progress: Progress) -> None:
    def fill(folder: Path) -> Mapping[str, object]:
        progress(0.0, f"the encoder, from {ENCODER.name}")
        source = folder_of(ENCODER)
        for name in ENCODER.files:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        return {"what": ENCODER.what}

    _part(paths.encoder, {"package": ENCODER.named}, fill, progress)


def build_arithmetic(paths: RealPaths, seed: int, progress: Progress) -> None:
    def fill(folder: Path) -> Mapping[str, object]:
        write_arithmetic(folder, seed=seed, **ARITHMETIC)
        return {}

    examples = [text for text, _ in WORKED]
    _part(paths.arithmetic, {"seed": seed, **ARITHMETIC, "examples": examples}, fill, progress)


def build_multihop(paths: RealPaths, questions: str, view: View, seed: int, progress: Progress) -> None:
    progress(0.0, "questions and index")
    file = Path(questions).expanduser()
    if file.is_dir():
        raise RealError(f"real.questions={questions} is a folder; expected a file, or OWNER/NAME on the hub")
    read = sha256_of(file) if file.is_file() else questions
    source = {"questions": read, "seed": seed}
    fill = partial(write_questions, encoder=paths.encoder, questions=questions, seed=seed)
    _part(paths.multihop, source, fill, progress)
    policy = {"policy": read_manifest(paths.policy, "the policy")["files"]}
    determines = json.dumps([asdict(view), asdict(WarmStart()), source, policy], sort_keys=True)
    settings = {"made_of": hashlib.sha256(determines.encode()).hexdigest()}
    made = {"policy": paths.policy, "encoder": paths.encoder, "multihop": paths.multihop}
    _part(
        paths.start, settings, partial(write_start, **made, view=view, seed=seed, progress=progress), progress
    )


def _part(folder: Path, settings: Mapping, fill: Callable[[Path], Mapping], progress: Progress) -> None:
    name, settings = f"the {folder.name}", {"version": VERSION, **settings}
    reuse_or_build(folder, settings, fill, parts=PARTS[folder.name], name=name, progress=progress)


TURN_END, PAD = "<|im_end|>", "<|endoftext|>"


def write_policy(gguf: Path, folder: Path, layers: int | None = None) -> None:
    """Write the folder in float32, the dtype of the dequantised weights. ``layers``: only the first layers, for tests.
    Raises RealError.

    transformers reads ``<|im_start|>`` as the end of a sequence from this file. The file has ``<|im_end|>``, and a policy
    with the other token would write on after its turns. The file also pads with ``<|im_end|>``; we pad with another token,
    so that no mask can take the end of a turn for padding.
    """
    model, tokenizer = read_gguf(gguf)
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    tokenizer.eos_token, tokenizer.pad_token = TURN_END, PAD
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config._name_or_path = ""  # otherwise the path of the machine that built it would be saved
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_gguf(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """(model, tokenizer). Raises RealError, with the file, without the package gguf and for a file without a model."""
    where = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **where)
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    except ImportError as error:
        raise RealError(f"{gguf} cannot be read without the package gguf: {INSTALL}") from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RealError(f"{gguf}: no model can be made of it ({type(error).__name__}: {reason})") from error
    for token in (TURN_END, PAD):
        if token not in tokenizer.get_vocab():
            raise RealError(f"{gguf}: its vocabulary has no {token}, with which turns end")
    return model, tokenizer
