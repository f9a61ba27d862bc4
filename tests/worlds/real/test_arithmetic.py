"""The arithmetic questions: right answers, no repeats, disjoint files, rows that verl and the reward can read."""

import operator

import pyarrow.parquet as parquet

from verl_credit.names import AGENT_NAME
from verl_credit.recipe.doctor.data import Reads, checked_row
from verl_credit.turns.rollout.reward.qa import compute_score
from verl_credit.worlds.data.output import SCHEMA
from verl_credit.worlds.real.arithmetic import WORKED, make_records, write_arithmetic

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def value_of(question: str) -> int:
    left, sign, right = question.removeprefix("What is ").removesuffix("?").split()
    return OPERATIONS[sign](int(left), int(right))


def rows_of(path):
    return parquet.read_table(path).to_pylist()


def test_every_answer_is_right_and_no_question_repeats():
    records = make_records(3, 900)
    assert len({r.question for r in records}) == len(records)
    assert all(r.answers == [str(value_of(r.question))] for r in records)
    assert {sign for sign in OPERATIONS for r in records if f" {sign} " in r.question} == {*OPERATIONS}
    assert min(int(r.answers[0]) for r in records) >= 2


def test_the_worked_examples_are_no_questions(tmp_path):
    write_arithmetic(tmp_path, train=890, test=1)
    shown = {m["content"] for m in rows_of(tmp_path / "test.parquet")[0]["prompt"][:-1]}
    assert not shown & {row["extra_info"]["question"] for row in rows_of(tmp_path / "train.parquet")}


def test_the_files_are_disjoint_and_a_seed_gives_the_same_rows(tmp_path):
    for name, seed in (("a", 1), ("again", 1), ("b", 2)):
        write_arithmetic(tmp_path / name, seed=seed, train=300, test=100)
    a, again, b = (
        {s: rows_of(tmp_path / n / f"{s}.parquet") for s in ("train", "test")} for n in ("a", "again", "b")
    )
    asked = {split: {row["extra_info"]["question"] for row in rows} for split, rows in a.items()}
    assert (len(asked["train"]), len(asked["test"])) == (300, 100) and not asked["train"] & asked["test"]
    assert a == again and a != b


def test_a_question_and_its_twin_with_the_numbers_exchanged_are_in_one_file(tmp_path):
    write_arithmetic(tmp_path)
    twins = {}
    for split in ("train", "test"):
        for row in rows_of(tmp_path / f"{split}.parquet"):
            first, sign, second = row["extra_info"]["id"].split()
            pair = frozenset((first, second)) if sign in "+*" else (first, second)
            twins.setdefault((sign, pair), set()).add(split)
    assert len(twins) > 400 and all(len(splits) == 1 for splits in twins.values())


def test_a_row_has_the_projects_schema_and_the_reward_accepts_the_form_of_its_examples(tmp_path):
    write_arithmetic(tmp_path)
    assert parquet.read_schema(tmp_path / "train.parquet").equals(SCHEMA)
    row = rows_of(tmp_path / "train.parquet")[0]
    checked_row("row 0", row, Reads(searches=False, agents=[AGENT_NAME]), named=True)
    assert [m["role"] for m in row["prompt"]] == ["user", "assistant"] * len(WORKED) + ["user"]
    for asked, answered in zip(row["prompt"][:-1:2], row["prompt"][1::2], strict=True):
        truth = {
            "target": [str(value_of(asked["content"]))],
            "form": row["reward_model"]["ground_truth"]["form"],
        }
        assert compute_score(row["data_source"], answered["content"], truth)["score"] == 1.0
    assert (
        compute_score(row["data_source"], "\\boxed{-1}", row["reward_model"]["ground_truth"])["score"] == 0.0
    )
