"""The planning mask: text is compared by its words, and exactly the covered tokens are marked."""

import random
import re

import pytest
import torch

from kit.each import each
from kit.gram_oracle import APOSTROPHES, oracle
from verl_credit.credit.planning.planning import STRATEGIC_GRAMS, coverage, parse_grams, planning_mask

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


def test_every_gram_is_found():
    rows = [re.findall(r" ?[^ ]+", f"So {gram} now") for gram in STRATEGIC_GRAMS]
    assert len(STRATEGIC_GRAMS) == 18
    assert marks(*rows) == ["0" + "1" * len(gram.split()) + "0" for gram in STRATEGIC_GRAMS]


@each(
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


@each(
    "text",
    [
        "outlet me think", "let me thinking", "let me rethink", "let them think", "letme think", "let me",
        "double checked", "let me2 think", "let me think2", "that is not right", "that'll not right",
        "notice what", "the keys is", "a\u00e9let me think", "", " ", "...",
    ],
)  # fmt: skip
def test_not_the_same_gram(text):
    assert not found(text)


def test_a_users_own_grams():
    assert found("Wait let me see", grams='["wait, let me"]')
    assert found("r\u00c9FL\u00c9CHISSONS un peu", grams="r\u00e9fl\u00e9chissons un")
    assert found("so \u8ba9\u6211 \u60f3\u60f3 .", grams=["\u8ba9\u6211 \u60f3\u60f3"])


def test_overlapping_grams():
    assert marks(["So", " wait", " let", " me", " think", " it"]) == ["011110"]
    assert marks([" the", " key", " is", " double", " check", "!"]) == ["111110"]
    assert marks(["let", " me", " think", " hard", " it"], grams=["let me think", "me think hard"]) == [
        "11110"
    ]


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


GRAMS = (*STRATEGIC_GRAMS, "let me", "re-check", "a")


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


def test_rows_are_worked_through_in_parts(monkeypatch):
    vocabulary = Vocabulary()
    ids, mask = vocabulary.batch(*random_batch(3))
    whole = planning_mask(ids, mask, vocabulary.decode)
    monkeypatch.setattr("verl_credit.credit.planning.token_text._TOKENS_AT_ONCE", 2 * ids.shape[1] + 2)
    assert torch.equal(planning_mask(ids, mask, vocabulary.decode), whole)


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
    planning_mask(ids, mask, vocabulary.decode)
    assert vocabulary.asked == [[0, 1, 2, 3]]


def test_nothing_to_look_at():
    def decode(ids):
        raise AssertionError(f"asked for {ids}")

    for shape in ((0, 5), (3, 0), (2, 4)):
        planning = planning_mask(torch.zeros(shape, dtype=torch.long), torch.zeros(shape), decode)
        assert planning.shape == shape and not planning.any()
        assert set(coverage(planning, torch.zeros(shape)).values()) == {0}


def test_coverage_reads_policy_tokens_only():
    planning = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    assert coverage(planning, mask) == {"planning/token_share": 2 / 5, "planning/rows_with": 1 / 2}
    nan = torch.where(mask.bool(), planning.float(), float("nan"))
    assert coverage(nan, mask) == coverage(planning, mask)
    with pytest.raises(ValueError, match="planning_B_T has shape"):
        coverage(planning[:1], mask)


IDS = torch.tensor([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"mask_B_T": torch.ones(1, 2)}, ValueError, "mask_B_T has shape"),
        ({"mask_B_T": torch.tensor([[1, 0], [2, 0]])}, ValueError, "mask_B_T is not a mask: row 1"),
        ({"token_ids_B_T": IDS[0], "mask_B_T": IDS[0] < 9}, ValueError, "token_ids_B_T has shape"),
        ({"token_ids_B_T": IDS.float()}, TypeError, "token_ids_B_T has dtype torch.float32"),
        ({"token_ids_B_T": torch.tensor([[0, 1], [2, -4]])}, ValueError, "row 1, .* position 1: id -4"),
        ({"decode": lambda ids: ["a"]}, ValueError, "decode returned 1 pieces for 4 ids"),
        ({"decode": lambda ids: [None] * 4}, TypeError, "decode returned None for id 0; expected a str"),
        ({"decode": lambda ids: ["a", "Ġlet", "b", "c"]}, ValueError, "decode returned 'Ġlet'"),
        ({"grams": "a,a"}, ValueError, "algorithm.strategic_grams"),
    ],
)
def test_bad_arguments_are_named(wrong, error, message):
    right = {"token_ids_B_T": IDS, "mask_B_T": torch.ones(2, 2), "decode": lambda ids: ["a", " b", "c", " d"]}
    with pytest.raises(error, match=message):
        planning_mask(**right | wrong)


def test_a_space_may_be_long():
    space = "\n " * 50_000
    assert marks(["let", " me", space, "think", space, "let", space, "it"]) == ["11110000"]
    assert marks(["that", space, "s", space, "not", space, "so"]) == ["0000000"]


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
    assert parse_grams(STRATEGIC_GRAMS) == STRATEGIC_GRAMS


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("", ValueError, "algorithm.strategic_grams='': entry 0 is ''"),
        ("let me think,", ValueError, "entry 1 is ''"),
        ("let me, ,think", ValueError, "entry 1 is ' '"),
        ('["let me", "..."]', ValueError, r"entry 1 is '\.\.\.'; expected a phrase of words"),
        ("[]", ValueError, r"algorithm.strategic_grams='\[\]' holds no gram"),
        ([], ValueError, r"algorithm.strategic_grams=\[\] holds no gram"),
        ('["let me"', ValueError, "algorithm.strategic_grams='.*' is not a JSON list"),
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
