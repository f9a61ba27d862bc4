"""Values in a step of credit: what providers observe, what no value may know, and the replay of a resumed run."""

from dataclasses import replace

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.turn_rows import Row, estimate, lost_row, padding_row, step_inputs, turn_batch
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.step.signals.built_in import InfoGainSignal
from verl_credit.turns.step.turn_values import TurnValues

HERE, NAN = __name__, float("nan")


def searched(*turns: int) -> dict:
    return RowRecord(searches=[{"turn": turn, "query": "", "pages": []} for turn in turns]).as_dict()


def row(*pages: str, answer: str, prompt: str) -> Row:
    parts = [part for page in pages for part in ("search", page)]
    return Row((*parts, answer), prompt)


GROUPS, OUTCOMES = [0, 0, 0, 1, 1, 2, 2, 3, 0, 4], [1.0, 0, 1, 0, 1, 0, 0, 1, 0, 0]
ROWS = [
    row("a page", "Paris, the city", answer="Paris", prompt="Who?"),
    row("a page", answer="Rome", prompt="Who?"),
    row(answer="Paris", prompt="Who?"),
    row("Parisian", "an other", answer="Rome", prompt="Where?"),
    row("the PARIS!", answer="Paris", prompt="Where?"),
    row("a page", answer="Rome", prompt="When?"),
    row("a page", "an other", answer="Oslo", prompt="When?"),
    row("so Paris", answer="Paris", prompt="Why?"),
]
BATCH = [*ROWS, lost_row("connect", prompt="Who?"), padding_row(ROWS[0])]
PROVIDERS = ["group", "features", "state", "column:belief", f"{HERE}.observed_words"]


@pytest.fixture(scope="module")
def turns():
    return made(BATCH)


def made(batch):
    found = turn_batch(batch, make_tokenizer())
    for place, record in enumerate(found.records):
        tool_turns = max(int(found.n_turns_B[place]) - 1, 0)
        record["searches"] = searched(*range(tool_turns))["searches"]
        record["signals"] = {"belief": [0.25 * (k + place % 3) for k in range(tool_turns)]}
    return found


def observed_words(trajectory):
    words, states = 0, []
    for turn in trajectory.turns:
        states.append(words)
        words += len(turn.observation.split())
    return states


def turns_left(trajectory):
    """Not seen at a start whose trial trajectories end as all do."""
    return [float(trajectory.turns[0].text == "search" and len(trajectory.turns) > 2)] * len(trajectory.turns)


def inputs_of(turns, provider, values=None, **changes):
    given = {"info_gain_norm_mode": "turn_gae", "turn_signal": "none", "turn_values": provider} | changes
    signals = {InfoGainSignal("info_gain"): 1.0} if given["turn_signal"] == "info_gain" else {}
    gains = [[0.125] * max(int(n) - 1, 0) for n in turns.n_turns_B]
    inputs = step_inputs(turns, gains, signals=signals, lam=0.5, **given)
    values = inputs.run.values if values is None else values
    gold_B_K1 = torch.linspace(0, 1, 30).view(10, 3).masked_fill(torch.arange(3) == 2, NAN)
    return replace(inputs, run=replace(inputs.run, values=values), gold_B_K1=gold_B_K1)


def step_of(turns, provider, outcomes=OUTCOMES, values=None, groups=GROUPS, **changes):
    return estimate(inputs_of(turns, provider, values, **changes), turns, outcomes, groups)


def values_of(step):
    return step.tables.optional["value_B_K1"]


APART = [replace(one, prompt=f"{one.prompt} {place}") for place, one in enumerate(BATCH)]
"""A group's rows have prompts of their own, as where an environment's first observation stands in them."""
TWICE = [replace(one, prompt="Who?") for one in BATCH]
"""One question under several uids."""


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("batch", [BATCH, APART], ids=["one prompt", "prompts of their own"])
def test_a_value_does_not_change_when_the_own_outcome_does(batch, provider):
    """With a step in the replay, too. The values of other prompts do change."""
    turns = made(batch)
    for before in (False, True):
        values = [TurnValues.of(inputs_of(turns, provider).run.settings) for _ in range(9)]
        for one in values if before else ():
            step_of(turns, provider, [1.0 - outcome for outcome in OUTCOMES], one)
        usual = values_of(step_of(turns, provider, values=values[8]))
        for place in turns.valid_rows:
            outcomes = [5.0 if other == place else outcome for other, outcome in enumerate(OUTCOMES)]
            changed = values_of(step_of(turns, provider, outcomes, values[place]))
            assert torch.equal(changed[place], usual[place]) and not torch.equal(changed, usual)


