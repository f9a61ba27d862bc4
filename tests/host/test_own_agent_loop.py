"""The agent loop of docs/agent-loops.md, as a user would have it: named in a file, and read by the trainer."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, _agent_loop_registry
from verl.utils.dataset.rl_dataset import RLHFDataset

from kit.byte_world import make_tokenizer
from kit.fake_store import FakeStore
from kit.recipes import load_config
from kit.tools import Tool, turn
from kit.trajectories import REQUIRED, run
from verl_credit.host.rollout.agent_manager import ERRORS, HELD_OUT_FAULTS, CreditAgentLoopWorker
from verl_credit.host.step.store import fetch_turn_batch
from verl_credit.recipe.agent_loops import LISTED, own_loops
from verl_credit.turns.rollout.book import RowRecord
from verl_credit.turns.rollout.reward.qa import compute_score
from verl_credit.turns.rollout.search.client import SearchFault
from verl_credit.worlds.lab.protocol import answer_turn, search_turn

PAGE = (Path(__file__).parents[2] / "docs/agent-loops.md").read_text()


def block(kind, name="MyAgentLoop"):
    """The block of the page that names the loop."""
    (found,) = (text for text in re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) if name in text)
    return found


@pytest.fixture
def my_agent(tmp_path, monkeypatch):
    """Its name, once verl's registry has it as a worker would enter it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loops.py").write_text(block("python"))
    (tmp_path / "my_loops.yaml").write_text(block("yaml"))
    config = OmegaConf.create({})
    OmegaConf.update(config, LISTED, str(tmp_path / "my_loops.yaml"))
    (listed,) = OmegaConf.load(tmp_path / "my_loops.yaml")
    monkeypatch.setitem(_agent_loop_registry, listed.name, listed)
    (name,) = own_loops(config)
    return name


def read(monkeypatch, *outputs):
    """The batch as the trainer reads it, of rows as verl's worker writes them."""
    kept, keys = FakeStore().install(monkeypatch), [f"row_{n}" for n in range(len(outputs))]
    others = {"reward_model": {"ground_truth": {"target": ["c"]}}, "extra_info": {}}
    kept.rows = {("train", key): one.as_dict() | others for key, one in zip(keys, outputs, strict=True)}
    return fetch_turn_batch(KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train"))


def test_the_loop_of_the_page_trains_beside_ours(monkeypatch, my_agent):
    tokenizer, tools = make_tokenizer(), [Tool(good=1, bad=-0.25, half=0.5, none=None)]
    script = [turn("good", "half"), turn("none"), turn("bad", "none"), answer_turn("c")]
    given = {"tools": tools, "max_tokens": 400}
    theirs, _ = run(tokenizer, script, agent=my_agent, **given)
    short, _ = run(tokenizer, [answer_turn("c")], agent=my_agent, **given)
    ours, _ = run(tokenizer, script, "search.max_new_tokens=400", agent="turn_agent", tools=tools)
    searched, _ = run(tokenizer, [search_turn("a"), answer_turn("c")])
    assert "turn_ids" not in theirs.as_dict()
    turns = read(monkeypatch, theirs, ours, short, searched)
    assert turns.n_turns_B.tolist() == [4, 4, 1, 2] and turns.row_valid_B.all()
    assert (
        torch.equal(turns.turn_ids_B_T[0], turns.turn_ids_B_T[1])
        and turns.response_ids[0] == turns.response_ids[1]
    )
    assert turns.turn_rewards == [[1.5, None, -0.25], [1.5, None, -0.25], [], [None]]
    assert turns.records[0]["calls"] == [] and len(turns.records[1]["calls"]) == 5
    texts = [
        tokenizer.decode(
            [t for t, k in zip(turns.response_ids[0], turns.turn_ids_B_T[0].tolist(), strict=False) if k == n]
        )
        for n in range(4)
    ]
    assert texts == script


def test_ids_of_tokens_that_are_not_the_policys_are_not_read(monkeypatch, my_agent):
    """As the page says: where ``response_mask`` is 0, a loop may write what it likes."""
    tokenizer, given = make_tokenizer(), {"tools": [Tool(good=1)], "max_tokens": 400}
    output, _ = run(tokenizer, [turn("good"), answer_turn("c")], agent=my_agent, **given)
    expected = read(monkeypatch, output)
    ids, own = output.extra_fields["turn_ids"], output.response_mask
    for other in (0, 1, 7):
        output.extra_fields["turn_ids"] = [turn if m else other for turn, m in zip(ids, own, strict=True)]
        found = read(monkeypatch, output)
        assert torch.equal(found.turn_ids_B_T, expected.turn_ids_B_T) and found.n_turns_B.tolist() == [2]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("answer", r"row 0: extra_fields\['credit'\]='answer'; expected RowRecord\(...\).as_dict\(\)"),
        ({"stop_raeson": "answer"}, "has 'stop_raeson'; expected some of stop_reason, n_searches"),
        ({"stop_reason": "over"}, "stop_reason='over'; expected one of answer, no_answer"),
    ],
)
def test_what_is_no_record_is_named_by_row(monkeypatch, my_agent, record, said):
    output, _ = run(make_tokenizer(), [answer_turn("c")], agent=my_agent, max_tokens=400)
    output.extra_fields["credit"] = record
    with pytest.raises(ValueError, match=said):
        read(monkeypatch, output)
    output.extra_fields["credit"] = {"final_text": "c"}
    assert read(monkeypatch, output).records == [RowRecord(final_text="c").as_dict()]


