"""The planning mask: text is compared by its words, and exactly the covered tokens are marked."""

import random
import re

import pytest
import torch

from verl_credit.credit.planning.planning import (
    STRATEGIC_GRAMS,
    coverage,
    parse_grams,
    planning_mask,
    planning_matches,
)
from verl_credit.credit.planning.token_text import Pieces

# H.4: names of tokens, what the published detector marks, what is marked here.
PUBLISHED = [
    ("So Ġthe Ġanswer Ġlet Ġme Ġthink Ġabout Ġit", "01111100", "00011100"),
    ("Ġa Ġb Ġc Ġd Ġnotice Ġthat Ġx", "0111110", "0000110"),
    ("Wait , Ġlet Ġme Ġsee", "00000", "11110"),
    ("Wait Ġlet Ġme Ġsee", "1110", "1110"),
    ("Ġthat 's Ġnot Ġright", "0000", "1111"),
    ("Ġthat Ġdoesn 't Ġwork", "0000", "1111"),
    ("Ġdou ble Ġcheck", "000", "111"),
    ("Ġdouble -check", "00", "11"),
    ("Ġlet Ġme Ċ Ġthink", "0000", "1111"),
    (". Ċ let Ġme Ġcheck .", "111110", "001110"),
]


def as_text(name):
    return name.replace("Ġ", " ").replace("Ċ", "\n")


class Vocabulary:
    """Ids in the order of first use; decodes them, and remembers what it was asked."""

    def __init__(self):
        self.ids, self.asked = {}, []

    def batch(self, rows, observed=()):
        """Rows of pieces as (ids, mask), padded with id -7; a piece in `observed` positions has mask 0."""
        width = max(map(len, rows), default=0)
        ids = torch.full((len(rows), width), -7)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, pieces in enumerate(rows):
            for column, piece in enumerate(pieces):
                ids[row, column] = self.ids.setdefault(piece, len(self.ids))
                mask[row, column] = (row, column) not in observed
        return ids, mask

    def decode(self, ids):
        self.asked.append(ids)
        pieces = list(self.ids)
        return [pieces[i] for i in ids]


def marks(*rows, observed=(), **options):
    """Rows of pieces to rows of "0110"."""
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch(rows, observed)
    planning = planning_mask(ids, mask, vocabulary.decode, **options)
    assert planning.dtype == torch.bool and planning.shape == ids.shape
    assert not planning[~mask].any()
    return ["".join(str(int(bit)) for bit in planning[row, : len(pieces)]) for row, pieces in enumerate(rows)]


def found(text, **options):
    """Whether a text, cut into single characters, has a gram."""
    return "1" in marks(list(text), **options)[0]


@pytest.mark.parametrize(("names", "published", "ours"), PUBLISHED)
def test_published_rows(names, published, ours):
    assert len(published) == len(ours) == len(names.split())
    assert marks([as_text(name) for name in names.split()]) == [ours]


def test_nine_of_the_ten_published_rows_are_defects():
    assert [ours for _, published, ours in PUBLISHED if published == ours] == ["1110"]


def test_the_list_is_complete_and_every_gram_is_found():
    assert len(STRATEGIC_GRAMS) == 18
    assert (STRATEGIC_GRAMS[0], STRATEGIC_GRAMS[-1]) == ("wait let me", "the key insight")
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch([re.findall(r" ?[^ ]+", f"So {gram} now") for gram in STRATEGIC_GRAMS])
    matches = planning_matches(ids, mask, vocabulary.decode)
    assert matches.gram_counts == dict.fromkeys(STRATEGIC_GRAMS, 1)
    assert matches.first_M.tolist() == [1] * 18
    assert (matches.last_M - matches.first_M + 1).tolist() == [len(g.split()) for g in STRATEGIC_GRAMS]


