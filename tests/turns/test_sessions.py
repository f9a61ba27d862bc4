"""Rollouts of several outputs: which rows are one rollout, what its credit is, and what is refused."""

from dataclasses import fields, replace
from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import OmegaConf

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, estimate, lost_row, padding_row, step_inputs, turn_batch
from verl_credit.credit import REGISTRY
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import RowRecord, TurnBatch
from verl_credit.turns.rollout.sessions import joined, link_of, sessions_of
from verl_credit.turns.step.outputs import CRITICS, MINI_BATCH, PER_OUTPUT
from verl_credit.turns.step.signals.built_in import SIGNALS
from verl_credit.turns.step.step_checks import StepChecks
from verl_credit.turns.step.step_metrics import score_metrics
from verl_credit.turns.step.token_stage import TokenInputs

TOKENIZER = make_tokenizer()
GROUPS, OUTCOMES = ["q"] * 6, [1.0, 0, 0, 0, 1, 1]
"""Sessions with the outcomes 1, 0, 0, 1, of which the second and the fourth have two outputs."""
OUTPUTS = {
    "q_0_0": Row(("ask", "page", "Rome")),
    "q_1_0": Row(("ask", "map", "sum", "full"), turn_rewards=(0.5, 0.25)),
    "q_1_1": Row(("seek", "page", "Oslo"), "Who? so far: sum", turn_rewards=(-0.5,)),
    "q_2_0": Row(("Oslo",)),
    "q_3_0": Row(("ask", "page"), turn_rewards=(1.0,)),
    "q_3_1": Row(("Paris",), "Who? so far: nothing"),
}
TOGETHER = [
    OUTPUTS["q_0_0"],
    Row(
        ("ask", "map", "sum", "fullWho? so far: sum", "seek", "page", "Oslo"), turn_rewards=(0.5, 0.25, -0.5)
    ),
    OUTPUTS["q_2_0"],
    Row(("ask", "pageWho? so far: nothing", "Paris"), turn_rewards=(1.0,)),
]
"""The same rollouts, each in one row."""
GAINS = [[0.25], [0.5, 0.25, -0.5], [], [1.0]]


def batch(outputs=OUTPUTS, links=()):
    made = turn_batch(list(outputs.values()), TOKENIZER)
    return replace(made, keys=list(outputs), links=[*links])


def advantages(turns, outcomes=OUTCOMES, gains=GAINS, groups=GROUPS, stage=False, **changes):
    """(the step, its advantages, clip scales and returns at the policy's tokens by key). ``stage``: with a token level."""
    given = {"info_gain_norm_mode": "turn_gae", "turn_values": "group"} | changes
    if given["info_gain_norm_mode"] != "turn_gae":
        del given["turn_values"]
    inputs = step_inputs(joined(turns), gains, TOKENIZER if stage else None, **given)
    if stage or given.get("turn_values") == "critic":
        ids_B_T = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in turns.response_ids], True)
        number_B_T = (ids_B_T * 37 % 101) / 101  # follows from the token alone
        mask_B_T = turns.response_mask_B_T.bool()
        tokens = TokenInputs(1, mask_B_T, ids_B_T, -number_B_T, number_B_T, turns.row_valid_B)
        inputs = replace(inputs, tokens=tokens, value_B_T=number_B_T)
    step = estimate(inputs, turns, outcomes, groups)
    mask_B_T, found = turns.turn_ids_B_T >= 0, {}
    for row in range(len(turns.prompt_ids)):
        own = mask_B_T[row]
        assert not step.advantage_B_T[row][~own].any() and (step.clip_scale_B_T[row][~own] == 1).all()
        columns = [step.advantage_B_T[row][own], step.clip_scale_B_T[row][own]]
        columns += [] if step.return_B_T is None else [step.return_B_T[row][own]]
        found[turns.keys[row] if turns.keys else row] = torch.stack(columns)
    return step, found


