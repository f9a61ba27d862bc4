"""Rows in verl's format, with one schema for all data sets, so that a run can read files of several."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from verl_credit.names import AGENT_NAME
from verl_credit.turns.reward.qa import BOXED, TAG
from verl_credit.worlds.data.catalogue import DataSet
from verl_credit.worlds.data.records import Record

# The chat template adds the tool's schema and the syntax of a call.
PROMPTS = {
    TAG: (
        "Answer the question below. Search for every fact that you are not sure of; you may search several times. "
        "When you know the answer, write it between <answer> and </answer>: the answer alone, in as few words as "
        "possible.\n\nQuestion: {question}"
    ),
    BOXED: (
        "Solve the problem below step by step. Then write the final answer, a single number without units, in "
        "\\boxed{{}}.\n\nProblem: {question}"
    ),
}

_TEXT = pa.string()
_TRUTH = pa.struct({"target": pa.list_(_TEXT), "form": _TEXT})
SCHEMA = pa.schema(
    {
        "data_source": _TEXT,
        "agent_name": _TEXT,
        "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
        "ability": _TEXT,
        "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TRUTH}),
        "extra_info": pa.struct(
            {
                "index": pa.int64(),
                "split": _TEXT,
                "question": _TEXT,
                "id": _TEXT,
                "supporting": pa.list_(_TEXT),
            }
        ),
    }
)


def to_row(record: Record, data_set: DataSet, split: str, index: int) -> dict:
    """One row; ``index`` is its number in the file."""
    content = PROMPTS[data_set.form].format(question=record.question)
    return {
        "data_source": data_set.name,
        "agent_name": AGENT_NAME,
        "prompt": [{"role": "user", "content": content}],
        "ability": data_set.ability,
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": record.answers, "form": data_set.form},
        },
        "extra_info": {
            "index": index,
            "split": split,
            "question": record.question,
            "id": record.id,
            "supporting": record.supporting,
        },
    }


def write_rows(records: list[Record], data_set: DataSet, split: str, path: Path) -> None:
    rows = [to_row(record, data_set, split, index) for index, record in enumerate(records)]
    parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
