"""The answers that are appended to a row fit its micro-batch, or the run ends before it starts."""

import pytest

from kit.byte_world import make_tokenizer
from kit.machine import SKIP, says
from kit.recipes import load_config
from kit.settings import settings
from kit.turn_rows import Row, turn_batch
from verl_credit.config.fit import MODEL_LEN, REFERENCE, place_of_answers
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.data import Row as DataRow
from verl_credit.recipe.doctor.inputs import check_answers
from verl_credit.recipe.doctor.lengths import answers_fit, worst_row
from verl_credit.recipe.rules import validate
from verl_credit.recipe.rules.engines import UPDATE
from verl_credit.turns.score.branches import plan_branches
from verl_credit.turns.score.requests import gain_requests
from verl_credit.turns.score.scorers import SCORERS
from verl_credit.worlds.lab.protocol import TURN_END, answer_turn, prompt_text, search_turn

ROLLOUT, ACTOR = (f"actor_rollout_ref.{role}" for role in ("rollout", "actor"))
BUDGET = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
ROW = 48 + 416  # of the lab
BY_REFERENCE = ["credit=trace"]
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, key, value, accepted",
    [
        ([f"{BUDGET}=100"], BUDGET, 100, "504 tokens"),  # 5 short answers of 8 tokens
        ([f"{BUDGET}={ROW + 39}"], BUDGET, ROW + 39, "504 tokens"),
        ([f"{BUDGET}={ROW}", "algorithm.info_gain_scorer=rows"], BUDGET, ROW, "472 tokens"),
        ([f"{BUDGET}={ROW - 1}", "credit=grpo"], BUDGET, ROW - 1, "464 tokens"),
        ([f"{UPDATE}={ROW - 1}"], UPDATE, ROW - 1, "464 tokens"),
        ([f"{REFERENCE}={ROW - 1}", f"{ACTOR}.use_kl_loss=true"], REFERENCE, ROW - 1, "464 tokens"),
        ([f"{REFERENCE}={ROW}", *BY_REFERENCE], REFERENCE, ROW, "472 tokens"),
        ([f"{BUDGET}={ROW}", *BY_REFERENCE, *LORA], BUDGET, ROW, "472 tokens"),
        (
            [f"{ROLLOUT}.log_prob_use_dynamic_bsz=false"],
            f"{ACTOR}.use_dynamic_bsz",
            True,
            "verl wants them equal",
        ),
    ],
)
def test_a_budget_too_small_for_any_answer_is_refused(overrides, key, value, accepted):
    with pytest.raises(ConfigError) as error:
        validate(load_config("lab", overrides))
    assert (error.value.key, error.value.value, error.value.accepted) == (key, value, accepted)


@pytest.mark.slow
def test_a_budget_that_suffices_is_accepted():
    for given in ([f"{BUDGET}={ROW + 40}"], [f"{BUDGET}={ROW}", "credit=grpo"], [f"{REFERENCE}=1"]):
        validate(load_config("lab", given))


def rows(*golds):
    return [DataRow(f"x row {n}", [], {"target": list(aliases)}) for n, aliases in enumerate(golds)]


def fitted(tokenizer, given, *overrides):
    config = load_config("lab", list(overrides))
    credit = CreditSettings.from_config(config)
    place = place_of_answers(config, credit, SCORERS[credit.algorithm.info_gain_scorer])
    return answers_fit(config, credit, place, tokenizer, given)


def test_an_answer_for_the_reference_has_to_fit_its_own_micro_batches(tokenizer):
    given, own = rows(["y" * 10], ["z" * 20]), ("credit=trace", TEMPLATE, f"{BUDGET}={ROW}")
    told = fitted(tokenizer, given, *own, f"{REFERENCE}={ROW + 21}")
    assert f"{REFERENCE}={ROW + 21} has room for 21" in told
    with pytest.raises(PreflightError, match=f"{REFERENCE}={ROW + 20}"):
        fitted(tokenizer, given, *own, f"{REFERENCE}={ROW + 20}")


TEMPLATE = "algorithm.info_gain_template='<answer>{answer}'"
PER_TAG = 1  # the byte world's tokenizer: the tag is a token, every other byte is one


