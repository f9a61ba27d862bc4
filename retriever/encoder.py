"""Sentence vectors from any Hugging Face encoder, with e5's conventions as default."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
)


class SentenceEncoder:
    """v(text) = normalise( mean over real tokens of last_hidden_state(prefix + text) ).

    Queries and passages differ by their prefix alone ("query: " and "passage: " for e5). Texts longer than
    `max_length` tokens are cut; `self.max_length` is the smaller of the argument, the tokenizer's limit and
    the number of positions the encoder has. A text's vector does not depend on the batch it came in, up to
    float32 rounding (1e-6).

    `path` is a local folder with config, tokenizer and `*.safetensors`; pickled weights and code shipped
    with a model are never loaded. Errors: FileNotFoundError when the folder or its weights are missing,
    ValueError for a pooled vector that is not finite or zero.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        max_length: int = 256,
        device: str = "cpu",
        batch_size: int = 64,
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
        self.query_prefix, self.passage_prefix = query_prefix, passage_prefix
        self.device, self.batch_size = torch.device(device), batch_size
        local = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(str(self.path), **local)
        self._model = AutoModel.from_pretrained(
            str(self.path), use_safetensors=True, dtype=torch.float32, **local
        )
        self._model.to(self.device).eval()
        self.dim = int(self._model.config.hidden_size)
        self.max_length = min(max_length, self._tokenizer.model_max_length, self._positions())

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Unit vectors of queries: float32 [N, D]; [0, D] for no query."""
        return self._encode(queries, self.query_prefix)

    def encode_passages(self, passages: list[str]) -> np.ndarray:
        """Unit vectors of passages: float32 [N, D]; [0, D] for no passage."""
        return self._encode(passages, self.passage_prefix)

    def fingerprint(self) -> dict:
        """Everything a vector depends on; an index built under another fingerprint answers nonsense."""
        return {
            "name": self.path.resolve().name,
            "weights_sha256": _sha256(sorted(self.path.glob("*.safetensors"))),
            "tokenizer_sha256": _sha256([self.path / n for n in TOKENIZER_FILES if (self.path / n).exists()]),
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "max_length": self.max_length,
            "pooling": "mean",
            "dim": self.dim,
        }

    def _positions(self) -> int:
        positions = getattr(self._model.config, "max_position_embeddings", None) or sys.maxsize
        # RoBERTa-style encoders number real tokens from padding_idx + 1: that many positions are lost.
        table = getattr(getattr(self._model, "embeddings", None), "position_embeddings", None)
        offset = getattr(table, "padding_idx", None)
        return positions if offset is None else positions - offset - 1

    @torch.inference_mode()
    def _encode(self, texts: list[str], prefix: str) -> np.ndarray:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts must be a list of str")
        out_N_D = np.zeros((len(texts), self.dim), dtype=np.float32)
        if not texts:
            return out_N_D
        ids_N = self._tokenizer([prefix + t for t in texts], truncation=True, max_length=self.max_length)[
            "input_ids"
        ]
        # Neighbours in length share a batch, so that little is spent on padding.
        order_N = sorted(range(len(texts)), key=lambda row: len(ids_N[row]))
        for start in range(0, len(order_N), self.batch_size):
            rows = order_N[start : start + self.batch_size]
            batch = self._tokenizer.pad({"input_ids": [ids_N[row] for row in rows]}, return_tensors="pt").to(
                self.device
            )
            hidden_N_L_D = self._model(**batch).last_hidden_state
            mask_N_L_1 = batch["attention_mask"].unsqueeze(-1).to(hidden_N_L_D.dtype)
            mean_N_D = (hidden_N_L_D * mask_N_L_1).sum(1) / mask_N_L_1.sum(1)
            out_N_D[rows] = torch.nn.functional.normalize(mean_N_D, dim=-1).cpu().numpy()
        # NaN fails the comparison too, so this one check covers zero and non-finite vectors.
        bad = np.flatnonzero(~(np.abs(np.linalg.norm(out_N_D, axis=1) - 1) < 1e-3))
        if bad.size:
            raise ValueError(
                f"the encoder gave no unit vector for text {texts[bad[0]][:80]!r}: zero or not finite"
            )
        return out_N_D


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with open(file, "rb") as handle:
            while chunk := handle.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
