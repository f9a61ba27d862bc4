"""Which code computes the log-probs of tokens in verl's engine, for the engine itself and for `plan`, which has no torch."""

from __future__ import annotations

from verl_credit.policy.log_prob_chunks import HELD_BYTES, chunk_tokens

FLASH, OURS, LOOP, FUSED = "flash", "ours", "loop", "fused"
LOOP_SECONDS = 1e-4
"""Seconds per token of verl's loop: 40 to 130 microseconds of Python, measured on CPUs."""


def log_prob_path(*, flash: bool, fused: bool = False, distills: bool = False) -> str:
    """The path in verl's FSDP engine. ``flash``: flash-attn's loss runs; ``fused``: model.use_fused_kernels; ``distills``:
    the logits themselves are read, too."""
    if fused:
        return FUSED
    if flash:
        return FLASH
    return LOOP if distills else OURS


def describe(path: str, vocabulary: int, device_type: str, no_flash: str) -> str:
    """Describes the path in one line. ``no_flash``: why flash-attn's loss does not run."""
    if path == FUSED:
        return "log-probs: verl's fused head (actor_rollout_ref.model.use_fused_kernels=true)"
    if path == FLASH:
        return "log-probs: flash-attn's loss, through verl; nothing beside the logits"
    if path == LOOP:
        return (
            f"log-probs: verl's loop over tokens, about {LOOP_SECONDS * 1e3:g} ms each ({no_flash}, and distillation reads "
            "the logits)"
        )
    held = HELD_BYTES * vocabulary * chunk_tokens(vocabulary, device_type) / 2**20
    return (
        f"log-probs and entropies: the project's own ({no_flash}), {chunk_tokens(vocabulary, device_type)} tokens at a time "
        f"in float32: at most {held:.0f} MiB beside the logits, which the gradient overwrites"
    )
