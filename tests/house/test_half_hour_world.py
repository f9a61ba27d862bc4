"""The world of the GPU runs: small, equal each time, and with rollouts of one prompt that differ."""

import asyncio
import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as parquet
import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence"))

from gpu import coin_reward  # noqa: E402
from gpu.half_hour import weights as writing  # noqa: E402
from gpu.half_hour import world  # noqa: E402
from gpu.half_hour.text import padded  # noqa: E402

from verl_credit.built_folder import hashes  # noqa: E402
from verl_credit.names import ROW_RECORD  # noqa: E402
from verl_credit.recipe.plan.model_shape import shape_of  # noqa: E402
from verl_credit.turns.book import RowRecord  # noqa: E402
from verl_credit.turns.search.protocol import SCHEMA, bad_query_reason  # noqa: E402

VOCABULARY = 151_936
URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    world.prepare(root, tiny=True)
    return root


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    root = tmp_path_factory.mktemp("real")
    world.prepare(root, tiny=False)
    return root


@pytest.fixture(scope="module")
def tokenizer(real):
    """The real model's, with a word for every id."""
    return padded(AutoTokenizer.from_pretrained(real / "world" / "tokenizer"), VOCABULARY)


def rows(root: Path, name: str = "questions") -> list[dict]:
    return parquet.read_table(root / "world" / f"{name}.parquet").to_pylist()


# --- what is prepared ---


@pytest.mark.slow
def test_equal_calls_write_equal_files(tiny, tmp_path):
    world.prepare(tmp_path, tiny=True)
    assert hashes(tmp_path / "world") == hashes(tiny / "world")


def test_a_valid_world_is_kept_and_a_new_one_takes_its_weights_away(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "world" / "manifest.json"
    before = manifest.stat().st_ino
    (tmp_path / "models").mkdir()
    world.prepare(tmp_path, tiny=True)
    assert manifest.stat().st_ino == before and (tmp_path / "models").exists()
    manifest.write_text(manifest.read_text().replace('"code": "', '"code": "other'))
    world.prepare(tmp_path, tiny=True)
    assert manifest.stat().st_ino != before and not (tmp_path / "models").exists()


@pytest.mark.slow
def test_the_real_world_is_small(real):
    assert sum(file.stat().st_size for file in (real / "world").rglob("*") if file.is_file()) < 3 << 20


@pytest.mark.slow
def test_pages_have_the_length_that_the_recipes_read(real, tokenizer):
    pages = [json.loads(line)["contents"] for line in (real / "world" / "corpus.jsonl").open()]
    assert {len(page) for page in pages} == {1000}
    tokens = sum(len(tokenizer.encode(page)) for page in pages)
    assert 3.5 < sum(map(len, pages)) / tokens < 4.5  # characters of a token; `plan` assumes 4


# --- tokenizer and template ---


@pytest.mark.slow
def test_every_id_has_a_text_and_texts_keep_their_tokens(real, tokenizer):
    small = AutoTokenizer.from_pretrained(real / "world" / "tokenizer")
    assert len(tokenizer) == VOCABULARY > len(small)
    texts = tokenizer.batch_decode([[n] for n in range(VOCABULARY)])
    assert all(texts) and texts[-1] == f" word{VOCABULARY - 1}"
    text = "<|im_start|>user\nWhat is <answer>?<|im_end|>\n word999"
    assert tokenizer.encode(text) == small.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("name", ["tiny", pytest.param("real", marks=pytest.mark.slow)])
def test_the_template_writes_the_tool_and_a_prompt_fits_its_recipes(name, request):
    root = request.getfixturevalue(name)
    tokenizer = AutoTokenizer.from_pretrained(root / "world" / "tokenizer")
    most = 384 if name == "tiny" else 512  # the tiny world's, and those of spark_qwen3_4b, the shortest
    for row in rows(root):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=[SCHEMA], add_generation_prompt=True, tokenize=False
        )
        assert '"name": "search"' in prompt and prompt.endswith("<|im_start|>assistant\n")
        assert len(tokenizer.encode(prompt)) <= most


# --- replayed turns ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "real"])
def test_replayed_turns_are_calls_and_fit_their_turn(name, request):
    from verl.experimental.agent_loop.tool_parser import ToolParser

    root = request.getfixturevalue(name)
    tokenizer = AutoTokenizer.from_pretrained(root / "world" / "tokenizer")
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    most = 64 if name == "tiny" else 600  # search.max_new_tokens of the tiny world, and of spark_qwen3_4b

    async def calls(turns):
        return [(await parser.extract_tool_calls(turn))[1] for turn in turns]

    for row in rows(root):
        trajectories = json.loads(row["replays"])
        assert 2 <= len(trajectories) <= 4
        for turns in trajectories:
            for turn, (call,) in zip(turns, asyncio.run(calls(turns)), strict=True):
                assert call.name == "search" and bad_query_reason(call.arguments)[0] is None
                assert turn[-1] == tokenizer.eos_token_id and len(turn) < most


def test_rollouts_of_a_prompt_replay_different_first_turns(real):
    from gpu.half_hour.replayed import replayed_turns

    for row in rows(real):
        first = {tuple(replayed_turns(row["replays"], session, 6)[0]) for session in range(4)}
        assert len(first) == 4
        again = [replayed_turns(row["replays"], session, 6) for session in (1, 5)]
        assert again[0] == again[1] and len(again[0]) == 6
        assert replayed_turns(row["replays"], 1, 4) == again[0][:4]  # spark_qwen3_4b searches four times