def a_worker(monkeypatch, **attributes):
    """(our worker without Ray, the fields and the tags of the rows that it puts into TransferQueue)."""
    fields, tags = [], []

    async def put(keys, fields: list, tags: list, partition_id):
        found[0].append(fields)
        found[1].extend(tags)

    async def nothing(*_, **__):
        return None

    found = fields, tags
    worker = object.__new__(CreditAgentLoopWorker.__ray_actor_class__)
    worker._compute_score = worker._compute_teacher_logprobs = nothing
    worker._compute_multi_modal_inputs = lambda *_: {}
    worker.tokenizer = make_tokenizer()
    worker.config = OmegaConf.create({"search": {"include_reasoning": False}})
    worker._compute_position_ids = lambda ids, *_: torch.arange(ids.shape[-1])[None]
    vars(worker).update({"versions": [], "_kept": {ERRORS: [], HELD_OUT_FAULTS: []}} | attributes)
    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.tq", SimpleNamespace(async_kv_batch_put=put))
    return worker, fields, tags


ROW = {"uid": "u", "session_id": 0, "global_steps": 3}


def written(monkeypatch, outputs, validate=False, faults=None, **attributes):
    """The fields of the rows as our worker puts them into TransferQueue. ``faults``: gets those of held-out rows."""
    kept = {HELD_OUT_FAULTS: [] if faults is None else faults}
    worker, fields, _ = a_worker(monkeypatch, _kept=kept, **attributes)
    for output in outputs:
        asyncio.run(worker._agent_loop_postprocess(output, validate, **ROW))
    return fields


VALIDATION = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
"""What verl sends with every held-out row, by rollout.val_kwargs."""


class Engine:
    """It answers with texts, in order, by weights of these versions; ``asked``: the sampling parameters of each call."""

    def __init__(self, tokenizer, texts, versions):
        self.tokenizer, self.texts, self.versions, self.asked = tokenizer, texts, versions, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        text, version = self.texts[len(self.asked)], self.versions[len(self.asked)]
        self.asked.append(sampling_params)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        fields = {"min_global_steps": version, "max_global_steps": version}
        return SimpleNamespace(token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields=fields)


