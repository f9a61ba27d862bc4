"""Planning by anchors, with an encoder that counts words."""

import random

import pytest
import torch

from verl_credit.credit.planning.anchors import EXECUTION_ANCHORS, PLANNING_ANCHORS, planning_mask_by_anchors
from verl_credit.credit.planning.planning import coverage

WORDS = ["plan", "check", "doubt", "paris", "river", "born"]
ANCHORS = {"planning_anchors": ["plan check", "doubt"], "execution_anchors": ["paris river", "born"]}


class BagOfWords:
    """Counts of WORDS; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, texts):
        self.asked.append(list(texts))
        return torch.tensor([[float(text.split().count(word)) for word in WORDS] for text in texts])


def tokens(rows, observed=()):
    """Rows of texts, a token per word with its leading space; words in `observed` have mask 0."""
    ids = {}
    rows = [[" " + word for word in row.split()] for row in rows]
    width = max(map(len, rows))
    id_B_T = torch.full((len(rows), width), -1)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, pieces in enumerate(rows):
        for column, piece in enumerate(pieces):
            id_B_T[row, column] = ids.setdefault(piece, len(ids))
            mask[row, column] = piece.strip() not in observed
    texts = list(ids)
    return id_B_T, mask, lambda wanted: [texts[i] for i in wanted]


def marks(*rows, observed=(), encode=None, **options):
    id_B_T, mask, decode = tokens(rows, observed)
    planning = planning_mask_by_anchors(id_B_T, mask, decode, encode or BagOfWords(), **ANCHORS | options)
    assert planning.dtype == torch.bool and planning.shape == id_B_T.shape
    assert not planning[~mask].any()
    return ["".join(str(int(bit)) for bit in planning[n, : len(row.split())]) for n, row in enumerate(rows)]


def test_a_window_reads_like_its_nearest_anchor():
    assert marks("plan check", "paris river", "doubt", "born", "x y") == ["11", "00", "1", "0", "00"]


def test_windows_overlap_and_are_mapped_to_tokens():
    row = "plan x x x doubt x paris river"
    # windows of 4 begin at words 0, 2 and 4: (plan x x x) (x x doubt x) (doubt x paris river)
    assert marks(row, window=4, stride=2) == ["11111100"]
    assert marks(row, window=4, stride=4) == ["11110000"]
    assert marks(row, window=8, stride=8, minimum=-1.0, threshold=-0.5) == ["11111111"]


def test_the_last_window_reaches_the_end():
    encode = BagOfWords()
    marks("a b c d e", "f g h", "i j k l", encode=encode, window=4, stride=2)
    assert encode.asked[2:] == [["c d e", "f g h", "a b c d", "i j k l"]]


def test_threshold_and_minimum_are_strict():
    tie = "doubt born"  # cosine 1/sqrt(2) with both
    assert marks(tie, threshold=0.0) == ["00"]
    assert marks(tie, threshold=-0.01) == ["11"]
    alone = "doubt"  # cosines 1 and 0
    assert marks(alone, threshold=1.0, minimum=0.0) == ["0"]
    assert marks(alone, threshold=0.99, minimum=1.0) == ["0"]
    assert marks(alone, threshold=0.99, minimum=0.99) == ["1"]
    nothing = "x y"  # a vector of zeros
    assert marks(nothing, threshold=-0.1, minimum=0.0) == ["00"]


def test_the_length_of_a_vector_does_not_matter():
    rng = random.Random(0)
    rows = [" ".join(rng.choices([*WORDS, "x"], k=20)) for _ in range(6)]
    scaled = lambda texts: BagOfWords()(texts) * 1e-3  # noqa: E731
    halves = lambda texts: BagOfWords()(texts).half()  # noqa: E731
    want = marks(*rows, window=5, stride=2)
    assert marks(*rows, window=5, stride=2, encode=scaled) == want
    assert marks(*rows, window=5, stride=2, encode=halves) == want


def oracle(words, *, window, stride, threshold=0.02, minimum=0.25):
    """One run of words, each a token."""

    def cosine(a, b):
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / ((sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5 or 1)

    def vector(text):
        return [text.split().count(word) for word in WORDS]

    marked, start = [False] * len(words), 0
    while words:
        mine = vector(" ".join(words[start : start + window]))
        best = {name: max(cosine(mine, vector(text)) for text in texts) for name, texts in ANCHORS.items()}
        if best["planning_anchors"] > max(best["execution_anchors"] + threshold, minimum):
            for t in range(start, min(start + window, len(words))):
                marked[t] = True
        if start + window >= len(words):
            break
        start += stride
    return "".join(str(int(bit)) for bit in marked)


@pytest.mark.parametrize("seed", range(6))
def test_oracle(seed):
    rng = random.Random(seed)
    shape = {"window": rng.randint(2, 12), "stride": rng.randint(1, 2)}
    rows = [" ".join(rng.choices([*WORDS, "x", "y", "OBS"], k=rng.randint(1, 40))) for _ in range(8)]
    got = marks(*rows, observed={"OBS"}, **shape)
    for row, text in enumerate(rows):
        turns = [turn.split() for turn in text.split("OBS")]
        assert got[row] == "0".join(oracle(turn, **shape) for turn in turns)
    assert "1" in "".join(got) and "0" in "".join(got)


def test_a_window_does_not_reach_over_an_observation():
    encode = BagOfWords()
    assert marks("plan x OBS doubt OBS born", observed={"OBS"}, encode=encode) == ["110100"]
    assert sorted(encode.asked[2]) == ["born", "doubt", "plan x"]


def test_each_distinct_text_is_encoded_once_in_batches():
    encode = BagOfWords()
    rows = ["plan x", "plan x", "plan  x", "doubt", "born x x", "y"]
    got = marks(*rows, encode=encode, batch_size=2)
    assert encode.asked[:2] == [ANCHORS["planning_anchors"], ANCHORS["execution_anchors"]]
    assert encode.asked[2:] == [["y", "doubt"], ["plan x", "born x x"]]
    assert got == ["11", "11", "11", "1", "000", "0"]
    other = BagOfWords()
    assert marks(*rows[::-1], encode=other, batch_size=2) == got[::-1]
    assert other.asked == encode.asked


def test_tokens_smaller_than_words():
    pieces = ["so", "\n", " pl", "an", " che", "ck", "", " ", "paris"]
    ids = torch.arange(len(pieces))[None]
    planning = planning_mask_by_anchors(
        ids, torch.ones_like(ids), lambda wanted: [pieces[i] for i in wanted], BagOfWords(), window=3, stride=3, **ANCHORS
    )  # fmt: skip
    assert planning[0].int().tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0]


def test_the_sentences():
    assert (len(set(PLANNING_ANCHORS)), len(set(EXECUTION_ANCHORS))) == (20, 15)
    ids, mask, decode = tokens([PLANNING_ANCHORS[0], EXECUTION_ANCHORS[0]])
    vocabulary = sorted({word for text in PLANNING_ANCHORS + EXECUTION_ANCHORS for word in text.split()})

    def encode(texts):
        return torch.tensor([[text.split().count(word) for word in vocabulary] for text in texts])

    planning = planning_mask_by_anchors(ids, mask, decode, encode)
    assert torch.equal(planning, mask & torch.tensor([[True], [False]]))
    assert coverage(planning, mask)["planning/rows_with"] == 0.5


def test_nothing_to_look_at():
    for shape in ((0, 4), (2, 0), (2, 3)):
        ids = torch.zeros(shape, dtype=torch.long)
        encode = BagOfWords()
        planning = planning_mask_by_anchors(ids, ids, lambda ids: [], encode)
        assert planning.shape == shape and not planning.any()
        assert len(encode.asked) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0: expected a whole number at least 1"),
        ({"window": 4, "stride": 5}, "stride=5: expected a whole number at least 1 and at most 4"),
        ({"stride": 0}, "stride=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"minimum": 25}, "minimum=25: expected a number at least -2 and at most 2"),
        ({"planning_anchors": []}, "planning_anchors is empty"),
        ({"execution_anchors": "born"}, "execution_anchors='born'; expected a list of sentences"),
        ({"execution_anchors": ["born", " "]}, "none of them blank"),
        ({"encode": lambda texts: torch.ones(len(texts))}, r"encode returned shape \(2,\) for 2 texts"),
        ({"encode": lambda texts: torch.ones(1, 3)}, r"shape \(1, 3\) for 2 texts; expected \(2, D\)"),
        ({"encode": lambda texts: torch.full((len(texts), 3), float("nan"))}, "not finite for 'plan check'"),
        ({"encode": lambda texts: torch.ones(len(texts), len(texts))}, r"shape \(1, 1\) for 1 texts; expected \(1, 2\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        marks("plan check", **options)
