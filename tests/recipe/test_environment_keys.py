"""`environment.*` before a start: what is read, what would do nothing, and what the default credit is."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kit.environments import CORRIDOR
from kit.recipes import check
from kit.recipes import refused as refused_recipe
from verl_credit.cli.recipe.stages import explanation
from verl_credit.config.settings import CreditSettings
from verl_credit.recipe.plan.job import read_job
from verl_credit.recipe.unread import warnings_of, without_effect
from verl_credit.recipe.world import without_value

HERE = __name__
GIVEN = ("data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x")
SIGNAL = ("algorithm.info_gain_norm_mode=turn-group-v1d", "algorithm.turn_signal=tool_reward")
PENALTY = "reward.custom_reward_function.reward_kwargs.format_penalty"
ACTOR = "actor_rollout_ref.actor"
GAE = "algorithm.info_gain_norm_mode=turn_gae"


def composed(*overrides):
    return check(*GIVEN, *overrides, recipe="doorkey")


def refused(*overrides, recipe="doorkey"):
    return refused_recipe(*GIVEN, *overrides, recipe=recipe)


def parser(text):
    return text


@pytest.mark.parametrize(
    "overrides",
    [
        (f"environment.path={CORRIDOR}", "~environment.kwargs", "+environment.kwargs.length=2"),
        (f"environment.action={HERE}.parser",),
        ("environment.outcome=return", "environment.invalid_reward=-1"),
        ("environment.success_at=0.5", "environment.invalid_reward=-1"),
        ("environment.outcome=last", "environment.invalid_reward=-1", *SIGNAL),
        (GAE, "algorithm.turn_values=column:progress", "algorithm.lam=0.5"),
        (GAE, "algorithm.turn_values=state", "algorithm.lam=0.5", "algorithm.turn_anchor=state"),
        (GAE, "algorithm.turn_values=group", "algorithm.lam=0.9"), ("algorithm.info_gain_norm_mode=gigpo",),
        ("environment.window=0",), ("environment.window=3", "algorithm.adv_estimator=grpo"),
    ],
)  # fmt: skip
def test_what_an_environment_takes(overrides):
    assert composed(*overrides).environment.path


@pytest.mark.parametrize(
    "overrides, key, words",
    [
        (("environment.path=gymnasum",), "environment.path", ["gymnasium", "my_module.MyEnvironment"]),
        (("environment.action=tags",), "environment.action", ["text", "tag"]),
        (("environment.action=no_module.f",), "environment.action", ["no_module"]),
        (("environment.outcome=won",), "environment.outcome", ["success", "return", "last"]),
        (("environment.max_steps=0",), "environment.max_steps", ["1 to 1000"]),
        (("environment.windows=2",), "environment.windows", ["did you mean environment.window?"]),
        (("environment.window=-1",), "environment.window", ["0 to 1000"]),
        (("environment.window=2", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"), f"{ACTOR}.loss_agg_mode",
         ["environment.window=2", "token-mean, or seq-mean-token-sum"]),
        (("environment.window=0", "algorithm.algorithm_mode=gtpo_canonical"), "algorithm.algorithm_mode",
         ["environment.window=0", "context resets"]),
        (("environment.window=1", "probe.every=1"), "probe.every", ["environment.window=1", "0"]),
        (("search.max_searches=2", "search.url=http://x"), "search.max_searches", ["0"]),
        (("algorithm.turn_signals={info_gain: 1.0}", SIGNAL[0]), "algorithm.turn_signals", ["tool_reward"]),
        (("algorithm.turn_signal=info_gain", SIGNAL[0]), "algorithm.turn_signal", ["tool_reward"]),
        ((GAE, "algorithm.turn_values=features"), "algorithm.turn_values", ["state", "column:progress"]),
        (SIGNAL, "environment.outcome", ["last"]),
        (("environment.outcome=return", *SIGNAL), "environment.outcome", ["last"]),
        ((SIGNAL[0], "algorithm.turn_signal=provenance"), "algorithm.turn_signal", ["env_agent", "pages"]),
        (("search.include_reasoning=true",), "search.include_reasoning", ["env_agent", "false"]),
        ((f"{PENALTY}=0.2",), PENALTY, ["0.2", "environment.invalid_reward"]),
        (("environment.invalid_reward=-1",), "environment.invalid_reward", ["environment.outcome=return"]),
        ((GAE, "algorithm.turn_values=group", "algorithm.lam=0.5"), "algorithm.lam", ["0.9", "state"]),
        (("algorithm.turn_anchor=states",), "algorithm.turn_anchor", ["observation", "state", "prefix"]),
    ],
)  # fmt: skip
def test_what_an_environment_has_no_use_for_is_refused(overrides, key, words):
    more = () if key != "algorithm.turn_anchor" else ("algorithm.info_gain_norm_mode=gigpo",)
    error = refused(*overrides, *more)
    assert error.key == key and all(word in str(error) for word in words), error


def test_tools_beside_an_environment_are_refused(tmp_path):
    (tmp_path / "tools.py").write_text("")
    key = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
    assert refused(f"{key}={tmp_path / 'tools.py'}").key == key


@pytest.mark.parametrize("key", ["path=gymnasium", "max_steps=3", "outcome=last", "deadline_s=1"])
def test_keys_of_an_environment_beside_another_loop_would_do_nothing(key):
    error = refused("search.url=http://x", f"environment.{key}", recipe="search_cpu")
    assert error.key == f"environment.{key.partition('=')[0]}" and "env_agent" in str(error)


def test_the_environment_is_a_required_input():
    assert "environment.path" in without_value(composed("environment.path=null"))
    assert "search.url" not in without_value(composed())


@pytest.mark.parametrize("outcome, floor", [("success", None), ("return", 0.0), ("last", 0.0)])
def test_the_default_credit_has_values_of_states(outcome, floor):
    algorithm = CreditSettings.from_config(composed(f"environment.outcome={outcome}")).algorithm
    assert (algorithm.info_gain_norm_mode, algorithm.turn_values, algorithm.lam) == ("turn_gae", "state", 0.9)
    assert algorithm.turn_params.get("rms_floor") == floor


def test_a_plan_has_a_row_for_half_of_the_turns_of_a_window():
    """As many as it takes a rollout to have."""
    one, several = (read_job(composed(*given), flash_attn=False) for given in ((), ("environment.window=1",)))
    assert (one.rows, several.rows, several.max_turns) == (128, 1536, 1)


def test_what_is_said_of_a_run_in_an_environment(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"Go {n}.\nActions: left"}]} for n in range(2)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    here = composed(f"data.train_files={tmp_path}/rows.parquet", "environment.window=4")
    assert (
        f"the first prompt of {tmp_path}/rows.parquet:\n    user: Go 0.\n    Actions: left\n"
        in explanation("doorkey", here)
    )
    assert "25 steps, each a row with the last 4 in its prompt" in explanation("doorkey", here)
    (tmp_path / "text.parquet").write_text("no parquet")
    broken = explanation("doorkey", composed(f"data.train_files={tmp_path}/text.parquet"))
    assert f"{tmp_path}/text.parquet cannot be read" in broken
    config = composed("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=7")
    (line,) = [
        line
        for line in without_effect(config, CreditSettings.from_config(config))
        if "max_assistant_turns" in line
    ]
    assert "environment.max_steps" in line
    text = explanation("doorkey", config)
    said = ("minigrid", "MiniGrid-DoorKey-6x6-v0", "outcome=success")
    assert "first prompt" not in text and all(one in text for one in said)
    windows = composed("environment.max_steps=999", "environment.window=2")
    assert not any("max_response_length" in line for line in warnings_of(windows))
    assert any(
        "environment.max_steps=999 of" in line for line in warnings_of(composed("environment.max_steps=999"))
    )
