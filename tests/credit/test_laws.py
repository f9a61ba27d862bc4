"""Every registered operator keeps the laws, its exemptions are real, and a broken operator is found out."""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from kit.fuzz import LAW_SEEDS
from verl_credit.credit import REGISTRY
from verl_credit.credit.laws import LAWS, PROPERTIES, check, own_subject, registered_subject
from verl_credit.credit.laws import laws as steady
from verl_credit.credit.laws.check import counterexample
from verl_credit.credit.laws.drawn_world import make_world
from verl_credit.credit.laws.effects import TOOL_TURNS
from verl_credit.credit.laws.subjects import run_turn_mode
from verl_credit.credit.operator import equation_of
from verl_credit.credit.turn.mode import as_turn_mode
from verl_credit.credit.turn.modes import MODES

SEEDS = range(6)
MANY_SEEDS = range(16)  # an exemption may be needed seldom
each_operator = pytest.mark.parametrize("level, name", list(REGISTRY), ids=lambda value: value)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """What an operator does after thousands of calls is tried with the planted ones."""
    monkeypatch.setattr(steady, "CALLS", 100)


@each_operator
def test_an_operator_says_its_equation_once(level, name):
    """In the docstring of its function, or of the parts of a transform."""
    operator = REGISTRY[level, name]
    assert "=" in operator.equation
    assert level == "token" or operator.equation == equation_of(operator.function)


@pytest.mark.slow
@each_operator
def test_an_operator_keeps_the_laws_and_is_what_it_declares(level, name):
    wrong = [finding for finding in check(registered_subject(level, name), LAW_SEEDS) if finding.wrong]
    assert not wrong, "\n".join(f"{finding.name}: {finding.detail}" for finding in wrong)


@each_operator
def test_an_exemption_is_needed(level, name):
    subject = registered_subject(level, name)
    assert set(subject.exempt) <= {*LAWS, TOOL_TURNS}
    assert subject.properties <= set(PROPERTIES)
    bound = replace(subject, exempt={})
    for law in subject.exempt:
        assert counterexample(LAWS["better" if law == TOOL_TURNS else law], bound, MANY_SEEDS) is not None
    if subject.scope == "batch":
        assert counterexample(LAWS["others"], subject, SEEDS) is not None


def centred(rewards):
    mean = math.fsum(rewards) / len(rewards)
    return [0.0 if max(rewards) == min(rewards) else r - mean for r in rewards]


@pytest.mark.slow
def test_properties_are_reported_and_count_when_declared():
    verdicts = {finding.name: finding.verdict for finding in check(own_subject(centred, "centred"), range(1))}
    assert (verdicts["centred"], verdicts["normalised"]) == ("yes", "no")

    def declared(rewards):
        return centred(rewards)

    declared.properties = ("centred", "normalised")
    subject = own_subject(declared, "declared")
    assert "normalised" in {finding.name for finding in check(subject) if finding.wrong}


@pytest.mark.slow
def test_a_property_that_holds_undeclared_is_a_remark_for_users_and_an_error_for_ours():
    def declared(rewards):
        return centred(rewards)

    declared.properties = ()
    finding = next(f for f in check(own_subject(declared, "declared"), range(1)) if f.name == "centred")
    assert (finding.verdict, finding.detail) == ("yes", "not declared, but it holds")
    ours = replace(registered_subject("outcome", "grpo"), properties=frozenset({"normalised"}))
    finding = next(f for f in check(ours, range(1)) if f.name == "centred")
    assert (finding.verdict, finding.detail) == ("BROKEN", "not declared, but it holds")


def test_a_registered_operator_leaves_no_rounding_residue_for_ties():
    def run(world):
        result = exact.run(world)
        return replace(result, advantage_B_T=result.advantage_B_T + 1e-17 * world.mask_B_T)

    exact = registered_subject("outcome", "grpo")
    assert counterexample(LAWS["ties"], replace(exact, run=run)) is not None
    assert counterexample(LAWS["ties"], replace(exact, run=run, operator=None)) is None


def test_a_token_operator_that_reads_outcomes_breaks_a_law():
    def apply(world, given_B_T):
        return given_B_T * (1 + world.outcome_B[:, None])

    subject = replace(registered_subject("token", "gtpo"), apply=apply)
    assert "outcomes or gains" in counterexample(LAWS["reads"], subject).message


READS_ITS_SURROUNDINGS = {
    "order": lambda world: torch.arange(len(world.outcome_B))[:, None],
    "observations": lambda world: world.mask_B_T.shape[1],
    "others": lambda world: len(world.outcome_B),
    "width": lambda world: world.gain_B_K.shape[1],
    "dtype": lambda world: world.outcome_B.element_size(),
    "layout": lambda world: world.log_prob_B_T.stride(0),
    "padding_rows": lambda world: int((~world.valid_B).sum()),
}


@pytest.mark.parametrize("output", ["advantage_B_T", "clip_scale_B_T"])
@pytest.mark.parametrize("law", READS_ITS_SURROUNDINGS)
def test_an_output_that_depends_on_what_its_law_changes_breaks_it(law, output):
    def run(world):
        result = exact.run(world)
        more_B_T = READS_ITS_SURROUNDINGS[law](world) * world.counted_B_T
        return replace(result, **{output: getattr(result, output) + more_B_T})

    exact = registered_subject("outcome", "grpo")
    assert counterexample(LAWS[law], exact, range(1)) is None
    example = counterexample(LAWS[law], replace(exact, run=run), range(1))
    assert f"{output[:-4].replace('_', ' ')} of row" in example.message


