"""Published question sets become rows: their forms, what is dropped and why, splits."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kit.prepared import WORKED, asked, assert_law, lines, questions, report, rows_of
from verl_credit.cli import main
from verl_credit.worlds.data.catalogue import DATA_SETS
from verl_credit.worlds.data.prepare import prepare
from verl_credit.worlds.data.records import OTHER_SET, PrepareError
from verl_credit.worlds.data.sources import split_of

# --- forms ---


@pytest.mark.parametrize("case", WORKED)
def test_a_published_record_becomes_a_row(case, tmp_path):
    raw, question, answers, record_id = WORKED[case]
    name = case.split()[0]
    prepare(name, lines(tmp_path / "x.jsonl", raw), tmp_path / "out", splits=[DATA_SETS[name].split])
    split = DATA_SETS[name].split
    (row,) = rows_of(tmp_path / "out" / f"{split}.parquet")
    assert row["extra_info"] == {
        "index": 0,
        "split": split,
        "question": question,
        "id": record_id,
        "supporting": ["It"] if name == "hotpotqa" and "supporting_facts" in raw else [],
    }
    assert row["reward_model"]["ground_truth"]["target"] == answers
    assert row["data_source"] == name and row["agent_name"] == "search_agent"
    assert [m["role"] for m in row["prompt"]] == ["user"] and row["prompt"][0]["content"].endswith(question)
    assert_law(tmp_path / "out")


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_kind_of_file(suffix, tmp_path):
    raw = [
        {"id": "1", "question": 'A "b", c?', "possible_answers": '["x", "y"]'},
        {"id": "2", "question": "D?", "possible_answers": '["z"]'},
    ]
    path = tmp_path / f"popqa_test{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(raw), path)
    elif suffix in (".csv", ".tsv"):
        cut = "," if suffix == ".csv" else "\t"
        cells = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row.values()] for row in raw]
        path.write_text("\n".join(cut.join(row) for row in [list(raw[0]), *cells]) + "\n")
    else:
        whole = json.dumps({"Data": raw, "Version": 1.0}, indent=1)  # as in TriviaQA's release
        path.write_text(whole if suffix == ".json" else "\n".join(map(json.dumps, raw)))
    prepare("popqa", str(path), tmp_path / "out")
    rows = rows_of(tmp_path / "out" / "test.parquet")
    assert [r["extra_info"]["question"] for r in rows] == ['A "b", c?', "D?"]
    assert [r["reward_model"]["ground_truth"]["target"] for r in rows] == [["x", "y"], ["z"]]


# --- what is dropped ---


def test_what_is_dropped_and_why(tmp_path, capsys):
    good = {"question": "Who?", "answer": ["Bo"]}
    messy = [
        good,
        '{"question": "cut off',
        {"question": "  ", "answer": ["Bo"]},
        {"question": "No answer?", "answer": []},
        {"question": "Null?", "answer": None},
        {"question": "Blank?", "answer": [" ", "\n"]},
        {"question": "who?  ", "answer": ["Bo"]},
        {"question": "Tagged?", "answer": ["a </answer> b"]},
        {"question": "Half a character \ud800?", "answer": ["Bo"]},
        {"text": "something else"},
        "[1, 2]",
        {"question": "Who?", "answer": ["another Bo"]},
        {"question": "Mixed?", "answer": ["", "x", "</answer>", "x", "\ud800"]},
        "",
    ]
    source = lines(tmp_path / "NQ-open.train.jsonl", *messy)
    assert main(["prepare", "nq", "--source", source, "--out", str(tmp_path / "out")]) == 0
    found = report(tmp_path / "out")
    train = found["read"]["train"]
    assert train["dropped"] == {
        "unreadable": 1,
        "no question": 1,
        "no answer": 2,
        "answers are blank": 1,
        "repeated": 1,
        "no answer that the reward can match": 1,
        "not valid text": 1,
        "not in a known form": 2,
    }
    assert train["records"] == 13 == train["kept"] + sum(train["dropped"].values())
    assert found["written"]["train.parquet"] == {"rows": 3, "gold_answers": 3}
    assert found["same_question_other_answers"] == 1
    # "Blank?" two, "Mixed?" one; "</answer>" of "Tagged?" and of "Mixed?", and half a character
    assert found["gold_answers_left_out"] == {
        "blank": 3,
        "no answer that the reward can match": 3,
        "repeated": 1,
    }
    assert train["examples"]["unreadable"][0].startswith("NQ-open.train.jsonl line 2: not JSON")
    assert "the record has text" in train["examples"]["not in a known form"][0]
    printed = capsys.readouterr().out
    assert "train          13        3       10" in printed
    assert "train: 1 unreadable, first NQ-open.train.jsonl line 2: not JSON" in printed
    assert_law(tmp_path / "out")


@pytest.mark.parametrize(
    "name, raw, reason",
    [
        ("musique", {"question": "Q?", "answer": "a", "answerable": False}, "marked as unanswerable"),
        ("triviaqa", {"question": "Q?", "answer": {"value": "<unk>", "aliases": []}}, "no answer"),
        ("hotpotqa", {"_id": "1", "question": "Q?", "context": []}, "no answer"),
        ("popqa", {"question": "Q?", "possible_answers": "not json"}, "possible_answers is not a JSON list"),
        ("gsm8k", {"question": "Q?", "answer": "so it is\n#### many"}, "answer is not a number"),
        ("gsm8k", {"question": "Q?", "answer": "1,2\n#### 1,2"}, "answer is not a number"),
        ("bamboogle", {"query": "Q?", "Answer": "a"}, "no field question or Question; the record has query"),
    ],
)
def test_records_of_a_data_set_that_cannot_be_used(name, raw, reason, tmp_path):
    with pytest.raises(PrepareError, match="no row is left of 1 records") as error:
        prepare(name, lines(tmp_path / "x_train.jsonl", raw), tmp_path / "out")
    assert reason in str(error.value) and "x_train.jsonl line 1" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x_train.jsonl"]


@pytest.mark.parametrize(
    "name, raw, golds",
    [
        ("qa", {"question": "Q?", "answers": [1e3, "x"]}, ["1000", "x"]),
        ("gsm8k", {"question": "Q?", "answer": 72.0}, ["72"]),
        ("nq", {"question": "Q?", "ground_truth": {"target": ["a", "b"]}}, ["a", "b"]),
        ("musique", {"question": "Q?", "answer": "a", "answer_aliases": "['b', 'c']"}, ["a", "b", "c"]),
        (
            "triviaqa",
            {"question": "Q?", "answer": "{'value': 'Ace', 'normalized_aliases': ['ace', 'b']}"},
            ["Ace", "b"],
        ),
    ],
)
def test_answers_in_the_other_forms_of_public_files(name, raw, golds, tmp_path):
    prepare(name, lines(tmp_path / "x.jsonl", raw), tmp_path / "out", splits=[DATA_SETS[name].split])
    (row,) = rows_of(tmp_path / "out" / f"{DATA_SETS[name].split}.parquet")
    assert row["reward_model"]["ground_truth"]["target"] == golds
    assert_law(tmp_path / "out")


def test_an_answer_that_is_not_certain_drops_its_row_with_place_and_reason(tmp_path, capsys):
    rows = [{"question": "R?", "answer": "r"}, {"question": "Q?", "answer": [["a", "b"], ["c"]]}]
    source = lines(tmp_path / "x_train.jsonl", *rows)
    assert main(["prepare", "qa", "--source", source, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "train: 1 answer not in a known form, first x_train.jsonl line 2: " in printed
    assert "lists several lists" in printed


def test_an_answer_that_looks_like_several_is_kept_and_said(tmp_path, capsys):
    golds = ["a|b", "c", "d ||| e", "f|g"]
    source = lines(
        tmp_path / "x_train.jsonl", *({"question": f"{i}?", "answer": g} for i, g in enumerate(golds))
    )
    assert main(["prepare", "qa", "--source", source, "--out", str(tmp_path / "out")]) == 0
    said = "2 rows with an answer that looks like several answers joined by '|', first x_train.jsonl line 1: 'a|b'"
    assert f"kept as it stands: {said}" in capsys.readouterr().out
    doubted = report(tmp_path / "out")["gold_answers_doubted"]
    assert {looks: n for looks, (n, _) in doubted.items()} == {
        "several answers joined by '|'": 2,
        "several answers joined by '|||'": 1,
    }
    rows = rows_of(tmp_path / "out" / "train.parquet")
    assert [row["reward_model"]["ground_truth"]["target"] for row in rows] == [[gold] for gold in golds]


ASKED = {"question": "Q?", "answer": "a"}


@pytest.mark.parametrize(
    "name, odd",
    [
        ("musique", {"paragraphs": 5}),
        ("hotpotqa", {"supporting_facts": {"title": 5}}),
        ("hotpotqa", {"supporting_facts": {"title": ["\ud800"]}}),
        ("hotpotqa", {"context": {"title": 5, "sentences": 5}}),
        ("hotpotqa", {"context": "[" * 100_000}),
        ("hotpotqa", {"golden_answers": ["a"], "metadata": {"context": {"title": ["T"], "sentences": 5}}}),
        ("hotpotqa", {"_id": "\ud800"}),
    ],
)
def test_a_field_of_another_form_is_left_out_and_its_row_stays(name, odd, tmp_path):
    source = lines(tmp_path / "x_train.jsonl", {**ASKED, **odd})
    assert prepare(name, source, tmp_path / "out").splits["train"].kept == 1
    assert_law(tmp_path / "out")
    (row,) = rows_of(tmp_path / "out" / "train.parquet")
    assert row["reward_model"]["ground_truth"]["target"] == ["a"] and not row["extra_info"]["supporting"]


def test_half_a_character_is_told_and_printed(tmp_path, capsys):
    other = {"data_source": "\ud800", "question": "Q?", "ground_truth": "a"}
    source = lines(tmp_path / "x_train.jsonl", other, ASKED)
    assert main(["prepare", "nq", "--source", source, "--out", str(tmp_path / "out")]) == 0
    assert "first x_train.jsonl line 1: \\ud800" in capsys.readouterr().out


# --- splits ---


@pytest.mark.parametrize(
    "name, split",
    [
        ("hotpot_train_v1.1", "train"),
        ("hotpot_dev_distractor_v1", "val"),
        ("NQ-open.dev", "val"),
        ("validation-00000-of-00001", "val"),
        ("unfiltered-web-train", "train"),
        ("test", "test"),
        ("popQA", None),
        ("latest", None),
        ("developers", None),
    ],
)
def test_a_file_name_says_its_split(name, split):
    assert split_of(name) == split


@pytest.fixture
def folder(tmp_path):
    lines(tmp_path / "nq" / "train.jsonl", *questions(6), {"question": "V1?", "answer": ["a"]})
    lines(tmp_path / "nq" / "dev.jsonl", *questions(3, "v"))
    lines(tmp_path / "nq" / "test.jsonl", *questions(2, "t"), {"question": "v0?", "answer": ["other"]})
    lines(tmp_path / "nq" / "notes.jsonl", {"note": 1})
    return tmp_path / "nq"


def test_a_folder_is_read_by_splits_and_what_is_tested_is_not_trained(folder, tmp_path):
    out = tmp_path / "out"
    tally = prepare("nq", str(folder), out)
    assert asked(out / "train.parquet") == [f"q{i}?" for i in range(6)]
    assert asked(out / "val.parquet") == ["v1?", "v2?"]
    assert asked(out / "test.parquet") == ["t0?", "t1?", "v0?"]
    read = report(out)["read"]
    assert read["train"]["dropped"] == {"question also in val": 1}
    assert read["val"]["dropped"] == {"question also in test": 1}
    for split in read.values():
        assert split["records"] == split["kept"] + sum(split["dropped"].values())
    assert "not read, because their names have no split: notes.jsonl" in tally.table()
    manifest = json.loads((out / "manifest.json").read_text())
    assert [Path(p).name for p in manifest["source"]["not_read"]] == ["notes.jsonl"]
    assert_law(out)


def test_splits_and_limit(folder, tmp_path):
    prepare("nq", str(folder), tmp_path / "out", splits=["dev", "train"], limit=2)
    assert asked(tmp_path / "out" / "train.parquet") == ["q0?", "q1?"]
    assert asked(tmp_path / "out" / "val.parquet") == ["v0?", "v1?"]
    assert not (tmp_path / "out" / "test.parquet").exists()
    with pytest.raises(PrepareError, match="--splits=tset: the source has no tset; it has train, val, test"):
        prepare("nq", str(folder), tmp_path / "other", splits=["tset"])


def test_a_split_without_answers_has_no_file(tmp_path):
    lines(tmp_path / "d" / "train.jsonl", *questions(2))
    lines(tmp_path / "d" / "test.jsonl", {"question": "t?"})
    prepare("nq", str(tmp_path / "d"), tmp_path / "out")
    assert not (tmp_path / "out" / "test.parquet").exists()
    assert report(tmp_path / "out")["read"]["test"]["dropped"] == {"no answer": 1}


def test_val_size_draws_from_one_split_by_the_seed(tmp_path):
    source = lines(tmp_path / "train.jsonl", *questions(20))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        prepare("nq", source, tmp_path / name, val_size=5, seed=seed)
    train, val = asked(tmp_path / "a" / "train.parquet"), asked(tmp_path / "a" / "val.parquet")
    assert (len(train), len(val)) == (15, 5)
    assert sorted(train + val) == sorted(q["question"] for q in questions(20))
    assert val == sorted(val, key=lambda q: int(q[1:-1])) and val != [f"q{i}?" for i in range(5)]
    assert (tmp_path / "a" / "val.parquet").read_bytes() == (tmp_path / "b" / "val.parquet").read_bytes()
    assert val != asked(tmp_path / "c" / "val.parquet")


def test_val_size_never_parts_a_question_from_itself(tmp_path):
    """The same question with other answers: whichever side it falls on, train has none of val's."""
    twice = [{"question": f"q{i // 2}?", "answer": [f"a{i}"]} for i in range(20)]
    prepare("nq", lines(tmp_path / "train.jsonl", *twice), tmp_path / "out", val_size=6)
    assert not set(asked(tmp_path / "out" / "train.parquet")) & set(asked(tmp_path / "out" / "val.parquet"))
    assert report(tmp_path / "out")["read"]["train"]["dropped"]["question also in val"] >= 1


