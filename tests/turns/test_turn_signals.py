"""Turn signals: what gives a tool turn its reward, what a missing one is, and how several are added."""

import asyncio
import math

import pytest
import torch

from kit.byte_world import make_tokenizer
from kit.settings import settings
from kit.turn_rows import Row, lost_row, padding_row, turn_batch
from verl_credit.config.keys import TurnJudge
from verl_credit.errors import IntegrityError
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.step.signals import own
from verl_credit.turns.step.signals.built_in import find_signal
from verl_credit.turns.step.signals.own import ask_signals, own_signal
from verl_credit.turns.step.signals.signal import Group, StepRows, Trajectory, Turn, step_rewards, turn_texts

NAN = math.nan
CALLS = [{"turn": 0, "name": "search", "arguments": "{}", "reward": 0.25}]
ROWS = [
    Row(
        ("ask", "page", "again", "page two", "done"),
        scores={"em": 1.0, "steps": [0.5, None]},
        record=RowRecord(calls=CALLS),
    ),
    Row(("ask", "page", "done"), scores={"em": 0.0, "steps": [0.1]}),
    Row(("done",), scores={"em": 1.0, "steps": []}),
    Row(("ask", "page", "done"), scores={"em": 0.0, "steps": [0.7]}),
]
BATCH = [*ROWS, lost_row("connect"), padding_row(ROWS[0])]
GROUPS = [0, 0, 1, 1, 1, 2]
OUTCOMES = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
TOOL = [[0.25, None], [None], [], [1.0], [], []]


@pytest.fixture(scope="module")
def rows():
    tokenizer = make_tokenizer()
    turns = turn_batch(BATCH, tokenizer)
    turns.turn_rewards[:] = TOOL
    gain = torch.tensor(
        [[0.4, 0.2], [0.1, 0.0], [0.0, 0.0], [NAN, 0.0], [0.0, 0.0], [9.0, 9.0]], dtype=torch.float64
    )
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 0], [0, 0], [1, 1]]).bool()
    return StepRows(turns, tokenizer.decode, torch.tensor(OUTCOMES), torch.tensor(GROUPS), gain, mask)


def rewards(rows, signals, tolerated_share=0.0, scored=True, **changes):
    """(what every turn got, metrics): "-" for a turn without a reward, "lost" for one that is not known."""
    chosen = settings(turn_signals={signal.name: weight for signal, weight in signals.items()}, **changes)
    reward, mask, metrics = step_rewards(
        signals, chosen, rows, scored=scored, tolerated_share=tolerated_share
    )
    shown = [
        [
            ("lost" if math.isnan(value) else round(value, 9)) if has else "-"
            for value, has in zip(*pair, strict=True)
        ]
        for pair in zip(reward.tolist(), mask.tolist(), strict=True)
    ]
    return shown, metrics


def named(name, **params):
    return {find_signal(name, params): 1.0}


def test_a_tools_reward_and_a_turn_without_one(rows):
    shown, metrics = rewards(rows, named("tool_reward"))
    assert shown == [[0.25, "-"], ["-", "-"], ["-", "-"], [1.0, "-"], ["-", "-"], ["-", "-"]]
    name = "credit/signal/tool_reward"
    assert (metrics[f"{name}/turns"], metrics[f"{name}/without"], metrics[f"{name}/lost"]) == (2, 2, 0)
    assert metrics[f"{name}/mean"] == 0.625


def test_a_weight_and_a_step_without_gains(rows):
    gain, share = find_signal("info_gain", {}), 0.25
    assert rewards(rows, {gain: 0.5}, share)[0][:2] == [[0.2, 0.1], [0.05, "-"]]
    assert rewards(rows, {gain: 0.5}, share)[0][3] == ["lost", "-"]  # whatever it weighs
    assert rewards(rows, {gain: 1.0}, scored=False) == ([["-", "-"]] * 6, {})


def test_several_are_normalised_over_their_question_and_added(rows):
    signals = {find_signal("info_gain", {}): 1.0, find_signal("tool_reward", {}): 0.5}
    scored, metrics = rewards(rows, signals, 0.25)
    gains = torch.tensor([0.4, 0.2, 0.1], dtype=torch.float64)
    z = (gains - gains.mean()) / (gains.var(correction=0) + 1e-8).sqrt()
    # question 0 has one tool reward: nothing to compare it with, z = 0
    assert [*scored[0], scored[1][0]] == pytest.approx(z.tolist(), rel=1e-4)
    assert {name for name in metrics if name.endswith("/mean")} == {
        "credit/signal/info_gain/mean",
        "credit/signal/tool_reward/mean",
    }


