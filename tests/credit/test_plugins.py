"""A user's own operators: found by dotted path, given plain lists of one prompt, checked in what they return."""

import dataclasses
import sys
import types

import pytest
import torch

from verl_credit.config.keys import Algorithm
from verl_credit.credit import gtpo_weights, hicra, plugins, sepa_amp, sepa_pool
from verl_credit.credit.plugins import (
    AlgorithmOutput,
    TransformOutput,
    TransformSpec,
    UncertaintySpec,
    as_transform_spec,
    as_uncertainty_spec,
    load,
    run_uncertainty,
)
from verl_credit.turns.step.token_stage import TokenInputs, TokenStage

NAN = float("nan")
# Rows 0 and 2 are of one prompt, row 1 of another, row 3 does not count. Observations and padding hold NaN.
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]).bool()
VALID, GROUP = torch.tensor([True, True, True, False]), torch.tensor([8, 3, 8, 8])
COUNTED = MASK & VALID[:, None]
LOG_PROB = torch.where(COUNTED, -0.25 * torch.arange(1.0, 17).view(4, 4), NAN)
OUTCOME = torch.tensor([1.0, 1.0, 0.0, NAN])
TURN = torch.where(COUNTED, torch.arange(16.0).view(4, 4) - 6, 0.0)
ADVANTAGE = torch.tensor([0.5, 0.0, -0.5, 0.0])
PLANNING = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]).bool()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module, in a package or not, where Python finds it; forgets it afterwards."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, source):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)

    yield write
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


def transformed(spec, turn_B_T=TURN, **options):
    given = {"log_prob_B_T": LOG_PROB, "uncertainty_B_T": -LOG_PROB, "planning_B_T": PLANNING} | options
    return plugins.run_transform(spec, turn_B_T, ADVANTAGE, COUNTED, GROUP, VALID, **given)


def algorithm(function, **options):
    return plugins.run_algorithm(function, OUTCOME, LOG_PROB, COUNTED, GROUP, VALID, name="mine.f", **options)


def scaled_rewards(ctx):
    rows = [[r * len(own)] * len(own) for r, own in zip(ctx.rewards_G, ctx.logprobs_G, strict=True)]
    return AlgorithmOutput(rows, extra_metrics={"members": len(rows)})


# Two plug-ins as users of retrain write them: types imported from it, an outcome function, a context function.
OUTCOME_PLUGIN = """
def twice_centred(rewards):
    if not rewards:
        return []
    middle = sum(rewards) / len(rewards)
    return [2.0 * reward - 2.0 * middle for reward in rewards]
"""
TRANSFORM_PLUGIN = """
from retrain import TransformOutput

def scaled(ctx):
    factor = float(ctx.params.get("factor", 1.0))
    rows = zip(ctx.episode_advantages, ctx.logprobs_G)
    return TransformOutput(token_advs=[[factor * advantage for _ in own] for advantage, own in rows])
"""


def test_plug_ins_written_for_retrain_run_through_the_token_stage(module):
    module("mine_outcome", OUTCOME_PLUGIN)
    module("mine_package.transform", TRANSFORM_PLUGIN)
    settings = Algorithm(
        info_gain_norm_mode="none",
        advantage_mode="mine_outcome.twice_centred",
        transform_mode="mine_package.transform.scaled",
        transform_params={"factor": 3.0},
    )
    stage = TokenStage(settings, tokenizer=None)
    assert "retrain" not in sys.modules and stage.active
    advantage_B = stage.outcome_operator(OUTCOME, GROUP, row_valid_B=VALID)
    assert advantage_B.tolist() == [1.0, 0.0, -1.0, 0.0]
    inputs = TokenInputs(0, MASK, MASK.long(), LOG_PROB, None, VALID)
    got, metrics = stage.apply(TURN, advantage_B, OUTCOME, GROUP, inputs, inputs.mask_B_T)
    assert torch.equal(got, torch.where(COUNTED, 3 * advantage_B[:, None], 0.0))
    assert metrics["credit/advantage_abs/token"] == pytest.approx(15 / 6)


BOOK = "from retrain import TransformSpec\nspec = TransformSpec('x')\ndef trans_form(ctx): ...\nvalue = 3\n"


