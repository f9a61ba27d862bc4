"""gigpo, hgpo, mt_grpo, progress, leave_one_out and turn_gae against tests/golden/turn_methods.json.

There a trajectory's last turn is its answer, and its reward is what the outcome is here. ``released`` numbers are those of
released code, which parity="released" reproduces; ``default`` and ``oracle`` come from independent float64 code.
"""

import json
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch

from verl_credit.credit import exact_anchors, gigpo, hgpo, leave_one_out, mt_grpo, progress, rloo, turn_gae

FILE = Path(__file__).parents[1] / "golden" / "turn_methods.json"
CASES = json.loads(FILE.read_text())["cases"]
CLOSE = {"rel": 1e-4, "abs": 1e-4}


def golden(method, *kinds, names=None):
    """(trajectories, options, kind, numbers) of a method's cases."""
    return [
        pytest.param(
            case["trajectories"],
            expected,
            kind,
            {"rel": 1e-4, "abs": loose(case["name"], kind)},
            id=f"{case['name']}-{number}-{kind}",
        )
        for case in CASES
        if case["method"] == method and (names is None or case["name"] in names)
        for number, expected in enumerate(case["expected"])
        for kind in kinds
        if kind in expected
    ]


def loose(name, kind):
    """Released code divides a float32 residue of ties, which float64 does not have."""
    return {"tied_outcomes": 0.1, "tied": 1e-3}.get(name, 1e-4) if kind == "released" else 1e-4


def test_every_method_of_the_file_is_tested_here_or_has_no_operator():
    methods = {case["method"] for case in CASES}
    tested = {"gigpo", "hgpo", "mt_grpo", "turn_credit", "loo_return_to_go", "turn_gae"}
    assert methods - tested == {"infopo"}  # a turn signal and a fusion of the whole batch, not a turn mode


def groups(trajectories):
    prompts = sorted({t["prompt"] for t in trajectories})
    return torch.tensor([prompts.index(t["prompt"]) for t in trajectories])


def padded(rows, width, fill=0.0):
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.float64).view(
        len(rows), width
    )


def tables(trajectories, rewards=None, outcomes=None):
    """(outcome_B, turn_reward_B_K, turn_mask_B_K, group_B) and n_tool_turns_B: the last reward is the outcome."""
    rewards = [t["rewards"] for t in trajectories] if rewards is None else rewards
    outcomes = [row[-1] for row in rewards] if outcomes is None else outcomes
    tool = [row[:-1] for row in rewards]
    width = max(len(row) for row in tool)
    lengths = torch.tensor([len(row) for row in tool])
    mask = torch.arange(width) < lengths[:, None]
    given = torch.tensor(outcomes, dtype=torch.float64), padded(tool, width), mask, groups(trajectories)
    return given, {"n_tool_turns_B": lengths}


def assert_turns(credit, expected, close):
    for row, want in enumerate(expected):
        assert credit.advantage_B_K1[row, : len(want)].tolist() == pytest.approx(want, **close), row


def anchors_of(trajectories, expected, kind):
    states, group = [t["anchors"] for t in trajectories], groups(trajectories)
    if not expected.get("enable_similarity"):
        return exact_anchors(states, group)
    places = [(b, k) for b, turns in enumerate(states) for k in range(len(turns))]
    order = places if kind == "default" else expected.get("row_order") or places
    return alike(states, group, order, expected["similarity_thresh"], autojunk=kind != "default")


def alike(states, group, order, threshold, *, autojunk):
    """Ids of the released clusters: a text joins the first one of its prompt whose first member is alike."""
    first, ids = [], torch.full((len(states), max(map(len, states))), -1)
    for row, turn in order:
        text, prompt = states[row][turn], int(group[row])
        found = (
            number
            for number, (of, one) in enumerate(first)
            if of == prompt and SequenceMatcher(None, text, one, autojunk=autojunk).ratio() >= threshold
        )
        ids[row, turn] = next(found, len(first))
        first += [(prompt, text)] if ids[row, turn] == len(first) else []
    return ids


