"""What a step leaves behind of its credit: which rows, which numbers, and whole characters."""

from types import SimpleNamespace

import pytest
import torch

from kit.credit_tables import GROUPS, credited_step, rollout, tokenizer, write_step
from verl_credit.credit import TRANSFORMS, gtpo_weights, sepa_pool
from verl_credit.host.step import store
from verl_credit.host.step.tables import (
    OBSERVATION_CHARACTERS,
    keep_tables,
    pipeline,
    sampled_rows,
    token_columns,
    token_texts,
    turn_columns,
)
from verl_credit.host.step.trajectories import sample_trajectories
from verl_credit.records.run.tables import TOKENS, TURNS, read_table, tables_of


def test_a_line_per_turn_of_every_row_but_padding():
    _, step, turns, *_ = credited_step()
    c = turn_columns(step, GROUPS)
    assert {len(values) for values in c.values()} == {sum(turns.n_turns_B.tolist()) - int(turns.n_turns_B[3])}
    assert 3 not in c["row"] and "pad" not in c["uid"]
    first = {name: values[0] for name, values in c.items()}
    assert (first["uid"], first["turn"], first["answer"], first["outcome"]) == ("p", 0, False, 1.0)
    assert first["reward"] == pytest.approx(0.4) and first["tokens"] == len("let me check the town")
    answers = [c["reward"][i] for i, answer in enumerate(c["answer"]) if answer]
    assert answers == [None] * len(answers)


def test_a_lost_reward_is_one_that_is_not_known():
    gains = [[float("nan"), None], [0.1], [0.6, 0.1], [], [0.3], [-0.1, 0.05], [], [0.0], [-0.2]]
    _, step, *_ = credited_step(gains=gains)
    c = turn_columns(step, GROUPS)
    assert (c["has_reward"][:2], c["reward"][:2], c["signals"][:2]) == ([True, False], [None, None], [[], []])
    assert c["signals"][3] == [("info_gain", pytest.approx(0.1))]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_whole_groups_of_the_rows_whose_text_is_recorded(count):
    _, step, turns, *_ = credited_step()
    shown = {row["question"] for row in sample_trajectories(step, count)}
    rows = sampled_rows(step, count)
    assert {turns.extra_infos[row]["question"] for row in rows} == shown
    assert rows == [row for row in range(9) if row != 3 and turns.extra_infos[row]["question"] in shown]


def test_a_group_that_is_all_right_and_gives_good_turns_negative_credit_is_among_them():
    """p's rows are the shortest, and it is the one that tells."""
    words = "call it", "page"
    rows = [rollout(*words, "done"), rollout(*words, "yes")]
    rows += [rollout(*words, *words, "done", prompt="Where?") for _ in range(2)]
    rows += [rollout(*words, *words, *words, "done", prompt="When?") for _ in range(2)]
    gains = [[0.4], [0.1], [0.3, 0.2], [0.1, 0.1], [0.1, 0.2, 0.3], [0.2, 0.1, 0.1]]
    groups = ["p", "p", "q", "q", "r", "r"]
    for outcomes, count, want in (
        ([1, 1, 1, 0, 0, 0], 1, [0, 1]),
        ([1, 1, 1, 0, 0, 0], 2, [0, 1, 4, 5]),
        ([1, 0, 1, 0, 0, 0], 2, [2, 3, 4, 5]),
        ([1, 1, 1, 1, 0, 0], 2, [2, 3, 4, 5]),
        ([1, 1, 1, 0, 0, 0], 0, []),
    ):
        _, step, *_ = credited_step(rows, gains, list(map(float, outcomes)), groups)
        assert sampled_rows(step, count) == want
    even = [[0.2], [0.2], *gains[2:]]  # all right, and no turn of p has less than none
    _, step, *_ = credited_step(rows, even, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], groups)
    assert sampled_rows(step, 1) == [4, 5]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tokens_have_the_weights_of_the_step(transform):
    """final advantage = turn's advantage times weight, but for what HICRA adds to planning tokens."""
    advantages_B_T, step, _, inputs, trained_B_T = credited_step(transform_mode=transform)
    rows = sampled_rows(step, 9)
    part = SimpleNamespace(**{
        name: getattr(inputs, name)[rows] for name in ("token_ids_B_T", "log_prob_B_T", "entropy_B_T")
    })  # fmt: skip
    c = token_columns(step, rows, part, trained_B_T[rows], advantages_B_T[rows])
    credit_B_K1 = step.credit.advantage_B_K1
    for place, row in enumerate(rows):
        lists = zip(
            c["turn"][place], c["weight"][place], c["planning"][place], c["advantage"][place], strict=True
        )
        for turn, weight, plans, advantage in lists:
            want = float(credit_B_K1[row, turn]) * weight
            want += 0.2 * abs(want) * plans * TRANSFORMS[transform].amplified
            assert advantage == pytest.approx(want, abs=1e-6)
    assert any(any(values) for values in c["planning"])
    mask_b_T = trained_B_T[rows]
    if transform == "gtpo_sepa":
        h_b_T, plans = -part.log_prob_B_T * mask_b_T, torch.zeros(mask_b_T.shape, dtype=torch.bool)
        for place, values in enumerate(c["planning"]):
            plans[place][mask_b_T[place]] = torch.tensor(values)
        pooled_b_T = sepa_pool(h_b_T, plans, mask_b_T, 0.5)
        assert torch.allclose(torch.tensor(c["pooled_uncertainty"][0]), pooled_b_T[0][mask_b_T[0]])
        assert torch.allclose(
            torch.tensor(c["weight"][0]), gtpo_weights(pooled_b_T, mask_b_T, beta=0.1)[0][mask_b_T[0]]
        )