def test_a_session_has_its_outputs_in_the_order_of_their_numbers():
    assert sessions_of(["a_0_1", "a_0_10", "a_0_2", "a_1_0", "b_0_0"]) == [[0, 2, 1], [3], [4]]


def test_a_batch_of_one_output_each_is_the_same_object():
    turns = replace(turn_batch(TOGETHER, TOKENIZER), keys=[f"q_{n}_0" for n in range(4)])
    assert joined(turns) is turns


def test_joined_rows_are_the_rollouts_in_one_row():
    found, wanted = joined(batch()), turn_batch(TOGETHER, TOKENIZER)
    for name in (
        field.name for field in fields(TurnBatch) if field.name not in ("keys", "sessions", "outputs")
    ):
        one, other = getattr(found, name), getattr(wanted, name)
        assert (
            torch.equal(one, other)
            if isinstance(one, torch.Tensor)
            else name == "extra_infos" or one == other
        ), name


@pytest.mark.parametrize(("operator", "right"), [("grpo", 0.8660254), ("rloo", 2 / 3)])
def test_sessions_count_once_and_as_verls_grpo_counts_them(operator, right):
    given = [1.0, 9, 0, 0, 9, 1]  # the outcome is that of the last output
    step, found = advantages(batch(), given, info_gain_norm_mode="none", advantage_mode=operator, stage=True)
    for outcome, values in zip(OUTCOMES, found.values(), strict=True):
        assert values[0].tolist() == pytest.approx([right if outcome else -right] * values.shape[1], abs=1e-5)
    assert step.credit.counts["groups"] == 1


def test_verls_metrics_of_the_score_count_each_rollout_once():
    step, _ = advantages(batch(), info_gain_norm_mode="none")
    found = score_metrics(step)
    assert {name: found[f"critic/{name}/mean"] for name in ("score", "rewards")} == {
        "score": 0.5,
        "rewards": 0.5,
    }
    assert (found["critic/score/max"], found["critic/score/min"]) == (1.0, 0.0)
    step, _ = advantages(
        turn_batch(TOGETHER, TOKENIZER), [1.0, 0, 0, 1], groups=["q"] * 4, info_gain_norm_mode="none"
    )
    assert score_metrics(step) == {}


def test_one_session_of_two_outputs_is_a_group_of_one():
    outputs = {key: OUTPUTS[key] for key in ("q_1_0", "q_1_1")}
    step, found = advantages(batch(outputs), [1.0, 1.0], GAINS[1:2], ["q"] * 2, info_gain_norm_mode="none")
    counts = step.credit.counts
    assert (counts["singleton_groups"], counts["tied_groups"]) == (1, 0)
    assert not any(values[0].any() for values in found.values())


def test_the_mean_of_the_others_is_over_sessions():
    step, _ = advantages(batch(), turn_signal="none", gains=[[None]] * 4)
    mean_of = {}
    for session, x in zip(
        [0] * 2 + [1] * 4 + [2] + [3] * 2, step.inputs.run.values._replay[0].x_N_D, strict=True
    ):
        mean_of[session] = round(x[0].item(), 3)
    assert mean_of == {0: 0.333, 1: 0.667, 2: 0.667, 3: 0.333}


MODES = [name for (level, name) in REGISTRY if level == "turn"]
CREDITS = [{"info_gain_norm_mode": mode} for mode in MODES] + [
    {"turn_values": "critic", "lam": 0.5, "gamma": 0.9},
    {"turn_values": "features", "lam": 0.5},
    {"turn_values": "state", "lam": 0.5},
    {"transform_mode": "gtpo_sepa_hicra", "info_gain_norm_mode": "separate", "stage": True},
    {"info_gain_norm_mode": "verl_credit_recipes.methods.trace.trace"},
    {"info_gain_norm_mode": "verl_credit_recipes.methods.calibadv.calibadv"},
    {"info_gain_norm_mode": "verl_credit_recipes.methods.gagpo.gagpo"},
]


