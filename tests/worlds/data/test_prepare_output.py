"""What `prepare` writes beside rows, where it reads from, and real records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kit.prepared import (
    HOTPOT,
    HOTPOT_HUB,
    WORKED,
    asked,
    assert_law,
    corpus_of,
    lines,
    questions,
    report,
    rows_of,
)
from verl_credit.cli import main
from verl_credit.worlds.data import prepare as prepare_module
from verl_credit.worlds.data.catalogue import DATA_SETS
from verl_credit.worlds.data.prepare import prepare
from verl_credit.worlds.data.records import PrepareError

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
    """The part that is known to fit is taken, unless --subset chooses; of other parts one has to be chosen."""
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


@pytest.mark.slow
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
        ("nq", "cut_train.parquet", "cut_train.parquet cannot be read: Couldn't deserialize thrift"),
        ("nq", "nothing_train.jsonl", "no row is left of 0 records: it is empty"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(name, source, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for file in ("notes.txt", "broken_train.parquet", "nothing_train.jsonl"):
        (tmp_path / file).write_text("" if "nothing" in file else "notes")
    (tmp_path / "broken_train.json").write_text('[{"question": ')
    (tmp_path / "cut_train.parquet").write_bytes(b"PAR1" + bytes(100) + (100).to_bytes(4, "little") + b"PAR1")
    assert main(["prepare", name, "--source", source, "--out", "out"]) == 4
    printed = capsys.readouterr().out
    assert said in printed and printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


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