def guess(
    monkeypatch, tmp_path, texts, *, versions=(2, 2, 2), engine="hf", most=4, room=300, logprobs=False, **row
):
    """(the engine, the tag, the fields) of a row of the page's environment, run by our worker. Its number is 2."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_game", raising=False)
    (tmp_path / "my_game.py").write_text(block("python", "GuessLoop"))
    monkeypatch.setitem(_agent_loop_registry, "guess", {"_target_": "my_game.GuessLoop"})
    tokenizer = make_tokenizer()
    server = Engine(tokenizer, texts, versions)
    config = load_config("search_cpu", REQUIRED)
    given = {"name": engine, "multi_turn.max_assistant_turns": most, "response_length": room}
    for key, value in given.items():
        OmegaConf.update(config, f"actor_rollout_ref.rollout.{key}", value)
    parts = {"tokenizer": tokenizer, "processor": None, "hf_model_type": "qwen3", "dataset_cls": RLHFDataset}
    parts |= {"config": config, "llm_client": server, "tools": []}
    parts |= {name: row.pop(name) for name in ["_kept"] if name in row}
    worker, fields, tags = a_worker(monkeypatch, **parts)
    question = [{"role": "user", "content": "Guess it. Write the number alone."}]
    prompt = ROW | {"agent_name": "guess", "raw_prompt": question, "extra_info": {"index": 1}} | row
    sent, trajectory = VALIDATION | {"logprobs": logprobs}, {"step": 3, "sample_index": 0, "rollout_n": 0}
    asyncio.run(worker._run_agent_loop(sent, trajectory | {"validate": False}, trace=False, **prompt))
    return server, tags[0], {name: fields[0][0][name] for name in list(fields[0].keys())}


def test_an_environment_is_a_whole_loop(monkeypatch, tmp_path):
    """Tokens, turns, rewards of the turns and the outcome of the loop that the page prints."""
    texts, tokenizer = ["8", "0", "2"], make_tokenizer()
    _, _, row = guess(monkeypatch, tmp_path, texts, logprobs=True)
    ids, extra, mask = row["responses"].tolist(), row["extra_fields"], row["response_mask"].tolist()
    turns = [[t for t, k in zip(ids, extra["turn_ids"], strict=True) if k == turn] for turn in range(3)]
    assert [tokenizer.decode(turn) for turn in turns] == texts
    assert mask == [int(turn >= 0) for turn in extra["turn_ids"]] and len(row["rollout_log_probs"]) == len(
        ids
    )
    assert "It is lower." in tokenizer.decode(ids) and "It is higher." in tokenizer.decode(ids)
    assert extra["turn_rewards"] == pytest.approx([0.4, 0.8, 1.0]) and row["rm_scores"].sum() == 1.0
    assert extra["credit"]["stop_reason"] == "answer" and extra["reward_extra_info"] == {"guesses": 3}
    for given, stop in ({"most": 2}, "max_turns"), ({"room": 10}, "length"):
        _, _, row = guess(monkeypatch, tmp_path, texts, **given)
        assert row["extra_fields"]["credit"]["stop_reason"] == stop and row["rm_scores"].sum() == 0.0
        assert len(row["extra_fields"]["turn_ids"]) == len(row["responses"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "sent"),
    [
        ("greedy", {"temperature": 0.0, "top_p": 1.0, "top_k": -1}),
        ("sampled", {"temperature": 1.0, "top_p": 1.0, "top_k": -1}),
        (None, VALIDATION),
    ],
)
def test_a_loop_of_ones_own_samples_as_the_row_says(monkeypatch, tmp_path, mode, sent):
    texts = ["8", "0", "2"]
    row = {} if mode is None else {"sampling": mode}
    several = [guess(monkeypatch, tmp_path, texts, session_id=n, **row)[0].asked for n in (0, 0, 1)]
    assert [{name: one[name] for name in sent} for one in several[0]] == [sent] * 3
    first, again, other = ([one["seed"] for one in asked] for asked in several)
    assert first == again and len({*first, *other}) == 6
    asked = guess(monkeypatch, tmp_path, texts, engine="vllm", **row)[0].asked
    assert not any("seed" in one for one in asked)
    with pytest.raises(ValueError, match="'beam': expected 'greedy' or 'sampled'"):
        guess(monkeypatch, tmp_path, texts, sampling="beam")


def test_the_trainer_gets_the_versions_that_a_loop_leaves_out(monkeypatch, tmp_path):
    """verl 0.9.1 makes an integer of both for every row, and a loop of one's own need not know them."""
    texts, names = ["8", "0", "2"], ("min_global_steps", "max_global_steps")
    for versions, expected in ((2, 1, 4), [1, 4]), ((None,) * 3, [2, 2]):
        _, tag, row = guess(monkeypatch, tmp_path, texts, versions=versions)
        assert [tag[name] for name in names] == [row["extra_fields"][name] for name in names] == expected
    worker, _, tags = a_worker(monkeypatch, versions=[1, 4])
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, extra_fields={"max_global_steps": 9}
    )
    asyncio.run(worker._agent_loop_postprocess(output, False, **ROW))
    assert [tags[0][name] for name in names] == [1, 9]


def test_a_loop_that_raises_is_named_with_its_last_frames(monkeypatch, tmp_path):
    kept = {ERRORS: [], HELD_OUT_FAULTS: []}
    with pytest.raises(KeyError):
        guess(monkeypatch, tmp_path, [], extra_info={}, _kept=kept)
    (said,) = kept[ERRORS]
    assert said.startswith("agent loop guess: KeyError: 'index'") and "my_game.py" in said


def test_a_tool_fault_that_a_loop_of_ones_own_reports_masks_the_row_as_ours_does(monkeypatch, my_agent):
    tokenizer, given = make_tokenizer(), {"tools": [Tool(good=1)], "max_tokens": 400}
    script = [turn("good"), answer_turn("c")]
    theirs, fine = (run(tokenizer, script, agent=my_agent, **given)[0] for _ in range(2))
    theirs.extra_fields["credit"] = RowRecord("tool_fault", tool_fault="sandbox").as_dict()

    async def down(query):
        raise SearchFault("connect", "refused")

    ours, _ = run(tokenizer, [search_turn("a")], lookup=down)
    first = fine.model_copy(update={"extra_fields": {}})  # an output of the rollout that the fault ended
    rows = written(monkeypatch, [[first, theirs], ours, [fine]])
    assert not rows[0]["response_mask"][0].any()
    rows = written(monkeypatch, [theirs, ours, [fine]])
    for mask in ("response_mask", "loss_mask"):  # what advantages, KL and entropy are weighed with
        assert [bool(row[mask].any()) for row in rows] == [False, False, True]
    turns = read(monkeypatch, theirs, ours, fine)
    assert turns.row_valid_B.tolist() == [False, False, True] and turns.n_turns_B.tolist() == [0, 0, 2]
    assert turns.turn_rewards == [[], [], [1.0]] and (turns.turn_ids_B_T[:2] == -1).all()
    assert [record["tool_fault"] for record in turns.records] == ["sandbox", "connect", ""]


