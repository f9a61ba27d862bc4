"""Which questions an index can answer: by gold ids, titles, or an answer's text; on the lab's index and on made pages."""

import random

import pytest

from kit.preflight import different, write
from verl_credit.cli import main
from verl_credit.turns.rollout.reward.qa import exact_match
from verl_credit.turns.rollout.search.wire import Page
from verl_credit.worlds.data import answerable
from verl_credit.worlds.data.answerable import Question, draw, in_corpus, pages_of, question_of


def page(title, text="", id="1"):
    return Page(id, title, text, None)


def ask(golds, **more):
    names = {name: frozenset(value) for name, value in more.items()}
    return Question("f row 0", "Who?", tuple(golds), **names)


def judged(question, *pages):
    """("page", "answer", "without" or "unjudged") of one question."""
    one = in_corpus([question], 1, pages)
    return next(kind for kind in ("page", "answer", "without", "unjudged") if getattr(one, kind))


@pytest.mark.slow
def test_the_lab_s_corpus_holds_every_answer(tiny_lab):
    questions, rows = draw([str(tiny_lab.questions("dev"))])
    whole = in_corpus(questions, rows, pages_of(tiny_lab.index))
    assert (whole.page, whole.share, whole.without) == (len(questions), 1.0, [])


@pytest.mark.parametrize(
    "golds, text, kind",
    [
        (["The Beatles!"], "they were beatles, in fact", "answer"),  # SQuAD's normalisation, as in the reward
        (["Ann"], "Annapolis", "without"),  # whole words
        (["nowhere", "Ann Lee"], "By Ann  Lee.", "answer"),  # any alias
        (["Ann Lee"], "Ann, and Lee", "without"),
        (["A"], "a bridge", "answer"),  # of which the normalisation leaves nothing
        (["yes"], "yes", "unjudged"),
        (["no", "Norway"], "no", "without"),
        ([], "anything", "unjudged"),  # mathematics
    ],
)
def test_an_answer_is_looked_for_as_the_reward_compares_it(golds, text, kind):
    assert judged(ask(golds), page("T", text)) == kind
    if kind == "answer":
        assert any(exact_match(gold, golds) for gold in golds)


@pytest.mark.parametrize(
    "named, kind",
    [
        ({"titles": ["Ann  lee", "Dune"]}, "page"),
        ({"titles": ["Ann Lee", "Emma"]}, "without"),  # all of them are needed
        ({"ids": ["7", "8"]}, "page"),
        ({"ids": ["7", "9"]}, "without"),
        ({"ids": ["7", "9"], "titles": ["Dune"]}, "without"),  # ids say it exactly
    ],
)
def test_gold_pages_count_when_all_of_them_are_there(named, kind):
    pages = page('"Ann Lee"', "x", id="7"), page("Dune", "y", id="8")
    assert judged(ask(["yes"], **named), *pages) == kind
    assert judged(ask(["x"], **named), *pages) == ("page" if kind == "page" else "answer")


def test_the_question_is_read_from_the_row_and_else_from_its_prompt():
    truth = {"ground_truth": {"target": ["a"]}}
    prompt = [{"role": "user", "content": "Answer it.\n\nQuestion: Who wrote it?"}]
    row = {"prompt": prompt, "reward_model": truth}
    assert question_of("f", row).text == "Who wrote it?"
    about = {"question": "Who?", "gold_ids": [3, "4"], "supporting": ["T"]}
    asked = question_of("f", row | {"extra_info": about})
    assert asked == Question("f", "Who?", ("a",), frozenset({"3", "4"}), frozenset({"T"}))
    boxed = {"ground_truth": {"target": ["4"], "form": "boxed"}}
    assert question_of("f", row | {"reward_model": boxed}).needles == ()


def test_a_bounded_sample_is_drawn_the_same_each_time_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(answerable, "MOST", 6)
    files = [write(tmp_path / f"{n}.parquet", different(10)) for n in range(2)]
    questions, rows = draw(files)
    assert (len(questions), rows) == (6, 20) and questions == draw(files)[0]
    chosen = sorted(random.Random(0).sample(range(20), 6))
    assert [q.where for q in questions] == [f"{files[row // 10]} row {row % 10}" for row in chosen]
    line = in_corpus(questions, rows, [page("T", "b")]).line()
    assert line.startswith("0 of 6 questions (0%, drawn with seed 0 from 20 rows) can be answered: 0 by all")
    assert line.count(" row ") == 5  # examples


def test_prepare_check_counts_in_a_corpus(tmp_path, capsys):
    file = write(tmp_path / "rows.parquet", different(3))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "T\\nis b"}\n')
    assert main(["prepare", "check", file, "--corpus", str(corpus)]) == 0
    said = capsys.readouterr().out
    assert f"{corpus}: 0 of 3 questions (0%) can be answered" in said and "not: " in said
    corpus.write_text("{}")
    assert main(["prepare", "check", file, "--corpus", str(corpus)]) == 4
    assert f"{corpus}:1: " in capsys.readouterr().out
