"""What computes the encoder: OpenVINO gives torch's vectors, or the server does not start."""

import sys

import numpy as np
import pytest
import torch

from verl_credit_retriever import engines
from verl_credit_retriever.cli import main
from verl_credit_retriever.encoder import SentenceEncoder

TEXTS = ["river", "who is the mayor of town 3", "bridge " * 40, "baker, violin?", ""]


@pytest.fixture
def encoder(world):
    return SentenceEncoder(world[0] / "encoder")


@pytest.mark.slow
def test_openvino_gives_the_vectors_of_torch(encoder):
    pytest.importorskip("openvino")
    right_N_D = encoder.encode_queries(TEXTS)
    assert engines.use(encoder, "openvino").startswith("encoder: openvino, vectors within")
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), right_N_D, atol=1e-6)


def raises(model):
    raise RuntimeError("no such operator")


def off(model):
    plain = engines.torch_forward(model)
    return lambda batch: plain(batch) + torch.linspace(0, 1e-2, model.config.hidden_size)


@pytest.mark.parametrize(
    "make, says", [(raises, "RuntimeError: no such operator"), (off, "differ from torch's")]
)
def test_a_model_that_it_cannot_take_or_computes_otherwise_is_refused(encoder, monkeypatch, make, says):
    monkeypatch.setattr(engines, "_openvino", make)
    with pytest.raises(ValueError, match=f"--encode-with=openvino: .*{says}"):
        engines.use(encoder, "openvino")


def test_a_missing_library_and_a_gpu_are_refused(encoder, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ValueError, match=r"--encode-with=openvino: .*pip install 'verl-credit\[openvino\]'"):
        engines.use(encoder, "openvino")
    encoder.device = torch.device("cuda")
    assert engines.use(encoder, "torch") == "encoder: torch"
    with pytest.raises(ValueError, match="--encode-with=openvino: for a CPU; on device='cuda'"):
        engines.use(encoder, "openvino")


def test_other_values_are_refused_with_those_that_there_are(capsys):
    assert main(["serve", "--index=x", "--encoder=x", "--encode-with=onednn"]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ("--encode-with", "onednn", "torch", "openvino"))