@pytest.mark.parametrize(
    "text",
    [
        "LET ME THINK", "Let  me\n\tthink", "let, me... think!", "**let** me _think_", "(let me) \u201cthink\u201d",
        "let-me-think", "\u2014let me think\u2014", "let\u00a0me think", "let me \ufffdthink", "\u212aey; let me thin\u212a",
        "that's not right", "that\u2019s not right", "that\u02bcs not right", "that`s not right", "thats not right",
        "that 's not right", "that ' s not right", "That\ufffd\ufffds not right", "THAT\u2019S NOT RIGHT",
        "doublecheck? no: Double--Check", "what if we'd stop", "notice that's so", "1) let me think",
    ],
)  # fmt: skip
def test_the_same_gram(text):
    assert found(text)


@pytest.mark.parametrize(
    "text",
    [
        "outlet me think", "let me thinking", "let me rethink", "let them think", "letme think", "let me",
        "double checked", "let me2 think", "let me think2", "that is not right", "that'll not right",
        "notice what", "the keys is", "a\u00e9let me think", "", " ", "...",
    ],
)  # fmt: skip
def test_not_the_same_gram(text):
    assert not found(text)


def test_overlapping_grams():
    assert marks(["So", " wait", " let", " me", " think", " it"]) == ["011110"]
    assert marks([" the", " key", " is", " double", " check", "!"]) == ["111110"]
    grams = ["let me", "let me think", "me think hard", "think"]
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch([["let", " me", " think", " hard"]])
    matches = planning_matches(ids, mask, vocabulary.decode, grams=grams)
    assert matches.gram_counts == dict.fromkeys(grams, 1)
    assert list(zip(matches.first_M.tolist(), matches.last_M.tolist(), strict=True)) == [
        (0, 1), (0, 2), (1, 3), (2, 2),
    ]  # fmt: skip


def test_tokens_at_the_edges():
    # Part of a token is enough; what merely touches the match is not marked.
    assert marks(["xx let", " me", " think so"]) == ["111"]
    assert marks(["x", " ", "let", " ", "me", ", ", "think", " ", "so"]) == ["001111100"]
    assert marks(["", "let", "", " me", "", " think", "", "."]) == ["01111100"]  # empty pieces
    assert marks([" let me think"], [" let me"], ["", ""]) == ["1", "0", "00"]


def test_an_observation_parts_two_turns():
    row = ["let", " me", "OBS", " think", " let", " me", " think"]
    assert marks(row, observed={(0, 2)}) == ["0000111"]
    assert marks(["let", " me", " think", "let me think"], observed={(0, 3)}) == ["1110"]
    assert marks(["let me think", "let", " me", " think"], observed={(0, 0)}) == ["0111"]
    assert marks(["let", " me", " think"], observed={(0, 0)}) == ["000"]
    # ... and so does the end of a row, though nothing stands between.
    assert marks(["so", " let", " me"], [" think", " now", "."]) == ["000", "000"]


# --- an oracle that walks the text character by character -------------------------------------------------

APOSTROPHES = "'\u2019\u02bc`"
GRAMS = (*STRATEGIC_GRAMS, "let me", "re-check", "a")


def is_word(c):
    return c.isalnum() and c not in APOSTROPHES


def walk(text, at, gram):
    """Where `gram`, begun at text[at], ends; None if it is not there."""
    for n, c in enumerate(gram):
        if is_word(c):
            if at == len(text) or not is_word(text[at]) or text[at].lower() != c.lower():
                return None
            at += 1
            continue
        optional = c in APOSTROPHES and is_word(gram[n - 1]) and is_word(gram[n + 1])
        if not optional and (at == len(text) or is_word(text[at])):
            return None
        while at < len(text) and not is_word(text[at]):
            at += 1
    return at if at == len(text) or not is_word(text[at]) else None


def oracle_spans(text, grams):
    starts = [s for s in range(len(text)) if is_word(text[s]) and (s == 0 or not is_word(text[s - 1]))]
    return [(s, end) for s in starts for gram in grams if (end := walk(text, s, gram)) is not None]