@pytest.mark.parametrize("changes", CREDITS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_the_credit_of_a_rollout_is_that_of_its_row(changes):
    """Turn indices, rewards on the way, values and token statistics go across the reset; the rows may come in any order."""
    _, found = advantages(batch(), **changes)
    _, wanted = advantages(turn_batch(TOGETHER, TOKENIZER), [1.0, 0, 0, 1], groups=["q"] * 4, **changes)
    assert any(values[0].any() for values in wanted.values())
    for row, keys in enumerate((["q_0_0"], ["q_1_0", "q_1_1"], ["q_2_0"], ["q_3_0", "q_3_1"])):
        together = torch.cat([found[key] for key in keys], dim=1)
        assert torch.allclose(together, wanted[row], rtol=0, atol=1e-7), (keys, together, wanted[row])
    places = [5, 2, 0, 4, 3, 1]  # last outputs before first ones
    mixed = batch({list(OUTPUTS)[place]: list(OUTPUTS.values())[place] for place in places})
    order = [int(outputs.split("_")[1]) for outputs in dict.fromkeys(key[:3] for key in mixed.keys)]
    _, again = advantages(mixed, [OUTCOMES[place] for place in places], [GAINS[n] for n in order], **changes)
    assert all(torch.allclose(again[key], found[key], rtol=0, atol=1e-12) for key in OUTPUTS)


def test_the_last_turn_of_an_output_leads_to_the_first_state_of_the_next():
    step, found = advantages(batch(), turn_values="critic", lam=0.0, gamma=0.5)
    value = step.tables.optional["value_B_K1"][1]
    delta = 0.25 + 0.5 * value[2] - value[1]
    assert found["q_1_0"][0, -1].item() == pytest.approx(delta.item(), abs=1e-6)


@pytest.mark.parametrize("anchor", ["prefix", "observation"])
def test_equal_states_after_a_reset_are_equal_prompts_whatever_stood_before(anchor):
    """``prefix`` is the prompt and what follows in the own output; an observation before the reset is one of its own."""
    outputs = {
        "q_0_0": Row(("ask", "page")), "q_0_1": Row(("seek", "map", "Rome"), "so far: nothing"),
        "q_1_0": Row(("look", "map")), "q_1_1": Row(("seek", "map", "Oslo"), "so far: nothing"),
    }  # fmt: skip
    given = {
        "gains": [[None] * 2] * 2,
        "turn_signal": "none",
        "turn_anchor": anchor,
        "info_gain_norm_mode": "gigpo",
    }
    step, _ = advantages(batch(outputs), [1.0, 1, 0, 0], groups=["q"] * 4, **given)
    first, second = step.tables.optional["anchor_B_K1"].tolist()
    equal = [one == other for one, other in zip(first, second, strict=True)]
    assert equal == [True, anchor == "prefix", True] and len({*first}) == 3


def test_no_own_value_follows_the_outcome_of_its_session():
    """With another prompt, whose values do follow it."""
    others = {
        key.replace("q", "p"): replace(row, prompt=f"{row.prompt} And?") for key, row in OUTPUTS.items()
    }
    turns, groups = batch(OUTPUTS | others), ["q"] * 6 + ["p"] * 6
    given = {"gains": GAINS * 2, "groups": groups}
    usual, _ = advantages(turns, OUTCOMES * 2, **given)
    changed, _ = advantages(
        turns,
        [5.0 if key.startswith("q_1") else o for key, o in zip(turns.keys, OUTCOMES * 2, strict=True)],
        **given,
    )
    before, after = (step.tables.optional["value_B_K1"] for step in (usual, changed))
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])
    assert not torch.equal(before[4:], after[4:])


