"""Which questions an index can answer: by gold ids, titles, or an answer's text; on the lab's index and on made pages."""

import random
from types import SimpleNamespace

import pytest

from kit.machine import MACHINE, PASS, SKIP, WARN, says
from kit.preflight import different, write
from kit.recipes import load_config
from kit.scripted_server import scripted_server
from verl_credit.cli import main
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.inputs import check_corpus
from verl_credit.turns.rollout.reward.qa import exact_match, normalize_answer
from verl_credit.turns.rollout.search.client import SearchFault
from verl_credit.turns.rollout.search.wire import Page
from verl_credit.worlds.data import answerable
from verl_credit.worlds.data.answerable import Question, draw, in_corpus, in_search, pages_of, question_of
from verl_credit.worlds.lab.evaluate import LocalRetriever


class Client:
    """A search client whose results are a function of the query."""

    topk = 3

    def __init__(self, find):
        self.find, self.queries, self.closed = find, [], False

    async def search(self, query):
        self.queries.append(query)
        return SimpleNamespace(pages=self.find(query))

    async def aclose(self):
        self.closed = True


def page(title, text="", id="1"):
    return Page(id, title, text, None)


def ask(golds, **more):
    names = {name: frozenset(value) for name, value in more.items()}
    return Question("f row 0", "Who?", tuple(golds), **names)


def judged(question, *pages):
    """("page", "answer", "without" or "unjudged") of one question, the same by the corpus and by a search that finds all."""
    found = [in_corpus([question], 1, pages), in_search([question], 1, Client(lambda query: pages))]
    kinds = [
        next(kind for kind in ("page", "answer", "without", "unjudged") if getattr(one, kind))
        for one in found
    ]
    assert kinds[0] == kinds[1]
    return kinds[0]


@pytest.mark.slow
def test_the_lab_s_corpus_holds_every_answer_and_its_index_finds_a_part(tiny_lab):
    questions, rows = draw([str(tiny_lab.questions("dev"))])
    whole = in_corpus(questions, rows, pages_of(tiny_lab.index))
    assert (whole.page, whole.share, whole.without) == (len(questions), 1.0, [])
    retriever = LocalRetriever(tiny_lab.encoder, tiny_lab.index)

    def find(query):
        ((*documents,),) = retriever.search([query])
        return [page(*one["contents"].split("\n", 1), id=one["id"]) for one in documents]

    client = Client(find)
    found = in_search(questions, rows, client)
    by_page = by_text = 0
    for question in questions:
        seen = find(question.text)
        text = f" {normalize_answer(' '.join(f'{one.title} {one.text}' for one in seen))} "
        if question.ids <= {one.id for one in seen}:
            by_page += 1
        elif f" {normalize_answer(question.golds[0])} " in text:
            by_text += 1
    assert (found.page, found.answer) == (by_page, by_text)
    assert 0 < found.page + found.answer < len(questions) == found.judged
    assert client.closed and "in the top 3 of a search for the question" in found.line()


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


def test_titles_are_searched_for_beside_the_question():
    client = Client(lambda query: [page(query)])
    found = in_search([ask(["x"], titles=["Dune", "Emma"])], 1, client)
    assert sorted(client.queries) == ["Dune", "Emma", "Who?"] and found.page == 1


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


def test_prepare_check_counts_in_a_corpus_and_by_searches(tmp_path, capsys):
    file = write(tmp_path / "rows.parquet", different(3))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "T\\nis b"}\n')
    with scripted_server() as server:  # its pages hold "a" and "b"
        assert main(["prepare", "check", file, "--corpus", str(corpus), "--search", server.url]) == 0
    said = capsys.readouterr().out
    assert f"{corpus}: 0 of 3 questions (0%) can be answered" in said and "not: " in said
    assert (
        f"{server.url}: 3 of 3 questions (100%) can be answered: 0 by all their gold pages, 3 by the text"
        in said
    )
    assert main(["prepare", "check", file, "--search", server.url]) == 4
    assert "connect: " in capsys.readouterr().out
    corpus.write_text("{}")
    assert main(["prepare", "check", file, "--corpus", str(corpus)]) == 4
    assert f"{corpus}:1: " in capsys.readouterr().out


def test_doctor_asks_the_run_s_server_and_warns_below_a_half(tmp_path):
    config = load_config("lab", [])
    rows = different(4)
    config.data.train_files = write(tmp_path / "train.parquet", rows)
    with scripted_server() as server:
        config.search.url = server.url
        found = check_corpus(Context(MACHINE, config))
        assert says(found, PASS, "4 of 4 questions (100%)", "in the top 3 of a search")
        for row in rows[:3]:
            row["reward_model"] = {"ground_truth": {"target": ["Zed"]}}
        config.data.train_files = write(tmp_path / "train.parquet", rows)
        found = check_corpus(Context(MACHINE, config))
        assert says(found, WARN, "1 of 4 questions (25%)", "('Zed', ", "prepare check FILE --corpus")
        for row in rows:
            row["reward_model"] = {"ground_truth": {"target": ["yes"]}}
        config.data.train_files = write(tmp_path / "train.parquet", rows)
        assert says(check_corpus(Context(MACHINE, config)), SKIP, "none of 4 questions")
        server.script = [(500, b"full")]
        config.data.train_files = write(tmp_path / "train.parquet", different(1))
        with pytest.raises(PreflightError, match="search.url=.*status 500") as error:
            check_corpus(Context(MACHINE, config))
    assert isinstance(error.value.__cause__, SearchFault)