def test_one_question_under_several_uids_is_one_prompt():
    """No fit has another state then, so that every value is the mean return of the uid's other rows."""
    first = values_of(step_of(made(TWICE), "group"))[:, 0]
    assert first[:8].tolist() == [0.5, 1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_no_fit_reads_an_earlier_draw_of_the_same_question(turns):
    """The replay's rows of "Who?" have another uid than this step's, and what they earned moves the other prompts alone."""
    found = []
    for earned in (0.0, 5.0):
        values = TurnValues.of(inputs_of(turns, "features").run.settings)
        before = [earned if place < 3 else outcome for place, outcome in enumerate(OUTCOMES)]
        step_of(turns, "features", before, values, groups=[7 + group for group in GROUPS])
        found.append(values_of(step_of(turns, "features", values=values)))
    assert torch.equal(found[0][:3], found[1][:3]) and not torch.equal(found[0][3:8], found[1][3:8])


seen_trajectories = []


def remembered(trajectory):
    seen_trajectories.append(trajectory)
    return [0.0] * len(trajectory.turns)


def test_a_function_sees_nothing_of_the_end(turns):
    seen_trajectories.clear()
    step_of(turns, f"{HERE}.remembered")
    assert len(seen_trajectories) >= len(ROWS)
    for one in seen_trajectories:
        assert (one.outcome, one.scores, one.stop_reason, one.turns[-1].text) == (None, {}, "", "")


def test_the_mean_of_the_others_is_one_of_returns(turns):
    """All outcomes are 0, and a tool's rewards of 1/8 a turn are all that is earned."""
    inputs = inputs_of(turns, "group", turn_signal="info_gain")
    estimate(inputs, turns, [0.0] * 10, GROUPS)
    found = inputs.run.values._replay[0].x_N_D[
        :7, 0
    ]  # 3, 2 and 1 states of the first prompt, and one of the next
    assert found.tolist() == [0.0625] * 3 + [0.125] * 2 + [0.1875, 0.125]


def test_the_mode_reads_the_values_and_metrics_say_what_they_explain(turns):
    step = step_of(turns, "features")
    value, credit = values_of(step), step.credit.advantage_B_K1
    assert value[0, 2] != 0 and not value[8:].any()
    torch.testing.assert_close(credit[0, 2].double(), 1 - value[0, 2], rtol=0, atol=1e-6)
    torch.testing.assert_close(credit[0, 1].double(), value[0, 2] - value[0, 1] + 0.5 * (1 - value[0, 2]))
    metrics = {name: number for name, number in step.metrics.items() if name.startswith("credit/values/")}
    states = int(turns.n_turns_B[turns.row_valid_B].sum())
    assert metrics.keys() == {
        "credit/values/states",
        "credit/values/explained_variance",
        "credit/values/explained_variance_of_changes",
    }
    assert metrics["credit/values/states"] == states
    every = torch.arange(3) < turns.n_turns_B[turns.row_valid_B, None]
    outcome = torch.tensor(OUTCOMES)[turns.row_valid_B, None].expand(-1, 3)[every].double()
    error = (outcome - value[turns.row_valid_B][every]).square().mean() / outcome.var(correction=0)
    assert metrics["credit/values/explained_variance"] == pytest.approx(1 - float(error))


def test_the_state_is_the_anchor(turns):
    """By the last observation: the first two rows read "a page" first, and then the first row reads another."""
    found = {}
    for anchor in ("observation", "prefix"):
        inputs = inputs_of(turns, "state", turn_anchor=anchor)
        estimate(inputs, turns, OUTCOMES, GROUPS)
        found[anchor] = inputs.run.values._replay[0].x_N_D[:, 12:]
    assert found["observation"][:3, 1].tolist() == [
        2,
        1,
        0,
    ]  # others at the prompt, after "a page", after Paris
    assert found["observation"][3:6, 1].tolist() == [2, 1, 2]
    assert torch.equal(found["prefix"][:6], found["observation"][:6])


def test_what_features_observe(turns):
    inputs = inputs_of(turns, "features", turn_signal="info_gain")
    step = estimate(inputs, turns, OUTCOMES, GROUPS)
    observed = inputs.run.values._replay[0].x_N_D[:, 12:]
    rows = [place for place in turns.valid_rows for _ in range(int(turns.n_turns_B[place]))]
    turn = [k for place in turns.valid_rows for k in range(int(turns.n_turns_B[place]))]
    seen = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]  # Parisian is not Paris
    gold = inputs.gold_B_K1[rows, turn].double()
    wanted = torch.stack([torch.tensor(seen).double(), torch.tensor(turn).double(), gold], dim=1)
    torch.testing.assert_close(observed, wanted, equal_nan=True)
    returns = inputs.run.values._replay[0].return_N  # gains are earned on the way
    assert returns[:3].tolist() == [1.25, 1.125, 1.0] and values_of(step).isfinite().all()
    without = inputs_of(turns, "features")  # no gain is measured
    estimate(without, turns, OUTCOMES, GROUPS)
    torch.testing.assert_close(without.run.values._replay[0].x_N_D[:, 12:], wanted[:, :2], equal_nan=True)


