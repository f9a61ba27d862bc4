"""How many tokens' logits are read at a time, for `log_probs` and for `plan`, which has no torch."""

CHUNK_LOGITS, CHUNK_LOGITS_CPU = 2**24, 2**20
"""Logits in one chunk. On a CPU a chunk stays in the cache; elsewhere it is worth a kernel's launch."""
HELD_BYTES = 8
"""Bytes per logit of a chunk, which is held twice in float32."""


def chunk_tokens(vocabulary: int, device_type: str) -> int:
    """Returns the number of tokens in one chunk, at least one."""
    return max(1, (CHUNK_LOGITS_CPU if device_type == "cpu" else CHUNK_LOGITS) // vocabulary)