def oracle(pieces, mask, grams):
    """One row by the definition."""
    planning, run = [False] * len(pieces), []
    for column in range(len(pieces) + 1):
        if column < len(pieces) and mask[column]:
            run.append(column)
            continue
        owner = [t for t in run for _ in pieces[t]]
        for begin, end in oracle_spans("".join(pieces[t] for t in run), grams):
            for t in range(owner[begin], owner[end - 1] + 1):
                planning[t] = True
        run = []
    return planning


def random_text(rng, words=14):
    """Words of grams and others, joined in every way that the tokenizer or the model may join them."""
    gram_words = " ".join(GRAMS).split()
    text = ""
    for _ in range(words):
        chunk = rng.choice(
            [rng.choice(GRAMS), rng.choice(gram_words), rng.choice(["outlet", "so", "x2", "\u00e9"])]
        )
        chunk = chunk.replace("'", rng.choice([*APOSTROPHES, "", " '", " ' "]))
        chunk = chunk.replace(" ", rng.choice([" ", " ", "  ", "\n", ", ", "-", ""]))
        chunk = rng.choice([str, str, str.upper, str.title])(chunk)
        text += chunk + rng.choice([" ", " ", " ", ", ", "\n\n", ".", "", "**"])
    return text


def cut(text, rng):
    """The text in random pieces, some of them empty."""
    at, pieces = 0, []
    while at < len(text):
        size = rng.choice([0, 1, 1, 2, 3, 5, 8])
        pieces.append(text[at : at + size])
        at += size
    return pieces


def random_batch(seed, rows=12):
    rng = random.Random(seed)
    batch = [cut(random_text(rng), rng) for _ in range(rows)]
    observed = {
        (row, column)
        for row, pieces in enumerate(batch)
        for column in range(len(pieces))
        if rng.random() < 0.04
    }
    return batch, observed


each_seed = pytest.mark.parametrize("seed", range(8))


@each_seed
def test_oracle(seed):
    batch, observed = random_batch(seed)
    got = marks(*batch, observed=observed, grams=GRAMS)
    for row, pieces in enumerate(batch):
        mask = [(row, column) not in observed for column in range(len(pieces))]
        want = oracle(pieces, mask, GRAMS)
        assert got[row] == "".join(str(int(bit)) for bit in want)
    assert 0.05 < "".join(got).count("1") / len("".join(got)) < 0.95  # the comparison is about something


@each_seed
def test_cutting_the_text_otherwise_marks_the_same_characters(seed):
    rng = random.Random(seed)
    text = random_text(rng)
    by_character = marks(list(text))[0]
    for _ in range(5):
        pieces = cut(text, rng)
        at, want = 0, []
        for piece in pieces:
            want.append("1" in by_character[at : at + len(piece)])
            at += len(piece)
        got = [bit == "1" for bit in marks(pieces)[0]]
        assert [g for g, p in zip(got, pieces, strict=True) if p] == [
            w for w, p in zip(want, pieces, strict=True) if p
        ]


@each_seed
def test_inserting_observation_tokens_between_turns_changes_nothing(seed):
    batch, observed = random_batch(seed)
    straight = marks(*batch, observed=observed)
    rng = random.Random(seed)
    longer, longer_observed, origin = [], set(), []
    for row, pieces in enumerate(batch):
        new, kept = [], []
        for column, piece in enumerate(pieces):
            if (row, column) in observed:
                for extra in rng.sample([piece, "let me think", " let", "\n"], rng.randint(1, 4)):
                    longer_observed.add((row, len(new)))
                    new.append(extra)
            else:
                kept.append((column, len(new)))
                new.append(piece)
        longer.append(new)
        origin.append(kept)
    got = marks(*longer, observed=longer_observed)
    for row, kept in enumerate(origin):
        assert [got[row][new] for _, new in kept] == [straight[row][old] for old, _ in kept]