def test_entropies_that_no_step_computed_are_left_out():
    advantages_B_T, step, _, inputs, trained_B_T = credited_step(uncertainty_kind="shannon_entropy")
    part = SimpleNamespace(
        token_ids_B_T=inputs.token_ids_B_T, log_prob_B_T=inputs.log_prob_B_T, entropy_B_T=None
    )
    c = token_columns(step, list(range(9)), part, trained_B_T, advantages_B_T)
    for name in ("entropy", "uncertainty", "pooled_uncertainty", "weight"):
        assert c[name] == [None] * 9


def test_text_of_tokens_is_the_text_of_the_turn():
    _, step, _, inputs, trained = credited_step()
    c = token_columns(step, [0], slice_rows(inputs, [0]), trained[[0]], trained[[0]].float())
    assert (
        "".join(t for t, turn in zip(c["text"][0], c["turn"][0], strict=True) if turn == 0)
        == "let me check the town"
    )
    assert c["observations"][0] == ["page", "other page", ""] and c["observation_characters"][0] == [4, 10, 0]


def slice_rows(inputs, rows):
    names = ("token_ids_B_T", "log_prob_B_T", "entropy_B_T")
    return SimpleNamespace(**{name: getattr(inputs, name)[rows] for name in names})


@pytest.mark.parametrize("text", ["né", "a€b", "日本", "x😀y😀"])
def test_a_character_of_several_tokens_stays_whole(text):
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    pieces = token_texts(ids, tokenizer())
    assert len(pieces) == len(ids) > len(text) and "".join(pieces) == text
    assert len(token_texts(ids[:-1], tokenizer())) == len(ids) - 1


class Handle:
    """Rows in a store: what keep_tables asks of it."""

    def __init__(self, keys):
        self.keys = keys

    def select_keys(self, keys):
        return Handle(keys)


def test_the_trainers_step_writes_both_tables(tmp_path, monkeypatch):
    advantages_B_T, step, turns, inputs, trained_B_T = credited_step()

    def read(batch, *names):
        if names == ("uid",):
            return {"uid": [GROUPS[row] for row in batch.keys]}
        fields = {
            "advantages": advantages_B_T,
            "response_mask": trained_B_T.long(),
            "old_log_probs": inputs.log_prob_B_T,
            "responses": inputs.token_ids_B_T,
            "entropy": inputs.entropy_B_T,
        }
        return {
            name: torch.nested.as_nested_tensor(
                [fields[name][row] for row in batch.keys], layout=torch.jagged
            )
            for name in names
        }

    monkeypatch.setattr(store, "read", read)
    keep_tables(tmp_path, Handle(list(range(9))), step, 7, groups=1, steps=1, entropy=True)
    (turn_path,), (token_path,) = tables_of(tmp_path, TURNS).values(), tables_of(tmp_path, TOKENS).values()
    assert read_table(turn_path).columns == read_table(write_turns(tmp_path / "again", step)).columns
    table = read_table(token_path)
    assert table.step == 7 and table.columns["row"] == [0, 1, 2] and table.pipeline == pipeline(step)
    written = turns.turn_ids_B_T[1] >= 0
    assert table.columns["advantage"][1] == advantages_B_T[1][written].float().tolist()
    keep_tables(tmp_path, Handle(list(range(9))), step, 8, groups=1, steps=0, entropy=True)
    assert list(tables_of(tmp_path, TURNS)) == [7, 8] and not tables_of(tmp_path, TOKENS)


def write_turns(folder, step):
    from verl_credit.records.run.tables import write_table

    return write_table(folder, TURNS, 7, turn_columns(step, GROUPS), pipeline(step))


def test_a_long_observation_is_cut_and_its_length_told(tmp_path):
    from kit import credit_tables

    long = "x" * (OBSERVATION_CHARACTERS + 50)
    rows = [credit_tables.rollout("call", long, "done"), *credit_tables.ROWS[1:]]
    write_step(tmp_path, rows=rows, gains=[[0.4], *credit_tables.GAINS[1:]])
    c = read_table(tables_of(tmp_path, TOKENS)[3]).columns
    assert c["observations"][0] == ["x" * OBSERVATION_CHARACTERS, ""]
    assert c["observation_characters"][0] == [OBSERVATION_CHARACTERS + 50, 0]