def gigpo_of(trajectories, expected, kind):
    given, more = tables(trajectories)
    return gigpo(
        *given,
        **more,
        anchor_B_K1=anchors_of(trajectories, expected, kind),
        norm=expected["mode"],
        gamma=expected["gamma"],
        step_weight=expected["step_advantage_w"],
        parity="none" if kind == "default" else "released",
    )


@pytest.mark.parametrize("trajectories, expected, kind, close", golden("gigpo", "released", "default"))
def test_gigpo(trajectories, expected, kind, close):
    if kind == "default" or expected["compute_mean_std_cross_steps"]:
        assert_turns(gigpo_of(trajectories, expected, kind), expected[kind]["advantage"], close)
        return
    # each trajectory once: released code cannot be asked for it; it is the default but for the plain R of a lone one
    group = groups(trajectories)
    alone = [int((group == g).sum()) == 1 for g in group]
    ours = gigpo_of(trajectories, expected, "default")
    for row, want in enumerate(expected[kind]["advantage"]):
        plain = sum(trajectories[row]["rewards"]) if alone[row] else 0.0
        assert [a + plain for a in ours.advantage_B_K1[row, : len(want)].tolist()] == pytest.approx(
            want, **close
        )


@pytest.mark.parametrize(
    "trajectories, expected, kind, close",
    golden("gigpo", "released_rows", names=["similarity_other_row_order"]),
)
def test_released_similarity_depends_on_the_order_of_the_batch(trajectories, expected, kind, close):
    credit = gigpo_of(trajectories, expected, kind)
    got = [float(credit.advantage_B_K1[row, turn]) for row, turn in expected["row_order"]]
    assert got == pytest.approx(expected[kind]["advantage"], **close)


