"""Log-probs of sampled tokens from logits, three ways: ours in chunks, flash-attn's loss, verl's loop over tokens.

T tokens over the recipes' vocabulary, forward and backward. Errors are against float64, relative where a value exceeds 1;
the memory is what the method needs above the logits; seconds are the median of 3.
"""

from __future__ import annotations

import statistics
import time

import torch

from gpu.models import give_back, shape_for
from gpu.record import at_most, within_factor
from verl_credit.config.log_prob_path import FLASH, LOOP, LOOP_SECONDS, OURS
from verl_credit.recipe.plan.activations import loss
from verl_credit.recipe.plan.job import Job

EXACT = 1e-6
CHUNK = 256  # tokens of the reference at a time
SOURCE = "verl_credit/recipe/plan/activations.py: loss; tests/policy/test_log_probs.py"


def run(setting, record) -> None:
    shape = shape_for(setting)
    vocabulary = shape.vocabulary
    sizes = {"fp32": (torch.float32, 48), "bf16": (torch.bfloat16, 80)} if setting.tiny else {
        "fp32": (torch.float32, 8192), "bf16": (torch.bfloat16, 16640)
    }  # fmt: skip
    for name, (dtype, tokens) in sizes.items():
        case = None
        for method, make in METHODS.items():
            title = f"{method}, {name}, {tokens} tokens of {vocabulary:,}"
            if record.has(title):
                continue
            case = case or Case(tokens, vocabulary, dtype, setting.device)
            try:
                log_probs = make()
            except ImportError as error:
                record.not_run(title, str(error))
                continue
            try:
                found = case.measure(log_probs)
            except Exception as error:  # out of memory, or what compilers raise
                record.off(title, error)
                continue
            finally:
                give_back(setting.device)
            record.add(title, found, _predicted(method, found, shape, dtype, tokens), SOURCE)


def _predicted(method: str, found: dict, shape, dtype: torch.dtype, tokens: int) -> dict:
    """verl's loop keeps a log-softmax in the logits' precision, so its error is only shown."""
    predicted = {} if method == "verl" else {"error": at_most(EXACT)}
    if "above_logits_gib" in found:
        size = dtype.itemsize
        job = Job(update_tokens=tokens, compute_bytes=size, log_prob_path=PATHS[method], device_type="cuda")
        above = (loss(shape, job) - size * tokens * shape.vocabulary) / 2**30
        # a hundred bytes a token, and the allocator's rounding
        predicted["above_logits_gib"] = at_most(1.25 * above + 0.05)
    if method == "verl" and "us_per_token" in found:
        predicted["us_per_token"] = within_factor(1e6 * LOOP_SECONDS, 2)
    return predicted


def _ours():
    from verl_credit.policy.log_probs import log_probs_from_logits

    return lambda logits, labels: log_probs_from_logits(logits, labels, inplace_backward=True)


def _flash():
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return lambda logits, labels: -cross_entropy_loss(logits, labels, inplace_backward=True)[0]


def _verl():
    from verl.utils.torch_functional import logprobs_from_logits_v2

    return logprobs_from_logits_v2


METHODS = {"ours": _ours, "flash": _flash, "verl": _verl}
PATHS = {"ours": OURS, "flash": FLASH, "verl": LOOP}


class Case:
    """Logits similar to a model's: spread over some nats, with one likely token."""

    def __init__(self, tokens: int, vocabulary: int, dtype: torch.dtype, device: str):
        random = torch.Generator(device).manual_seed(tokens)
        self.logits = torch.empty(tokens, vocabulary, dtype=dtype, device=device).normal_(
            0, 3, generator=random
        )
        self.labels = torch.randint(0, vocabulary, (tokens,), generator=random, device=device)
        self.logits[torch.arange(tokens, device=device), self.labels] += 8
        self.weight = torch.randn(tokens, generator=random, device=device)
        self.device, self.dtype = device, dtype

    def measure(self, log_probs) -> dict:
        found, gradient = self._pass(log_probs)  # warms up, and is compared
        exact_error, gradient_error = self._errors(found, gradient)
        del found, gradient
        result = {"error": exact_error, "gradient_error": gradient_error}
        if self.device == "cpu":
            return result
        taken = []
        for _ in range(3):
            logits = self.logits.clone().requires_grad_()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held, start = torch.cuda.memory_allocated(), time.perf_counter()
            self._pass(log_probs, logits)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
            above = torch.cuda.max_memory_allocated() - held
            del logits
        seconds = statistics.median(taken)
        return result | {
            "above_logits_gib": above / 2**30, "seconds": seconds, "us_per_token": 1e6 * seconds / len(self.labels)
        }  # fmt: skip

    def _pass(self, log_probs, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, gradient of their weighted sum). Under autocast, as in verl's engine."""
        logits = self.logits.clone().requires_grad_() if logits is None else logits
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            found = log_probs(logits, self.labels)
            total = (found.float() * self.weight).sum()
        return found.detach(), torch.autograd.grad(total, logits)[0]

    def _errors(self, found: torch.Tensor, gradient: torch.Tensor) -> tuple[float, float]:
        largest = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, len(self.labels), CHUNK):
            rows = slice(start, start + CHUNK)
            label, weight = self.labels[rows, None], self.weight[rows, None].double()
            exact = self.logits[rows].double().log_softmax(-1)
            slope = -exact.exp() * weight
            slope.scatter_add_(1, label, weight)
            value = exact.gather(1, label)[:, 0]
            apart = ((found[rows].double() - value).abs() / value.abs().clamp(min=1)).max()
            largest = torch.maximum(
                largest, torch.stack([apart, (gradient[rows].double() - slope).abs().max()])
            )
        return tuple(largest.tolist())