def test_a_plug_in_runs_where_the_package_it_was_written_for_is_installed(module, monkeypatch):
    theirs = types.ModuleType("retrain")
    theirs.TransformOutput = type("TransformOutput", (types.SimpleNamespace,), {"extra_metrics": {}})
    monkeypatch.setitem(sys.modules, "retrain", theirs)
    module("mine_c", TRANSFORM_PLUGIN)
    got, _ = transformed(as_transform_spec(load("mine_c.scaled", "key"), "mine_c.scaled"))
    assert torch.equal(got, torch.where(COUNTED, ADVANTAGE[:, None], 0.0))


LOAD_ERRORS = {
    "mine_b": "expected a built-in name or a dotted path such as my_module.my_function",
    "mine-b.f": "expected a built-in name or a dotted path",
    "mine_b.": "expected a built-in name or a dotted path",
    "mine_nowhere.f": "cannot import 'mine_nowhere' .No module named 'mine_nowhere'",
    "mine_broken.f": "importing 'mine_broken' raised ZeroDivisionError: division by zero",
    "mine_other.f": "cannot import 'mine_other' .*Nonsense",
    "mine_b.transform": "module 'mine_b' has no 'transform' .did you mean 'trans_form'",
    "mine_b.value": "is a int; expected a function or a spec",
}


@pytest.mark.parametrize("path", LOAD_ERRORS)
def test_load_finds_what_there_is_and_names_the_key_and_the_path_where_not(module, path):
    module("mine_b", BOOK)
    module("mine_broken", "1 / 0")
    module("mine_other", "from retrain import Nonsense")
    assert load("mine_b.spec", "key") == load("mine_b:spec", "key") == TransformSpec("x")
    with pytest.raises(ValueError, match=f"algorithm.transform_mode='{path}'.*{LOAD_ERRORS[path]}"):
        load(path, "algorithm.transform_mode")
    assert "retrain" not in sys.modules


def test_a_context_transform_is_given_one_prompt_at_a_time_and_policy_tokens_only():
    seen = []

    def keep(ctx):
        seen.append(ctx)
        return ctx.turn_advantages_G

    options = {"params": {"a": 1}, "step": 4, "sepa_lambda": 0.3, "gtpo_beta": 0.7, "hicra_alpha": 0.9}
    got, metrics = transformed(as_transform_spec(keep, "mine.f"), uncertainty_kind="my_kind", **options)
    assert torch.equal(got, TURN) and metrics == {}
    first, second = seen
    assert first.episode_advantages == [0.5, -0.5] and second.episode_advantages == [0.0]
    assert first.logprobs_G == [[-0.25, -0.5, -1.0], [-2.5, -2.75]] and second.logprobs_G == [[-1.25]]
    assert first.uncertainties_G == [[0.25, 0.5, 1.0], [2.5, 2.75]]
    assert first.planning_masks_G == [[1, 0, 0], [1, 0]]
    assert first.uncertainty_kind == "my_kind" and first.token_distributions_G is None
    assert {name: getattr(first, name) for name in options} == options
    transformed(as_transform_spec(keep, "mine.f"), planning_B_T=None)
    assert seen[2].planning_masks_G == [[], []]


def test_needs_are_read_off_a_function_a_spec_or_what_a_factory_makes():
    def f(ctx): ...

    f.needs_planning = f.uses_sepa_controller = True
    spec = as_transform_spec(f, "mine.f")
    assert (spec.needs_planning, spec.uses_sepa_controller, spec.uses_turn_advantages) == (True, True, False)
    assert spec.name == "mine.f" and spec.compute_context is f
    made = TransformSpec("x")
    assert as_transform_spec(made, "mine.f") is made and as_transform_spec(lambda: made, "mine.f") is made
    assert as_transform_spec(lambda: f, "mine.f").compute_context is f
    with pytest.raises(ValueError, match="transform_mode='mine.f' gave a int; expected a TransformSpec"):
        as_transform_spec(lambda: 3, "mine.f")


def halve(uncertainties, planning, lam):
    return [h * (1 - m / 2) + lam for h, m in zip(uncertainties, planning, strict=True)]


def times_k(advantages, raw, params):
    return [[params["k"] * a for a in row] for row in advantages], {"largest": max(map(max, raw))}


