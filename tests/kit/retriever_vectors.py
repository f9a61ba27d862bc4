"""An encoder that looks vectors up by text, so that an index holds exactly the rows a test chose."""

import json
from pathlib import Path

import numpy as np


class TableEncoder:
    """Encodes the text "row R" as row R of a table; `fingerprint` is that of a table, not of a model."""

    dtype = "fp32"

    def __init__(self, table_M_D: np.ndarray, name: str = "table"):
        self.table_M_D, self.dim, self._name, self.calls = table_M_D, table_M_D.shape[1], name, 0

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        self.calls += 1
        return self.table_M_D[[int(text.split()[1]) for text in texts]]

    def fingerprint(self) -> dict:
        return {"name": self._name, "weights_sha256": self._name, "normalize": True, "dim": self.dim}


def write_rows(path: Path, rows: int, first: int = 0) -> Path:
    """A corpus whose document r has the contents "row r"."""
    lines = (json.dumps({"id": f"d{row}", "contents": f"row {row}"}) for row in range(first, first + rows))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def clustered(rows: int, dim: int, seed: int) -> np.ndarray:
    """Unit vectors float32 [rows, dim] around 20 centres, as sentences are: neighbours exist."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((20, dim))
    vectors = centres[rng.integers(20, size=rows)] + 0.6 * rng.standard_normal((rows, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
