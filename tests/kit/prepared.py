"""Published records of question sets, and what `prepare` wrote of them."""

import json

import pyarrow.parquet as parquet

from verl_credit.recipe.doctor.data import read_rows
from verl_credit.turns.rollout.reward.qa import BOXED, compute_score
from verl_credit.worlds.data.catalogue import DATA_SETS
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