def test_the_parts_of_a_spec_act_in_order():
    """entropy_transform, GTPO, HICRA, post_process (which reads the uncertainties as they came)."""
    spec = TransformSpec("x", apply_hicra=True, entropy_transform=halve, post_process=times_k)
    options = {"sepa_lambda": 0.5, "gtpo_beta": 0.4, "hicra_alpha": 0.3}
    got, metrics = transformed(spec, params={"k": 2.0}, **options)
    h = torch.where(COUNTED, -LOG_PROB * (1 - PLANNING / 2) + 0.5, 0.0)
    want = 2 * hicra(TURN * gtpo_weights(h, COUNTED, beta=0.4), PLANNING, 0.3)
    torch.testing.assert_close(got, torch.where(COUNTED, want, 0.0))
    assert metrics == {"largest": (2.75 + 1.25) / 2}  # one call per prompt, means over prompts
    assert torch.equal(transformed(TransformSpec("x", use_gtpo=False))[0], TURN)
    torch.testing.assert_close(transformed(TransformSpec("x"))[0], TURN * gtpo_weights(-LOG_PROB, COUNTED))
    with pytest.raises(ValueError, match="'x': .*planning mask"):
        transformed(TransformSpec("x", apply_hicra=True), planning_B_T=None)
    with pytest.raises(
        ValueError, match="entropy_transform of 'x' returned 2 values for .* row 0; expected a list of 3"
    ):
        transformed(TransformSpec("x", entropy_transform=lambda h, planning, lam: h[:2]))


@pytest.mark.parametrize("use_gtpo", [True, False])
def test_masked_advantages_may_be_anything_and_are_left_alone(use_gtpo):
    spec = TransformSpec("x", use_gtpo=use_gtpo, post_process=times_k)
    turn_B_T = torch.where(COUNTED, TURN, NAN)
    got, _ = transformed(spec, turn_B_T, params={"k": 2.0})
    assert torch.equal(got, transformed(spec, params={"k": 2.0})[0])
    assert torch.equal(turn_B_T.nan_to_num(), TURN)


def test_the_contexts_helpers_are_our_operators():
    h, planning, ones = [0.2, 0.3, 1.8, 0.1], [0, 0, 1, 0], torch.ones(1, 4).bool()
    ctx = plugins.TransformContext([1.0], [[]], [[]], sepa_lambda=0.5, gtpo_beta=0.3)
    row, mask = torch.tensor([h], dtype=torch.float64), torch.tensor([planning]).bool()
    assert ctx.gtpo(-2.0, h) == (-2 * gtpo_weights(row, ones, beta=0.3))[0].tolist()
    assert ctx.gtpo(2.0, h, beta=0.0) == [2.0] * 4
    assert ctx.hicra(h, planning) == hicra(row, mask, 0.2)[0].tolist()
    assert ctx.sepa_pool(h, planning) == sepa_pool(row, mask, ones, 0.5)[0].tolist()
    assert ctx.sepa_amp(h, planning) == sepa_amp(row, mask, ones, 0.5)[0].tolist()
    with pytest.raises(ValueError, match="planning_mask has 3 entries for 4 tokens"):
        ctx.sepa_pool(h, planning[:3])
    with pytest.raises(TypeError):  # no mask is not a mask of zeros, which would do nothing
        ctx.hicra(h, None)


def test_an_algorithm_replaces_the_whole_pipeline():
    seen = []
    options = {"params": {"a": 1}, "step": 4, "sepa_lambda": 0.3, "gtpo_beta": 0.7, "hicra_alpha": 0.9}
    got, metrics = algorithm(lambda ctx: seen.append(ctx) or scaled_rewards(ctx), **options)
    assert got.tolist() == [[3, 3, 0, 3], [1, 0, 0, 0], [0] * 4, [0] * 4] and metrics == {"members": 1.5}
    assert seen[0].rewards_G == [1.0, 0.0] and seen[0].precomputed_entropies_G is None
    assert seen[0].planning_masks_G == [[], []]
    assert {name: getattr(seen[0], name) for name in options} == options
    algorithm(lambda ctx: seen.append(ctx) or ctx.logprobs_G, planning_B_T=PLANNING, entropy_B_T=-LOG_PROB)
    assert seen[2].planning_masks_G == [[1, 0, 0], [1, 0]]
    assert seen[2].precomputed_entropies_G == [[0.25, 0.5, 1.0], [2.5, 2.75]]