def test_the_row_that_needs_most_is_named_with_what_it_needs(tokenizer):
    """5 contexts x (tag + 10 bytes, tag + 20 bytes): all aliases of the second row."""
    given = rows(["x" * 25], ["y" * 10, "z" * 20], ["w"])
    needed = 5 * (2 * PER_TAG + 30)
    with pytest.raises(PreflightError) as error:
        fitted(tokenizer, given, TEMPLATE, f"{BUDGET}={ROW + needed - 1}")
    said = str(error.value)
    assert f"{BUDGET}={ROW + needed - 1}" in said and "x row 1" in said and "2 gold answers" in said
    assert f"= {ROW}" in said and "5 x 32 tokens" in said and f"Set it to {ROW + needed} or more" in said
    assert "info_gain_aliases=first" in said
    told = fitted(tokenizer, given, TEMPLATE, f"{BUDGET}={ROW + needed}")
    assert f"= {needed}; {BUDGET}={ROW + needed} has room for {needed}" in told


@pytest.mark.parametrize(
    "overrides, needed",
    [
        (["algorithm.info_gain_aliases=first"], 5 * (PER_TAG + 25)),
        (["algorithm.info_gain_scorer=rows"], PER_TAG + 25),
        (["algorithm.info_gain_prefix=ab"], 5 * (2 * PER_TAG + 2 * 2 + 30)),
        (["search.max_searches=2"], 3 * (2 * PER_TAG + 30)),
    ],
)
def test_what_counts_is_what_rides(tokenizer, overrides, needed):
    given = rows(["x" * 25], ["y" * 10, "z" * 20, "z" * 20], ["w"])
    fitted(tokenizer, given, TEMPLATE, *overrides, f"{BUDGET}={ROW + needed}")
    with pytest.raises(PreflightError, match=f"Set it to {ROW + needed} or more"):
        fitted(tokenizer, given, TEMPLATE, *overrides, f"{BUDGET}={ROW + needed - 1}")


def test_nothing_is_counted_where_nothing_rides():
    """Neither rows nor tokenizer are looked at."""
    context = Context(None, load_config("lab", ["data.train_files=nowhere", "credit=grpo"]))
    assert says(check_answers(context), SKIP)


@pytest.mark.slow
def test_a_longest_sequence_too_short_for_a_row_is_refused():
    validate(load_config("lab", [f"{MODEL_LEN}={ROW}"]))
    with pytest.raises(ConfigError) as caught:
        validate(load_config("lab", [f"{MODEL_LEN}={ROW - 1}"]))
    assert (caught.value.key, caught.value.value) == (MODEL_LEN, ROW - 1)
    assert caught.value.accepted == f"{ROW} or more, or auto"


def test_auto_is_the_longest_row():
    def length(*overrides):
        return load_config("lab", list(overrides)).actor_rollout_ref.rollout.max_model_len

    assert length() == ROW and length("data.max_response_length=500") == 548
    assert length(f"{MODEL_LEN}=9000") == 9000 and length(f"{MODEL_LEN}=null") is None


@pytest.mark.parametrize("context", ["observation", "call"])
@pytest.mark.parametrize("template", ["auto", "{answer}", "So {answer}."])
def test_no_more_rides_than_was_counted(tokenizer, context, template):
    header = "\n<|im_start|>assistant\n"
    page = f"\n<|im_start|>user\n<tool_response>\nA\n</tool_response>{TURN_END}{header}"
    row = Row((search_turn("a"), page, search_turn("b"), page, answer_turn("x")), prompt_text("Who?"))
    asked = settings(info_gain_context=context, info_gain_template=template)
    turns = turn_batch([row], tokenizer)
    plan = plan_branches(gain_requests(turns, asked, tokenizer), turns)
    row = DataRow("here", "Who?", turns.ground_truths[0])
    where, tokens, golds = worst_row(tokenizer, asked, [row])
    assert (where, golds) == ("here", 2)
    counted = 3 * tokens
    exact = context == "observation"
    assert plan.tokens_B[0] == counted if exact else plan.tokens_B[0] < counted
