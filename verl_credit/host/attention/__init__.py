"""Attention over packed rows and branches, with or without flash-attn."""

from verl_credit.host.attention.implementation import AUTO, NAMES, PACK, choice, chosen, forced, install
from verl_credit.host.attention.pack import Pack, PackedRow, pack_rows

__all__ = ["AUTO", "NAMES", "PACK", "Pack", "PackedRow", "choice", "chosen", "forced", "install", "pack_rows"]