def test_a_fault_in_one_output_takes_the_whole_rollout_out():
    fault = lost_row("connect", prompt="Who? so far: sum")
    turns = batch(OUTPUTS | {"q_1_1": fault})
    assert joined(turns).row_valid_B.tolist() == [True, False, True, True]
    assert joined(turns).records[1]["tool_fault"] == "connect"
    _, found = advantages(turns, gains=[GAINS[0], [None] * 1, [], GAINS[3]], info_gain_norm_mode="none")
    assert not found["q_1_0"][0].any() and found["q_0_0"][0].all()
    early = RowRecord(
        "tool_fault", tool_fault="connect", calls=[{"turn": 4}]
    )  # of a turn that the mask took away
    before = joined(batch(OUTPUTS | {"q_1_0": replace(fault, prompt="Who?", record=early)})).records[1]
    assert (before["tool_fault"], before["stop_reason"], before["calls"]) == ("connect", "tool_fault", [])
    # The agent manager masks all outputs of such a rollout: the parent has no turns, and the sub-agent no place.
    lost = {"q_0_0": lost_row("connect"), "q_0_1": lost_row("connect"), "q_1_0": AGENTS["q_1_0"]}
    assert joined(batch(lost, LINKS)).row_valid_B.tolist() == [False, True]
    padded = batch(AGENTS | {"pad1_0_0": padding_row(AGENTS["q_0_0"])}, [*LINKS, LINKS[0]])
    assert joined(padded).row_valid_B.tolist() == [True, True, False]


def test_a_padding_row_of_verls_is_a_session_of_its_own():
    turns = joined(batch(OUTPUTS | {"pad1_0_0": padding_row(OUTPUTS["q_0_0"])}))
    assert turns.is_padding == [False] * 4 + [True] and turns.row_valid_B.tolist() == [True] * 4 + [False]


def test_records_are_joined_with_the_turns_of_the_session():
    call = {"turn": 1, "name": "t", "arguments": "", "reward": None}
    search = {"turn": 0, "query": "x", "pages": ["7"]}
    first = RowRecord(
        "length", n_searches=1, calls=[call], searches=[search], final_text="sum", signals={"s": [1.0]}, states=["a", "b"],
    )  # fmt: skip
    second = RowRecord(
        "answer", n_searches=1, searches=[search], final_text="Oslo", signals={"s": [3.0]}, states=["c", "d"]
    )
    turns = batch(
        OUTPUTS
        | {
            "q_1_0": replace(OUTPUTS["q_1_0"], record=first),
            "q_1_1": replace(OUTPUTS["q_1_1"], record=second),
        }
    )
    found = joined(turns).records[1]
    assert (found["stop_reason"], found["final_text"], found["n_searches"]) == ("answer", "Oslo", 2)
    assert [one["turn"] for one in found["searches"]] == [0, 2] and found["calls"][0]["turn"] == 1
    assert found["signals"] == {"s": [1.0, None, 3.0]} and found["states"] == ["a", "b", "c", "d"]


# --- sub-agents ------------------------------------------------------------------------------------

AGENTS = {
    "q_0_0": Row(("find", "found", "read"), "Find it."),
    "q_0_1": Row(("plan", "help", "Paris")),
    "q_1_0": Row(("Rome",)),
}
LINKS = [(1, (0, 0)), (0, None), (0, None)]


def test_the_turns_of_a_sub_agent_stand_after_its_parents_turn():
    turns = joined(batch(AGENTS, LINKS))
    assert turns.sessions.turn_B_K1.tolist() == [[1, 2], [0, 3], [0, -1]]
    one = turn_batch([Row(("plan", "Find it.", "find", "found", "read", "help", "Paris"))], TOKENIZER)
    assert turns.response_ids[0] == one.response_ids[0] and turns.n_turns_B.tolist() == [4, 1]
    assert (
        torch.equal(turns.turn_ids_B_T[0], one.turn_ids_B_T[0]) and turns.prompt_ids[0] == turns.prompt_ids[1]
    )


