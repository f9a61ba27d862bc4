"""Keys, values and paths of before name their place now, or the commit that last had them."""

from __future__ import annotations

from kit.recipes import refused
from verl_credit.cli.saved_run import CONFIG, run_config
from verl_credit.config import gone
from verl_credit.config.keys import our_keys


def test_nothing_that_is_gone_is_declared():
    declared = {key.name for key in our_keys()}
    assert not [name for name in gone.KEYS if any(f"{key}.".startswith(f"{name}.") for key in declared)]


def test_a_key_of_before_names_its_place_or_its_commit(monkeypatch):
    monkeypatch.setitem(gone.KEYS, "algorithm.was_here", gone.no_more("a reason"))
    monkeypatch.setitem(gone.KEYS, "algorithm.was_here.moved", "search.topk=N")
    error = refused("+algorithm.was_here.other=1")
    assert error.key == "algorithm.was_here.other" and gone.LAST in error.accepted
    assert refused("algorithm.was_here.moved=1").meant == "search.topk"


def test_a_value_of_before_names_its_place(monkeypatch):
    monkeypatch.setitem(gone.VALUES, ("algorithm.turn_signal", "was_here"), "tool_reward")
    monkeypatch.setitem(gone.PATHS, "my_package.old", "my_package.new")
    error = refused("algorithm.turn_signal=was_here")
    assert (error.value, error.accepted) == ("was_here", "tool_reward")
    assert "my_package.new.f" in refused("algorithm.turn_signal=my_package.old:f").accepted


def test_a_run_of_before_has_its_paths_at_their_places_now(tmp_path):
    path = "pkg://verl_credit.turns.reward.qa"
    (tmp_path / CONFIG).write_text(
        f"reward: {{custom_reward_function: {{path: {path}}}}}\nfork_workers: auto\n"
    )
    config = run_config(tmp_path)
    assert config.reward.custom_reward_function.path == "pkg://verl_credit.turns.rollout.reward.qa"
    assert "fork_workers" not in config
