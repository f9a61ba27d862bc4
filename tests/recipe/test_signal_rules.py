"""`algorithm.turn_signal`, `.turn_signals` and what belongs to them."""

import re
import traceback
from pathlib import Path

import pytest

from kit.idle import unused
from kit.recipes import check, refused
from verl_credit.cli.recipe.stages import explanation
from verl_credit.config.gone import LAST
from verl_credit.config.keys import our_keys
from verl_credit.config.settings import CreditSettings
from verl_credit.turns.step.signals.built_in import SIGNALS

SIGNAL, SEVERAL, MODE = (
    f"algorithm.{name}" for name in ("turn_signal", "turn_signals", "info_gain_norm_mode")
)
HERE = __name__
SCORER, ROLLOUT = "algorithm.info_gain_scorer", "actor_rollout_ref.rollout"
BYPASS, BUDGET = "algorithm.rollout_correction.bypass_mode", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
TOOLS_ALONE = (
    f"{ROLLOUT}.agent.default_agent_loop=turn_agent", f"{ROLLOUT}.multi_turn.tool_config_path={__file__}",
    "search.max_searches=0", "search.url=null",
)  # fmt: skip


def lengths(group, *, scale=1.0):
    return [[scale * len(turn.text) for turn in one.tool_turns] for one in group.trajectories]


async def judge(trajectory, *, url):
    raise AssertionError("a judge is not called before the start")


def fails(group):
    return 1 / 0


def outcomes_alone(tables):
    outcome_B = tables.outcome_advantage("grpo")
    return outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()


outcomes_alone.reads = ("rewards", "groups")


def signals(*overrides):
    return CreditSettings.from_config(check(*overrides)).turn_signals


@pytest.mark.slow
def test_information_gain_is_the_signal_unless_another_is_named():
    assert signals() == {"info_gain": 1.0}
    assert signals(f"{MODE}=none") == {}
    assert signals("algorithm.adv_estimator=grpo", f"{MODE}=none") == {}
    assert signals(f"{SIGNAL}=column:steps") == {"column:steps": 1.0}
    both = signals(f"{SEVERAL}={{info_gain:1,{HERE}.lengths:0.5}}", "+algorithm.turn_signal_params.scale=2")
    assert both == {"info_gain": 1.0, f"{HERE}.lengths": 0.5}


def test_the_key_and_the_page_name_every_signal():
    (key,) = (key for key in our_keys() if key.name == "algorithm.turn_signal")
    page = Path(__file__).parents[2] / "docs/turn-signals.md"
    for name in (*SIGNALS, "column:NAME"):
        assert name in key.expected and name in key.sentence and f"| `{name}` |" in page.read_text()


def test_a_judge_is_bound_but_not_called():
    check(f"{SIGNAL}={HERE}.judge", "+algorithm.turn_signal_params.url=http://localhost:1")


