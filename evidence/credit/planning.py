"""The speed of the planning mask: python evidence/credit/planning.py [rows] [tokens per row]

Synthetic responses with a vocabulary of about 5,000 pieces (English words in Zipf's proportions, the first words of grams
among the common ones, punctuation, newlines), five turns a row with observations between them, and a gram every eighty
tokens. One thread. Only the first call decodes the vocabulary. Rates are per second of processor time, which other programs
disturb less than the clock; the clock's seconds are printed, too.
"""

from __future__ import annotations

import random
import sys
import time

import torch

from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, coverage, planning_matches
from verl_credit.credit.planning.token_text import Pieces

COMMON = """
    the of and to in is that it was for on are as with they be at this from I have or by one had not but what all
    were when we there can an your which their if will each about how up out them then she many some so these
    would other into has more her two like him see time could no make than first been its who now people my made
    over did down only way find use may long little very after words called just where most know let me wait
    think check key another back go start notice double try second thought right work doesn insight verify
""".split()  # noqa: SIM905
EVERY = 80  # tokens from one gram to the next, on average


def vocabulary(rng: random.Random) -> list[str]:
    letters = "etaoinshrdlu" * 3 + "cmfwypvbgkjqxz"
    made = {"".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(6000)}
    pieces = [" " + word for word in COMMON] + [",", ".", "\n", "'s", "'t", "-", " (", ")", ":", "\n\n"]
    rare = sorted(made - set(COMMON))[: 5000 - len(pieces)]
    rng.shuffle(rare)
    return pieces + [rng.choice(["", " ", " ", " "]) + word for word in rare]


def gram_ids(pieces: list[str]) -> list[list[int]]:
    """Each gram in pieces of the vocabulary, words whole."""
    number = {piece: i for i, piece in enumerate(pieces)}
    cut = [gram.replace("'", " '").split() for gram in STRATEGIC_GRAMS]
    ids = []
    for words in cut:
        for word in words:
            piece = word if word.startswith("'") else " " + word
            if piece not in number:
                number[piece] = len(pieces)
                pieces.append(piece)
        ids.append([number[word if word.startswith("'") else " " + word] for word in words])
    return ids


def batch(rows: int, columns: int, pieces: list[str], grams: list[list[int]], seed: int):
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / (torch.arange(len(pieces)).double() + 5)
    ids = torch.multinomial(weights, rows * columns, replacement=True, generator=generator)
    n = rows * columns // EVERY
    at = torch.randint(0, rows * columns - 8, (n,), generator=generator)
    which = torch.randint(0, len(grams), (n,), generator=generator)
    for g, gram in enumerate(grams):
        start = at[which == g]
        for offset, i in enumerate(gram):
            ids[start + offset] = i
    turn = torch.arange(columns) % (columns // 5)
    mask = (turn < 0.8 * (columns // 5)).expand(rows, columns)
    return ids.view(rows, columns), mask


def main(rows: int = 256, columns: int = 8192) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    pieces = vocabulary(rng)
    grams = gram_ids(pieces)
    decoded = Pieces(lambda ids: [pieces[i] for i in ids])
    for seed in range(3):
        ids, mask = batch(rows, columns, pieces, grams, seed)
        clock, cpu = time.perf_counter(), time.process_time()
        matches = planning_matches(ids, mask, decoded)
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        share = coverage(matches.planning_B_T, mask)["planning/token_share"]
        print(
            f"{rows} x {columns} tokens, {int(mask.sum()):,} of them the policy's, {len(pieces)} pieces, "
            f"{len(matches.gram_M):,} matches on {share:.1%} of policy tokens: {cpu:.2f} s ({clock:.2f} s on the "
            f"clock), {ids.numel() / cpu / 1e6:.2f} M tokens/s, {int(mask.sum()) / cpu / 1e6:.2f} M policy tokens/s"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