def test_a_turn_that_lacks_a_part_does_not_win(rows):
    """Both signals are penalties: a part that is missing is no penalty of 0."""

    def a(group):
        return [[-1.0] * len(one.tool_turns) for one in group.trajectories]

    def b(group):
        return [[None if one.scores["em"] else -2.0] * len(one.tool_turns) for one in group.trajectories]

    signals = {own_signal(f"mine.{part.__name__}", part, {}): 1.0 for part in (a, b)}
    by_question, _ = rewards(rows, signals)
    assert by_question[:4] == [[0.0, 0.0], [0.0, "-"], ["-", "-"], [0.0, "-"]]


def test_a_step_without_gains_leaves_the_other_signals_their_scale(rows):
    """`info_gain_every`: what is normalised in one step is so in the next."""
    signals = {find_signal("info_gain", {}): 1.0, find_signal("column:steps", {}): 0.5}
    alone, _ = rewards(rows, signals, scored=False)
    # question 0 has 0.5 and 0.1 in its first two rows: z = +-1; question 1 has one reward: z = 0
    assert [row[0] for row in alone[:4]] == [
        pytest.approx(0.5, rel=1e-4),
        pytest.approx(-0.5, rel=1e-4),
        "-",
        0.0,
    ]


def words(group: Group, *, scale: float = 1.0):
    return [[scale * len(turn.text) for turn in one.tool_turns] for one in group.trajectories]


def test_a_signal_of_ones_own_sees_every_turn_of_the_group(rows):
    seen = []

    def signal(group):
        seen.append(group)
        return words(group, scale=0.5)

    shown, _ = rewards(rows, {own_signal("mine.signal", signal, {}): 1.0})
    assert shown[:4] == [[1.5, 2.5], [1.5, "-"], ["-", "-"], [1.5, "-"]]
    assert [len(group.trajectories) for group in seen] == [2, 2]  # neither the lost row nor the padding
    first = seen[0].trajectories[0]
    assert (first.outcome, first.stop_reason, first.golds) == (1.0, "no_answer", ["Paris", "paris, france"])
    assert [(turn.text, turn.observation, turn.reward) for turn in first.turns] == [
        ("ask", "page", 0.25),
        ("again", "page two", None),
        ("done", "", None),
    ]
    assert (
        first.turns[0].calls == CALLS and first.scores["em"] == 1.0 and first.extra_info["question"] == "Who?"
    )


@pytest.mark.parametrize(
    "values, message",
    [
        ([[1.0], [0.0]], "'mine.signal' gave 1 values for row 0; expected .* each of its 2 tool turns"),
        ([[1.0, "x"], [0.0]], "gave 'x' for row 0, turn 1; expected a finite number"),
        ([[1.0, math.inf], [0.0]], "gave inf for row 0, turn 1"),
        ([[1.0, 2.0]], "returned 1 values for a group of 2"),
        (None, "returned NoneType for a group of 2"),
        ([[1.0, 2.0], 0.5], r"gave float for row 1; expected a list"),
    ],
)
def test_what_a_signal_returns_wrongly_is_named_by_row_and_turn(rows, values, message):
    with pytest.raises(IntegrityError, match=message):
        rewards(rows, {own_signal("mine.signal", lambda group: values, {}): 1.0})


def test_a_signal_that_raises_is_named_with_its_rows(rows):
    def outcome_of_the_second(group):
        return 1 / group.trajectories[1].outcome

    with pytest.raises(IntegrityError, match="'mine.signal' raised for rows 0, 1: ZeroDivisionError: float"):
        rewards(rows, {own_signal("mine.signal", outcome_of_the_second, {}): 1.0})


# --- coroutines, in the agent loop ---------------------------------------------------------------

ONE = Trajectory([Turn("ask", [], "page"), Turn("done")], ["Paris"], "answer", extra_info={"index": 7})


def asked(function, **judge) -> RowRecord:
    record = RowRecord()
    asyncio.run(ask_signals([own_signal("my.judge", function, {})], ONE, TurnJudge(**judge), record))
    return record


