"""A tiny lab, built once: its files, its cache, its policy's turns and the control index."""

import json
import shutil
from dataclasses import replace

import pyarrow.parquet
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.lab_run import run
from verl_credit.built_folder import why_invalid
from verl_credit.cli import main
from verl_credit.cli.train import start as train_module
from verl_credit.errors import ExitCode
from verl_credit.worlds.lab import protocol
from verl_credit.worlds.lab.build import build_lab
from verl_credit.worlds.lab.config import NAME, SIZES, settings_of
from verl_credit.worlds.lab.encyclopedia import make_splits, make_world
from verl_credit.worlds.lab.evaluate import LocalRetriever, Roller
from verl_credit.worlds.lab.warm_start import WarmStart

pytestmark = pytest.mark.slow  # a lab is trained


@pytest.fixture(scope="session")
def lab(tiny_lab):
    return tiny_lab


def test_the_command_says_in_one_line_where_it_cannot_write(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["lab", "--dir", str(tmp_path / "file"), "--size", "tiny"]) == 4
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"verl-credit lab --dir {tmp_path}/file: ") and "is a file" in said[-1]


def why(folder, world_seed: int, size: str) -> str | None:
    return why_invalid(folder, settings_of(world_seed, size), NAME)


@pytest.fixture
def copy(lab, tmp_path):
    """A lab that a test may damage."""
    return shutil.copytree(lab.root, tmp_path / "copy")


def test_a_valid_lab_is_reused(lab):
    before = lab.manifest.stat().st_mtime_ns
    seen = []
    build_lab(lab.root, size="tiny", progress=lambda share, text: seen.append(text))
    assert seen == [f"using the lab in {lab.root}"]
    assert lab.manifest.stat().st_mtime_ns == before


def test_a_run_builds_the_lab_that_is_not_there(tmp_path, capsys, monkeypatch):
    """With few steps of training. The runs of tests/e2e use one that is there."""
    few = replace(
        SIZES["tiny"], encoder_steps=1, demonstrations=16, warm_start=WarmStart(steps=1, short_steps=1)
    )
    monkeypatch.setitem(SIZES, "tiny", few)
    for name, found in {"_preflight": None, "_launch": (ExitCode.DONE, "")}.items():
        monkeypatch.setattr(train_module, name, lambda *_, found=found: found)
    code, lines = run(capsys, tmp_path / "run", "lab.size=tiny", f"lab.dir={tmp_path / 'lab'}")
    assert code == 0 and any("lab   0%" in line for line in lines), lines
    assert why(tmp_path / "lab", 0, "tiny") is None


@pytest.mark.parametrize(
    "file", ["policy/model.safetensors", "corpus.jsonl", "index/index.faiss", "dev.parquet"]
)
def test_a_changed_or_missing_file_is_noticed(copy, file):
    path = copy / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert file in why(copy, 0, "tiny")
    path.unlink()
    assert "is missing" in why(copy, 0, "tiny")


def test_another_seed_size_or_version_is_another_lab(copy):
    assert why(copy, 0, "tiny") is None
    assert "world_seed is 0" in why(copy, 6, "tiny")
    assert "size is 'tiny'" in why(copy, 0, "full")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"generator_version": 0}))
    assert "generator_version is 0" in why(copy, 0, "tiny")


def test_a_broken_or_absent_manifest_is_noticed(copy):
    (copy / "manifest.json").write_text('{"files": ')
    assert "cannot be read" in why(copy, 0, "tiny")
    (copy / "manifest.json").unlink()
    assert "cannot be read" in why(copy, 0, "tiny")


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        build_lab(tmp_path, size="tiny")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_unknown_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"size='huge': expected one of \['full', 'tiny'\]"):
        build_lab(tmp_path / "x", size="huge")


def test_parquet_and_corpus_agree(lab):
    corpus = {row["id"]: row["contents"] for row in map(json.loads, lab.corpus.read_text().splitlines())}
    for split in ("train", "dev", "test"):
        rows = pyarrow.parquet.read_table(lab.questions(split)).to_pylist()
        assert len(rows) == getattr(SIZES["tiny"].world, split)
        for row in rows:
            (gold,) = row["reward_model"]["ground_truth"]["target"]
            assert gold in corpus[row["extra_info"]["gold_ids"][-1]]
            assert len(row["extra_info"]["gold_ids"]) == row["extra_info"]["hops"]


@pytest.fixture(scope="module")
def rolled(lab):
    world = make_world(0, SIZES["tiny"].world)
    questions = make_splits(world, SIZES["tiny"].world, 0)["dev"]
    tokenizer = AutoTokenizer.from_pretrained(lab.policy)
    model = AutoModelForCausalLM.from_pretrained(lab.policy)
    roller = Roller(model, tokenizer, LocalRetriever(lab.encoder, lab.index))
    return roller.roll(questions, temperature=1.0, seed=0), tokenizer


def test_the_policy_mostly_calls_the_tool_in_format(rolled):
    rollouts, _ = rolled
    assert sum(bool(r.found_ids) for r in rollouts) > len(rollouts) / 2


def test_rollouts_are_the_template_rendered_token_by_token(rolled, lab):
    rollouts, tokenizer = rolled
    corpus = {row["id"]: row["contents"] for row in map(json.loads, lab.corpus.read_text().splitlines())}
    for rollout in rollouts:
        text = protocol.prompt_text(rollout.question.text)
        for turn, found in zip(rollout.turns, [*rollout.found_ids, None], strict=False):
            text += turn
            if found is not None:
                text += protocol.observation_text(protocol.pages(corpus[i] for i in found))
        assert tokenizer.decode(rollout.prompt_ids + rollout.response_ids) == text
        recipe = json.loads(lab.manifest.read_text())["recipe"]
        assert len(rollout.prompt_ids) <= recipe["max_prompt_length"]
        assert len(rollout.response_ids) <= recipe["max_response_length"]