def test_an_uncertainty_is_computed_row_by_row():
    seen = []

    def squared(ctx):
        seen.append(ctx)
        return torch.tensor(ctx.logprobs) ** 2

    spec = as_uncertainty_spec(squared, "mine.u")
    options = {"entropy_B_T": -LOG_PROB, "planning_B_T": PLANNING, "params": {"a": 1}}
    got = run_uncertainty(spec, LOG_PROB, COUNTED, **options)
    assert torch.equal(got, torch.where(COUNTED, LOG_PROB**2, 0.0))
    assert len(seen) == 3 and seen[2].precomputed_entropy == [2.5, 2.75] and seen[2].planning_mask == [1, 0]
    assert seen[0].params == {"a": 1} and seen[0].token_distributions is None
    own = UncertaintySpec("u", squared)
    assert as_uncertainty_spec(own, "mine.u") is own and as_uncertainty_spec(lambda: own, "mine.u") is own
    with pytest.raises(ValueError, match="uncertainty_kind='mine.u' .*distributions"):
        as_uncertainty_spec(UncertaintySpec("u", squared, needs_distributions=True), "mine.u")


INF = float("inf")
WRONG = {
    "returned 1 lists for a group of 2 completions; expected one list each": lambda own: own[:1],
    "returned NoneType for a group of 2 completions": lambda own: None,
    "returned 2 values for .* row 0; expected a list of 3": lambda own: [row[:2] for row in own],
    "returned nan for .* row 0; expected a list of 3 finite": lambda own: [[NAN] * len(row) for row in own],
    "returned inf for .* row 2; expected": lambda own: own if len(own) < 2 else [own[0], [0.0, INF]],
    "returned {0: 1.0, .* row 0; expected a list of 3": lambda own: [dict.fromkeys(range(3), 1.0)] * len(own),
    "returned {0.0, .* row 0; expected a list of 3": lambda own: [{0.0, 1.0, 2.0}] * len(own),
    "returned '123' for .* row 0; expected a list of 3": lambda own: ["123"] * len(own),
    "returned \\['1', .* row 0; expected a list of 3": lambda own: [["1", "2", "3"]] * len(own),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_an_operator_returns_is_checked(message):
    def function(ctx):
        return WRONG[message](ctx.logprobs_G)

    with pytest.raises(ValueError, match=f"transform 'mine.t' {message}"):
        transformed(as_transform_spec(function, "mine.t"))
    with pytest.raises(ValueError, match=f"transform 'x' {message}"):
        transformed(TransformSpec("x", compute_context=lambda ctx: TransformOutput(function(ctx))))
    with pytest.raises(ValueError, match=f"algorithm 'mine.f' {message}"):
        algorithm(function)
    for values in ([1.0], [NAN] * 3):
        with pytest.raises(ValueError, match="uncertainty 'u' returned .* row 0; expected a list of 3"):
            run_uncertainty(UncertaintySpec("u", lambda ctx, values=values: values), LOG_PROB, COUNTED)


def test_an_algorithm_reads_turns_where_the_caller_brings_them():
    """Row 0 searched twice and lost the second reward; row 2 once, without a reward; rejected tokens are not listed."""
    seen = []

    def reading(context):
        seen.append((context.turn_ids_G, context.turn_rewards_G, context.anchors_G, context.observations_G))
        return [[0.0] * len(values) for values in context.logprobs_G]

    algorithm(reading)
    assert seen == [([], [], [], [])] * 2
    seen.clear()
    turns = plugins.TurnInputs(
        torch.tensor([[0, 1, -1, 2], [0, -1, -1, -1], [-1, 0, 1, -1], [0, 1, 2, 2]]),
        torch.tensor([[0.5, NAN], [9.0, 9.0], [0.25, 9.0], [1.0, 1.0]]),
        torch.tensor([[True, True], [False, False], [False, False], [True, True]]),
    )
    algorithm(reading, turns=turns)
    assert seen[0] == ([[0, 1, 2], [0, 1]], [[0.5, None], [None]], [], [])
    assert seen[1] == ([[0]], [[]], [], [])
    seen.clear()
    states = torch.tensor([[3, 4, -1], [5, -1, -1], [3, 6, -1], [7, 8, 9]])
    texts = [["page", "nothing"], [], ["page"], ["a", "b"]]
    algorithm(reading, turns=dataclasses.replace(turns, anchor_B_K1=states, observations_B=texts))
    assert seen[0][2:] == ([[3, 4, None], [3, 6]], [["page", "nothing"], ["page"]])
    assert seen[1][2:] == ([[5]], [[]])
