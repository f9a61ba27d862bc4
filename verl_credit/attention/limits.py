"""What attention holds at a time for scored answers, whatever they ask for: the kernels keep to it, `plan` counts it.

100 answers of 12 tokens behind each of 7 contexts of up to 8,192 tokens would ask for the keys of 3 million tokens or more
(varlen: 13 GB a layer of Qwen3-4B and up), or for a mask of 140 million numbers a row (SDPA). One answer is never divided.
"""

from __future__ import annotations

KEY_TOKENS = 2**16
"""varlen: tokens whose keys and values are gathered."""
MASK_NUMBERS = 2**24
"""SDPA: numbers of a mask, queries x keys; with a softcap, of the scores of all heads."""
