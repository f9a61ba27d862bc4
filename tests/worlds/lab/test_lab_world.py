"""The world, its questions and the demonstrations, without building a lab."""

import random
from itertools import pairwise

import pytest

from verl_credit.turns.rollout.reward.qa import exact_match, extract_answer
from verl_credit.worlds.lab.demos import Demonstrator, DemoStyle
from verl_credit.worlds.lab.encyclopedia import RELATIONS, SPLITS, WorldSize, make_questions, make_world
from verl_credit.worlds.lab.protocol import GRAMS

SMALL = WorldSize(people=80, companies=40, towns=40, works=40)


@pytest.fixture(scope="module")
def world():
    return make_world(3, SMALL)


@pytest.fixture(scope="module")
def questions(world):
    return {s: make_questions(world, s, 40, random.Random(1)) for s in SPLITS}


def test_the_seed_decides_the_world(world):
    assert make_world(3, SMALL) == world
    assert make_world(4, SMALL) != world


def test_full_world_has_a_few_thousand_articles():
    full = make_world(0, WorldSize())
    assert 2000 <= len(full.articles) <= 5000
    held_out = sum(e.split != "train" for e in full.entities.values()) / len(full.entities)
    assert held_out == pytest.approx(0.30, abs=0.01)


def test_no_name_is_the_beginning_of_another(world):
    names = sorted(world.names())
    assert len(set(names)) == len(names)
    assert not any(b.startswith(a) for a, b in pairwise(names))


def test_relations_stay_inside_a_split(world):
    for article in world.articles.values():
        title, value = world.entities[article.title], world.entities[article.value]
        assert title.split == value.split
        assert value.kind == RELATIONS[title.kind][article.relation]


def test_questions_are_answered_by_following_the_articles(world, questions):
    articles = {a.id: a for a in world.articles.values()}
    for question in (q for qs in questions.values() for q in qs):
        name = question.path[0]
        assert name in question.text
        for relation, gold_id in zip(question.relations, question.gold_ids, strict=True):
            article = articles[gold_id]
            assert article.title == name and f"{relation} {article.value}" in article.contents
            assert article.contents.split("\n")[0] == name
            name = article.value
        assert name == question.gold
        assert " of the ".join(reversed(question.relations)) in question.text


def test_hops_come_in_their_shares_and_questions_differ(world):
    made = make_questions(world, "train", 100, random.Random(0))
    assert [sum(q.hops == h for q in made) for h in (1, 2, 3)] == [30, 50, 20]
    assert len(set(made)) == 100


def test_too_many_questions_for_a_split_is_an_error(world):
    with pytest.raises(ValueError, match="'dev' has too few entities"):
        make_questions(world, "dev", 1000, random.Random(0))


def demonstrate(world, questions, **style):
    """Trajectories over a search that finds the entity's articles, as an ideal index would."""

    def search(query):
        found = [a for (name, _), a in world.articles.items() if name in query.split()]
        return (found + list(world.articles.values()))[:3]

    demonstrator = Demonstrator(search, DemoStyle(**style), random.Random(2))
    return [(q, demonstrator.write(q)) for q in questions]


def test_default_demonstrations_are_imperfect(world, questions):
    right = [
        exact_match(extract_answer(segments[-1][0]), [question.gold])
        for question, segments in demonstrate(world, questions["train"] * 10)
    ]
    assert 0.3 < sum(right) / len(right) < 0.7


def test_prompts_and_observations_are_not_the_policys(world, questions):
    for _, segments in demonstrate(world, questions["train"][:5]):
        for text, by_policy in segments:
            assert by_policy == (not text.startswith(("<|im_start|>user", "\n<|im_start|>user")))


@pytest.mark.slow
def test_all_five_categories_of_grams_occur(world, questions):
    text = "".join(
        t
        for _, segments in demonstrate(world, questions["train"] * 20)
        for t, by_policy in segments
        if by_policy
    )
    for category, grams in GRAMS.items():
        assert any(gram in text for gram in grams), category
