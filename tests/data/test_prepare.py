"""Published question sets become rows that verl reads and the reward can score; what is dropped is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from verl_credit.cli import main
from verl_credit.data import prepare as prepare_module
from verl_credit.data.catalogue import DATA_SETS
from verl_credit.data.prepare import prepare
from verl_credit.data.records import PrepareError
from verl_credit.data.sources import split_of
from verl_credit.doctor.inputs.data import read_rows
from verl_credit.reward.qa import BOXED, compute_score
from verl_credit_retriever.index.corpus import Documents, copy_corpus

HOTPOT = {
    "_id": "5a8b",
    "question": "Who wrote it?",
    "answer": "Ann Lee",
    "type": "bridge",
    "supporting_facts": [["It", 0]],
    "context": [["It", ["It is a book.", " Ann Lee wrote it."]], ["Ann Lee", ["Ann Lee is a writer."]]],
}
HOTPOT_HUB = {
    **{key: HOTPOT[key] for key in ("question", "answer", "type")},
    "id": "5a8b",
    "supporting_facts": {"title": ["It"], "sent_id": [0]},
    "context": {
        "title": ["It", "Ann Lee"],
        "sentences": [["It is a book.", " Ann Lee wrote it."], ["Ann Lee is a writer."]],
    },
}
WORKED = {  # data set and form: (the published record, question, gold answers, id)
    "hotpotqa release": (HOTPOT, "Who wrote it?", ["Ann Lee"], "5a8b"),
    "hotpotqa hub": (HOTPOT_HUB, "Who wrote it?", ["Ann Lee"], "5a8b"),
    "nq release": (
        {"question": "who is it ", "answer": ["Bo", " Bo", "bo", "B. O."]},
        "who is it",
        ["Bo", "bo", "B. O."],
        "x.jsonl line 1",
    ),
    "musique release": (
        {
            "id": "2hop__1_2",
            "question": "Where?",
            "answer": "New York",
            "answer_aliases": ["NYC", "New York", ""],
            "answerable": True,
            "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "P", "is_supporting": True}],
        },
        "Where?",
        ["New York", "NYC"],
        "2hop__1_2",
    ),
    "2wiki release": (
        {
            "_id": "a1",
            "question": "Which country?",
            "answer": "France",
            "answer_id": "Q142",
            "context": [["France", ["A.", "B."]]],
        },
        "Which country?",
        ["France"],
        "a1",
    ),
    "triviaqa hub": (
        {
            "question": "Name?",
            "question_id": "tc_1",
            "answer": {
                "value": "The Beatles",
                "aliases": ["Beatles", "Fab Four", "B-side"],
                # the reward strips punctuation, this release puts a space in its place: "b side" is news
                "normalized_aliases": ["beatles", "fab four", "b side"],
            },
        },
        "Name?",
        ["The Beatles", "Beatles", "Fab Four", "B-side", "b side"],
        "tc_1",
    ),
    "triviaqa release": (
        {
            "Question": "Name?",
            "QuestionId": "tc_1",
            "Answer": {"Value": "Ace", "Aliases": ["Ace (band)"], "NormalizedAliases": ["ace"]},
        },
        "Name?",
        ["Ace", "Ace (band)"],
        "tc_1",
    ),
    "popqa release": (
        {"id": 7, "question": "Job?", "obj": "poet", "possible_answers": '["poet", "bard", "poet"]'},
        "Job?",
        ["poet", "bard"],
        "7",
    ),
    "bamboogle release": ({"Question": "Year?", "Answer": 2012}, "Year?", ["2012"], "x.jsonl line 1"),
    "gsm8k release": (
        {"question": "How many?", "answer": "6*203=<<6*203=1218>>1218\n#### 1,218"},
        "How many?",
        ["1218"],
        "x.jsonl line 1",
    ),
    "qa own": ({"question": "Q?", "answers": ["a", "b"]}, "Q?", ["a", "b"], "x.jsonl line 1"),
}
for _name in DATA_SETS:
    _gold = ["1,218"] if DATA_SETS[_name].form == BOXED else ["Bo", "Ann"]
    WORKED[f"{_name} FlashRAG"] = (
        {"id": "test_0", "question": "Q?", "golden_answers": _gold, "metadata": {}},
        "Q?",
        [g.replace(",", "") for g in _gold],
        "test_0",
    )
    WORKED[f"{_name} joined"] = (
        {"data_source": _name, "question": "Q?", "ground_truth": "<|answer_split|>".join(_gold)},
        "Q?",
        [g.replace(",", "") for g in _gold],
        "x.jsonl line 1",
    )


def corpus_of(path):
    """Every document, as the retriever reads and checks it."""
    copy = path.with_name("copied.jsonl")
    documents = Documents(copy, copy_corpus(path, copy))
    return [documents[row] for row in range(len(documents))]


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def questions(n, prefix="q"):
    return [{"question": f"{prefix}{i}?", "answer": [f"a{i}"]} for i in range(n)]


def rows_of(path):
    return parquet.read_table(path).to_pylist()


def asked(path):
    return [row["extra_info"]["question"] for row in rows_of(path)]


def report(out):
    return json.loads((out / "report.json").read_text())


def assert_law(out, files=("train", "val", "test")):
    """Preflight takes every row, and a trajectory that answers with any gold alias scores 1."""
    paths = [str(out / f"{name}.parquet") for name in files if (out / f"{name}.parquet").exists()]
    assert read_rows(paths, "data.train_files")
    for path in paths:
        for row in rows_of(path):
            truth = row["reward_model"]["ground_truth"]
            assert truth["target"] and len(set(truth["target"])) == len(truth["target"])
            boxed = truth["form"] == BOXED
            assert ("\\boxed" in row["prompt"][0]["content"]) == boxed
            assert ("<answer>" in row["prompt"][0]["content"]) != boxed
            for alias in truth["target"]:
                said = f"\\boxed{{{alias}}}" if boxed else f"<answer>{alias}</answer>"
                assert compute_score(row["data_source"], f"So {said}", truth)["score"] == 1.0, alias


# --- forms ---


@pytest.mark.parametrize("case", WORKED)
def test_a_published_record_becomes_a_row(case, tmp_path):
    raw, question, answers, record_id = WORKED[case]
    name = case.split()[0]
    prepare(name, lines(tmp_path / "x.jsonl", raw), tmp_path / "out", splits=[DATA_SETS[name].split])
    split = DATA_SETS[name].split
    (row,) = rows_of(tmp_path / "out" / f"{split}.parquet")
    assert row["extra_info"] == {"index": 0, "split": split, "question": question, "id": record_id}
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
        path.write_text(json.dumps(raw) if suffix == ".json" else "\n".join(map(json.dumps, raw)))
    prepare("popqa", str(path), tmp_path / "out")
    rows = rows_of(tmp_path / "out" / "test.parquet")
    assert [r["extra_info"]["question"] for r in rows] == ['A "b", c?', "D?"]
    assert [r["reward_model"]["ground_truth"]["target"] for r in rows] == [["x", "y"], ["z"]]


def test_triviaqas_release_holds_its_list_in_an_object(tmp_path):
    raw = WORKED["triviaqa release"][0]
    path = tmp_path / "wikipedia-train.json"
    path.write_text(json.dumps({"Data": [raw], "Domain": "Wikipedia", "Version": 1.0}, indent=1))
    prepare("triviaqa", str(path), tmp_path / "out")
    assert asked(tmp_path / "out" / "train.parquet") == ["Name?"]


def test_2wikis_aliases_stand_in_a_file_beside_it(tmp_path):
    raw = WORKED["2wiki release"][0]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.json").write_text(json.dumps([raw]))
    lines(
        tmp_path / "d" / "id_aliases.json",
        {"Q_id": "Q142", "aliases": ["French Republic"], "demonyms": ["French"]},
        {"Q_id": "Q1", "aliases": ["Universe"], "demonyms": []},
    )
    prepare("2wiki", str(tmp_path / "d"), tmp_path / "out")
    (row,) = rows_of(tmp_path / "out" / "train.parquet")
    assert row["reward_model"]["ground_truth"]["target"] == ["France", "French Republic", "French"]
    sources = json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]["files"]
    assert {Path(name).name for name in sources} == {"train.json", "id_aliases.json"}


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
    prepare("nq", str(folder), out)
    assert asked(out / "train.parquet") == [f"q{i}?" for i in range(6)]
    assert asked(out / "val.parquet") == ["v1?", "v2?"]
    assert asked(out / "test.parquet") == ["t0?", "t1?", "v0?"]
    read = report(out)["read"]
    assert read["train"]["dropped"] == {"question also in val": 1}
    assert read["val"]["dropped"] == {"question also in test": 1}
    for split in read.values():
        assert split["records"] == split["kept"] + sum(split["dropped"].values())
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


# --- the corpus ---


def test_paragraphs_become_a_corpus_that_the_retriever_reads(tmp_path):
    other = {
        **HOTPOT,
        "question": "Other?",
        "context": [["It", ["It is a book.", " Ann Lee wrote it."]], ["It", ["Another."]], ["", ["x"]]],
    }
    dropped = {**HOTPOT, "question": "Dropped?", "answer": "", "context": [["Never", ["seen"]]]}
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps([HOTPOT, other, dropped]))
    prepare("hotpotqa", str(tmp_path / "hotpot_dev_distractor_v1.json"), tmp_path / "out")
    assert [document for document in corpus_of(tmp_path / "out" / "corpus.jsonl")] == [
        {"id": "0", "contents": "It\nIt is a book. Ann Lee wrote it."},
        {"id": "1", "contents": "Ann Lee\nAnn Lee is a writer."},
        {"id": "2", "contents": "It\nAnother."},
    ]
    assert report(tmp_path / "out")["written"]["corpus.jsonl"] == {
        "paragraphs": 3,
        "repeated": 1,
        "unusable": 1,
    }


@pytest.mark.parametrize(
    "case, contents",
    [
        ("hotpotqa hub", ["It\nIt is a book. Ann Lee wrote it.", "Ann Lee\nAnn Lee is a writer."]),
        ("musique release", ["T\nP"]),
        ("2wiki release", ["France\nA. B."]),
    ],
)
def test_paragraphs_of_other_forms(case, contents, tmp_path):
    prepare(case.split()[0], lines(tmp_path / "train.jsonl", WORKED[case][0]), tmp_path / "out")
    assert [d["contents"] for d in corpus_of(tmp_path / "out" / "corpus.jsonl")] == contents


def test_no_paragraphs_no_corpus(tmp_path):
    prepare("nq", lines(tmp_path / "train.jsonl", *questions(2)), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "report.json",
        "train.parquet",
    ]


# --- the output folder ---


def test_nothing_is_overwritten_unasked(tmp_path):
    source, out = lines(tmp_path / "train.jsonl", *questions(2)), tmp_path / "out"
    prepare("nq", source, out)
    before = (out / "train.parquet").read_bytes()
    with pytest.raises(PrepareError, match="holds manifest.json.*or --overwrite"):
        prepare("nq", source, out, limit=1)
    assert (out / "train.parquet").read_bytes() == before
    prepare("nq", source, out, limit=1, overwrite=True)
    assert asked(out / "train.parquet") == ["q0?"]
    (out / "index").mkdir()
    with pytest.raises(PrepareError, match="holds index, not written by prepare: move it away"):
        prepare("nq", source, out, overwrite=True)
    assert asked(out / "train.parquet") == ["q0?"] and (out / "index").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_fails_leaves_everything_as_it_was(overwrite, tmp_path, monkeypatch):
    source, out = lines(tmp_path / "train.jsonl", *questions(2)), tmp_path / "out"
    if overwrite:
        prepare("nq", source, out)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(prepare_module, "write_rows", full)
    arguments = ["prepare", "nq", "--source", source, "--out", str(out), "--limit", "1"]
    assert main([*arguments, *(["--overwrite"] if overwrite else [])]) == 4
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert out.exists() == overwrite


def test_the_manifest_names_source_and_files_with_their_hashes(tmp_path):
    import hashlib

    source, out = lines(tmp_path / "train.jsonl", *questions(3)), tmp_path / "out"
    prepare("nq", source, out, limit=2, seed=5)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"]["files"] == {source: hashlib.sha256(Path(source).read_bytes()).hexdigest()}
    assert manifest["settings"] == {"limit": 2, "val_size": None, "seed": 5, "splits": ["train"]}
    assert manifest["files"]["train.parquet"] == {
        "sha256": hashlib.sha256((out / "train.parquet").read_bytes()).hexdigest(),
        "rows": 2,
        "gold_answers": 2,
    }
    assert manifest["files"].keys() == {"train.parquet", "report.json"}


# --- the hub ---


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets` itself, sent to a folder: what owner/name would be on the hub."""
    import datasets

    def serve(owner_name, root):
        for function in ("load_dataset", "get_dataset_config_names"):
            real = getattr(datasets, function)

            def local(name, *args, _real=real, revision=None, **kwargs):
                assert name == owner_name
                if _real.__name__ == "load_dataset":
                    kwargs["cache_dir"] = str(tmp_path / "cache")
                return _real(str(root), *args, **kwargs)

            monkeypatch.setattr(datasets, function, local)

    return serve


