"""Labs whose questions have a number of hops: questions, limits, key and demonstrations, without building one."""

import json
import random

import pytest

from kit.recipes import check, load_config
from verl_credit.built_folder import write_manifest
from verl_credit.cli.fidelity.policies import policies_of
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.recipe.world import LabWorld
from verl_credit.turns.rollout.reward.qa import exact_match, extract_answer
from verl_credit.worlds.lab import protocol
from verl_credit.worlds.lab.build import build_lab
from verl_credit.worlds.lab.config import config_of, settings_of
from verl_credit.worlds.lab.demos import Demonstrator
from verl_credit.worlds.lab.encyclopedia import Question, WorldSize, make_splits, make_world
from verl_credit.worlds.lab.evaluate import Rollout, open_decisions, right_turns
from verl_credit.worlds.lab.limits import MAX_NEW_TOKENS, MOST_HOPS, OBSERVATION, TOP_K, limits_of

SMALL = WorldSize(people=80, companies=40, towns=40, works=40, train=64, dev=24, test=24)
HOPS = range(1, MOST_HOPS + 1)


@pytest.fixture(scope="module")
def world():
    return make_world(3, SMALL)


@pytest.fixture(scope="module")
def tokenizer(world):
    return protocol.make_tokenizer(world.names())


@pytest.fixture(scope="module")
def splits(world):
    return {
        hops: make_splits(world, SMALL, 3, hop_shares=config_of("tiny", hops).question_hops) for hops in HOPS
    }


def search_in(world):
    """A query's entity finds its three articles, as the lab's index mostly does."""
    articles = {}
    for (name, _), article in world.articles.items():
        articles.setdefault(name, []).append(article)
    return lambda query: next(
        (articles[word] for word in query.split() if word in articles), articles["".join([*articles][:1])]
    )


@pytest.mark.parametrize("hops", HOPS)
def test_every_question_takes_so_many_searches_to_its_answer(world, splits, hops):
    for questions in splits[hops].values():
        for question in questions:
            name = question.path[0]
            for relation in question.relations:
                name = world.value(name, relation)
            assert question.hops == hops and name == question.gold and len(set(question.gold_ids)) == hops
            assert question.gold not in question.text


@pytest.mark.parametrize("hops", HOPS)
def test_splits_share_no_article(splits, hops):
    needed = [{i for q in questions for i in q.gold_ids} for questions in splits[hops].values()]
    assert sum(map(len, needed)) == len(set.union(*needed))


@pytest.mark.parametrize("hops", [None, *HOPS])
def test_the_longest_row_fits_its_limits(world, tokenizer, splits, hops):
    limits, questions = limits_of(hops), splits[hops or 3]["train"]

    def length(text):
        return len(tokenizer.encode(text, add_special_tokens=False))

    assert max(length(protocol.prompt_text(q.text)) for q in questions) <= limits.max_prompt_length
    contents = sorted((a.contents for a in world.articles.values()), key=length)
    observation = length(protocol.observation_text(protocol.pages(contents[-TOP_K:])))
    assert observation <= OBSERVATION
    used = limits.max_searches * (MAX_NEW_TOKENS + observation) + MAX_NEW_TOKENS
    assert used <= limits.max_response_length and limits.max_searches > (hops or 3)
    answer = length("<answer> Name</answer>")
    assert limits.max_prompt_length + limits.max_response_length + answer <= 1024  # the policy's positions


@pytest.mark.slow
def test_the_recipe_follows_the_hops(monkeypatch):
    monkeypatch.setenv("VERL_CREDIT_LAB", "/labs")
    folders = set()
    for hops in (None, *HOPS):
        config, limits = check(f"lab.hops={'null' if hops is None else hops}"), limits_of(hops)
        data = config.data
        found = config.search.max_searches, data.max_prompt_length, data.max_response_length
        assert found == (limits.max_searches, limits.max_prompt_length, limits.max_response_length)
        assert config.actor_rollout_ref.model.path == f"{config.lab.dir}/policy"
        folders.add(config.lab.dir)
    assert len(folders) == 1 + len(HOPS) and "/labs/full-0" in folders
    own = check("lab.hops=2", "search.max_searches=3", "data.max_response_length=300", "lab.dir=mine")
    assert (own.search.max_searches, own.data.max_response_length, own.lab.dir) == (3, 300, "mine")


