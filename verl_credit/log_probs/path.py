"""Which code makes the log-probs of the policy that is trained, and what it holds: for the engine and for `plan`."""

from __future__ import annotations

FLASH, OURS, LOOP, FUSED = "flash", "ours", "loop", "fused"
LOOP_SECONDS = 1e-4
"""Of verl's loop, a token: 40 to 130 microseconds of Python, measured on CPUs."""
CHUNK_LOGITS, CHUNK_LOGITS_CPU = 2**24, 2**20
"""Logits that ours works on at a time: on a CPU what stays in its cache, elsewhere what is worth a kernel's launch."""
HELD_BYTES = 8
"""Of each of them: twice in float32."""


def log_prob_path(*, flash: bool, fused: bool = False, distills: bool = False) -> str:
    """Of verl's FSDP engine. ``flash``: flash-attn's loss runs; ``fused``: model.use_fused_kernels; ``distills``: the
    logits themselves are asked for, too."""
    if fused:
        return FUSED
    if flash:
        return FLASH
    return LOOP if distills else OURS


def said(path: str, vocabulary: int, device_type: str, no_flash: str) -> str:
    """One line. ``no_flash``: why flash-attn's loss does not run."""
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
        f"in float32: at most {held:.0f} MiB beside the logits, over which the gradient is written"
    )


def chunk_tokens(vocabulary: int, device_type: str) -> int:
    """Tokens that ours works on at a time, at least one."""
    return max(1, (CHUNK_LOGITS_CPU if device_type == "cpu" else CHUNK_LOGITS) // vocabulary)