def test_copied_rows_that_are_not_valid_change_nothing():
    """Released trainers copy rows before the advantages; their operator cannot tell (`duplicated_rows`)."""
    case = next(case for case in CASES if case["name"] == "duplicated_rows")
    twice = case["trajectories"] * 2
    for expected in case["expected"]:
        given, more = tables(twice)
        credit = gigpo(
            *given,
            **more,
            anchor_B_K1=exact_anchors([t["anchors"] for t in twice], groups(twice)),
            norm=expected["mode"],
            gamma=expected["gamma"],
            row_valid_B=torch.arange(len(twice)) < len(twice) // 2,
        )
        assert_turns(credit, expected["default"]["advantage"], CLOSE)
        assert (credit.advantage_B_K1[len(twice) // 2 :] == 0).all()


@pytest.mark.parametrize("trajectories, expected, kind, close", golden("hgpo", "released", "default"))
def test_hgpo(trajectories, expected, kind, close):
    given, more = tables(trajectories)
    credit = hgpo(
        *given,
        **more,
        anchor_B_K1=anchors_of(trajectories, expected, kind),
        norm=expected["mode"],
        gamma=expected["gamma"],
        history_length=expected["history_length"],
        length_weight_alpha=expected["length_weight_alpha"],
        base_group=expected["base_group"],
        parity="none" if kind == "default" else "released",
    )
    assert_turns(credit, expected[kind]["advantage"], close)


@pytest.mark.parametrize("trajectories, expected, kind, close", golden("mt_grpo", "released"))
def test_released_mt_grpo(trajectories, expected, kind, close):
    """The turn reward of a trajectory stands in its first turn; a trajectory of one turn gets a column for it."""
    turns = torch.tensor([max(len(t["assistant_tokens"]) - 1, 1) for t in trajectories])
    reward = torch.zeros(len(trajectories), int(turns.max()), dtype=torch.float64)
    reward[:, 0] = torch.tensor([t["turn_reward"] for t in trajectories], dtype=torch.float64)
    credit = mt_grpo(
        torch.tensor([t["outcome"] for t in trajectories], dtype=torch.float64),
        reward,
        torch.arange(reward.shape[1]) < 1 + torch.zeros(len(turns), 1),
        groups(trajectories),
        n_tool_turns_B=turns,
        result_turn_B=torch.tensor([min(t["result_after_turns"], default=-1) for t in trajectories]),
        turn_weight=expected["turn_advantage_coef"],
        parity="released",
    )
    assert_turns(credit, expected[kind]["advantage"], close)


def length_penalty(trajectories, weights):
    """p_b of the release, which belongs into the outcome here."""
    counts = [(sum(t["turn_tokens"]), 3 + sum(t["gap_tokens"]), len(t["turn_tokens"])) for t in trajectories]
    penalties = []
    for t, own in zip(trajectories, counts, strict=True):
        mates = [i for i, other in enumerate(trajectories) if other["prompt"] == t["prompt"]]
        mean = sum(trajectories[i]["outcome"] for i in mates) / len(mates)
        most = [max(counts[i][j] for i in mates) for j in range(3)]
        penalties.append(mean * sum(w * own[j] / most[j] for j, w in enumerate(weights)))
    return penalties


@pytest.mark.parametrize("trajectories, expected, kind, close", golden("turn_credit", "released"))
def test_released_turn_credit(trajectories, expected, kind, close):
    tokens = [t["turn_tokens"] for t in trajectories]
    width = max(map(len, tokens))
    scores = [t["state_scores"] or [None] * len(t["turn_tokens"]) for t in trajectories]
    scores = [[float("nan") if score is None else score for score in row] for row in scores]
    weights = expected["length_penalty"]
    penalties = length_penalty(trajectories, weights) if weights else [0.0] * len(tokens)
    outcomes = [t["outcome"] - p for t, p in zip(trajectories, penalties, strict=True)]
    given, more = tables(trajectories, rewards=[[0.0] * len(row) for row in tokens], outcomes=outcomes)
    credit = progress(
        *given,
        **more,
        state_score_B_K1=padded(scores, width, 1e3),
        turn_tokens_B_K1=padded(tokens, width, -1),
        gamma=expected["gamma"],
        beta=expected["beta"],
        parity="released",
    )
    assert_turns(credit, expected[kind]["advantage"], close)


@pytest.mark.parametrize("trajectories, expected, kind, close", golden("loo_return_to_go", "oracle"))
def test_leave_one_out(trajectories, expected, kind, close):
    """The answer turn has a reward r of its own there. "last_turn": the outcome here is r + R; "separate": it is r, and R
    is compared beside it."""
    outcome = torch.tensor([t["outcome"] for t in trajectories], dtype=torch.float64)
    (last, *given), more = tables(trajectories)
    together = expected["outcome"] == "last_turn"
    credit = leave_one_out(
        last + outcome if together else last,
        *given,
        **more,
        outcome="last_turn",
        gamma=expected["gamma"],
        alpha=expected["alpha"],
        baseline=expected["baseline"].removeprefix("all_"),
    )
    beside = torch.zeros(len(outcome)) if together else rloo(outcome, given[-1])
    for row, want in enumerate(expected[kind]["advantage"]):
        got = (credit.advantage_B_K1[row, : len(want)] + beside[row]).tolist()
        assert got == pytest.approx(want, **close)


@pytest.mark.parametrize("trajectories, expected, kind, close", golden("turn_gae", "oracle"))
def test_turn_gae(trajectories, expected, kind, close):
    values = [t["values"] for t in trajectories]
    given, more = tables(trajectories)
    credit = turn_gae(
        *given,
        **more,
        value_B_K1=padded(values, max(map(len, values)), float("nan")),
        bootstrap_B=torch.tensor([t["bootstrap"] for t in trajectories], dtype=torch.float64),
        gamma=expected["gamma"],
        lam=expected["lam"],
    )
    assert_turns(credit, expected[kind]["advantage"], close)
    for row, want in enumerate(expected[kind]["returns"]):
        got = [
            a + v for a, v in zip(credit.advantage_B_K1[row, : len(want)].tolist(), values[row], strict=True)
        ]
        assert got == pytest.approx(want, **close)