def test_a_data_set_of_the_hub(hub, tmp_path):
    table = pa.Table.from_pylist([HOTPOT_HUB, {**HOTPOT_HUB, "question": "Two?"}])
    (tmp_path / "hub" / "data").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    parquet.write_table(table.slice(0, 1), tmp_path / "hub" / "data" / "validation-00000-of-00001.parquet")
    hub("hotpotqa/hotpot_qa", tmp_path / "hub")
    prepare("hotpotqa", "hotpotqa/hotpot_qa", tmp_path / "out")
    assert asked(tmp_path / "out" / "train.parquet") == ["Two?"]
    assert asked(tmp_path / "out" / "val.parquet") == ["Who wrote it?"]
    assert len(list(corpus_of(tmp_path / "out" / "corpus.jsonl"))) == 2
    source = json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]
    assert source["source"] == "hotpotqa/hotpot_qa" and source["splits"]["train"]["records_read"] == 2
    assert len(source["splits"]["train"]["sha256_of_records"]) == 64
    assert_law(tmp_path / "out")


def test_parts_of_a_data_set_of_the_hub(hub, tmp_path):
    """The part that is known to fit is taken; another by --subset; otherwise one has to be chosen."""
    root = tmp_path / "hub"
    answers = {"rc": "from rc", "rc.nocontext": "from rc.nocontext"}
    listed = []
    for subset, answer in answers.items():
        raw = {"question": "Q?", "question_id": "1", "answer": {"value": answer, "aliases": ["x"]}}
        lines(root / subset / "validation.jsonl", raw)
        listed.append(
            f"- config_name: {subset}\n  data_files:\n  - split: validation\n    path: {subset}/*\n"
        )
    (root / "README.md").write_text("---\nconfigs:\n" + "".join(listed) + "---\n")
    hub("mandarjoshi/trivia_qa", root)
    for subset, taken in ((None, "rc.nocontext"), ("rc", "rc")):
        out = tmp_path / f"out {taken}"
        prepare("triviaqa", "mandarjoshi/trivia_qa", out, subset=subset)
        (row,) = rows_of(out / "val.parquet")
        assert row["reward_model"]["ground_truth"]["target"] == [f"from {taken}", "x"]
    with pytest.raises(PrepareError, match="--subset=rcc: mandarjoshi/trivia_qa has rc, rc.nocontext"):
        prepare("triviaqa", "mandarjoshi/trivia_qa", tmp_path / "o", subset="rcc")
    with pytest.raises(PrepareError, match="choose one with --subset: rc, rc.nocontext"):
        prepare("nq", "mandarjoshi/trivia_qa", tmp_path / "o")


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    command = [sys.executable, "-m", "verl_credit.cli", "prepare", "nq", "--source", "nobody/nothing"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith(
        "verl-credit prepare: --source=nobody/nothing cannot be loaded from the hub"
    )
    assert done.stdout.count("\n") == 1 and not (tmp_path / "out").exists()


# --- the command ---


@pytest.mark.parametrize(
    "name, source, said",
    [
        ("hotpot", "x", "'hotpot' (did you mean hotpotqa?): data sets are hotpotqa, nq,"),
        (
            "nq",
            "nowhere",
            "--source=nowhere: no such file or folder, and not a data set on the hub (owner/name)",
        ),
        ("nq", "data/train.jsonl", "--source=data/train.jsonl: no such file or folder"),
        ("nq", "a/b/c", "--source=a/b/c: no such file or folder"),
        ("nq", "empty", "empty holds no file .json, .jsonl"),
        ("nq", "notes.txt", "notes.txt: expected a file .json, .jsonl"),
        ("nq", "broken_train.json", "broken_train.json is not JSON"),
        ("nq", "broken_train.parquet", "broken_train.parquet is not a parquet file"),
        ("nq", "nothing_train.jsonl", "no row is left of 0 records: it is empty"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(name, source, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for file in ("notes.txt", "broken_train.parquet", "nothing_train.jsonl"):
        (tmp_path / file).write_text("" if "nothing" in file else "notes")
    (tmp_path / "broken_train.json").write_text('[{"question": ')
    assert main(["prepare", name, "--source", source, "--out", "out"]) == 4
    printed = capsys.readouterr().out
    assert said in printed and printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_help_names_every_data_set(capsys):
    assert main(["prepare", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in DATA_SETS)


def test_verl_can_take_files_of_several_sets_together(tmp_path):
    """verl concatenates its files, which needs one schema."""
    import datasets

    math = WORKED["gsm8k release"][0]
    prepare("gsm8k", lines(tmp_path / "train.jsonl", math), tmp_path / "math")
    prepare("nq", lines(tmp_path / "train.jsonl", *questions(2)), tmp_path / "nq")
    files = [str(tmp_path / name / "train.parquet") for name in ("math", "nq")]
    loaded = [
        datasets.load_dataset("parquet", data_files=file, cache_dir=str(tmp_path / "cache"))["train"]
        for file in files
    ]
    together = datasets.concatenate_datasets(loaded)
    assert together["ability"] == ["math", "qa", "qa"]
    assert [row["form"] for row in (r["ground_truth"] for r in together["reward_model"])] == [
        "boxed",
        "tag",
        "tag",
    ]


# --- real records ---


@pytest.fixture(scope="module")
def real():
    folder = os.environ.get("VERL_CREDIT_TEST_DATA")
    if not folder:
        pytest.skip("VERL_CREDIT_TEST_DATA is not set: real questions are not here")
    return Path(folder)


def test_real_hotpotqa_with_its_paragraphs(real, tmp_path):
    source = real / "hotpotqa_dev_distractor_70.json"
    prepare("hotpotqa", str(source), tmp_path / "out", val_size=20)
    assert [len(asked(tmp_path / "out" / f"{s}.parquet")) for s in ("train", "val")] == [50, 20]
    raw = json.loads(source.read_text())
    paragraphs = {
        f"{title}\n{''.join(sentences)}".strip()
        for row in raw
        for title, sentences in zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    }
    assert {d["contents"] for d in corpus_of(tmp_path / "out" / "corpus.jsonl")} == paragraphs
    assert_law(tmp_path / "out")


@pytest.mark.parametrize("name", ["hotpotqa", "nq", "musique", "2wiki", "triviaqa", "popqa", "bamboogle"])
def test_real_questions_of_seven_sets_in_one_file(name, real, tmp_path):
    """60 of each; the file's own gold answers, all of them, ugly ones included."""
    source = real / "open_domain_qa_420.jsonl"
    prepare(name, str(source), tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.parquet")
    called = {name, *DATA_SETS[name].other_names}
    raw = [json.loads(line) for line in source.read_text().splitlines()]
    raw = [row for row in raw if row["data_source"].lower() in called]
    rows = rows_of(path)
    assert len(rows) == len(raw) == 60
    for row, published in zip(rows, raw, strict=True):
        golds = [gold.strip() for gold in published["ground_truth"].split("<|answer_split|>")]
        assert row["reward_model"]["ground_truth"]["target"] == list(dict.fromkeys(golds))
    assert_law(tmp_path / "out")


def test_sentences_that_bring_no_spaces_are_kept_apart_in_every_form():
    context = {"title": ["T"], "content": [["One.", "Two."]]}
    raw = {"question": "q", "golden_answers": ["a"], "metadata": {"context": context}}
    assert DATA_SETS["2wiki"].read(raw).paragraphs == [("T", "One. Two.")]
    context["content"] = [["One.", " Two."]]
    assert DATA_SETS["hotpotqa"].read(raw).paragraphs == [("T", "One. Two.")]