@pytest.mark.parametrize(
    "links", [[(1, (0, 2)), (0, None)], [(1, (2, 0)), (0, None)], [(1, (1, 0)), (0, None)]]
)
def test_a_sub_agent_without_its_parents_turn_is_refused(links):
    with pytest.raises(ValueError, match=r"row 0: extra_fields\['link'\]=.*'parent'.*expected a turn"):
        joined(batch(AGENTS, [*links, (0, None)]))
    with pytest.raises(ValueError, match=r"row 0: extra_fields\['link'\]=.*'parent'.*expected a turn"):
        joined(batch({"q_0_0": AGENTS["q_0_0"]}, links[:1]))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (
            [(1, (0, 0)), (1, (0, 1)), (0, None)],
            r"row 1: .*'chain': 1, 'parent': \[0, 1\].*expected .*\[0, 0\]",
        ),
        (
            [(0, None), (0, None), (1, (0, 0))],
            r"row 2: .*'chain': 1, 'parent': \[0, 0\].*expected chain 0 for the last",
        ),
    ],
)
def test_a_second_parent_and_an_outcome_of_a_sub_agents_are_refused(links, message):
    outputs = {"q_0_0": Row(("look",)), "q_0_1": Row(("read",)), "q_0_2": Row(("plan", "help", "Paris"))}
    with pytest.raises(ValueError, match=message):
        joined(batch(outputs, links))


@pytest.mark.parametrize(
    "given",
    [
        "main",
        {"chain": 1},
        {"chain": 0, "parent": [0, 0]},
        {"chain": 1, "parent": [0]},
        {"chain": True, "parent": [0, 0]},
        {"chain": -1, "parent": [0, 0]},
        {"chain": 1, "parent": [0, -1]},
    ],
)
def test_what_is_no_link_is_refused_by_row(given):
    with pytest.raises(ValueError, match=r"row 3: extra_fields\['link'\]=.*expected .*chain"):
        link_of({"link": given}, 3)
    assert link_of({"link": {"chain": 2, "parent": [0, 1]}}, 0) == (2, (0, 1)) and link_of({}, 0) == (0, None)


# --- what is refused -------------------------------------------------------------------------------

BASE = {"run_dir": ".", "faults": {"max_tool_faults": 0.0, "max_unrewarded_steps": None},
        "search": {"url": None, "max_new_tokens": 8}}  # fmt: skip
SUB = ("none", "turn_gae")
"""The turn modes with a meaning for sub-agents."""


def check(turns, overrides=(), **changes):
    config = OmegaConf.create(BASE)
    for key, value in overrides:
        OmegaConf.update(config, key, value)
    StepChecks(config, settings(**{"turn_signal": "none"} | changes)).rows(MagicMock(step=1), turns)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resets", [True, False])
def test_a_mode_has_a_meaning_or_is_refused_by_name(mode, resets):
    turns = batch() if resets else batch(AGENTS, LINKS)
    given = (
        {"info_gain_norm_mode": mode, "turn_values": "group"}
        if mode == "turn_gae"
        else {"info_gain_norm_mode": mode}
    )
    if resets or mode in SUB:
        check(turns, **given)
        return
    with pytest.raises(
        IntegrityError, match=f"row 1: .*2 outputs.*q_0.*info_gain_norm_mode={mode} .*expected"
    ):
        check(turns, **given)


@pytest.mark.parametrize("mode", ["gtpo_canonical", "grpo_s"])
def test_a_transform_by_positions_of_a_row_is_refused(mode):
    with pytest.raises(IntegrityError, match=f"algorithm.transform_mode={mode}"):
        check(batch(), info_gain_norm_mode="none", transform_mode=mode, uncertainty_kind="shannon_entropy")
    check(batch(), info_gain_norm_mode="none", transform_mode="gtpo")


def plugged(given, **params):
    return given