@pytest.mark.parametrize("value", [0, MOST_HOPS + 1, "two", 1.5])
def test_other_hops_are_refused_by_the_key_alone(value):
    with pytest.raises(ConfigError) as refused:
        check(f"lab.hops={value}")
    assert (refused.value.key, refused.value.value) == ("lab.hops", value)
    assert f"a whole number from 1 to {MOST_HOPS} or null" in str(refused.value)


def test_a_build_refuses_them_too(tmp_path):
    with pytest.raises(ValueError, match=f"hops=9: expected a whole number from 1 to {MOST_HOPS}"):
        build_lab(tmp_path / "lab", hops=9)
    assert not (tmp_path / "lab").exists()


def test_hops_make_another_lab_and_another_command():
    assert settings_of(0, "full", 2) != settings_of(0, "full") == settings_of(0, "full", None)
    assert settings_of(0, "full")["hops"] is None  # as a manifest that was written before the key
    assert LabWorld(load_config("lab", ["lab.hops=2"])).command().endswith(" --hops 2")
    assert "--hops" not in LabWorld(load_config("lab", [])).command()


@pytest.mark.parametrize(
    "given, says",
    [
        ("lab.hops=4", "lab.hops=4: expected 2, as"),
        ("lab.hops=null", "lab.hops=null: expected 2, as"),
        ("lab.world_seed=1", "lab.world_seed=1: expected 0, as"),
        ("lab.size=tiny", "lab.size=tiny: expected full, as"),
    ],
)
def test_a_run_does_not_replace_a_lab_of_other_settings(given, says, tmp_path):
    write_manifest(tmp_path, settings_of(0, "full", 2), {})
    config = load_config("lab", [f"lab.dir={tmp_path}", "lab.hops=2", given])
    with pytest.raises(PreflightError) as refused:
        LabWorld(config).build(lambda share, text: None)
    assert str(refused.value) == f"{says} the lab in lab.dir={tmp_path} has it, or another lab.dir"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("hops", [None, 4])
def test_a_policy_that_no_run_made_is_measured_within_the_limits_of_its_lab(tmp_path, hops):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "manifest.json").write_text(json.dumps(settings_of(0, "full", hops) | {"files": {}}))
    (policy,) = policies_of(tmp_path / "policy", None, None)
    assert policy.config.search.max_searches == limits_of(hops).max_searches


@pytest.mark.parametrize("hops", HOPS)
def test_demonstrations_follow_the_whole_chain(world, splits, hops):
    demonstrator = Demonstrator(search_in(world), config_of("full", hops).style, random.Random(hops))
    for question in splits[hops]["train"]:
        segments = demonstrator.write(question)
        assert exact_match(extract_answer(segments[-1][0]), [question.gold]) == 1.0
        assert sum(by_policy for _, by_policy in segments) > hops


def rolled(hops, found, answer):
    """A rollout whose searches find these articles; ``answer`` None: it ends with a search that is not made."""
    path = tuple(f"E{i}" for i in range(hops + 1))
    question = Question(path, tuple(f"r{i}" for i in range(hops)))
    last = protocol.search_turn(" E") if answer is None else protocol.answer_turn(f" {answer}")
    turns = [protocol.search_turn(" E")] * len(found) + [last]
    return Rollout(question, [], turns=turns, found_ids=[[f"E{i}-r{i}"] for i in found])


def test_right_turns_by_hand():
    rollouts = [
        rolled(2, [0, 1], "E2"),  # right at 0, 1 and 2
        rolled(2, [0, 0, 1], "E1"),  # wasted at 1, a wrong answer at 2
        rolled(2, [0], "E1"),  # stops at 1
        rolled(2, [5], None),  # finds nothing at 0, and is cut there
    ]
    assert right_turns(rollouts) == [3 / 5, 2 / 4, 1 / 2]
    assert open_decisions([0.05, 0.06, 0.5, 0.94, 0.95, 1.0]) == 3
