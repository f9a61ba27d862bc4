"""What computes the encoder's forward pass in a server: torch, or OpenVINO on a CPU.

torch's fp32 products come from MKL, which on an AMD processor is half as fast as OpenVINO (`evidence/retriever`).
"""

import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch

Forward = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""input_ids and attention_mask [N, L] -> last hidden states [N, L, D] in float32"""
CLOSE = 1e-5
"""The largest difference from torch's vectors that counts as rounding."""
CALL_TOKENS = 12
"""What a call costs on a CPU beside its tokens, in tokens: 12 to 17 with torch and OpenVINO in e5-base's shape."""
PROBES = ["query", "a question of the usual length, as a search agent may ask it", "a longer one " * 15]


def use(encoder, name: str) -> str:
    """Lets ``encoder`` compute with torch or openvino; returns a line that says which.

    Errors: ValueError for openvino on a GPU, and where it is not installed, cannot take the model, or gives vectors that
    differ from torch's by more than `CLOSE`.
    """
    if name == "torch":
        return "encoder: torch"
    if encoder.device.type != "cpu":
        raise ValueError(f"--encode-with={name}: for a CPU; on device={str(encoder.device)!r} torch computes")
    right_N_D = encoder.encode_queries(PROBES)
    try:
        encoder.forward = _openvino(encoder.model)
        apart = float(np.abs(encoder.encode_queries(PROBES) - right_N_D).max())
    except ImportError as error:
        raise ValueError(f"--encode-with={name}: {error}; pip install 'verl-credit[openvino]'") from None
    except Exception as error:  # OpenVINO does not know every model
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"--encode-with={name}: not with this encoder ({reason}); use torch") from error
    if not apart <= CLOSE:
        raise ValueError(
            f"--encode-with={name}: vectors differ from torch's by {apart:.1g}, over {CLOSE:g}; use torch"
        )
    return f"encoder: openvino, vectors within {apart:.1g} of torch's"


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


def _openvino(model: torch.nn.Module) -> Forward:
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
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(converted, "CPU", threads).create_infer_request()

    def forward(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        request.infer({name: batch[name].numpy() for name in example})
        return torch.from_numpy(request.get_output_tensor(0).data.astype(np.float32))

    return forward