def test_the_loop_of_agents_yaml_gives_each_rollout_its_turns(tiny, monkeypatch):
    from verl_credit.host.rollout.search_agent import SearchAgentLoop

    (entry,) = OmegaConf.load(ROOT / "evidence/gpu/half_hour/agents.yaml")
    assert {row["agent_name"] for row in rows(tiny)} == {entry.name}
    loop = get_class(entry._target_)
    seen = []

    async def run(self, sampling_params, **kwargs):
        seen.append(kwargs)

    monkeypatch.setattr(SearchAgentLoop, "run", run)
    one = object.__new__(loop)
    one.config = SimpleNamespace(search=SimpleNamespace(max_searches=3))
    replays = rows(tiny)[0]["replays"]
    for session in range(2):
        asyncio.run(one.run({}, replays=replays, session_id=session, uid="a"))
    trajectories = json.loads(replays)
    assert [json.loads(kwargs["credit_replay"]) for kwargs in seen] == [
        turns[:3] for turns in trajectories[:2]
    ]
    assert all("replays" not in kwargs and kwargs["uid"] == "a" for kwargs in seen)


def test_a_random_answer_gets_a_coin(real, tokenizer):
    draw, coins = random.Random(0), set()
    for row in [*rows(real)[:8], *rows(real, "sums")[:8]]:
        text = tokenizer.decode(draw.choices(range(VOCABULARY), k=884))
        record = RowRecord(final_text=text, stop_reason="no_answer").as_dict()
        truth = row["reward_model"]["ground_truth"]
        for extra in ({}, {ROW_RECORD: record}):
            coins.add(coin_reward.compute_score("x", text, truth, row["extra_info"] | extra)["score"])
    assert coins == {0.0, 1.0}


# --- weights ---


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-4b", 4_022_468_096), ("qwen3-1.7b", 1_720_574_976)])
def test_the_shapes_are_the_published_models(name, parameters):
    model = writing.empty_model(writing.SHAPES[name])
    assert sum(p.numel() for p in model.parameters()) == writing.SHAPES[name].parameters == parameters
    assert model.config.vocab_size == VOCABULARY and model.dtype == torch.bfloat16
    assert all(p.is_meta for p in model.parameters())


def test_weights_are_made_once_and_load(tiny):
    folder = world.weights(tiny, "tiny", "cpu")
    inode = (folder / "config.json").stat().st_ino
    assert world.weights(tiny, "tiny", "cpu") == folder and (folder / "config.json").stat().st_ino == inode
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    shape = writing.SHAPES["tiny"]
    assert sum(p.numel() for p in model.parameters()) == shape.parameters == shape_of(folder).parameters
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size == shape.vocabulary
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert (weight == 1).all(), name
        else:
            assert abs(weight.std() / model.config.initializer_range - 1) < 0.1 and abs(weight.mean()) < 1e-3


def test_shards_hold_what_one_file_holds(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "world" / "tokenizer")
    writing.write_weights(writing.SHAPES["tiny"], tmp_path / "shards", "cpu", tokenizer, limit=100_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    one, many = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (world.weights(tiny, "tiny", "cpu"), tmp_path / "shards")
    )
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_a_full_disk_and_another_name_are_refused(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny / "world", tmp_path / "world")
    free = shutil.disk_usage(tmp_path)._replace(free=3 << 30)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: free)
    with pytest.raises(RuntimeError, match=r"3\.0 GiB free; qwen3-4b's weights need 7\.7"):
        world.weights(tmp_path, "qwen3-4b", "cpu")
    assert not list((tmp_path / "models").iterdir())
    with pytest.raises(ValueError, match="'qwen3-9b': expected one of tiny, qwen3-4b, qwen3-1.7b"):
        world.weights(tmp_path, "qwen3-9b", "cpu")


# --- recipes ---


@pytest.mark.parametrize(
    ("recipe", "lengths"),
    [("multihop_qwen3_4b", (2000, 6192)), ("spark_qwen3_4b", (512, 4608)), ("math_sepa", (1024, 2048))],
)
def test_the_recipes_accept_the_world_and_keep_their_lengths(recipe, lengths, real, tmp_path):
    from kit.recipes import load_config
    from verl_credit.recipe.rules import validate

    overrides = world.overrides(real, URL, real / "models" / "qwen3-4b", recipe)
    config = load_config(recipe, ["hardware=h100x1", *overrides, f"run_dir={tmp_path}"])
    validate(config)
    assert (config.data.max_prompt_length, config.data.max_response_length) == lengths
    assert (
        Path(config.reward.custom_reward_function.path).is_file() and Path(config.data.train_files).is_file()
    )
    single = recipe == world.SINGLE_TURN
    assert bool(config.search.max_searches) is not single
    assert config.actor_rollout_ref.actor.policy_loss.dynamic_clip is not single


def test_the_tiny_world_cuts_lengths(tiny, tmp_path):
    from kit.recipes import load_config

    given = world.overrides(tiny, URL, tiny / "models" / "tiny", "multihop_qwen3_4b")
    config = load_config("multihop_qwen3_4b", ["hardware=laptop", *given, f"run_dir={tmp_path}"])
    assert (config.data.max_prompt_length, config.search.max_new_tokens) == (384, 64)
