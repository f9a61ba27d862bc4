"""What a step leaves behind of its credit: which rows, which numbers, and whole characters."""

from dataclasses import replace

import pytest
import torch

from kit.credit_tables import GROUPS, credited_step, rows_of, tokenizer
from verl_credit.credit import TRANSFORMS, gtpo_weights, sepa_pool
from verl_credit.host.step import store
from verl_credit.host.step.kept_tables import keep_turns, pipeline, sampled_rows, turn_columns
from verl_credit.host.step.watch import CREDIT, credit_columns, text_columns, token_texts
from verl_credit.records.run.table_files import TURNS, read_table, table_path


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


def test_all_rows_of_the_groups_with_the_longest_rows_are_kept():
    _, step, *_ = credited_step()
    assert sampled_rows(step, 0) == [] and sampled_rows(step, 9) == step.inputs.turns.valid_rows
    assert sampled_rows(step, 1) == [0, 1, 2] and sampled_rows(step, 2) == [0, 1, 2, 4, 5, 6]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tokens_have_the_weights_of_the_step(transform):
    """final advantage = turn's advantage times weight, but for what HICRA adds to planning tokens."""
    advantages_B_T, step, _, inputs, trained_B_T = credited_step(transform_mode=transform)
    rows = sampled_rows(step, 9)
    part = rows_of(inputs, rows, trained_B_T)
    c = credit_columns(step, rows, part)
    turn_ids_B_T = step.inputs.turns.turn_ids_B_T
    credit_B_K1 = step.credit.advantage_B_K1
    for place, row in enumerate(rows):
        length = len(c["weight"][place])
        for token in turn_ids_B_T[row, :length].ge(0).nonzero().flatten().tolist():
            turn, weight = int(turn_ids_B_T[row, token]), c["weight"][place][token]
            want = float(credit_B_K1[row, turn]) * weight
            want += 0.2 * abs(want) * c["planning"][place][token] * TRANSFORMS[transform].amplified
            assert float(advantages_B_T[row, token]) == pytest.approx(want, abs=1e-6)
    assert any(any(values) for values in c["planning"])
    mask_b_T = trained_B_T[rows]
    if transform == "gtpo_sepa":
        h_b_T, plans = -part.log_prob_B_T * mask_b_T, torch.zeros(mask_b_T.shape, dtype=torch.bool)
        for place, values in enumerate(c["planning"]):
            plans[place, : len(values)] = torch.tensor(values)
        pooled_b_T = sepa_pool(h_b_T, plans, mask_b_T, 0.5)
        weight_b_T = gtpo_weights(pooled_b_T, mask_b_T, beta=0.1)
        for name, expected_b_T in (("pooled_uncertainty", pooled_b_T), ("weight", weight_b_T)):
            length = len(c[name][0])
            stored, expected = torch.tensor(c[name][0]), expected_b_T[0, :length]
            assert torch.allclose(stored[mask_b_T[0, :length]], expected[mask_b_T[0, :length]])


def test_what_entropies_make_is_left_out_where_no_step_computed_them():
    _, step, _, inputs, trained_B_T = credited_step(uncertainty_kind="shannon_entropy")
    part = replace(rows_of(inputs, list(range(9)), trained_B_T), entropy_B_T=None)
    c = credit_columns(step, list(range(9)), part)
    assert c["planning"] is not None and [c[name] for name in CREDIT[1:]] == [None] * 3


def test_pieces_are_the_text_of_the_turn_and_observations_stand_apart():
    _, _, turns, *_ = credited_step()
    c = text_columns(turns, [0], tokenizer())
    turn_ids = turns.turn_ids_B_T[0].tolist()
    assert len(c["pieces"][0]) == len(turns.response_ids[0])
    for turn, text in enumerate(("let me check the town", "call it", "done")):
        assert c["texts"][0][turn] == text
        assert "".join(p for p, one in zip(c["pieces"][0], turn_ids, strict=False) if one == turn) == text
    assert not any(p for p, one in zip(c["pieces"][0], turn_ids, strict=False) if one < 0)
    assert c["observations"][0] == ["page", "other page", ""]


@pytest.mark.parametrize("text", ["né", "a€b", "日本", "x😀y😀"])
def test_a_character_of_several_tokens_stays_whole(text):
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    pieces = token_texts(ids, tokenizer())
    assert len(pieces) == len(ids) > len(text) and "".join(pieces) == text
    assert len(token_texts(ids[:-1], tokenizer())) == len(ids) - 1


def test_the_trainers_step_writes_the_turns_of_all_rows(tmp_path, monkeypatch):
    _, step, *_ = credited_step()
    monkeypatch.setattr(store, "prompt_ids", lambda batch: GROUPS)
    keep_turns(tmp_path, None, step, 7)
    table = read_table(table_path(tmp_path, TURNS, 7))
    assert table.step == 7 and table.pipeline == pipeline(step) and table.update is None
    columns = turn_columns(step, GROUPS)
    assert table.columns["z"] == columns["z"] and table.columns["row"] == columns["row"]
    assert table.columns["advantage"] == pytest.approx(columns["advantage"], abs=1e-6)
