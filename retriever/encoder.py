"""Sentence vectors from any Hugging Face encoder, with e5's conventions as default."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from verl_credit_retriever.engines import CALL_TOKENS, calls, torch_forward
from verl_credit_retriever.foreign import what_it_is
from verl_credit_retriever.settings import POOLINGS

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt")
TOKENIZER_FILES += ("added_tokens.json", "special_tokens_map.json", "sentencepiece.bpe.model", "spiece.model")
# Keys of config.json that describe how the model was saved and do not change what it computes.
SAVED_BY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
UNUSED = "pooler."  # the classification head of BERT's family: sentence vectors are made without it
LOCAL = {"local_files_only": True, "trust_remote_code": False}
CONVENTIONS = ("query_prefix", "passage_prefix", "max_length", "pooling", "normalize")
# Older versions of sentence-transformers wrote these flags instead of one key "pooling_mode".
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SentenceEncoder:
    """v(text) = normalise( pool over real tokens of last_hidden_state(prefix + text) ).

    Queries and passages differ only by their prefix ("query: " and "passage: " for e5). `pooling` is the mean over
    real tokens (e5) or the first token ("cls", as bge); the default is that of sentence-transformers' files in the
    folder, else the mean. `normalize=False` keeps the vectors' lengths. `self.max_length`, at which texts are cut, is the
    smallest of the argument, the tokenizer's limit and the encoder's positions. A text's vector does not depend on its
    batch, up to the rounding of `dtype`, in which the model computes (fp32: 1e-6); pooling and vectors are float32.

    `path` is a local folder with config, tokenizer and `*.safetensors`; pickled weights and a model's own code are
    never loaded. Errors: FileNotFoundError when the folder or its weights are missing; ValueError for missing
    tensors, for arguments or modules that contradict the folder, for a device that is not here, and for a pooled
    vector that is zero or not finite.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        max_length: int = 256,
        pooling: str | None = None,
        normalize: bool = True,
        device: str = "cpu",
        batch_size: int = 64,
        dtype: str = "fp32",
    ):
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"encoder={str(path)!r} is not a folder; expected a Hugging Face model")
        if not list(self.path.glob("*.safetensors")):
            raise FileNotFoundError(f"encoder={str(path)!r} holds no *.safetensors; no other format is read")
        for file in sorted(self.path.iterdir()):
            if file.suffix in (".json", ".txt", ".safetensors", ".model") and (what := what_it_is(file)):
                raise ValueError(f"{file}: {what}")
        if max_length < 3 or batch_size < 1:
            raise ValueError(f"max_length={max_length}, batch_size={batch_size}: need at least 3 and 1")
        self.query_prefix, self.passage_prefix = query_prefix, passage_prefix
        self.pooling = _pooling_of(self.path, pooling, normalize)
        self.normalize = bool(normalize)
        self.device, self.batch_size, self.dtype = device_for(device, dtype), batch_size, dtype
        self._tokenizer = AutoTokenizer.from_pretrained(str(self.path), **LOCAL)
        # cls pooling reads position 0, and real tokens keep their positions.
        self._tokenizer.padding_side = "right"
        self.model = load_model(self.path)
        self.model.to(self.device, COMPUTE[dtype]).eval()
        self.forward = torch_forward(self.model)
        self.dim = int(self.model.config.hidden_size)
        positions = getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        # RoBERTa-style encoders number real tokens from padding_idx + 1, and lose that many positions.
        table = getattr(getattr(self.model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        positions -= 0 if padding is None else padding + 1
        self.max_length = min(max_length, self._tokenizer.model_max_length, positions)
        self._fingerprint: dict | None = None

    @classmethod
    def for_index(cls, path: str | Path, manifest: dict, **machine) -> Self:
        """The encoder in `path` with the conventions of the index's manifest; `machine`: device, batch_size, dtype."""
        built_with = manifest["encoder"]
        return cls(path, **machine, **{key: built_with[key] for key in CONVENTIONS if key in built_with})

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Vectors of queries: float32 [N, D]; [0, D] for no query."""
        return self.encode_tokens(self.tokenize_queries(queries))

    def encode_passages(self, passages: list[str]) -> np.ndarray:
        """Vectors of passages: float32 [N, D]; [0, D] for no passage."""
        return self.encode_tokens(self._tokenize(passages, self.passage_prefix), split=False)

    def tokenize_queries(self, queries: list[str]) -> list[list[int]]:
        """Token ids of each prefixed query, cut to `max_length`, for `encode_tokens`."""
        return self._tokenize(queries, self.query_prefix)

    @torch.inference_mode()
    def encode_tokens(self, ids_N: list[list[int]], *, split: bool = True) -> np.ndarray:
        """Vectors of tokenized texts: float32 [N, D] in the order given.

        Texts of similar length share a model call of at most `batch_size`, or of fewer where padding costs more than a call
        (`split`). Errors: ValueError for an empty or overlong row, and for a vector that is zero or not finite.
        """
        out_N_D = np.zeros((len(ids_N), self.dim), dtype=np.float32)
        for row, ids in enumerate(ids_N):
            if not 1 <= len(ids) <= self.max_length:
                raise ValueError(f"row {row}: {len(ids)} tokens; expected 1 to max_length={self.max_length}")
        # Passages are not split: an index keeps its last bits.
        padding = CALL_TOKENS if split and self.device.type == "cpu" else sys.maxsize
        for rows in calls([len(ids) for ids in ids_N], self.batch_size, padding):
            padded = {"input_ids": [ids_N[row] for row in rows]}
            batch = self._tokenizer.pad(padded, return_tensors="pt").to(self.device)
            out_N_D[rows] = self._pool(self.forward(batch), batch["attention_mask"]).cpu().numpy()
        length_N = np.linalg.norm(out_N_D, axis=1)
        # NaN fails every comparison, so both conditions refuse zero and non-finite vectors.
        good_N = np.abs(length_N - 1) < 1e-3 if self.normalize else (length_N > 0) & (length_N < np.inf)
        if not good_N.all():
            row = int(np.flatnonzero(~good_N)[0])
            kind = "unit vector" if self.normalize else "finite vector"
            text = self._tokenizer.decode(ids_N[row][:40])
            raise ValueError(f"the encoder gave no {kind} for row {row}, {text[:80]!r}: zero or not finite")
        return out_N_D

    def fingerprint(self) -> dict:
        """Everything that a vector depends on. An index accepts only the encoder with the fingerprint it was built with."""
        if self._fingerprint is None:
            config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            kept = {key: value for key, value in config.items() if key not in SAVED_BY}
            tokenizer = [self.path / name for name in TOKENIZER_FILES if (self.path / name).exists()]
            self._fingerprint = {
                "name": self.path.resolve().name,
                "weights_sha256": _sha256(sorted(self.path.glob("*.safetensors"))),
                "config_sha256": hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest(),
                "tokenizer_sha256": _sha256(tokenizer),
                **{key: getattr(self, key) for key in (*CONVENTIONS, "dim")},
            }
        return dict(self._fingerprint)

    def _tokenize(self, texts: list[str], prefix: str) -> list[list[int]]:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts must be a list of str")
        prefixed = [prefix + text for text in texts]
        cut = {"truncation": True, "max_length": self.max_length}
        return self._tokenizer(prefixed, **cut)["input_ids"] if texts else []

    def _pool(self, hidden_N_L_D: torch.Tensor, mask_N_L: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            pooled_N_D = hidden_N_L_D[:, 0]
        else:
            mask_N_L_1 = mask_N_L.unsqueeze(-1).to(hidden_N_L_D.dtype)
            pooled_N_D = (hidden_N_L_D * mask_N_L_1).sum(1) / mask_N_L_1.sum(1)
        return torch.nn.functional.normalize(pooled_N_D, dim=-1) if self.normalize else pooled_N_D


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with open(file, "rb") as handle:
            hashlib.file_digest(handle, lambda: digest)
    return digest.hexdigest()


def device_for(name: str, dtype: str) -> torch.device:
    """The torch device `name`. Errors: ValueError when it is not here, or does not compute in `dtype` of `COMPUTE`."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}; expected cpu, cuda, cuda:1 or another that torch knows") from None
    if device.type == "cpu" and dtype == "fp16":
        raise ValueError(f"encode dtype=fp16 on device={name!r}; a CPU computes in fp32 or bf16 only")
    if device.type == "cuda":
        if (device.index or 0) >= (here := torch.cuda.device_count()):
            raise ValueError(f"device={name!r}; torch {torch.__version__} sees {here} GPUs")
        major, minor = torch.cuda.get_device_capability(device)
        if dtype == "bf16" and major < 8:
            has = f"its compute capability is {major}.{minor}, bf16 needs 8.0"
            raise ValueError(f"encode dtype=bf16 on device={name!r}: {has}; use fp16")
    return device


def load_model(path: Path) -> torch.nn.Module:
    """The float32 model in `path`, from `*.safetensors` alone.

    Errors: ValueError names tensors that the files lack or hold in another shape. transformers would fill them with
    random numbers, and every start of the server would give other answers.
    """
    model, report = AutoModel.from_pretrained(
        str(path),
        **LOCAL,
        use_safetensors=True,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, with both shapes
    )
    name_of = {key: key for key in report["missing_keys"]}
    name_of |= {
        key: f"{key} {list(found)}, not {list(right)}" for key, found, right in report["mismatched_keys"]
    }
    if bad := sorted(name for key, name in name_of.items() if not key.startswith(UNUSED)):
        raise ValueError(
            f"encoder={str(path)!r}: its *.safetensors miss {len(bad)} tensors of config.json's model, such as "
            f"{', '.join(bad[:3])}; unknown: {', '.join(sorted(report['unexpected_keys'])[:3]) or 'none'}. Save the encoder "
            "itself with save_pretrained, not a wrapper around it"
        )
    return model


def _pooling_of(path: Path, pooling: str | None, normalize: bool) -> str:
    """The pooling in force: the argument, else that of sentence-transformers' files, else the mean.

    Errors: ValueError names file and value of a module, pooling or option that would give other vectors than ours.
    """
    modules = path / "modules.json"
    listed = _modules(modules) if modules.is_file() else {}
    pooling_file, own = path / (listed.get("Pooling") or "1_Pooling") / "config.json", None
    if pooling_file.is_file():
        own = _pooling(pooling_file)
    elif "Pooling" in listed:
        raise ValueError(f"{modules}: lists Pooling, but {pooling_file} does not exist")
    if None not in (pooling, own) and pooling != own:
        raise ValueError(
            f"pooling={pooling!r}; the encoder in {path} was trained with {own!r}, as its Pooling "
            "module says: leave it out, or take that module's files out of the folder"
        )
    if "Normalize" in listed and not normalize:
        raise ValueError(f"normalize=False; {modules} lists Normalize: the encoder's vectors have length 1")
    return pooling or own or "mean"


def _modules(file: Path) -> dict[str, str]:
    """Folder by kind of module."""
    entries = [entry if isinstance(entry, dict) else {"type": entry} for entry in _read(file, list)]
    kinds = [str(entry.get("type")).rsplit(".", 1)[-1] for entry in entries]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(f"{file}: modules {', '.join(kinds)}; expected Transformer, Pooling[, Normalize]")
    if folder := entries[0].get("path"):
        raise ValueError(f"{file}: Transformer is in {folder!r}; expected it beside {file.name}")
    return dict(zip(kinds, [str(entry.get("path") or "") for entry in entries], strict=True))


def _pooling(file: Path) -> str:
    config = _read(file, dict)
    flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    modes = [FLAGS.get(key, key) for key, value in flags.items() if value]
    if not flags:
        modes = [config.get("pooling_mode", "mean")]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{file}: pooling {modes}; accepted: one of {', '.join(POOLINGS)}")
    if config.get("include_prompt", True) is not True:
        raise ValueError(f"{file}: include_prompt={config['include_prompt']!r}; here the prefix is pooled")
    return modes[0]


def _read(file: Path, kind: type):
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(parsed, kind):
        raise ValueError(f"{file}: {str(parsed)[:80]!r}; expected a JSON {kind.__name__}")
    return parsed