@pytest.mark.parametrize(
    "overrides, key, message",
    [
        ([f"{SIGNAL}=info_gian"], SIGNAL, "did you mean info_gain"),
        ([f"{SIGNAL}=column:"], SIGNAL, "column:NAME"),
        ([f"{SIGNAL}=tool_reward"], SIGNAL, "the search gives no reward"),
        ([f"{SIGNAL}=tool_reward", f"{MODE}=none"], SIGNAL, "reads no turn rewards"),
        ([f"{SIGNAL}=info_gain", f"{MODE}={HERE}.outcomes_alone"], SIGNAL, '"gains" among them'),
        ([f"{SIGNAL}=none"], SIGNAL, "has none to compare"),
        ([f"{SIGNAL}=info_gain", f"{SEVERAL}={{info_gain:1}}"], SIGNAL, "set one of the two"),
        ([f"{SEVERAL}={{info_gain:0}}"], SEVERAL, "weights other than 0"),
        ([f"{SEVERAL}={{info_gain:0,tool_reward:1}}"], SEVERAL, "weights other than 0"),
        ([f"{SEVERAL}={{}}"], SEVERAL, "weights other than 0"),
        ([f"{SIGNAL}={HERE}.absent"], SIGNAL, "has no 'absent'"),
        ([f"{SEVERAL}={{info_gain:1,{HERE}.absent:1}}"], SEVERAL, f"{SEVERAL}='{HERE}.absent': module"),
        ([f"{SIGNAL}={HERE}.fails"], SIGNAL, "ZeroDivisionError"),
        ([f"{SIGNAL}={HERE}.judge"], SIGNAL, "missing a required argument: 'url'"),
        ([f"{SIGNAL}={HERE}.lengths", "+algorithm.turn_signal_params.skale=2"], SIGNAL, "unexpected keyword"),
        ([f"{SIGNAL}=os.abort"], SIGNAL, "Python's own"),
        ([f"{SIGNAL}=lapo"], SIGNAL, LAST),
        ([f"{SEVERAL}={{info_gain:1,infopo:1}}"], SEVERAL, LAST),
        ([f"{SCORER}=reference"], SCORER, "loads no reference; set actor_rollout_ref.actor.use_kl_loss=true"),
        ([f"{SIGNAL}=provenance", *TOOLS_ALONE], SIGNAL, "turn_agent"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides, key, message):
    error = refused(*overrides)
    assert error.key == key and error.accepted and message in str(error)


@pytest.mark.slow
def test_rows_may_name_a_loop_of_ones_own_whose_tools_give_rewards(tmp_path):
    listed = f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml"
    (tmp_path / "loops.yaml").write_text("- {name: my_agent, _target_: my_loops.MyAgentLoop}\n")
    assert signals(f"{SIGNAL}=tool_reward", listed) == {"tool_reward": 1.0}
    (tmp_path / "loops.yaml").write_text("[]\n")
    error = refused(f"{SIGNAL}=tool_reward", listed)
    assert (error.key, error.value) == (SIGNAL, "tool_reward")
    assert "the search gives no reward" in error.accepted


@pytest.mark.slow
@pytest.mark.parametrize("key, given", [(SIGNAL, "{}"), (SEVERAL, "{{info_gain:1,{}:0.5}}")])
def test_a_judge_that_the_default_agent_loop_would_not_ask_is_refused(tmp_path, key, given):
    (tmp_path / "loops.yaml").write_text("- {name: my_agent, _target_: my_loops.MyAgentLoop}\n")
    listed, loop = (
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop",
    )
    judged = (
        f"{key}={given.format(f'{HERE}.judge')}",
        "+algorithm.turn_signal_params.url=http://localhost:1",
        listed,
    )
    error = refused(*judged, f"{loop}=my_agent")
    assert (error.key, error.value, error.beside) == (
        key,
        f"{HERE}.judge",
        (loop,),
    ) and f"set {loop}" in error.accepted
    # A row may name the loop in its column agent_name: the default says nothing of it.
    check(*judged)
    for own in (f"{HERE}.lengths", "tool_reward"):
        check(f"{key}={given.format(own)}", listed, f"{loop}=my_agent")


@pytest.mark.slow
def test_a_secret_among_the_params_is_never_shown():
    params = "+algorithm.turn_signal_params"
    config = check(f"{SIGNAL}={HERE}.asks", f"{params}.api_key=hush", f"{params}.url=http://me:hush@judge")
    assert "hush" not in explanation("lab", config, values=True)
    unread = unused(check(f"{params}.api_key=hush", f"{params}.url=http://me:hush@judge"))
    assert unread == ["algorithm.turn_signal_params={'api_key': '***', 'url': 'http://***@judge'}"]
    own = f"algorithm.algorithm_mode={HERE}.shaped", f"{MODE}=none"
    given = check(*own, "+algorithm.algorithm_params.api_key=hush")
    assert "params={'api_key': '***'}" in explanation("lab", given, values=True)
    assert "hush" not in str(refused(f"{SIGNAL}={HERE}.judge", f"{params}.api_key=hush"))
    error = refused(f"{SIGNAL}={HERE}.leaky", f"{params}.api_key=hush", f"{params}.url=http://me:hush@judge")
    assert error.key == SIGNAL
    assert "raised: ConnectionError: 401 for http://***@judge with Bearer ***" in error.accepted
    assert "hush" not in "".join(traceback.format_exception(error))


def leaky(group, *, api_key, url):
    raise ConnectionError(f"401 for {url} with Bearer {api_key}")


async def asks(trajectory, *, api_key, url):
    raise AssertionError("a judge is not called before the start")


def shaped(context):
    return [[reward] * len(row) for reward, row in zip(context.rewards_G, context.logprobs_G, strict=True)]


@pytest.mark.slow
def test_an_algorithm_of_ones_own_is_brought_the_signal_that_the_run_names():
    own = f"algorithm.algorithm_mode={HERE}.shaped", f"{MODE}=none"
    assert signals(*own) == {}
    config = check(*own, f"{SIGNAL}=column:steps")
    assert CreditSettings.from_config(config).turn_signals == {"column:steps": 1.0}
    assert not [key for key in unused(config) if "turn" in key]
    assert "turn signal: column:steps" in explanation("lab", config)


@pytest.mark.parametrize(
    "signal, read",
    [(f"{HERE}.lengths", 1), (f"{HERE}:lengths", 1), (f"{HERE}.asks_nobody", 2), ("column:a.b", 0)],
)
def test_keys_of_a_judge_are_unread_beside_a_signal_that_is_none(signal, read):
    keys = ("+algorithm.turn_signal_params.scale=2", "algorithm.turn_judge.retries=5")
    assert [key.split("=")[0] for key in unused(check(f"{SIGNAL}={signal}", *keys))] == [
        "algorithm.turn_signal_params",
        "algorithm.turn_judge.retries",
    ][read:]


async def asks_nobody(trajectory, *, scale):
    raise AssertionError("a judge is not called before the start")


@pytest.mark.slow
def test_explain_names_every_signal_and_their_sum():
    config = check(f"{SEVERAL}={{info_gain:1,{HERE}.lengths:0.5}}")
    shown = explanation("lab", config)
    assert f"turn signal: {HERE}.lengths" in shown and "a call of your function per question" in shown
    assert f"1 info_gain + 0.5 {HERE}.lengths, each z-scored over its question's turns" in shown


@pytest.mark.slow
@pytest.mark.parametrize("given", [[KL], ["actor_rollout_ref.model.lora_rank=4"]])
def test_a_reference_of_its_own_or_under_an_adapter_scores(given):
    lora = ["actor_rollout_ref.model.lora.merge=true"] * (given != [KL])
    config = check(f"{SCORER}=reference", *given, *lora)
    by = "compute_ref_log_prob" if given == [KL] else "compute_log_prob without the adapter"
    shown = explanation("lab", config)
    assert f"through {by}: 640 a step" in shown and "reads the reference;" in shown


@pytest.mark.slow
def test_the_signals_of_the_page_run(tmp_path, monkeypatch):
    """docs/turn-signals.md: the function is called with the page's option, the judge is bound to its address."""
    page = (Path(__file__).parents[2] / "docs" / "turn-signals.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "page_signals.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    check(f"{SIGNAL}=page_signals.short_queries", "+algorithm.turn_signal_params.scale=50")
    check(f"{SIGNAL}=page_signals.judge", "+algorithm.turn_signal_params.url=http://localhost:1")