@pytest.mark.parametrize("validate", [False, True])
def test_the_worker_keeps_the_faults_of_held_out_rows(monkeypatch, validate):
    async def down(query):
        raise SearchFault("connect", "refused")

    faults, tokenizer = [], make_tokenizer()
    outputs = [run(tokenizer, [search_turn("a")], lookup=down)[0], run(tokenizer, [answer_turn("c")])[0]]
    written(monkeypatch, outputs, validate, faults)
    assert faults == ([{"tool_fault": "connect", "fault_detail": "refused"}] if validate else [])


def test_a_rollout_of_several_outputs_is_scored_by_its_last_one(monkeypatch, my_agent):
    """verl's own call pads the prompts of all outputs to the longest, and its reward managers then decode a part of the
    last response."""
    output, _ = run(make_tokenizer(), [answer_turn("c")], agent=my_agent, max_tokens=400)
    longer, scored = output.model_copy(update={"prompt_ids": [5] * 900}), []

    class Reward:
        class compute_score:
            @staticmethod
            async def remote(data):
                (row,) = data
                width = row.batch["responses"].shape[-1]
                scored.append(int(row.batch["attention_mask"][-width:].sum()))
                return {"reward_score": 1.0, "reward_extra_info": {}}

    worker = object.__new__(CreditAgentLoopWorker.__ray_actor_class__)
    worker.reward_loop_worker_handles = [Reward]
    worker._compute_multi_modal_inputs = lambda *_: {}
    worker._get_mm_processor_kwargs = lambda *_: {}
    worker._compute_position_ids = lambda ids, *_: torch.arange(ids.shape[-1])[None]
    asyncio.run(worker._compute_score([longer, output], {"raw_prompt": "p"}))
    assert scored == [len(output.response_ids)] and output.reward_score == 1.0 and longer.reward_score is None


def test_a_score_of_the_loop_is_that_of_all_outputs(monkeypatch, my_agent):
    """Also without further numbers of the outcome, which verl copies from the last output to the others."""
    output, _ = run(make_tokenizer(), [answer_turn("c")], agent=my_agent, max_tokens=400)
    outputs = [output.model_copy(update={"extra_fields": {}, "reward_score": one}) for one in (None, 0.5)]
    (rows,) = written(monkeypatch, [outputs])
    assert [float(row["rm_scores"].sum()) for row in rows] == [0.5, 0.5]
    assert [row["extra_fields"]["reward_extra_info"] for row in rows] == [{}, {}]


def test_verls_own_loop_trains_by_the_mask_and_is_scored_by_its_last_turn(monkeypatch):
    """Without a file of loops: its turns are those of `turn_agent`, and an observation holds no answer of the policy's."""
    from verl.experimental.agent_loop import tool_agent_loop  # noqa: F401  (the import registers it)

    tokenizer, tools = make_tokenizer(), [Tool(good=1)]
    script, given = [turn("good"), answer_turn("c")], {"tools": tools, "max_tokens": 400}
    verls, _ = run(tokenizer, script, agent="tool_agent", **given)
    ours, _ = run(tokenizer, script, "search.max_new_tokens=400", agent="turn_agent", tools=tools)
    written(monkeypatch, [verls], tokenizer=tokenizer)
    assert verls.extra_fields["credit"]["final_text"] == ours.extra_fields["credit"]["final_text"]
    assert compute_score("lab", "", {"target": ["c"]}, extra_info=verls.extra_fields)["em"] == 1.0
    # A loop whose two last turns stand side by side: its turn ids say which text is the last one.
    verls.extra_fields = {
        "turn_ids": [0] * (len(verls.response_mask) - 3) + [1] * 3,
        "credit": {"stop_reason": "answer"},
    }
    written(monkeypatch, [verls], tokenizer=tokenizer)
    record = verls.extra_fields.pop("credit")
    assert (record["final_text"], record["stop_reason"]) == (
        tokenizer.decode(verls.response_ids[-3:], skip_special_tokens=True),
        "answer",
    )
    assert (
        compute_score("lab", "", {"target": ["c"]}, extra_info={"credit": {"stop_reason": "answer"}})["em"]
        == 0.0
    )
    verls.extra_fields = {}
    written(monkeypatch, [verls], tokenizer=tokenizer)
    turns = read(monkeypatch, verls, ours)
    assert torch.equal(turns.turn_ids_B_T[0], turns.turn_ids_B_T[1]) and turns.n_turns_B.tolist() == [2, 2]
