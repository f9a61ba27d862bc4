"""Parquet files with anything in them: `prepare check` names what is wrong, and the trainer reads what it took."""

from __future__ import annotations

import copy
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
from omegaconf import OmegaConf

from kit.byte_world import make_tokenizer
from kit.damage import damaged_bytes, damaged_value
from kit.fuzz import ACCEPTED, REFUSED, Check, command, cuts, one_plain_line, told, try_all
from verl_credit.errors import ExitCode
from verl_credit.recipe.doctor.data import Reads, read_rows
from verl_credit.turns.rollout.reward.qa import compute_score

GOOD = {
    "data_source": "qa",
    "agent_name": "search_agent",
    "prompt": [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who?"}],
    "ability": "qa",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann Lee", "A. Lee"], "form": "tag"}},
    "extra_info": {"index": 0, "split": "train", "question": "Who?", "tool_selection": ["search"]},
}
# fmt: off
ODD = (
    "", " ", "text", "é" * 200, "\x00", "\x1b[31m", "a\nb", "\u202e", "x" * 50_000, "<answer>", "</answer>", None, True,
    0, -1, 2**62, 0.5, float("nan"), float("inf"), b"\xff\xfe", [], [None], ["a"], [["a"]], [1, 2], {}, {"a": 1},
    {"a": {"b": [None]}}, [{"role": "user"}], {"target": []}, {"target": "x", "form": "boxed"}, {"target": [None, ""]},
)
NAMES = ("sampling", "uid", "turn_ids", "Prompt", "prompt ", "question", "x" * 300, "", "é", "a\nb", "response_mask")
# fmt: on
tokenizer = cache(make_tokenizer)


def make(seed: int) -> tuple[list[str], list[dict], str]:
    """(what was done, the rows, where the file's bytes are damaged)"""
    draw = random.Random(seed)
    rows = [copy.deepcopy(GOOD) for _ in range(draw.choice((1, 2, 3)))]
    done = []
    for _ in range(draw.choice((0, 1, 1, 2))):
        row, kind = draw.choice(rows), draw.random()
        if kind < 0.6:
            done.append(damaged_value(row, draw, ODD))
        elif kind < 0.8:
            target = draw.choice(rows if draw.random() < 0.5 else [row])
            done.append(f"without {target.pop(draw.choice(list(target) or ['x']), None)!r:.40}")
        else:
            name = draw.choice(NAMES)
            for one in rows:
                one[name] = draw.choice(ODD)
            done.append(f"column {name!r:.40}")
    return done, rows, draw.choice(("", "", "", "bytes"))


def write(path: Path, rows: list[dict]) -> bool:
    """Whether parquet can hold them."""
    try:
        table = pa.Table.from_pylist(rows)
        parquet.write_table(table, path)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError):
        return False
    return True


def law(file: Path, before: bytes) -> str:
    code, out, err = command("prepare check", str(file))
    assert file.read_bytes() == before and not err
    if code == ExitCode.PREFLIGHT:
        one_plain_line(out)
        assert str(file) in out, f"names no file: {out!r:.600}"
        return REFUSED
    assert code == ExitCode.DONE and "rows can train" in out
    read_by_the_trainer(file)
    return ACCEPTED


def read_by_the_trainer(file: Path) -> None:
    """verl's data set gives every row, and the reward scores an answer to it."""
    from datasets import disable_progress_bars
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = {"max_prompt_length": 100_000, "truncation": "error", "filter_overlong_prompts": False}
    config = OmegaConf.create({**config, "cache_dir": str(file.parent / "cache")})
    disable_progress_bars()
    with redirect_stdout(StringIO()):
        data = RLHFDataset([str(file)], tokenizer(), config)
    rows = read_rows(str(file), "data.train_files", Reads(other_tools=True))
    assert len(data) == len(rows)
    for number in range(len(data)):
        row = data[number]
        assert row["raw_prompt"] and row["data_source"].strip()
        score = compute_score(
            row["data_source"], "<answer>x</answer>", row["reward_model"]["ground_truth"], {}
        )
        assert 0 <= score["score"] <= 1


@contextmanager
def checker(work: Path) -> Iterator[Check]:
    def check(seed: int) -> str:
        done, rows, damaged = make(seed)
        file = work / f"{seed}.parquet"
        with told((done, rows)):
            if not write(file, rows):
                write(file, [GOOD])
                damaged = "bytes"
            if damaged:
                file.write_bytes(damaged_bytes(file.read_bytes(), random.Random(seed))[1])
            verdict = law(file, file.read_bytes())
        file.unlink()
        shutil.rmtree(work / "cache", ignore_errors=True)
        return verdict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield check


@cuts(20, failed=(339, 353, 397, 5391))
def test_a_file_of_rows_can_train_or_is_refused_in_one_line(seeds, tmp_path):
    with checker(tmp_path) as check:
        try_all(check, seeds)
