"""verl's reward managers beside ours: what they hand to the reward function, and penalties where MaxRL takes none."""

import asyncio

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.idle import without_effect
from kit.recipes import check, load_config, refused
from kit.turn_rows import Row, credited, lost_row, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.names import ROW_RECORD
from verl_credit.recipe.rules.engines import HAND_ON, MANAGER
from verl_credit.recipe.unread import warnings_of
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.rollout.reward.qa import compute_score

SINGLE = ("search.max_searches=0", "search.url=null", "credit=grpo")
MAXRL = ("algorithm.advantage_mode=maxrl",)
DAPO = (f"{MANAGER}.name=dapo",)
OVERLONG = tuple(
    f"+reward.reward_kwargs.{name}"
    for name in (
        "max_resp_len=6", "overlong_buffer_cfg.enable=true", "overlong_buffer_cfg.len=4",
        "overlong_buffer_cfg.penalty_factor=1.0", "overlong_buffer_cfg.log=false",
    )
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def score_by(name, tokenizer, text, *overrides):
    """What a manager of verl makes of a row whose page, and not whose policy, says the answer."""
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    config = load_config("lab", list(overrides))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    batch = DataProto.from_dict(
        {"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={
            "data_source": ["qa"],
            "reward_model": [{"ground_truth": {"target": ["Paris"]}}],
            "extra_info": [{}],
            "tool_extra_fields": [{ROW_RECORD: RowRecord(final_text="no idea").as_dict()}],
        },
    )

    async def scored():
        return await get_reward_manager_cls(name)(config, tokenizer, compute_score).run_single(batch)

    return asyncio.run(scored())["reward_score"]


PAGE = "<answer>Paris</answer>"


def test_a_manager_that_hands_the_record_on_scores_the_policys_own_text(tokenizer):
    assert score_by("naive", tokenizer, PAGE) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "gdpo"])
def test_a_manager_that_does_not_would_score_a_page_and_is_refused(tokenizer, name):
    assert score_by(name, tokenizer, PAGE) == 1
    error = refused(f"{MANAGER}.name={name}")
    assert (error.key, error.value, error.beside) == (f"{MANAGER}.name", name, ("search.max_searches",))
    assert error.accepted.endswith(f"use one of {', '.join(HAND_ON)}")
    check(f"{MANAGER}.name={name}", *SINGLE)


@pytest.mark.parametrize("name", HAND_ON)
def test_managers_that_hand_it_on_are_accepted(name):
    check(f"{MANAGER}.name={name}")


@pytest.mark.slow
def test_the_overlong_penalty_is_negative_and_refused_with_maxrl(tokenizer):
    assert score_by("dapo", tokenizer, "x" * 6, *OVERLONG) == -1
    check(*SINGLE, *DAPO, *OVERLONG)
    check(*SINGLE, *MAXRL, *DAPO)
    error = refused(*SINGLE, *MAXRL, *DAPO, *OVERLONG)
    assert (error.key, error.value) == ("reward.reward_kwargs.overlong_buffer_cfg.enable", True)


def test_an_overlong_penalty_that_the_manager_does_not_know_is_said():
    (line,) = without_effect(load_config("lab", list(OVERLONG)))
    assert f"{MANAGER}.name=naive knows no penalty for long rows" in line
    assert without_effect(load_config("lab", [*SINGLE, *DAPO, *OVERLONG])) == []


@pytest.mark.slow
def test_a_manager_of_ones_own_is_told_what_it_has_to_hand_on():
    own = (f"{MANAGER}.source=importlib", f"{MANAGER}.name=Mine")
    (line,) = [said for said in warnings_of(check(*own)) if "reward_manager" in said]
    assert "tool_extra_fields" in line
    assert not [said for said in warnings_of(check(*own, *SINGLE)) if "reward_manager" in said]


@pytest.mark.parametrize("mode, stops", [("maxrl", True), ("grpo", False)])
def test_a_negative_outcome_stops_a_run_with_maxrl(tokenizer, mode, stops):
    """Whoever made it: a reward function of the user's, a manager of theirs. A lost row's outcome is none."""
    rows = [Row(("a",)), Row(("b",)), lost_row("connect")]

    def step(*outcomes):
        turns = turn_batch(rows, tokenizer)
        return credited(turns, [[]] * 3, list(outcomes), ["p"] * 3, advantage_mode=mode)

    step(1.0, 0.0, -5.0)
    if not stops:
        step(1.0, -0.2, 0.0)
        return
    with pytest.raises(IntegrityError, match="row 1 of this step has outcome -0.2"):
        step(1.0, -0.2, 0.0)
