"""Converts token ids to text and back: the policy's tokens to one string, character spans to runs of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verl_credit.credit.arguments import checked_ids
from verl_credit.lazy import torch

Decode = Callable[[list[int]], list[str]]
"""Gets a sorted list of ids without repeats and returns one piece of text per id.

The text is the concatenation of pieces, so **the piece of an id must not depend on its neighbours**, and a token's space
must be in its piece. A piece may be empty. For byte-level BPE: `lambda ids: tokenizer.batch_decode([[i] for i in ids])`.
For a decoder that strips the leading space (SentencePiece), put that space back. A character that a token boundary divides
may become any punctuation (such as U+FFFD) in both pieces."""
BARRIER = "\0"  # marks in the text where the policy's tokens end: at an observation, at the end of a row
_BARRIER_ID = -1
_TOKENS_AT_ONCE = 1 << 20  # bounds the memory of Python lists for a large batch


def decoded(ids: list[int], decode: Decode) -> list[str]:
    """The pieces, checked. Raises ValueError for a wrong number, and for names of tokens ("Ġlet") in place of text."""
    pieces = decode(ids) if ids else []
    if len(pieces) != len(ids):
        raise ValueError(f"decode returned {len(pieces)} pieces for {len(ids)} ids; expected one per id")
    for i, piece in zip(ids, pieces, strict=True):
        if not isinstance(piece, str):
            raise TypeError(f"decode returned {piece!r} for id {i}; expected a str")
    names = [piece for piece in pieces if piece.startswith(("Ġ", "Ċ", "▁"))]
    if names and not any(c.isspace() for piece in pieces for c in piece):
        raise ValueError(
            f"decode returned {names[0]!r} and no piece with a space; expected text, "
            "not names of tokens (batch_decode of single ids, not convert_ids_to_tokens)"
        )
    return pieces


@dataclass(frozen=True)
class PolicyText:
    """The policy's text of some rows; BARRIERs separate runs of policy tokens."""

    rows: slice
    text: str
    piece_N: list[str]  # what `text` was joined from, BARRIERs included
    place_N: torch.Tensor  # row * T + column of each piece, rows counted from the first one here

    def covered(self, spans: list[tuple[int, int]], columns: int) -> torch.Tensor:
        """True for the tokens with a character in [begin, end) of a span, and for those between; [rows, columns]."""
        begin_M, end_M = torch.tensor(spans, dtype=torch.long).view(-1, 2).unbind(1)
        length_N = array("q", map(len, self.piece_N))  # torch.tensor(list) takes thrice as long
        ends_N = torch.frombuffer(length_N, dtype=torch.int64).cumsum(0)
        first_M = self.place_N[torch.searchsorted(ends_N, begin_M.contiguous(), right=True)]
        last_M = self.place_N[torch.searchsorted(ends_N, end_M.contiguous())]
        n_rows, one_M = self.rows.stop - self.rows.start, torch.ones_like(first_M)
        steps = torch.zeros(n_rows * columns + 1, dtype=torch.long)
        steps.index_add_(0, first_M, one_M).index_add_(0, last_M + 1, -one_M)
        return (steps[:-1].cumsum(0) > 0).view(n_rows, columns)


def policy_texts(
    token_ids_B_T: torch.Tensor, mask_B_T: torch.Tensor, decode: Decode, change: Callable[[str], str]
) -> Iterator[PolicyText]:
    """The policy tokens (mask 1) of a batch as text, some rows at a time, each piece changed by `change`.

    `change` keeps the length of a piece. Each id is decoded once; ids where the mask is 0 are not read.
    Raises TypeError or ValueError that names the argument, the row and the value.
    """
    ids_B_T, mask_B_T = checked_ids(token_ids_B_T, mask_B_T, "token_ids_B_T", "mask_B_T", "token ids")
    ids_B_T, mask_B_T = ids_B_T.cpu().long(), mask_B_T.cpu()
    bad_B_T = mask_B_T & (ids_B_T < 0)
    if bad_B_T.any():
        row, column = bad_B_T.nonzero()[0].tolist()
        raise ValueError(
            f"token_ids_B_T row {row}, policy token at position {column}: id {ids_B_T[row, column]}; expected 0 or more"
        )
    known = ids_B_T[mask_B_T].unique().tolist()
    table = dict(zip(known, map(change, decoded(known, decode)), strict=True)) | {_BARRIER_ID: BARRIER}
    rows, columns = ids_B_T.shape
    at_once = max(1, _TOKENS_AT_ONCE // (columns + 1))
    for top in range(0, rows, at_once):
        mask = mask_B_T[top : top + at_once]
        keep = torch.zeros(len(mask), columns + 1, dtype=torch.bool)
        keep[:, 0] = True  # separates a row from the previous one
        keep[:, 1:] = mask
        keep[:, 2:] |= mask[:, :-1]  # the first observation token after each run
        ids = torch.full(keep.shape, _BARRIER_ID)
        ids[:, 1:] = torch.where(mask, ids_B_T[top : top + at_once], _BARRIER_ID)
        row_N, column_N = keep.nonzero(as_tuple=True)
        piece_N = [table[i] for i in ids[keep].tolist()]
        yield PolicyText(
            slice(top, top + len(mask)), "".join(piece_N), piece_N, row_N * columns + column_N - 1
        )
