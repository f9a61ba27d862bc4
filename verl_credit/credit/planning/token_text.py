"""Converts token ids to text and back: the policy's tokens to one string, character spans to runs of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from verl_credit.credit.arguments import checked_ids
from verl_credit.lazy import torch

Decode = Callable[[list[int]], list[str]]
BARRIER = "\0"  # marks in the text where the policy's tokens end: at an observation, at the end of a row
_BARRIER_ID = -1
_TOKENS_AT_ONCE = 1 << 20  # bounds the memory of Python lists for a large batch


class Pieces:
    """The texts of token ids; each id is decoded once.

    `decode(ids)` gets a sorted list without repeats and returns one piece of text per id. The text is the concatenation
    of pieces, so **the piece of an id must not depend on its neighbours**, and a token's space must be in its piece. A
    piece may be empty. For byte-level BPE: `lambda ids: tokenizer.batch_decode([[i] for i in ids])`. For a decoder that
    strips the leading space (SentencePiece), put that space back. A character that a token boundary divides may become
    any punctuation (such as U+FFFD) in both pieces.
    Raises ValueError for a wrong number of pieces, and for names of tokens ("Ġlet") in place of text.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._has_space = False
        self.text: dict[int, str] = {_BARRIER_ID: BARRIER}

    def __call__(self, ids: list[int]) -> list[str]:
        self.learn(ids)
        return [self.text[i] for i in ids]

    def learn(self, ids: Iterable[int]) -> None:
        """Decode those of `ids` that are not known yet."""
        new = sorted(set(ids) - self.text.keys())
        if not new:
            return
        pieces = self._decode(new)
        if len(pieces) != len(new):
            raise ValueError(f"decode returned {len(pieces)} pieces for {len(new)} ids; expected one per id")
        for i, piece in zip(new, pieces, strict=True):
            if not isinstance(piece, str):
                raise TypeError(f"decode returned {piece!r} for id {i}; expected a str")
            self.text[i] = piece.replace(BARRIER, " ")
        self._has_space = self._has_space or any(c.isspace() for piece in pieces for c in piece)
        names = [piece for piece in pieces if piece.startswith(("Ġ", "Ċ", "▁"))]
        if names and not self._has_space:
            raise ValueError(
                f"decode returned {names[0]!r} and no piece with a space; expected text, "
                "not names of tokens (batch_decode of single ids, not convert_ids_to_tokens)"
            )


@dataclass(frozen=True)
class PolicyText:
    """The policy's text of some rows; BARRIERs separate runs of policy tokens."""

    text: str
    piece_N: list[str]  # what `text` was joined from, BARRIERs included
    position_N: torch.Tensor  # row * T + column of each piece

    def tokens(self, begin_M: list[int], end_M: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the first and the last token with a character in [begin, end), non-empty spans."""
        length_N = array("q", map(len, self.piece_N))  # torch.tensor(list) takes thrice as long
        ends_N = torch.frombuffer(length_N, dtype=torch.int64).cumsum(0)
        first_M = torch.searchsorted(ends_N, torch.tensor(begin_M, dtype=torch.long), right=True)
        last_M = torch.searchsorted(ends_N, torch.tensor(end_M, dtype=torch.long))
        return self.position_N[first_M], self.position_N[last_M]


def policy_texts(
    token_ids_B_T: torch.Tensor, mask_B_T: torch.Tensor, pieces: Pieces, transform: Callable[[str], str] = str
) -> Iterator[PolicyText]:
    """The policy tokens (mask 1) of a batch as text, some rows at a time, each piece changed by `transform`.

    `transform` keeps the length of a piece; it sees each piece once. Ids where the mask is 0 are not read.
    Raises TypeError or ValueError that names the argument, the row and the value.
    """
    ids_B_T, mask_B_T = checked_ids(token_ids_B_T, mask_B_T, "token_ids_B_T", "mask_B_T", "token ids")
    ids_B_T, mask_B_T = ids_B_T.cpu(), mask_B_T.cpu()
    bad_B_T = mask_B_T & (ids_B_T < 0)
    if bad_B_T.any():
        row, column = bad_B_T.nonzero()[0].tolist()
        raise ValueError(
            f"token_ids_B_T row {row}, policy token at position {column}: id {ids_B_T[row, column]}; expected 0 or more"
        )
    rows, columns = ids_B_T.shape
    at_once = max(1, _TOKENS_AT_ONCE // (columns + 1))
    table = {_BARRIER_ID: BARRIER}
    for top in range(0, rows, at_once):
        mask = mask_B_T[top : top + at_once]
        keep = torch.zeros(len(mask), columns + 1, dtype=torch.bool)
        keep[:, 0] = True  # separates a row from the previous one
        keep[:, 1:] = mask
        keep[:, 2:] |= mask[:, :-1]  # the first observation token after each run
        ids = torch.full(keep.shape, _BARRIER_ID)
        ids[:, 1:] = torch.where(mask, ids_B_T[top : top + at_once].long(), _BARRIER_ID)
        row_N, column_N = keep.nonzero(as_tuple=True)
        id_N = ids[keep].tolist()

        new = set(id_N) - table.keys()
        pieces.learn(new)
        table.update((i, transform(pieces.text[i])) for i in new)
        piece_N = [table[i] for i in id_N]
        yield PolicyText("".join(piece_N), piece_N, (row_N + top) * columns + column_N - 1)


def mark(first_M: torch.Tensor, last_M: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """True from each first to its last position (both included) of a row-major B x T grid."""
    steps = torch.zeros(shape.numel() + 1, dtype=torch.long)
    ones_M = torch.ones_like(first_M)
    steps.index_add_(0, first_M, ones_M).index_add_(0, last_M + 1, -ones_M)
    return (steps[:-1].cumsum(0) > 0).view(shape)