@pytest.mark.slow
def test_a_law_tells_of_an_error_once(monkeypatch):
    monkeypatch.setattr(import_module("verl_credit.credit.laws.check"), "TRIES", 20)

    def never_three(rewards):
        return [1 / (len(rewards) - 3)] * len(rewards)

    findings = check(own_subject(never_three, "never_three"), range(1))
    errors = [finding for finding in findings if finding.wrong and "ZeroDivisionError" in finding.detail]
    assert len(errors) == 1
    assert {finding.detail for finding in findings if finding.name == "width"} == {f"as for {errors[0].name}"}


@pytest.mark.parametrize("name", ["joint", "gigpo"])
def test_where_tool_turns_are_exempt_from_better_the_answer_is_bound(name):
    subject = registered_subject("turn", name)

    def flipped(world):
        found = subject.run(world)
        answer_B_1 = world.n_tool_turns_B[:, None]
        sign_B_T = torch.where(world.turn_ids_B_T == answer_B_1, -1.0, 1.0)
        return replace(found, advantage_B_T=found.advantage_B_T * sign_B_T)

    assert TOOL_TURNS in subject.exempt and "better" not in subject.exempt
    assert "of its answer falls" in counterexample(LAWS["better"], replace(subject, run=flipped)).message


def once_in_a_state(name):
    """The mode without exemptions, in worlds where no trajectory comes to a state twice: a state is of one turn."""
    subject = registered_subject("turn", name)

    def run(world):
        anchor_B_K1 = world.anchor_B_K1
        turn_K1 = torch.arange(anchor_B_K1.shape[1])
        at_turn_B_K1 = torch.where(anchor_B_K1 < 0, anchor_B_K1, 3 * turn_K1 + anchor_B_K1)
        return subject.run(world.but(anchor_B_K1=at_turn_B_K1))

    return replace(subject, run=run, exempt={})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_a_better_outcome_lowers_no_turn_of_a_trajectory_that_comes_to_a_state_once(name):
    """What `gigpo` exempts for tool turns, and `hgpo` for answers, too, needs a second visit."""
    for law in ("better", "signed"):
        assert counterexample(LAWS[law], once_in_a_state(name), SEEDS) is None

    def flipped(world):
        found = once.run(world)
        return replace(found, advantage_B_T=-found.advantage_B_T)

    once = once_in_a_state(name)
    assert counterexample(LAWS["better"], replace(once, run=flipped)) is not None


@pytest.mark.parametrize("seed", [6, 520])
def test_a_factor_on_the_outcomes_does_what_the_floors_do(seed):
    """Gains and outcomes of these worlds nearly undo each other: their spread is as small as the floor under it."""
    subject, world, normalised = (
        registered_subject("turn", "turn-group"),
        make_world(seed),
        PROPERTIES["normalised"],
    )
    normalised(subject, world)
    with pytest.raises(steady.Broken):
        normalised(replace(subject, unfloored=None), world)

    def wrong(world):
        found = subject.unfloored(world)
        return replace(found, advantage_B_T=found.advantage_B_T + 1e-9 * world.outcome_B[:, None])

    with pytest.raises(steady.Broken):
        normalised(replace(subject, unfloored=wrong), world)


def test_a_mode_of_ones_own_that_takes_any_option_is_given_any():
    def mine(tables, *, weight=1.0, **others):
        outcome_B = tables.outcome_advantage("grpo") * others.get("times", 1.0)
        return weight * outcome_B[:, None].expand_as(tables.reward_B_K), outcome_B, tables.ones()

    world, mode = make_world(0), as_turn_mode(mine, "m.mine")
    ours = run_turn_mode(world, mode=mode).advantage_B_T
    assert torch.equal(run_turn_mode(world, mode=mode, times=2.0).advantage_B_T, 2 * ours) and ours.any()


def test_the_ranges_of_our_options_do_not_bind_a_mode_of_ones_own():
    def mine(tables, *, lam=0.5, beta=1.0, eps=1e-6):
        outcome_B = tables.outcome_advantage("grpo")
        return (
            lam * beta * (1 - eps) * outcome_B[:, None].expand_as(tables.reward_B_K),
            outcome_B,
            tables.ones(),
        )

    options = {"lam": 2.0, "beta": -1.0, "eps": 0.0}
    mode, world = as_turn_mode(mine, "m.mine"), make_world(0, turns=1)
    tool_B = world.mask_B_T & (world.turn_ids_B_T < world.n_tool_turns_B[:, None])
    advantage_B_T, ours_B_T = (
        run_turn_mode(world, mode=mode, **given).advantage_B_T for given in (options, {})
    )
    assert torch.allclose(advantage_B_T[tool_B], -4 * ours_B_T[tool_B] / (1 - 1e-6)) and tool_B.any()
    for shipped in (mode for mode in MODES.values() if "norm_by_std" in mode.options):
        with pytest.raises(ValueError, match="eps=0.001 with norm_by_std=False"):
            shipped.check_options({"norm_by_std": False, "eps": 1e-3})
    with pytest.raises(ValueError, match="lam=2.0: expected a number at least 0 and at most 1"):
        run_turn_mode(world, mode=MODES["turn_gae"], lam=2.0)
