"""`keep_rollouts`: what the update of a step read, token by token, and what a probe reads of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from kit.credit_tables import GROUPS, OUTCOMES, ROWS, credited_step, tokenizer
from kit.recipes import load_config
from kit.turn_rows import Row, estimate, lost_row, step_inputs, turn_batch
from verl_credit.host.step import store
from verl_credit.host.step.kept_tables import pipeline, turn_columns
from verl_credit.host.step.trainer import CreditSteps
from verl_credit.host.step.v1_host import V1Host
from verl_credit.host.step.watch import credited_rows, keep_rollouts
from verl_credit.names import CLIP_SCALE
from verl_credit.records.run.files import EVENTS, read_json_lines
from verl_credit.records.run.rollouts import read_samples, token_steps
from verl_credit.records.run.table_files import (
    ROLLOUTS,
    SAMPLES,
    TURNS,
    DamagedTable,
    read_table,
    table_path,
    tables_of,
    write_table,
)
from verl_credit.study.probe.kept_rollouts import read_rollouts
from verl_credit.turns.rollout.sessions import joined


class Handle:
    def __init__(self, keys):
        self.keys = keys

    def select_keys(self, keys):
        return Handle(keys)


def config_with(*overrides):
    return load_config("lab", ["keep_rollouts={steps: 2, groups: null}", *overrides])


def kept(tmp_path, monkeypatch, *overrides, without=(), rejected=(0,)):
    """(columns, update, what stood in the batch by field, turns) of one step. Row 8 of the batch is lost to a fault."""
    rows, gains = (
        [*ROWS[:8], lost_row("http")],
        [[0.4, 0.2], [0.1], [0.6, 0.1], [], [0.3], [-0.1, 0.05], [], [0.0], []],
    )
    advantages_B_T, step, turns, inputs, trained_B_T = credited_step(
        rows, gains, OUTCOMES, GROUPS, reject=rejected
    )
    scores_B_T = torch.zeros(advantages_B_T.shape)
    scores_B_T[:, 0] = torch.tensor(OUTCOMES)
    fields = {
        "advantages": advantages_B_T.float(), "response_mask": trained_B_T.long(), "old_log_probs": inputs.log_prob_B_T,
        "entropy": inputs.entropy_B_T, CLIP_SCALE: step.clip_scale_B_T.float(), "rm_scores": scores_B_T,
        "ref_log_prob": inputs.log_prob_B_T - 1, "rollout_is_weights": inputs.entropy_B_T + 1,
        "responses": inputs.token_ids_B_T, "token_level_rewards": scores_B_T - 0.5 / scores_B_T.shape[1],
    }  # fmt: skip
    fields = {name: value for name, value in fields.items() if name not in without}

    def read(batch, *names, rows=None):
        cut = {
            name: [
                fields[name][row, : len(turns.response_ids[row])]
                for row in (batch.keys if rows is None else rows)
            ]
            for name in names
            if name in fields
        }
        nested = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in cut.items()
        }
        return nested | {"uid": [GROUPS[row] for row in batch.keys]}

    monkeypatch.setattr(store, "read", read)
    config, batch = config_with(*overrides), Handle(list(range(9)))
    host = V1Host(config, None, None)
    host.enter(batch, {}, step=7, last_step=9, workers=None)
    credited = credited_rows(host, step, config.keep_rollouts)
    keep_rollouts(tmp_path, batch, turns, credited, 7, config, tokenizer())
    table = read_table(table_path(tmp_path, ROLLOUTS, 7))
    assert table.step == 7 and table.pipeline == pipeline(step)
    return table.columns, table.update, fields, turns


def test_a_line_per_valid_row_has_what_the_update_read(tmp_path, monkeypatch):
    c, _, fields, turns = kept(tmp_path, monkeypatch)
    assert c["row"] == [0, 1, 2, 4, 5, 6, 7]  # 3 is padding, 8 was lost
    assert c["uid"] == ["p", "p", "p", "q", "q", "q", "r"] and c["group"] == [
        0,
        0,
        0,
        2,
        2,
        2,
        3,
    ]  # the padding has one
    said = [tokenizer().decode(ids) for ids in c["response_ids"]]
    assert said == ["".join(ROWS[row].parts) for row in c["row"]]
    assert [tokenizer().decode(ids) for ids in c["prompt_ids"]] == [ROWS[row].prompt for row in c["row"]]
    for place, row in enumerate(c["row"]):
        length = len(c["response_ids"][place])
        spoken = [turn for turn, text in enumerate(ROWS[row].parts) for _ in tokenizer()(text)["input_ids"]]
        turn = [part // 2 if part % 2 == 0 else -1 for part in spoken]
        assert c["turn"][place] == turn and c["written"][place] == [one >= 0 for one in turn]
        for column, name in (
            ("advantage", "advantages"), ("old_log_prob", "old_log_probs"), ("entropy", "entropy"),
            ("clip_scale", CLIP_SCALE), ("ref_log_prob", "ref_log_prob"), ("rollout_is_weight", "rollout_is_weights"),
        ):  # fmt: skip
            assert c[column][place] == fields[name][row, :length].float().tolist(), (column, row)
        assert c["trained"][place] == fields["response_mask"][row, :length].bool().tolist()
    assert c["written"][0][0] and not c["trained"][0][0]  # rejected
    assert c["outcome"][0] == pytest.approx(1 - 0.5 * len(c["response_ids"][0]) / turns.turn_ids_B_T.shape[1])


def test_the_objective_of_the_update_is_told(tmp_path, monkeypatch):
    _, about, *_ = kept(
        tmp_path,
        monkeypatch,
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
    )
    assert about["policy_step"] == 6 and about["sampling"] == {"temperature": 0.7, "top_p": 0.9, "top_k": -1}
    assert (about["rows"], about["updates"]) == (9, 6)  # 9 rows in mini-batches of 3, twice
    assert about["loss_tokens"] == sum(
        len(tokenizer()(text)["input_ids"])
        for row in ROWS[:8]
        for text in row.parts[::2]
        if not row.is_padding
    )
    objective = about["objective"]
    assert (
        objective["loss_mode"] == "turn_ppo"
        and objective["ratio_level"] == "turn"
        and objective["grad_clip"] == 0.5
    )
    assert objective["loss_agg_mode"] == "token-mean" and "_target_" not in objective


def test_without_all_groups_nothing_is_known_of_the_update(tmp_path, monkeypatch):
    c, about, *_ = kept(tmp_path, monkeypatch, "keep_rollouts.groups=1")
    assert about is None and c["row"] == [0, 1, 2]
    with pytest.raises(DamagedTable, match=r"keep_rollouts\.groups=null"):
        read_rollouts(table_path(tmp_path, ROLLOUTS, 7))


def test_with_all_groups_a_probe_reads_them(tmp_path, monkeypatch):
    kept(tmp_path, monkeypatch)
    _, facts = read_rollouts(table_path(tmp_path, ROLLOUTS, 7))
    assert facts.policy_step == 6


def test_verls_own_estimator_has_rollouts_without_credit_where_all_are_kept(tmp_path, monkeypatch):
    *_, turns = kept(tmp_path, monkeypatch)
    keep_rollouts(tmp_path, Handle(list(range(9))), turns, None, 8, config_with(), tokenizer())
    table = read_table(table_path(tmp_path, ROLLOUTS, 8))
    assert table.columns["row"] == [0, 1, 2, 4, 5, 6, 7] and table.update and not table.pipeline
    assert table.columns["weight"] == [None] * 7 and list(token_steps(tmp_path)) == [7]
    config = config_with("keep_rollouts.groups=3")
    keep_rollouts(tmp_path, Handle(list(range(9))), turns, None, 9, config, tokenizer())
    assert list(tables_of(tmp_path, ROLLOUTS)) == [8]


def test_of_older_steps_the_texts_stay_and_without_the_key_there_is_none(tmp_path, monkeypatch):
    kept(tmp_path, monkeypatch)
    turns = SimpleNamespace(valid_rows=[])
    config = config_with()
    for number, left in ((8, [7]), (9, [])):
        keep_rollouts(tmp_path, Handle([0, 1]), turns, None, number, config, tokenizer())
        assert list(tables_of(tmp_path, ROLLOUTS)) == left
    c = read_table(table_path(tmp_path, SAMPLES, 7)).columns
    assert c["row"] == [0, 5, 7] and c["texts"][0] == list(ROWS[0].parts[::2])
    monkeypatch.setattr(store, "read", None)
    turns.row_valid_B, config.keep_rollouts.steps = torch.ones(2, dtype=torch.bool), 0
    keep_rollouts(tmp_path, Handle([0, 1]), turns, None, 9, config, tokenizer())
    assert not tables_of(tmp_path, ROLLOUTS)


def test_an_old_file_that_is_damaged_stops_no_run(tmp_path, monkeypatch):
    kept(tmp_path, monkeypatch)
    table_path(tmp_path, ROLLOUTS, 3).write_text("damaged")
    kept(tmp_path, monkeypatch)
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["rollouts_000007.parquet"]


def test_the_trainer_keeps_them_before_its_update(monkeypatch):
    calls = []
    monkeypatch.setattr("verl_credit.host.step.trainer.keep_rollouts", lambda *given: calls.append(given))
    monkeypatch.setattr(
        PPOTrainerSync, "_update_actor", lambda self, batch, metrics: calls.append("update") or batch
    )
    trainer = object.__new__(type("Recorded", (CreditSteps, PPOTrainerSync), {}))
    trainer.recorder, trainer._turns = SimpleNamespace(run_dir="folder"), "turns"
    trainer.probe = SimpleNamespace(before_update=lambda *_, **__: calls.append("probe") or {})
    trainer.global_steps, trainer.total_training_steps, trainer.config = 4, 9, "config"
    trainer._credited, trainer.tokenizer, trainer.actor_rollout_wg = "credited", "tokenizer", None
    assert trainer._update_actor("batch", {}) == "batch"
    assert calls == ["probe", ("folder", "batch", "turns", "credited", 4, "config", "tokenizer"), "update"]


def test_of_rollouts_of_several_outputs_the_texts_are_kept_with_a_mark_at_every_other_context(tmp_path):
    outputs = {
        "q_0_0": Row(("look", "page", "ask", "help")), "q_0_1": Row(("find",), "Find it."),
        "q_0_2": Row(("seek", "map", "Rome"), "So far: page"), "p_0_0": Row(("Oslo",)),
    }  # fmt: skip
    links = [(0, None), (1, (0, 0)), (0, None), (0, None)]
    turns = replace(turn_batch(list(outputs.values()), tokenizer()), keys=list(outputs), links=links)
    inputs = step_inputs(joined(turns), [[None] * 4, []], info_gain_norm_mode="none")
    step = estimate(inputs, turns, [1.0, 1.0, 1.0, 0.0], [*"qqqp"])
    config = config_with(f"run_dir={tmp_path}")
    host = V1Host(config, None, None)
    host.enter(None, {}, step=7, last_step=9, workers=None)
    credited = credited_rows(host, step, config.keep_rollouts)
    keep_rollouts(tmp_path, None, turns, credited, 7, config, tokenizer())
    write_table(tmp_path, TURNS, 7, turn_columns(step, ["q", "p"]), pipeline(step))
    ((row, other), problems), (note,) = read_samples(tmp_path), read_json_lines(tmp_path / EVENTS)
    assert problems == [] and "several outputs" in note["text"] and not token_steps(tmp_path)
    assert [(turn["text"], turn["observation"]) for turn in row["turns"]] == [
        ("look", "[another context] Find it."), ("find", "[another context] page"),
        ("ask", "[another context] helpSo far: page"), ("seek", "map"), ("Rome", ""),
    ]  # fmt: skip
    assert (other["turns"][0]["observation"], row["outcome"], other["outcome"]) == ("", 1.0, 0.0)
