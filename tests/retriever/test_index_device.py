"""Encoding Wikipedia on a CPU takes months: published commands name the GPU, and `index` says when one is idle."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl_credit_retriever import encoder
from verl_credit_retriever.cli import main
from verl_credit_retriever.index import build

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^verl-credit-retriever (index .*)$", re.MULTILINE)


@pytest.mark.parametrize("place", [0, 1])
def test_published_commands_that_encode_a_large_corpus_do_it_on_a_gpu(place, monkeypatch):
    command = COMMAND.findall((ROOT / "docs" / "recipes.md").read_text())[place]
    devices = []

    def load(*_, device, **__):
        devices.append(device)
        raise ValueError("far enough")

    monkeypatch.setattr(encoder, "SentenceEncoder", load)
    assert main(shlex.split(command, comments=True)) == 2 and devices == ["cuda"]


@pytest.mark.parametrize(
    "seen, device, told", [(True, "cpu", True), (True, "cuda", False), (False, "cpu", False)]
)
def test_an_idle_gpu_is_told(seen, device, told, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(encoder, "SentenceEncoder", lambda *_, **__: SimpleNamespace())

    def stop(*_, **__):
        raise ValueError("far enough")

    monkeypatch.setattr(build, "build_index", stop)
    arguments = ["index", "--corpus", "c", "--encoder", "e", "--out", "o", "--device", device]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "far enough" in said and ("--device cuda uses it" in said) == told