@pytest.mark.parametrize(
    "key", ["advantage_mode", "transform_mode", "algorithm_mode", "uncertainty_kind", "turn_signal"]
)
def test_an_operator_of_a_users_declares_what_it_takes(monkeypatch, key):
    given = {"info_gain_norm_mode": "none", key: f"{__name__}.plugged"}
    if key == "turn_signal":
        given["info_gain_norm_mode"] = "separate"
    check(batch(), **given)
    monkeypatch.setattr(plugged, "outputs", "one", raising=False)
    with pytest.raises(IntegrityError, match=r"plugged.*expected one for context resets; .*one output alone"):
        check(batch(), **given)
    monkeypatch.setattr(plugged, "outputs", "all")
    with pytest.raises(ValueError, match=r"plugged.*outputs='all'.*one, resets, sub-agents"):
        check(batch(), **given)


def test_gains_are_measured_across_resets_and_not_around_sub_agents():
    assert {name: kind.outputs for name, kind in SIGNALS.items()} == {
        "info_gain": "resets",
        "tool_reward": "sub-agents",
    }
    check(batch(), info_gain_norm_mode="separate", turn_signal="info_gain")
    with pytest.raises(IntegrityError, match="turn signal info_gain"):
        check(
            batch(AGENTS, LINKS), info_gain_norm_mode="turn_gae", turn_values="group", turn_signal="info_gain"
        )


def test_values_by_hidden_states_are_refused_around_sub_agents():
    given = {"info_gain_norm_mode": "turn_gae", "turn_values": "state"}
    check(batch(), **given)
    with pytest.raises(IntegrityError, match="algorithm.turn_values=state .*sub-agents"):
        check(batch(AGENTS, LINKS), **given)


REFUSED = [(key, values[0]) for key, values, _ in PER_OUTPUT]
REFUSED += [("algorithm.rollout_correction.rollout_rs", "token_k1,seq_sum_k3"), ("probe.every", 5)]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_a_key_that_reads_an_output_by_itself_is_refused(key, value):
    with pytest.raises(IntegrityError, match=f"{key}={value} .*expected"):
        check(batch(), [(key, value)])
    check(replace(batch(), keys=[f"q_{n}_0" for n in range(6)]), [(key, value)])


@pytest.mark.parametrize("critics", [4, 8])
def test_a_critic_with_other_mini_batches_is_refused(critics):
    keys = {MINI_BATCH: 4, CRITICS: critics, "critic.enable": True}
    if critics == 4:
        check(batch(), keys.items())
        return
    with pytest.raises(IntegrityError, match=f"{CRITICS}=8 .*expected {MINI_BATCH}=4"):
        check(batch(), keys.items())
    check(batch(), (keys | {"critic.enable": False}).items())


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_of_verls_estimators_grpo_alone_knows_sessions(estimator):
    if estimator == "grpo":
        check(batch(), adv_estimator=estimator)
        return
    with pytest.raises(IntegrityError, match="algorithm.adv_estimator=rloo .*info_gain or grpo"):
        check(batch(), adv_estimator=estimator)


def test_sub_agents_side_by_side_need_lam_and_gamma_1():
    outputs = {"q_0_0": AGENTS["q_0_0"], "q_0_1": Row(("look",), "Look."), "q_0_2": AGENTS["q_0_1"]}
    turns = batch(outputs, [LINKS[0], (2, (0, 0)), (0, None)])
    assert joined(turns).sessions.turn_B_K1.tolist() == [[1, 2], [3, -1], [0, 4]]
    given = {"info_gain_norm_mode": "turn_gae", "turn_values": "group"}
    check(turns, **given)
    for name in ("lam", "gamma"):
        with pytest.raises(IntegrityError, match=rf"algorithm.{name}=0.5.*expected 1"):
            check(turns, **given | {name: 0.5})


def test_one_sub_agent_of_a_turn_takes_any_lam_and_gamma():
    """Also where another rollout has one at the same turn."""
    turns = batch(AGENTS | {"q_1_0": AGENTS["q_0_0"], "q_1_1": AGENTS["q_0_1"]}, LINKS[:2] * 2)
    check(turns, info_gain_norm_mode="turn_gae", turn_values="group", lam=0.5, gamma=0.9)
