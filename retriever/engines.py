"""What computes the encoder's forward pass in a server: torch, or one of the faster ways that a CPU may have.

torch's fp32 products come from MKL, which on an AMD processor is half as fast as oneDNN and OpenVINO
(measured in `evidence/retriever/README.md`).
"""

import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.utils.mkldnn import MkldnnLinear

from verl_credit_retriever.settings import ENGINES

Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""input_ids and attention_mask [N, L] -> last hidden states [N, L, D] in float32"""
EXACT = ("torch", "onednn", "openvino")
"""The engines that compute in fp32: `auto` takes the fastest of these."""
CLOSE = 1e-5
"""The largest difference from torch's vectors that counts as rounding."""
CLOSE_BF16 = 0.1
"""The same for bf16, whose differences are about 1e-2."""
CALL_TOKENS = 12
"""What a call costs on a CPU beside its tokens, in tokens: 12 to 17 with torch and OpenVINO in e5-base's shape."""
ROUNDS = 3
PROBES = (
    ["query"],
    ["a question of the usual length, as a search agent may ask it"] * 16,
    ["a longer one " * 15] * 4,
)


def use(encoder, name: str) -> str:
    """Lets ``encoder`` compute with the engine ``name``; returns a line that says what computes now, and why.

    Each engine is measured against torch at once, on a few texts: the least of three rounds. An engine that is not here,
    cannot take this model, differs by more than `CLOSE` (`CLOSE_BF16`), or is slower than torch leaves torch in place.
    Errors: ValueError for an unknown name, and for an engine other than torch that is asked for by name on a GPU.
    """
    if name not in ENGINES:
        raise ValueError(f"encode_with={name!r}; accepted: {', '.join(ENGINES)}")
    if encoder.device.type != "cpu":
        if name not in ("auto", "torch"):
            raise ValueError(
                f"encode_with={name!r}: for a CPU; on device={str(encoder.device)!r} only torch computes"
            )
        return "encoder: torch"
    if name == "torch":
        return "encoder: torch, fp32"
    plain, (vectors_N_D, seconds) = encoder.forward, _measured(encoder)
    best, least, said = plain, seconds, []
    for one in EXACT[1:] if name == "auto" else (name,):
        try:
            encoder.forward = MAKE[one](encoder.model)
            found_N_D, took = _measured(encoder)
        except Exception as error:  # of a library that may be absent, or that does not know the model
            said.append(f"{one} does not compute here ({type(error).__name__}: {str(error)[:200]})")
            continue
        apart = float(np.abs(found_N_D - vectors_N_D).max())
        said.append(f"{one} {seconds / took:.1f} times as fast as torch, vectors within {apart:.1g} of its")
        if took < least and apart <= (CLOSE if one in EXACT else CLOSE_BF16):
            best, least, name = encoder.forward, took, one
    encoder.forward = best
    return f"encoder: {'torch, fp32' if best is plain else name} ({'; '.join(said)})"


def _measured(encoder) -> tuple[np.ndarray, float]:
    """(vectors of all probes, seconds of the fastest round)"""
    rounds = []
    for _ in range(ROUNDS + 1):  # the first one compiles
        start = time.perf_counter()
        vectors = [encoder.encode_queries(texts) for texts in PROBES]
        rounds.append(time.perf_counter() - start)
    return np.concatenate(vectors), min(rounds[1:])


def calls(length_N: list[int], most: int, padding: int) -> list[list[int]]:
    """The rows in calls of at most `most`, by length: a longer one begins a call if it adds more than `padding` tokens to
    the others."""
    found: list[list[int]] = []
    for row in sorted(range(len(length_N)), key=length_N.__getitem__):
        call = found[-1] if found else []
        if not call or len(call) == most or len(call) * (length_N[row] - length_N[call[-1]]) > padding:
            found.append([row])
        else:
            call.append(row)
    return found


def torch_forward(model: torch.nn.Module) -> Forward:
    return lambda batch: model(**batch).last_hidden_state.float()


def _onednn(model: torch.nn.Module) -> Forward:
    """The model with the weights of its linear layers in oneDNN's order. All else is the same, and shared."""
    return torch_forward(_copied(model, lambda layer: MkldnnLinear(layer, torch.float32)))


def _copied(
    model: torch.nn.Module, replaced: Callable[[torch.nn.Linear], torch.nn.Module]
) -> torch.nn.Module:
    """A copy of the tree of modules that shares all parameters but those of linear layers."""
    if type(model) is torch.nn.Linear:
        return replaced(model)
    copy = model.__new__(type(model))
    copy.__dict__ = {**model.__dict__, "_modules": {}}
    copy._modules = {name: child and _copied(child, replaced) for name, child in model._modules.items()}
    return copy


def _bf16(model: torch.nn.Module) -> Forward:
    import copy

    return torch_forward(copy.deepcopy(model).to(torch.bfloat16))


def _openvino(model: torch.nn.Module, precision: str = "f32") -> Forward:
    # It would report its import to its makers; without this package it uses a stub of its own.
    sys.modules.setdefault("openvino_telemetry", None)
    import openvino

    class LastHiddenState(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    example = {name: torch.ones(2, 8, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    converted = openvino.convert_model(LastHiddenState().eval(), example_input=example)
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": precision}
    request = openvino.Core().compile_model(converted, "CPU", threads).create_infer_request()

    def forward(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        request.infer({name: batch[name].numpy() for name in example})
        return torch.from_numpy(request.get_output_tensor(0).data.astype(np.float32))

    return forward


MAKE: dict[str, Callable[[torch.nn.Module], Forward]] = {
    "onednn": _onednn,
    "openvino": _openvino,
    "torch-bf16": _bf16,
    "openvino-bf16": lambda model: _openvino(model, "bf16"),
}
