"""Attention over packed rows and branches, with or without flash-attn. Needs only torch and transformers."""

from verl_credit.policy.attention.implementation import (
    AUTO,
    NAMES,
    PACK,
    choice,
    chosen,
    forced,
    install,
    named,
)
from verl_credit.policy.attention.kernels import KERNELS, row_by_row
from verl_credit.policy.attention.pack import Pack, PackedRow, pack_rows

__all__ = [
    "AUTO", "KERNELS", "NAMES", "PACK", "Pack", "PackedRow", "choice", "chosen", "forced", "install", "named",
    "pack_rows", "row_by_row",
]  # fmt: skip
