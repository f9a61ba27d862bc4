"""DoorKey's world: shortest ways, the dialogue of a rollout in single words, and what a build writes."""

import random

import pyarrow.parquet
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.recipes import check
from verl_credit.built_folder import why_invalid
from verl_credit.errors import PreflightError
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.plan import DOORKEY_POLICY
from verl_credit.recipe.world import world_of
from verl_credit.study.exact_worlds.door_key import door_key
from verl_credit.worlds.doorkey import build
from verl_credit.worlds.doorkey.build import GRID, MAX_NEW_TOKENS, MAX_STEPS, NAME, build_doorkey
from verl_credit.worlds.doorkey.dialogue import Dialogue, doorkey_tokenizer
from verl_credit.worlds.doorkey.moves import ACTIONS, DoorKey, shortest, walk
from verl_credit.worlds.environments.interface import NO_ACTION


@pytest.fixture(scope="module")
def tokenizer():
    return doorkey_tokenizer()


def test_the_shortest_ways_are_those_of_the_exact_table():
    seed = 5
    mdp, game = door_key(GRID, MAX_STEPS, 0, 1, seed), DoorKey(GRID, seed)
    moves = walk([game.state], game.moves)
    best_S_A = mdp.best_actions()[0] > 0
    found = shortest(moves)
    assert [best_S_A[place].nonzero()[:, 0].tolist() for place in range(len(moves))] == [*found.values()]
    assert len(moves) > 100 and {len(actions) for actions in found.values()} >= {1, 2}


def test_a_place_without_a_way_has_no_action():
    assert shortest({"a": [("b", False), ("a", True)], "b": [("b", False), ("b", False)]}) == {
        "a": [1],
        "b": [],
    }


@pytest.mark.parametrize("seed", range(4))
def test_every_text_of_a_walk_is_written_in_whole_words(tokenizer, seed):
    """An observation has about 20 tokens, and a turn has 2: no phrase falls into bytes."""
    one, drawn = Dialogue(GRID, seed, tokenizer), random.Random(seed)
    while not one.now.done and len(one.segments) < 60:
        one.act(drawn.choice([*ACTIONS]))
    for text, by_policy in one.segments:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text and len(ids) <= (2 if by_policy else 26), text


def test_what_is_no_action_moves_nothing_and_is_told(tokenizer):
    one = Dialogue(GRID, 0, tokenizer)
    state = one.now.state
    one.act("jump")
    one.act("left", ended=False)
    assert [one.now.valid, NO_ACTION in one.segments[2][0], one.segments[3]] == [False, True, ("left", True)]
    one.act("left")
    assert one.now.valid and one.now.state != state


def test_a_demonstration_errs_and_what_is_imitated_is_on_a_shortest_way():
    first, names, shares = 7, [*ACTIONS], []
    for seed, segments in enumerate(build.demonstrations(first, 12), first):
        game = DoorKey(GRID, seed)
        moves, state = walk([game.state], game.moves), game.state
        best, turns = shortest(moves), segments[1::2]
        for text, imitated in turns:
            action = names.index(text.removesuffix("<|im_end|>"))
            assert action in best[state] or not imitated
            state, solved = moves[state][action]
        assert solved or len(turns) == MAX_STEPS
        assert not any(imitated for _, imitated in segments[::2])
        shares += [imitated for _, imitated in turns]
    assert 0.5 < sum(shares) / len(shares) < 0.7


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doorkey") / "world"
    build_doorkey(folder, size="tiny")
    return folder


def recipe(*overrides):
    return check(*overrides, recipe="doorkey")


@pytest.mark.slow
def test_a_build_has_rows_and_a_policy_and_is_reused(world):
    settings = {"version": build.VERSION, "world_seed": 0, "size": "tiny"}
    assert why_invalid(world, settings, NAME) is None
    assert "world_seed is 0" in why_invalid(world, settings | {"world_seed": 1}, NAME)
    said = []
    build_doorkey(world, size="tiny", progress=lambda share, text: said.append(text))
    assert said == [f"using {NAME} in {world}"]
    train, test = (
        pyarrow.parquet.read_table(world / f"data/{name}.parquet").to_pylist() for name in ("train", "test")
    )
    seeds = [{row["extra_info"]["environment"]["seed"] for row in rows} for rows in (train, test)]
    assert [len(one) for one in seeds] == [32, 8] and not seeds[0] & seeds[1]
    model, tokenizer = (
        kind.from_pretrained(world / "policy") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.config.vocab_size == len(tokenizer) == len(doorkey_tokenizer())
    found, planned = shape_of(str(world / "policy")), vars(DOORKEY_POLICY)
    assert {name: value for name, value in vars(found).items() if value != planned[name]}.keys() <= {"name"}


@pytest.mark.slow
def test_the_run_of_the_recipe_builds_what_it_reads_and_nothing_else(world, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(build, "build_doorkey", lambda folder, **settings: built.append((folder, settings)))
    world_of(recipe(f"doorkey.dir={tmp_path}", "doorkey.world_seed=3")).build(None)
    assert built == [(tmp_path, {"world_seed": 3, "size": "full", "progress": None})]
    own = ("data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=c")
    world_of(recipe(f"doorkey.dir={tmp_path}", *own)).build(None)
    assert len(built) == 1


@pytest.mark.slow
def test_a_policy_that_learns_too_little_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(build.SIZES, "tiny", build.Size(2, 2, 8, 1, 2, 0.9))
    with pytest.raises(
        PreflightError, match=r"world seed 4: the policy solves 0\.\d+ of the tasks after 2 supervised.*0\.9"
    ):
        build_doorkey(tmp_path / "world", world_seed=4, size="tiny")
    assert not (tmp_path / "world").exists()


def test_the_build_has_the_recipes_numbers():
    config = recipe()
    assert config.environment.kwargs.id == f"MiniGrid-DoorKey-{GRID}x{GRID}-v0"
    assert [*config.environment.kwargs.actions] == [*ACTIONS]
    assert (config.environment.max_steps, config.search.max_new_tokens) == (MAX_STEPS, MAX_NEW_TOKENS)
