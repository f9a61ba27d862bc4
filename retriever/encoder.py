"""Sentence vectors from any Hugging Face encoder, with e5's conventions as default."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Self

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from verl_credit_retriever.encoder_settings import read_settings

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)
# Keys of config.json that describe how the model was saved and do not change what it computes.
SAVED_BY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
UNUSED = "pooler."  # the classification head of BERT's family: sentence vectors are made without it
NAMED = 3
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SentenceEncoder:
    """v(text) = normalise( pool over real tokens of last_hidden_state(prefix + text) ).

    Queries and passages differ only by their prefix ("query: " and "passage: " for e5). `pooling` is the mean over
    real tokens (e5) or the first token ("cls", as bge); the default is that of sentence-transformers' files in the
    folder, else the mean. `notes` lists options of those files that are not followed. `normalize=False` keeps the
    encoder's vector lengths. Texts longer than `max_length` tokens are cut; `self.max_length` is the smallest of the
    argument, the tokenizer's limit and the encoder's positions. A text's vector does not depend on its batch, up to
    the rounding of `dtype`, in which the model computes (fp32: 1e-6); pooling and vectors are float32.

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
            raise FileNotFoundError(
                f"encoder={str(path)!r} is not a folder; give a local Hugging Face model folder"
            )
        if not list(self.path.glob("*.safetensors")):
            raise FileNotFoundError(
                f"encoder={str(path)!r} holds no *.safetensors; other weight formats are refused"
            )
        if max_length < 3 or batch_size < 1:
            raise ValueError(f"max_length={max_length}, batch_size={batch_size}: need at least 3 and 1")
        settings = read_settings(self.path)
        self.notes = settings.notes
        self.query_prefix, self.passage_prefix = query_prefix, passage_prefix
        self.pooling = settings.resolve(self.path, pooling, normalize)
        self.normalize = bool(normalize)
        self.device, self.batch_size, self.dtype = device_for(device, dtype), batch_size, dtype
        self._tokenizer = AutoTokenizer.from_pretrained(
            str(self.path), local_files_only=True, trust_remote_code=False
        )
        # cls pooling reads position 0, and real tokens keep their positions.
        self._tokenizer.padding_side = "right"
        self._model = load_model(self.path)
        self._model.to(self.device, COMPUTE[dtype]).eval()
        self.dim = int(self._model.config.hidden_size)
        self.max_length = min(max_length, self._tokenizer.model_max_length, self._positions())
        self._fingerprint: dict | None = None

    @classmethod
    def for_index(
        cls,
        path: str | Path,
        manifest: dict,
        *,
        device: str = "cpu",
        batch_size: int = 64,
        dtype: str = "fp32",
    ) -> Self:
        """The encoder in `path` with the prefixes, length, pooling and normalisation of the index's manifest."""
        built_with = {"normalize": True, **manifest["encoder"]}
        keys = ("query_prefix", "passage_prefix", "max_length", "pooling", "normalize")
        settings = {key: built_with[key] for key in keys if key in built_with}
        return cls(path, device=device, batch_size=batch_size, dtype=dtype, **settings)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Vectors of queries: float32 [N, D]; [0, D] for no query."""
        return self.encode_tokens(self.tokenize_queries(queries))

    def encode_passages(self, passages: list[str]) -> np.ndarray:
        """Vectors of passages: float32 [N, D]; [0, D] for no passage."""
        return self.encode_tokens(self._tokenize(passages, self.passage_prefix))

    def tokenize_queries(self, queries: list[str]) -> list[list[int]]:
        """Token ids of each prefixed query, cut to `max_length`, for `encode_tokens`."""
        return self._tokenize(queries, self.query_prefix)

    @torch.inference_mode()
    def encode_tokens(self, ids_N: list[list[int]]) -> np.ndarray:
        """Vectors of tokenized texts: float32 [N, D] in the order given.

        Texts of similar length share a model call of up to `batch_size` texts, which saves padding. Errors:
        ValueError for an empty or overlong row, and for a vector that is zero or not finite.
        """
        out_N_D = np.zeros((len(ids_N), self.dim), dtype=np.float32)
        for row, ids in enumerate(ids_N):
            if not 1 <= len(ids) <= self.max_length:
                raise ValueError(f"row {row}: {len(ids)} tokens; expected 1 to max_length={self.max_length}")
        order_N = sorted(range(len(ids_N)), key=lambda row: len(ids_N[row]))
        for start in range(0, len(order_N), self.batch_size):
            rows = order_N[start : start + self.batch_size]
            batch = self._tokenizer.pad({"input_ids": [ids_N[row] for row in rows]}, return_tensors="pt").to(
                self.device
            )
            hidden_N_L_D = self._model(**batch).last_hidden_state.float()
            out_N_D[rows] = self._pool(hidden_N_L_D, batch["attention_mask"]).cpu().numpy()
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
            self._fingerprint = {
                "name": self.path.resolve().name,
                "weights_sha256": _sha256(sorted(self.path.glob("*.safetensors"))),
                "config_sha256": _config_sha256(self.path / "config.json"),
                "tokenizer_sha256": _sha256(
                    [self.path / n for n in TOKENIZER_FILES if (self.path / n).exists()]
                ),
                "query_prefix": self.query_prefix,
                "passage_prefix": self.passage_prefix,
                "max_length": self.max_length,
                "pooling": self.pooling,
                "normalize": self.normalize,
                "dim": self.dim,
            }
        return dict(self._fingerprint)

    def _positions(self) -> int:
        positions = getattr(self._model.config, "max_position_embeddings", None) or sys.maxsize
        # RoBERTa-style encoders number real tokens from padding_idx + 1, and lose that many positions.
        table = getattr(getattr(self._model, "embeddings", None), "position_embeddings", None)
        offset = getattr(table, "padding_idx", None)
        return positions if offset is None else positions - offset - 1

    def _tokenize(self, texts: list[str], prefix: str) -> list[list[int]]:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts must be a list of str")
        if not texts:
            return []
        prefixed = [prefix + text for text in texts]
        return self._tokenizer(prefixed, truncation=True, max_length=self.max_length)["input_ids"]

    def _pool(self, hidden_N_L_D: torch.Tensor, mask_N_L: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            pooled_N_D = hidden_N_L_D[:, 0]
        else:
            mask_N_L_1 = mask_N_L.unsqueeze(-1).to(hidden_N_L_D.dtype)
            pooled_N_D = (hidden_N_L_D * mask_N_L_1).sum(1) / mask_N_L_1.sum(1)
        return torch.nn.functional.normalize(pooled_N_D, dim=-1) if self.normalize else pooled_N_D


def _config_sha256(path: Path) -> str:
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in SAVED_BY}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with open(file, "rb") as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def device_for(name: str, dtype: str) -> torch.device:
    """The torch device `name`. Errors: ValueError when it is not here, or does not compute in `dtype` of `COMPUTE`."""
    if dtype not in COMPUTE:
        raise ValueError(f"encode dtype={dtype!r}; accepted: {', '.join(COMPUTE)}")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}; expected cpu, cuda, cuda:1 or another that torch knows") from None
    if device.type == "cpu" and dtype == "fp16":
        raise ValueError(
            f"encode dtype=fp16 on device={name!r}; a CPU computes in fp32 or bf16, a GPU in all"
        )
    if device.type == "cuda":
        if (device.index or 0) >= (here := torch.cuda.device_count()):
            raise ValueError(f"device={name!r}; torch {torch.__version__} sees {here} GPUs")
        major, minor = torch.cuda.get_device_capability(device)
        if dtype == "bf16" and major < 8:
            raise ValueError(
                f"encode dtype=bf16 on device={name!r}: its compute capability is {major}.{minor}, bf16 "
                "needs 8.0; use fp16"
            )
    return device


def load_model(path: Path) -> torch.nn.Module:
    """The float32 model in `path`, from `*.safetensors` alone.

    Errors: ValueError names tensors that the files lack or hold in another shape. transformers would fill them with
    random numbers, and every start of the server would give other answers.
    """
    model, report = AutoModel.from_pretrained(
        str(path),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, with both shapes
    )
    mismatched = {
        key: f"{key} {list(found)}, not {list(right)}" for key, found, right in report["mismatched_keys"]
    }
    missing = [key for key in report["missing_keys"] if key not in mismatched]
    _refuse(path, "miss", missing, report["unexpected_keys"])
    _refuse(path, "hold in another shape", mismatched.values(), ())
    if report.get("error_msgs"):
        raise ValueError(f"encoder={str(path)!r}: {report['error_msgs'][0]}")
    return model


def _refuse(path: Path, what: str, keys, instead) -> None:
    bad = sorted(key for key in keys if not key.startswith(UNUSED))
    if not bad:
        return
    extra = f" They hold instead: {_some(sorted(instead))}." if instead else ""
    raise ValueError(
        f"encoder={str(path)!r}: its *.safetensors {what} {len(bad)} tensors of config.json's model: {_some(bad)}."
        f"{extra} Save the encoder itself with save_pretrained, not a wrapper around it"
    )


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:NAMED]) + (f" and {len(keys) - NAMED} more" if len(keys) > NAMED else "")
