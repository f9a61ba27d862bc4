"""Compares gains by branch with gains by rows, on English text.

R rows of L tokens from the project's pages, T turns each; the answer is the next 8 tokens of the text. A gain is the
difference of two consecutive contexts' mean log-probs of the answer, as `log_prob_diff`. The reference is `rows` in
float32. In float32 `branch` must give the same gains. In bf16 `branch` may differ from the reference as much as `rows` in
bf16; the error beside the spread of the gains shows how much that matters.
"""

from __future__ import annotations

import torch

from gpu.models import english, forward_script, give_back, heads_of, kernels, load
from gpu.record import at_least, at_most
from verl_credit.policy.attention.implementation import forced

EXACT = 1e-4  # nats; 1e-6 was found on a CPU, 4 layers
SOURCE = "evidence/information_gain/README.md; in bf16 `rows` itself"


def run(setting, record) -> None:
    rows, length, turns = (3, 320, 3) if setting.tiny else (8, 4096, 6)
    script = forward_script()
    ids, source = english(setting)
    batch = [_row(script, ids, number, length, turns, setting.device) for number in range(rows)]
    reference = None
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model, weights = load(setting, dtype)
        why = kernels(setting, dtype, heads_of(model.config))
        with forced("sdpa"):
            by_rows = _gains(script, "rows", model, batch)
        reference = by_rows if reference is None else reference
        for kernel, reason in why.items():
            title = f"{kernel}, {name}"
            if reason:
                record.not_run(title, reason)
            elif not record.has(title):
                try:
                    with forced(kernel):
                        gains = _gains(script, "branch", model, batch)
                except Exception as error:  # out of memory, or what compilers raise
                    record.off(title, error)
                    continue
                found = _compare(gains, by_rows, reference) | {"text": source, "model": weights}
                record.add(title, found, _predicted(found, name, bool(setting.model)), SOURCE)
        del model
        give_back(setting.device)


def _predicted(found: dict, name: str, trained: bool) -> dict:
    if name == "fp32":
        return {"largest_error": at_most(EXACT), "correlation": at_least(0.9999)}
    # the root mean square of some tens of errors scatters by a fifth
    predicted = {"rms_error": at_most(1.5 * found["rms_error_of_rows"])}
    return predicted | ({"correlation": at_least(0.99)} if trained else {})


def _row(script, ids: torch.Tensor, number: int, length: int, turns: int, device: str):
    """(row, answers, ends of the contexts); the answer is the same after every context."""
    start = number * (length + script.ANSWER) % max(1, len(ids) - length - script.ANSWER)
    row = ids[start : start + length].to(device)
    answer = ids[start + length : start + length + script.ANSWER].to(device)
    ends = script.ends(length, turns)
    return row, [answer] * len(ends), ends


@torch.no_grad()
def _gains(script, method: str, model, batch) -> torch.Tensor:
    """[rows x turns], float64, nats."""
    found = []
    for row, answers, ends in batch:
        scores = torch.stack([one.double().mean() for one in script.run(method, model, row, answers, ends)])
        found.append(scores.diff())
    return torch.cat(found).cpu()


def _compare(gains: torch.Tensor, by_rows: torch.Tensor, reference: torch.Tensor) -> dict:
    error, of_rows = gains - reference, by_rows - reference
    spread = float(reference.std())
    return {
        "gains": len(gains),
        "largest_error": float(error.abs().max()),
        "rms_error": float(error.square().mean().sqrt()),
        "rms_error_of_rows": float(of_rows.square().mean().sqrt()),
        "correlation": float(torch.corrcoef(torch.stack([gains, reference]))[0, 1]),
        "spread": spread,
        "error_over_spread": float(error.square().mean().sqrt()) / spread,
    }