@each_seed
def test_permuting_rows_commutes_and_rows_do_not_see_each_other(seed):
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch(*random_batch(seed))
    planning = planning_mask(ids, mask, vocabulary.decode)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(planning_mask(ids[order], mask[order], vocabulary.decode), planning[order])
    alone = [
        planning_mask(ids[row : row + 1], mask[row : row + 1], vocabulary.decode) for row in range(len(ids))
    ]
    assert torch.equal(torch.cat(alone), planning)


def test_rows_are_worked_through_in_parts(monkeypatch):
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch(*random_batch(3))
    whole = planning_matches(ids, mask, vocabulary.decode)
    monkeypatch.setattr("verl_credit.credit.planning.token_text._TOKENS_AT_ONCE", 2 * ids.shape[1] + 2)
    parts = planning_matches(ids, mask, vocabulary.decode)
    for name in ("planning_B_T", "gram_M", "row_M", "first_M", "last_M"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


def test_what_stands_where_the_mask_is_0_is_not_read():
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch(*random_batch(5))
    junk = torch.where(mask, ids, -(10**12))
    want = planning_mask(ids, mask, vocabulary.decode)
    assert torch.equal(planning_mask(junk, mask, vocabulary.decode), want)
    assert torch.equal(planning_mask(ids.int(), mask.float(), vocabulary.decode), want)


def test_ids_are_decoded_once():
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch([["let", " me", " think", " think"], ["let", " me", " go", "let"]])
    pieces = Pieces(vocabulary.decode)
    planning_mask(ids, mask, pieces)
    planning_mask(ids, mask, pieces)
    assert vocabulary.asked == [[0, 1, 2, 3]]
    more, mask = vocabulary.batch([["let", " us"]])
    assert not planning_mask(more, mask, pieces).any()
    assert vocabulary.asked[1:] == [[4]]
    assert pieces([4, 0]) == [" us", "let"]


def test_nothing_to_look_at():
    def decode(ids):
        raise AssertionError(f"asked for {ids}")

    for shape in ((0, 5), (3, 0), (2, 4)):
        ids = torch.zeros(shape, dtype=torch.long)
        matches = planning_matches(ids, torch.zeros(shape), decode)
        assert matches.planning_B_T.shape == shape and not matches.planning_B_T.any()
        assert matches.metrics()["planning/tokens_per_match"] == 0
        assert matches.metrics()["planning/semantic_entropy"] == 0
        assert coverage(matches.planning_B_T, torch.zeros(shape)) == {
            "planning/token_share": 0,
            "planning/rows_with": 0,
        }


def test_metrics():
    vocabulary = Vocabulary()
    rows = [
        ["let", " me", " think", ".", " That", "'s", " not", " right", "."],
        ["so", " let", " me", " think"],
        ["x"],
    ]
    ids, mask = vocabulary.batch(rows)
    matches = planning_matches(ids, mask, vocabulary.decode)
    got = matches.metrics()
    assert got["planning/matches"] == 3
    assert got["planning/tokens_per_match"] == pytest.approx((3 + 4 + 3) / 3)
    assert got["planning/gram/let_me_think"] == 2
    assert got["planning/gram/thats_not_right"] == 1
    assert got["planning/gram/start_over"] == 0
    assert got["planning/semantic_entropy"] == pytest.approx(0.636514)  # of 2/3, 1/3
    assert matches.row_M.tolist() == [0, 0, 1]
    assert coverage(matches.planning_B_T, mask) == {
        "planning/token_share": pytest.approx(10 / 14),
        "planning/rows_with": pytest.approx(2 / 3),
    }


def test_coverage_reads_policy_tokens_only():
    planning = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    assert coverage(planning, mask) == {"planning/token_share": 2 / 5, "planning/rows_with": 1 / 2}
    nan = torch.where(mask.bool(), planning.float(), float("nan"))
    assert coverage(nan, mask) == coverage(planning, mask)


@pytest.mark.parametrize(
    "given",
    [
        '["let me think", "that\'s it"]', " let me think , that's it",
        ["let me think", "that's it "], ("let me think", "that's it"),
    ],
)  # fmt: skip
def test_parse_grams(given):
    assert parse_grams(given) == ("let me think", "that's it")


def test_parse_grams_keeps_commas_of_json():
    assert parse_grams('["wait, let me"]') == ("wait, let me",)
    assert found("Wait let me see", grams='["wait, let me"]')
    assert parse_grams(STRATEGIC_GRAMS) == STRATEGIC_GRAMS
    assert found("r\u00c9FL\u00c9CHISSONS un peu", grams="r\u00e9fl\u00e9chissons un")
    assert found("so \u8ba9\u6211 \u60f3\u60f3 .", grams=["\u8ba9\u6211 \u60f3\u60f3"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("", ValueError, "algorithm.strategic_grams='': entry 0 is ''"),
        ("let me think,", ValueError, "entry 1 is ''"),
        ("let me, ,think", ValueError, "entry 1 is ' '"),
        ('["let me", "..."]', ValueError, r"entry 1 is '\.\.\.'; expected a phrase of words"),
        ("[]", ValueError, r"algorithm.strategic_grams='\[\]' holds no gram"),
        ([], ValueError, r"algorithm.strategic_grams=\[\] holds no gram"),
        ('["let me"', ValueError, "algorithm.strategic_grams='.*' is no JSON list"),
        ('["let me", 3]', TypeError, "entry 1 is 3; expected a string"),
        ([["let me"]], TypeError, r"entry 0 is \['let me'\]"),
        (7, TypeError, "algorithm.strategic_grams=7; expected a JSON list"),
        ("double check,Double-Check", ValueError, "entry 1, 'Double-Check', repeats 'double check'"),
        (["that's it", "thats it"], ValueError, "entry 1, 'thats it', repeats \"that's it\""),
    ],
)
def test_grams_that_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        parse_grams(given)


def test_bad_arguments_are_named():
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch([["a", " b"], ["c", " d"]])
    with pytest.raises(ValueError, match="mask_B_T has shape"):
        planning_mask(ids, mask[:1], vocabulary.decode)
    with pytest.raises(ValueError, match="mask_B_T is not a mask: row 1"):
        planning_mask(ids, torch.tensor([[1, 0], [2, 0]]), vocabulary.decode)
    with pytest.raises(ValueError, match="expected rows x response tokens"):
        planning_mask(ids[0], mask[0], vocabulary.decode)
    with pytest.raises(TypeError, match="token_ids_B_T has dtype torch.float32"):
        planning_mask(ids.float(), mask, vocabulary.decode)
    with pytest.raises(ValueError, match="row 1, policy token at position 1: id -4; expected 0 or more"):
        planning_mask(torch.tensor([[0, 1], [2, -4]]), mask, vocabulary.decode)
    with pytest.raises(ValueError, match="decode returned 1 pieces for 4 ids"):
        planning_mask(ids, mask, lambda ids: ["a"])
    with pytest.raises(TypeError, match="decode returned None for id 0; expected a str"):
        planning_mask(ids, mask, lambda ids: [None for _ in ids])
    with pytest.raises(ValueError, match="decode returned 'Ġlet' and no piece with a space; expected text"):
        planning_mask(ids, mask, lambda ids: ["a", "Ġlet", "b", "c"])
    with pytest.raises(ValueError, match="algorithm.strategic_grams"):
        planning_mask(ids, mask, vocabulary.decode, grams="a,a")
    with pytest.raises(ValueError, match="planning_B_T has shape"):
        coverage(mask[:1], mask)


def test_a_space_may_be_long():
    space = "\n " * 50_000
    assert marks(["let", " me", space, "think", space, "let", space, "it"]) == ["11110000"]
    assert marks(["that", space, "s", space, "not", space, "so"]) == ["0000000"]
