"""Rows and folders that pass the checks before the start."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as parquet

from kit.byte_world import make_tokenizer

GOOD = {
    "data_source": "qa",
    "prompt": [{"role": "user", "content": "q"}],
    "reward_model": {"ground_truth": {"target": ["a"]}},
}


def different(n):
    """n good rows, each of another question, whose prompt says how an answer is written."""
    asks = ("Write the answer between <answer> and </answer>.", "Who wrote book")
    return [{**GOOD, "prompt": [{"role": "user", "content": f"{asks[0]} {asks[1]} {i}?"}]} for i in range(n)]


def write(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def policy(root):
    """A folder with a tokenizer and nothing to train."""
    make_tokenizer().save_pretrained(root / "policy")
    (root / "policy/config.json").write_text('{"model_type": "qwen3"}')
    return root / "policy"
