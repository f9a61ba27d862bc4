"""What must hold for every turn mode beside the laws that all operators share (`test_laws.py`)."""

import pytest
import torch

from kit.modes import NO_TABLES
from verl_credit.credit import turn_credit


def batch(seed=0, rows=24, turns=4, groups=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    outcome = torch.randint(0, 3, (rows,), generator=generator) / 2
    gain = torch.randn(rows, turns, generator=generator) * 0.2
    n_gains = torch.randint(0, turns + 1, (rows, 1), generator=generator)
    mask = torch.arange(turns) < n_gains
    group = torch.randint(0, groups, (rows,), generator=generator) * 11 - 20
    return outcome.to(dtype), gain.to(dtype), mask, group


def fields(credit):
    return credit.advantage_B_K, credit.outcome_advantage_B, credit.clip_scale_B_K


def assert_same(credit, other, *, tolerance=0.0):
    for ours, theirs in zip(fields(credit), fields(other), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, check_dtype=False)


WHOLE_RETURNS = ("turn-group-unbiased", "leave_one_out")  # they have tests of their own
COMPARED = [mode for mode in NO_TABLES if mode not in WHOLE_RETURNS]


@pytest.mark.parametrize("mode", ["separate", "turn-group-v1d"])
@pytest.mark.parametrize("seed", range(4))
def test_a_constant_added_to_all_gains_or_their_positive_scale_does_nothing(mode, seed):
    outcome, gain, mask, group = batch(seed, dtype=torch.float64)
    ours = turn_credit(outcome, gain, mask, group, info_gain_norm_mode=mode)
    shifted = turn_credit(outcome, gain + 0.5, mask, group, info_gain_norm_mode=mode)
    scaled = turn_credit(outcome, gain * 3, mask, group, info_gain_norm_mode=mode)
    assert_same(ours, shifted, tolerance=1e-9)
    assert_same(ours, scaled, tolerance=1e-2)  # exact but for the variance floor and eps


def test_integer_outcomes_and_zero_one_masks_are_accepted():
    outcome, gain, mask, group = batch(0)
    whole = (outcome * 2).long()
    assert_same(turn_credit(whole, gain, mask.long(), group), turn_credit(whole.float(), gain, mask, group))


@pytest.mark.parametrize("mode", COMPARED)
def test_a_reward_that_is_not_finite_is_as_none(mode):
    outcome, gain, mask, group = batch(5)
    row = int((mask.sum(dim=1) >= 2).nonzero()[0])
    bad_gain, bad_outcome, hole = gain.clone(), outcome.clone(), mask.clone()
    bad_gain[row, 0], bad_outcome[row], hole[row, 0] = float("inf"), float("nan"), False
    dropped = turn_credit(outcome, bad_gain, mask, group, info_gain_norm_mode=mode)
    assert_same(dropped, turn_credit(outcome, gain, hole, group, info_gain_norm_mode=mode))
    for arguments, name in (((outcome, bad_gain), "turn_reward_B_K"), ((bad_outcome, gain), "outcome_B")):
        with pytest.raises(ValueError, match=f"{name} row {row} .*not finite"):
            turn_credit(*arguments, mask, group, info_gain_norm_mode=mode, on_nonfinite="raise")


def own_mode(scale):
    """A mode of one's own that says nothing sensible of columns past a row's tool turns."""

    def mine(tables):
        missing_B_K = torch.where(tables.has_reward_B_K, 0.0, torch.nan)
        return tables.reward_B_K + missing_B_K, tables.outcome_B, scale * tables.ones() + missing_B_K

    return mine


def test_the_answer_turn_reads_the_outcome_whatever_a_mode_of_ones_own_returns_past_the_tool_turns():
    outcome, reward = torch.tensor([1.0, 0.5]), torch.tensor([[0.1, 0.2], [0.3, 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    credit = turn_credit(outcome, reward, mask, torch.zeros(2).long(), info_gain_norm_mode=own_mode(2.0))
    assert torch.equal(credit.advantage_B_K1, torch.tensor([[0.1, 0.2, 1.0], [0.3, 0.5, 0.5]]))
    assert torch.equal(credit.clip_scale_B_K1, torch.tensor([[2.0, 2.0, 1.0], [2.0, 1.0, 1.0]]))
    with pytest.raises(ValueError, match="'mine' returned clip_scale_B_K row 0 below 0; expected at least 0"):
        turn_credit(outcome, reward, mask, torch.zeros(2).long(), info_gain_norm_mode=own_mode(-1.0))


def test_what_a_mode_declares_to_read_and_to_need_exists():
    for reads, needs, message in (
        (("anchor",), (), "turn mode 'mine': reads='anchor' is not known .did you mean 'anchors'"),
        (("anchors",), ("anchors",), "'mine': needs='anchors' is not known.*accepted: anchor_B_K1"),
        (
            ("gains",),
            ("anchor_B_K1",),
            "needs='anchor_B_K1' is not known; accepted: none: it reads no tables",
        ),
    ):
        mode = own_mode(1.0)
        mode.reads, mode.needs = reads, needs
        with pytest.raises(ValueError, match=message):
            turn_credit(*batch(), info_gain_norm_mode=mode)


@pytest.mark.parametrize("mode", NO_TABLES)
def test_an_empty_batch(mode):
    empty = torch.zeros(0)
    credit = turn_credit(
        empty, torch.zeros(0, 2), torch.zeros(0, 2).bool(), empty.long(), info_gain_norm_mode=mode
    )
    assert credit.advantage_B_K1.shape == (0, 3)
    assert credit.counts["groups"] == 0


def test_bad_arguments_are_named():
    outcome, gain, mask, group = batch(0)
    wrong = [
        ({"info_gain_norm_mode": "turn-group-v1"}, "did you mean 'turn-group-v1d'"),
        ({"outcome_operator": "maxlr"}, "outcome_operator='maxlr'.*did you mean 'maxrl'"),
        (
            {"outcome_operator": "maxrl", "info_gain_norm_mode": "joint"},
            "outcome_operator='maxrl' with info_gain_norm_mode='joint': that mode does not read it",
        ),
        ({"tied_groups": "drop"}, "accepted: keep, skip"),
        ({"on_nonfinite": "ignore"}, "accepted: drop, raise"),
        ({"row_valid_B": torch.ones(3).bool()}, r"row_valid_B has shape \(3,\); expected \(24,\)"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            turn_credit(outcome, gain, mask, group, **options)
    with pytest.raises(ValueError, match="turn_reward_B_K has shape"):
        turn_credit(outcome, gain[:5], mask, group)
    with pytest.raises(ValueError, match="turn_reward_B_K has shape"):
        turn_credit(outcome, gain[:, 0], mask, group)
    with pytest.raises(ValueError, match="turn_mask_B_K has shape"):
        turn_credit(outcome, gain, mask[:, :2], group)
    with pytest.raises(ValueError, match="turn_mask_B_K is not a mask: row 2 "):
        turn_credit(outcome, gain, mask.long() + 2 * (torch.arange(24) == 2)[:, None], group)
    for place, name in enumerate(("outcome_B", "turn_reward_B_K", "turn_mask_B_K", "group_B")):
        listed = [t.tolist() if n == place else t for n, t in enumerate((outcome, gain, mask, group))]
        with pytest.raises(TypeError, match=f"^{name} is a list; expected a torch.Tensor"):
            turn_credit(*listed)
    with pytest.raises(ValueError, match="group_B has shape"):
        turn_credit(outcome, gain, mask, group[:4])
    for dtype in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"group_B has dtype {dtype}"):
            turn_credit(outcome, gain, mask, group.to(dtype))
    with pytest.raises(ValueError, match="outcome_B has shape"):
        turn_credit(outcome[:, None], gain, mask, group)


@pytest.mark.parametrize("mode", ["joint", "separate", "turn-group-v1d", "turn-group-unbiased"])
def test_curriculum_weights_act_after_normalisation(mode):
    """The advantage is linear in both, so a weight of 2 doubles its part; before normalisation it would do nothing."""
    tables = batch(3, dtype=torch.float64)

    def at(gain, outcome):
        credit = turn_credit(*tables, info_gain_norm_mode=mode, gain_scale=gain, outcome_scale=outcome)
        return credit.advantage_B_K1

    gains, outcomes = at(1.0, 0.0), at(0.0, 1.0)
    assert gains.abs().max() > 0 and outcomes.abs().max() > 0
    torch.testing.assert_close(at(1.0, 1.0), gains + outcomes)
    torch.testing.assert_close(at(0.5, 2.0), 0.5 * gains + 2.0 * outcomes)
    scales = [turn_credit(*tables, info_gain_norm_mode=mode, gain_scale=g).clip_scale_B_K for g in (1.0, 0.1)]
    assert torch.equal(*scales)


def test_groups_per_prompt_and_turn_are_counted_by_size():
    """Prompt 0: three rows with turn 0, two with turn 1, one with turn 2. Prompt 1: a lost reward leaves one in turn 0."""
    reward = torch.zeros(5, 3)
    reward[4, 0] = torch.nan
    mask = torch.arange(3) < torch.tensor([3, 2, 1, 1, 1])[:, None]
    counts = turn_credit(torch.zeros(5), reward, mask, torch.tensor([0, 0, 0, 1, 1])).counts
    names = "turn_groups", "turn_groups_of_one", "turn_groups_of_two"
    assert [counts[name] for name in names] == [4, 2, 1]


def test_what_a_mode_of_ones_own_reads_is_0_in_rows_that_do_not_count():
    """A padding copy and a row whose outcome is not finite."""
    seen = []

    def looks(tables):
        seen.append(tables)
        return *tables.split(torch.zeros(3, 3, dtype=torch.float64)), tables.ones()

    outcome_B, reward_B_K = torch.tensor([1.0, 1.0, float("inf")]), torch.ones(3, 2)
    everything, row_valid_B = torch.ones(3, 2, dtype=torch.bool), torch.tensor([True, False, True])
    for kind in (torch.float64, torch.float32, torch.float16):
        credit = turn_credit(
            outcome_B.double(),
            reward_B_K.to(kind),
            everything,
            torch.zeros(3).long(),
            row_valid_B=row_valid_B,
            info_gain_norm_mode=looks,
        )
    assert (credit.counts["invalid_rows"], credit.counts["nonfinite_outcomes"]) == (1, 1)
    tables, *coarse = seen
    assert tables.resolution == torch.finfo(torch.float64).eps
    assert {each.resolution for each in coarse} == {torch.finfo(torch.float32).eps}
    assert tables.valid_B.tolist() == [True, False, False]
    assert tables.outcome_B.tolist() == [1.0, 0.0, 0.0]
    assert tables.reward_B_K.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
