"""The answers that ride behind a row fit its micro-batch, or the run ends before it starts."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kit.byte_world import make_tokenizer
from kit.preflight import GOOD
from kit.recipes import load_config
from kit.settings import settings
from kit.turn_rows import Row, turn_batch
from verl_credit.config.rules import validate
from verl_credit.config.rules.row_room import engine_tokens
from verl_credit.doctor.inputs.answer_budget import MODEL_LEN, check_answers, worst_row
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.lab.protocol import TURN_END, answer_turn, prompt_text, search_turn
from verl_credit.turns.branches import plan_branches
from verl_credit.turns.requests import gain_requests

ROLLOUT, ACTOR, REF = (f"actor_rollout_ref.{role}" for role in ("rollout", "actor", "ref"))
BUDGET = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
ROW = 48 + 416  # of the lab


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize(
    "overrides, said",
    [
        ([f"{BUDGET}=100"], f"{BUDGET}=100 cannot hold a row .* and 5 short answers of 8 tokens: 504 tokens"),
        ([f"{BUDGET}={ROW + 39}"], "504 tokens"),
        (
            [f"{BUDGET}={ROW}", "algorithm.info_gain_scorer=rows"],
            "and 1 short answer of 8 tokens: 472 tokens",
        ),
        ([f"{BUDGET}={ROW - 1}", "credit=grpo"], f"{BUDGET}=463 cannot hold a row .*: 464 tokens"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu={ROW - 1}"], "ppo_max_token_len_per_gpu=463 cannot hold a row"),
        (
            [f"{REF}.log_prob_max_token_len_per_gpu={ROW - 1}", f"{ACTOR}.use_kl_loss=true"],
            f"{REF}.log_prob_max_token_len_per_gpu=463 cannot",
        ),
        ([f"{ROLLOUT}.log_prob_use_dynamic_bsz=false"], "verl wants them equal"),
    ],
)
def test_a_budget_too_small_for_any_answer_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        validate(load_config("lab", overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{BUDGET}={ROW + 40}"],
        [f"{BUDGET}={ROW}", "algorithm.info_gain_scorer=server"],
        [f"{BUDGET}={ROW}", "credit=grpo"],
        [f"{REF}.log_prob_max_token_len_per_gpu=1"],  # no reference
    ],
)
def test_a_budget_that_suffices_is_accepted(overrides):
    validate(load_config("lab", overrides))


def data(tmp_path, *golds, **truth):
    rows = [
        {"prompt": GOOD["prompt"], "reward_model": {"ground_truth": {"target": list(g), **truth}}}
        for g in golds
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    return f"data.train_files={tmp_path}/train.parquet"


def preflight(tmp_path, tokenizer, given, *overrides):
    tokenizer.save_pretrained(tmp_path / "policy")
    given = [given, f"actor_rollout_ref.model.path={tmp_path}/policy", *overrides]
    return check_answers(load_config("lab", given))


TEMPLATE = "algorithm.info_gain_template='<answer>{answer}'"
PER_TAG = 1  # the byte world's tokenizer: the tag is a token, every other byte is one


def test_the_row_that_needs_most_is_named_with_what_it_needs(tmp_path, tokenizer):
    """5 contexts x (tag + 10 bytes, tag + 20 bytes): all aliases of the second row."""
    given = data(tmp_path, ["x" * 25], ["y" * 10, "z" * 20], ["w"])
    needed = 5 * (2 * PER_TAG + 30)
    with pytest.raises(PreflightError) as error:
        preflight(tmp_path, tokenizer, given, TEMPLATE, f"{BUDGET}={ROW + needed - 1}")
    said = str(error.value)
    assert (
        f"{BUDGET}={ROW + needed - 1}" in said and "train.parquet row 1" in said and "2 gold answers" in said
    )
    assert f"= {ROW}" in said and "5 x 32 tokens" in said and f"Set it to {ROW + needed} or more" in said
    assert "info_gain_aliases=first" in said
    told = preflight(tmp_path, tokenizer, given, TEMPLATE, f"{BUDGET}={ROW + needed}")
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
def test_what_counts_is_what_rides(tmp_path, tokenizer, overrides, needed):
    given = data(tmp_path, ["x" * 25], ["y" * 10, "z" * 20, "z" * 20], ["w"])
    preflight(tmp_path, tokenizer, given, TEMPLATE, *overrides, f"{BUDGET}={ROW + needed}")
    with pytest.raises(PreflightError, match=f"Set it to {ROW + needed} or more"):
        preflight(tmp_path, tokenizer, given, TEMPLATE, *overrides, f"{BUDGET}={ROW + needed - 1}")


def test_nothing_is_counted_where_nothing_rides(tmp_path):
    unbounded = ["algorithm.info_gain_scorer=server", f"{MODEL_LEN}=null"]
    for overrides in (["credit=grpo"], unbounded):
        assert check_answers(load_config("lab", ["data.train_files=nowhere", *overrides])) is None


def test_what_the_server_scores_fits_its_longest_sequence(tmp_path, tokenizer):
    """One answer behind the longest row, and the token that the engine writes: other answers have requests of their own."""
    given = data(tmp_path, ["x" * 25], ["y" * 10, "z" * 20])
    served = (TEMPLATE, "algorithm.info_gain_scorer=server")
    needed = ROW + PER_TAG + 25 + 1
    with pytest.raises(PreflightError) as error:
        preflight(tmp_path, tokenizer, given, *served, f"{MODEL_LEN}={needed - 1}")
    said = str(error.value)
    assert f"{MODEL_LEN}={needed - 1} cannot hold" in said and f"Set it to {needed} or more" in said
    assert "row 0" in said and "1 x 26 tokens" in said
    assert f"{MODEL_LEN}={needed} has room for 26" in preflight(
        tmp_path, tokenizer, given, *served, f"{MODEL_LEN}={needed}"
    )


@pytest.mark.parametrize("overrides, length", [([], ROW), (["algorithm.info_gain_scorer=server"], ROW + 9)])
def test_a_longest_sequence_too_short_for_a_row_is_refused(overrides, length):
    validate(load_config("lab", [*overrides, f"{MODEL_LEN}={length}"]))
    with pytest.raises(
        ConfigError, match=f"{MODEL_LEN}={length - 1} cannot hold a row .* set it to {length}"
    ):
        validate(load_config("lab", [*overrides, f"{MODEL_LEN}={length - 1}"]))


def test_auto_is_the_longest_row_and_what_the_server_scores_behind_it():
    def length(*overrides):
        return load_config("lab", list(overrides)).actor_rollout_ref.rollout.max_model_len

    assert length() == ROW and length("data.max_response_length=500") == 548
    assert length("algorithm.info_gain_scorer=server") == engine_tokens(ROW, True) > ROW + 9
    assert length("algorithm.info_gain_scorer=server", "credit=grpo") == ROW  # no gain, no answer
    assert length(f"{MODEL_LEN}=9000") == 9000 and length(f"{MODEL_LEN}=null") is None


def test_a_tokenizer_that_cannot_be_loaded_is_told(tmp_path):
    (tmp_path / "policy").mkdir()
    config = load_config("lab", [data(tmp_path, ["x"]), f"actor_rollout_ref.model.path={tmp_path}/policy"])
    with pytest.raises(
        PreflightError, match="actor_rollout_ref.model.path=.*/policy: no tokenizer can be loaded"
    ):
        check_answers(config)


def test_a_tokenizer_that_is_not_here_is_told_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    config = load_config("lab", [data(tmp_path, ["x"]), "actor_rollout_ref.model.path=hub/name"])
    said = check_answers(config)
    assert (
        "answers were not counted: the tokenizer of hub/name cannot be loaded here (OSError: no network)"
        in said
    )


@pytest.mark.parametrize("context", ["observation", "call"])
@pytest.mark.parametrize("template", ["auto", "{answer}", "So {answer}."])
def test_no_more_rides_than_was_counted(tokenizer, context, template):
    header = "\n<|im_start|>assistant\n"
    page = f"\n<|im_start|>user\n<tool_response>\nA\n</tool_response>{TURN_END}{header}"
    row = Row((search_turn("a"), page, search_turn("b"), page, answer_turn("x")), prompt_text("Who?"))
    asked = settings(info_gain_context=context, info_gain_template=template)
    turns = turn_batch([row], tokenizer)
    plan = plan_branches(gain_requests(turns, asked, tokenizer), turns)
    truth = {"prompt": "Who?", "reward_model": {"ground_truth": turns.ground_truths[0]}}
    where, tokens, golds = worst_row(tokenizer, asked, iter([("here", truth)]))
    assert (where, golds) == ("here", 2)
    counted = 3 * tokens
    exact = context == "observation"
    assert plan.tokens_B[0] == counted if exact else plan.tokens_B[0] < counted


def test_rows_that_surely_fit_are_not_tokenised(tokenizer):
    """80,000 questions cost no minute where there is room: only the longest text is looked at."""

    class Counting:
        calls = 0

        def __call__(self, *args, **options):
            Counting.calls += 1
            return tokenizer(*args, **options)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    def rows():
        truths = [{"target": ["x" * n]} for n in range(1, 40)]
        return iter([(str(t), {"prompt": "Who?", "reward_model": {"ground_truth": t}}) for t in truths])

    where, tokens, _ = worst_row(Counting(), settings(), rows(), 1000)
    assert (where, tokens) == (str({"target": ["x" * 39]}), 40) and Counting.calls < 5
    assert worst_row(Counting(), settings(), rows(), 0)[1] == 40
