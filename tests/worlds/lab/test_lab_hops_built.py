"""A lab of three hops, built: its policy is inside the gate, and each of its turns is an open decision."""

import json

import pytest
from transformers import AutoConfig

from verl_credit.worlds.lab.build import build_lab
from verl_credit.worlds.lab.config import config_of
from verl_credit.worlds.lab.limits import limits_of

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # minutes of one core


def test_a_lab_of_three_hops_begins_with_several_open_decisions(tmp_path):
    said = []
    lab = build_lab(tmp_path / "lab", hops=3, progress=lambda share, text: said.append(text))
    manifest, gate, limits = json.loads(lab.manifest.read_text()), config_of("full", 3).gate, limits_of(3)
    measured = manifest["measured"]
    assert manifest["hops"] == 3 and measured["dev_em"] == measured["dev_em_3hop"]
    assert gate.low <= measured["dev_em"] <= gate.high
    assert measured["dev_open_decisions"] >= 3
    assert any(f"{measured['dev_open_decisions']} of 4 decisions open" in text for text in said)
    assert measured["dev_response_tokens_max"] <= limits.max_response_length
    assert (
        limits.max_prompt_length + limits.max_response_length
        < AutoConfig.from_pretrained(lab.policy).max_position_embeddings
    )
