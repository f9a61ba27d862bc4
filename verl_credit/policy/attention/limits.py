"""Upper limits of the memory that attention uses for scored answers at a time. `plan` counts with them.

Without limits, 100 answers of 12 tokens after each of 7 contexts of up to 8,192 tokens would need the keys of 3 million
tokens (varlen: 13 GB for a layer of Qwen3-4B), or a mask of 140 million numbers per row (SDPA). A single answer is never
divided.
"""

from __future__ import annotations

KEY_TOKENS = 2**16
"""varlen: tokens whose keys and values are gathered at a time."""
MASK_NUMBERS = 2**24
"""SDPA: numbers in a mask, queries x keys; with a softcap, in the scores of all heads."""