@pytest.mark.parametrize(
    "kept, said", [(0, "no row is left of 3 records: 3 "), (2, "only 2 rows are left; .*: 3 ")]
)
def test_too_few_rows_for_val_size_are_told_with_what_was_dropped(kept, said, tmp_path):
    """A file of several sets: the rows are of another one."""
    rows = [{"data_source": "popqa", "question": f"p{i}?", "ground_truth": "a"} for i in range(3)]
    rows += [{"data_source": "nq", "question": f"n{i}?", "ground_truth": "a"} for i in range(kept)]
    source = lines(tmp_path / "train.jsonl", *rows)
    with pytest.raises(PrepareError, match=f"{said}{OTHER_SET} \\(first .*popqa"):
        prepare("nq", source, tmp_path / "out", val_size=20)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"val_size": 2}, "the source has train, val, test; choose the one to divide with --splits"),
        ({"val_size": 7, "splits": ["train"]}, "--val-size=7: only 7 rows are left; at least one"),
        ({"val_size": 0}, "--val-size=0: expected 1 or more"),
        ({"limit": 0}, "--limit=0: expected 1 or more"),
        ({"subset": "x"}, "--subset=x works only for the hub"),
    ],
)
def test_options_that_cannot_be(options, said, folder, tmp_path):
    with pytest.raises(PrepareError, match=said):
        prepare("nq", str(folder), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
