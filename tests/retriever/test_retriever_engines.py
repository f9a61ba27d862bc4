"""What computes the encoder: each engine in fp32 gives torch's vectors, and what cannot compute leaves torch in place."""

import sys

import numpy as np
import pytest
import torch

from verl_credit_retriever import engines
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.settings import ENGINES

TEXTS = ["river", "who is the mayor of town 3", "bridge " * 40, "baker, violin?", ""]


@pytest.fixture
def encoder(world):
    return SentenceEncoder(world[0] / "encoder")


def ticking(clock):
    clock[0] += 1e-3
    return clock[0]


@pytest.fixture
def slow_torch(encoder, monkeypatch):
    """As if torch's forward pass took a second, so that whatever computes is faster."""
    clock = [0.0]
    plain = encoder.forward

    def slow(batch):
        clock[0] += 1.0
        return plain(batch)

    encoder.forward = slow
    monkeypatch.setattr(engines.time, "perf_counter", lambda: ticking(clock))
    return encoder


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one == "openvino")) for one in engines.EXACT[1:]],
)
def test_an_engine_in_fp32_gives_the_vectors_of_torch(slow_torch, name):
    if name == "openvino":
        pytest.importorskip("openvino")
    right_N_D = slow_torch.encode_queries(TEXTS)
    line = engines.use(slow_torch, name)
    assert line.startswith(f"encoder: {name} ") and "vectors within" in line
    np.testing.assert_allclose(slow_torch.encode_queries(TEXTS), right_N_D, atol=1e-6)


def test_the_copy_for_onednn_leaves_the_model_as_it_is_and_shares_the_embeddings(encoder):
    before = {name: type(module) for name, module in encoder.model.named_modules()}
    copy = engines._copied(encoder.model, lambda layer: torch.nn.Identity())
    assert {name: type(module) for name, module in encoder.model.named_modules()} == before
    assert torch.nn.Linear in before.values() and torch.nn.Linear not in map(type, copy.modules())
    words = "embeddings.word_embeddings.weight"
    assert copy.get_parameter(words) is encoder.model.get_parameter(words)


def test_bf16_is_taken_by_name_alone(slow_torch, monkeypatch):
    right_N_D = slow_torch.encode_queries(TEXTS)
    monkeypatch.setattr(engines, "EXACT", ("torch",))
    assert engines.use(slow_torch, "auto").startswith("encoder: torch, fp32")
    assert engines.use(slow_torch, "torch-bf16").startswith("encoder: torch-bf16 ")
    apart = np.abs(slow_torch.encode_queries(TEXTS) - right_N_D).max()
    assert 1e-5 < apart < 0.05


def raises(model):
    raise RuntimeError("no such operator")


def off(model):
    plain = engines.torch_forward(model)
    return lambda batch: plain(batch) + torch.linspace(0, 1e-2, model.config.hidden_size)


@pytest.mark.parametrize(
    "make, says", [(raises, "openvino does not compute here (RuntimeError: no such"), (off, "within 0.0")]
)
@pytest.mark.parametrize("name", ["auto", "openvino"])
def test_an_engine_that_cannot_or_differs_leaves_torch_in_place(slow_torch, monkeypatch, name, make, says):
    plain = slow_torch.forward
    monkeypatch.setattr(engines, "EXACT", ("torch", "openvino"))
    monkeypatch.setitem(engines.MAKE, "openvino", make)
    line = engines.use(slow_torch, name)
    assert line.startswith("encoder: torch, fp32 (") and says in line
    assert slow_torch.forward is plain


def test_a_library_that_is_not_installed_leaves_torch_in_place(encoder, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert "openvino does not compute here (" in engines.use(encoder, "openvino")


def test_a_slower_engine_is_not_taken(encoder, monkeypatch):
    clock, plain = [0.0], encoder.forward

    def slow(model):
        def forward(batch):
            clock[0] += 1.0
            return plain(batch)

        return forward

    monkeypatch.setattr(engines.time, "perf_counter", lambda: ticking(clock))
    monkeypatch.setitem(engines.MAKE, "onednn", slow)
    assert engines.use(encoder, "onednn").startswith("encoder: torch, fp32 (onednn 0.0 times")
    assert encoder.forward is plain


def test_other_values_and_a_gpu_are_refused(encoder, capsys):
    with pytest.raises(ValueError, match="encode_with='tpu'; accepted: " + ", ".join(ENGINES)):
        engines.use(encoder, "tpu")
    encoder.device = torch.device("cuda")
    with pytest.raises(ValueError, match="encode_with='onednn': for a CPU"):
        engines.use(encoder, "onednn")
    assert engines.use(encoder, "auto") == "encoder: torch"
    assert main(["serve", "--index=x", "--encoder=x", "--encode-with=tpu"]) == 2
    assert "--encode-with" in capsys.readouterr().err