def test_a_judge_is_asked_again_and_then_its_rewards_are_lost_never_0(monkeypatch):
    tries, pauses = [], []
    monkeypatch.setattr(own, "backoff", lambda failed, jitter: pauses.append(failed) or 0.0)

    async def down(trajectory):
        tries.append(trajectory)
        raise ConnectionError("http://me:secret@judge refused")

    record = asked(down, retries=2)
    assert len(tries) == 3 and pauses == [0, 1] and math.isnan(record.signals["my.judge"][0])
    assert record.signal_errors["my.judge"] == "ConnectionError: http://***@judge refused"

    async def second_time(trajectory):
        tries.append(trajectory)
        if len(tries) == 4:
            raise ConnectionError("refused")
        return [0.5]

    record = asked(second_time, retries=1)
    assert record.signals["my.judge"] == [0.5] and not record.signal_errors


def test_a_judge_that_hangs_is_given_up():
    async def hangs(trajectory):
        await asyncio.Event().wait()

    record = asked(hangs, retries=0, deadline_s=0.01)
    assert record.signal_errors["my.judge"] == "no answer within 0.01 s"


@pytest.mark.parametrize(
    "answer, said",
    [
        ([1.0, 2.0], "gave 2 values for a trajectory of the row with index 7; expected a list"),
        (["high"], "gave 'high' for a trajectory of the row with index 7, turn 0; expected a finite number"),
    ],
)
def test_a_judges_wrong_answer_is_asked_for_again_and_then_lost(answer, said):
    answers = [answer, [0.5], answer, answer]

    async def judge(trajectory):
        return answers.pop(0)

    assert asked(judge, retries=1).signals["my.judge"] == [0.5]
    record = asked(judge, retries=1)
    assert math.isnan(record.signals["my.judge"][0]) and not answers
    assert said in record.signal_errors["my.judge"]


def test_a_trajectory_without_tool_turns_is_not_judged():
    async def judge(trajectory):
        raise AssertionError("there is nothing to judge")

    record = RowRecord()
    alone = Trajectory([Turn("done")], ["Paris"], "answer")
    asyncio.run(ask_signals([own_signal("my.judge", judge, {})], alone, TurnJudge(), record))
    assert record.signals == {"my.judge": []} and not record.signal_errors


def test_a_judge_that_cancels_itself_has_lost_its_rewards_and_a_cancelled_rollout_ends():
    async def cancels(trajectory):
        raise asyncio.CancelledError("its own pool closed")

    record = asked(cancels, retries=0)
    assert record.signal_errors["my.judge"] == "CancelledError: its own pool closed"

    async def given_up():
        started = asyncio.Event()

        async def hangs(trajectory):
            started.set()
            await asyncio.Event().wait()

        asks = ask_signals([own_signal("my.judge", hangs, {})], ONE, TurnJudge(), RowRecord())
        rollout = asyncio.create_task(asks)
        await started.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(given_up())


def test_a_judges_own_timeout_is_not_taken_for_the_deadline():
    async def times_out(trajectory):
        raise TimeoutError("the pool has no connection")

    record = asked(times_out, retries=0)
    assert record.signal_errors["my.judge"] == "TimeoutError: the pool has no connection"


def test_a_secret_among_the_params_is_in_no_reason():
    async def refused(trajectory, *, api_key, url):
        raise ConnectionError(f"401 for url '{url}&top=3' with Bearer {api_key}")

    signal = own_signal("my.judge", refused, {"api_key": "hush", "url": "https://judge/score?auth=whisper"})
    record = RowRecord()
    asyncio.run(ask_signals([signal], ONE, TurnJudge(retries=0), record))
    said = "ConnectionError: 401 for url 'https://judge/score?auth=***&top=3' with Bearer ***"
    assert record.signal_errors["my.judge"] == said


def test_no_more_judges_at_a_time_than_asked_for():
    running, most = [], []

    async def judge(trajectory):
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0)
        running.pop()
        return [1.0]

    async def many():
        signal, record = own_signal("my.judge", judge, {}), RowRecord()
        limit = TurnJudge(concurrency=3)
        await asyncio.gather(*(ask_signals([signal], ONE, limit, record) for _ in range(10)))

    for _ in range(2):  # event loops
        asyncio.run(many())
    assert max(most) == 3 and len(most) == 20


def test_a_coroutine_that_left_no_value_is_named(rows):
    async def judge(trajectory):
        return [1.0]

    with pytest.raises(
        IntegrityError, match="'my.judge' left no value for row 0: .* search_agent and turn_agent only"
    ):
        rewards(rows, {own_signal("my.judge", judge, {}): 1.0})


def test_tokens_before_the_first_turn_belong_to_none():
    found = turn_texts([1, 2, 3, 4, 5, 6], [-1, 0, 0, -1, 1, -1], 2, str)
    assert found == [("[2, 3]", "[4]"), ("[5]", "[6]")]