def test_a_column_is_known_after_its_turn_and_the_reward_functions_is_not_read(turns):
    inputs = inputs_of(turns, "column:belief")
    estimate(inputs, turns, OUTCOMES, GROUPS)
    observed = inputs.run.values._replay[0].x_N_D[:, 12:]
    wanted = [NAN, 0, 0.25, NAN, 0.25, NAN]
    torch.testing.assert_close(observed[:6, 0], torch.tensor(wanted).double(), equal_nan=True)
    leaking = replace(turns, scores=[{"em": [outcome] * 3} for outcome in OUTCOMES])
    with pytest.raises(
        IntegrityError, match="'em' of row 0 is missing.*in the agent loop's record .signals.: belief"
    ):
        step_of(leaking, "column:em")


def test_a_function_that_reads_ahead_stops_the_first_step(turns):
    with pytest.raises(IntegrityError, match=r"turns_left, row 0: ValueError: the features of turn 1 differ"):
        step_of(turns, f"{HERE}.turns_left")


@pytest.mark.parametrize("provider", ["group", "state"])
def test_the_order_of_the_batch_does_not_matter(turns, provider):
    order = [4, 7, 0, 6, 1, 3, 5, 2]
    shuffled = turn_batch([BATCH[place] for place in order], make_tokenizer())
    numbered = [GROUPS[place] for place in order]
    step = step_of(shuffled, provider, [OUTCOMES[place] for place in order], groups=numbered)
    usual = values_of(step_of(turns, provider))[order]
    torch.testing.assert_close(values_of(step), usual, rtol=0, atol=1e-12)


def test_one_turn_only_and_groups_of_one(turns):
    """Every value is a fit of the intercept; a run of such steps has no changes to explain."""
    alone = turn_batch([row(answer="Paris", prompt=f"{place}?") for place in range(4)], make_tokenizer())
    inputs = inputs_of(alone, "features")
    step = estimate(replace(inputs, gold_B_K1=None), alone, [1.0, 0, 0, 1], [0, 1, 2, 3])
    assert values_of(step).flatten().tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert "credit/values/explained_variance_of_changes" not in step.metrics


def test_a_step_without_variance_and_the_first_step_of_one_prompt(turns):
    step = step_of(turns, "features", [1.0] * 10)
    assert values_of(step)[0].tolist() == pytest.approx([1, 1, 1])
    assert step.credit.advantage_B_K1[:8].abs().max() < 1e-12
    assert "credit/values/explained_variance" not in step.metrics
    one = turn_batch(ROWS[:3], make_tokenizer())
    step = step_of(one, "group", [1.0, 0, 1], groups=[0, 0, 0])
    assert values_of(step)[:, 0].tolist() == [0.5, 1.0, 0.5]  # the mean of the others


def test_the_replay_has_the_last_steps_and_a_resumed_run_goes_on_exactly(turns):
    provider = "features"
    ran = TurnValues.of(inputs_of(turns, provider, turn_values_replay=2).run.settings)
    draws = [[float((3 * k + place) % 4 < 2) for place in range(10)] for k in range(4)]
    for outcomes in draws[:3]:
        step_of(turns, provider, outcomes, ran)
    saved = ran.state_dict()
    resumed = TurnValues.of(inputs_of(turns, provider, turn_values_replay=2).run.settings)
    resumed.load_state_dict(saved)
    went_on, again = (step_of(turns, provider, draws[3], one) for one in (ran, resumed))
    assert torch.equal(values_of(went_on), values_of(again)) and went_on.metrics == again.metrics
    assert went_on.metrics["credit/values/states"] == 3 * int(turns.n_turns_B[turns.row_valid_B].sum())
    fresh = TurnValues.of(inputs_of(turns, provider).run.settings)
    assert not torch.equal(values_of(step_of(turns, provider, draws[3], fresh)), values_of(again))


@pytest.mark.parametrize(
    ("provider", "signal", "names"),
    [("group", "none", ()), ("features", "info_gain", ("gold seen", "searches", "gold probability"))],
)
def test_a_resume_with_other_features_is_refused(turns, provider, signal, names):
    saved = TurnValues.of(inputs_of(turns, "features").run.settings).state_dict()
    other = TurnValues.of(inputs_of(turns, provider, turn_signal=signal).run.settings)
    assert other.provider.names == names
    with pytest.raises(IntegrityError, match=rf"algorithm.turn_values={provider} observes .* begin again"):
        other.load_state_dict(saved)
