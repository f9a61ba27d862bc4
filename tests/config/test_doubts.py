"""Warnings at the start: each with the override that brings it, and none without."""

import pytest

from verl_credit.config.compose import load_config
from verl_credit.config.unread import idle_lines
from verl_credit.config.warnings import doubts

ROLLOUT = "actor_rollout_ref.rollout"
CASES = [
    (["actor_rollout_ref.actor.ppo_mini_batch_size=16"], "one update a step"),
    ([f"{ROLLOUT}.top_p=0.9"], "top_p=0.9: rollouts are drawn from a truncated distribution"),
    ([f"{ROLLOUT}.top_k=20", f"{ROLLOUT}.top_p=0.95"], "top_p=0.95, top_k=20"),
    (["algorithm.adv_estimator=gdpo"], "verl normalises twice"),
    (
        ["search.max_page_chars=1000"],
        "5 of search.max_new_tokens=40 are 200 tokens, and what 4 searches return",
    ),
    (["data.max_response_length=391"], "about 192 more"),
]


def test_the_recipes_give_no_reason_to_doubt():
    for name in ("lab", "search_cpu"):
        assert doubts(load_config(name, [])) == []


@pytest.mark.parametrize("overrides, said", CASES)
def test_each_doubt_is_said_with_key_and_value(overrides, said):
    (line,) = doubts(load_config("lab", overrides))
    assert said in line


def test_a_response_that_just_holds_all_turns_is_not_doubted():
    """5 turns of 40 tokens, 4 results of 3 pages of 64 characters."""
    assert doubts(load_config("lab", ["data.max_response_length=392"])) == []
    assert doubts(load_config("lab", ["search.max_page_chars=1000", "search.max_searches=0"])) == []


def test_two_epochs_over_one_mini_batch_are_two_updates():
    assert doubts(load_config("lab", [*CASES[0][0], "actor_rollout_ref.actor.ppo_epochs=2"])) == []


def test_they_are_among_the_notes_of_a_run():
    assert any(
        line.startswith("warning: the clip can never act")
        for line in idle_lines(load_config("lab", CASES[0][0]))
    )
