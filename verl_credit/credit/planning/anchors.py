"""A second detector of planning: windows of words compared with example sentences by their embeddings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from verl_credit.credit.operator import Range
from verl_credit.credit.planning.token_text import BARRIER, Decode, Pieces, mark, policy_texts
from verl_credit.lazy import torch

Encode = Callable[[list[str]], "torch.Tensor"]

PLANNING_ANCHORS = (
    "Wait, something here is off, so I should look at it again.",
    "Let me think about how to approach this question.",
    "First I will find the person, and then I will look for the birthplace.",
    "Before I answer, I should verify this against another source.",
    "I am not sure that this is right; let me check it once more.",
    "That search did not help, so I will try a different query.",
    "The question has two parts, and I will take them one after the other.",
    "Maybe there is another way to get at this.",
    "What if the name refers to somebody else?",
    "I need to go back and reconsider my assumption.",
    "These two results contradict each other; which of them should I trust?",
    "On second thought, the earlier answer may have been correct.",
    "My plan is to compare the dates once I have both of them.",
    "It is better to break the problem into smaller steps.",
    "I still do not know enough to answer, so I should keep looking.",
    "Do I have everything that the question asks for?",
    "The important thing to notice is how these two facts are connected.",
    "Alternatively, I could begin from the other end.",
    "This approach leads nowhere, so let me start over.",
    "Now that I know this, the next step is to find out when it happened.",
)
EXECUTION_ANCHORS = (
    "The film was released in 1994 and directed by Frank Darabont.",
    "Twelve times seven is eighty-four.",
    "Paris is the capital of France.",
    "The document says that he was born in Vienna in 1862.",
    "Substituting x = 3 gives y = 11.",
    "The answer is 42.",
    "She won the prize in 1978 for her second novel.",
    "The river flows through four countries into the sea.",
    "The sum of the first two terms is 15.",
    "search query: population of Norway 2010",
    "The company was founded by two brothers in Ohio.",
    "According to the article, the bridge is 300 metres long.",
    "Therefore the area equals 24 square centimetres.",
    "He played for the club from 2003 to 2009.",
    "The song was written by the band's bass player.",
)


def planning_mask_by_anchors(
    token_ids_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    decode: Decode | Pieces,
    encode: Encode,
    *,
    threshold: float = 0.02,
    window: int = 12,
    stride: int = 6,
    minimum: float = 0.25,
    planning_anchors: Sequence[str] = PLANNING_ANCHORS,
    execution_anchors: Sequence[str] = EXECUTION_ANCHORS,
    batch_size: int = 1024,
) -> torch.Tensor:
    """True for the policy's tokens in a window of words that reads like planning; bool B x T.

        planning(w)  iff  p(w) > e(w) + threshold  and  p(w) > minimum,
        p(w), e(w) = largest cosine of w with a planning, an execution anchor

    Windows of `window` words begin every `stride` words of a run of consecutive policy tokens, until one reaches the
    run's end; the last may be shorter, and a run of fewer words is one window. Words are separated by whitespace. All
    tokens from the first to the last character of a planning window are marked. Windows overlap; one planning window
    is enough.

    `encode(texts)` returns a float tensor texts x D; vectors may have any length, and a vector of zeros resembles
    nothing. It gets each distinct text (words joined by single spaces) once, at most `batch_size` at a time, short ones
    first, so its input does not depend on the order or the repetition of rows. `decode` as in `planning_mask`.
    Shapes: token_ids_B_T integers (anything where the mask is 0), mask_B_T 0/1. Cosines in float64.
    Raises TypeError or ValueError that names the argument and the value.
    Source: SEPA's second detector (its windows, strides and thresholds; the anchor sentences are our own).
    """
    for name, value, accepted in (
        ("window", window, Range(1)),
        ("stride", stride, Range(1, window, high_allowed=True)),  # a longer one leaves words in no window
        ("batch_size", batch_size, Range(1)),
        ("threshold", threshold, Range(-2.0, 2.0, high_allowed=True)),  # as far as two cosines can differ
        ("minimum", minimum, Range(-2.0, 2.0, high_allowed=True)),
    ):
        accepted.check(name, value)
    planning_P_D = _anchors("planning_anchors", planning_anchors, encode)
    execution_E_D = _anchors("execution_anchors", execution_anchors, encode)
    pieces = decode if isinstance(decode, Pieces) else Pieces(decode)

    number: dict[str, int] = {}  # each distinct window text has one
    text_M: list[int] = []
    ends = [torch.zeros(2, 0, dtype=torch.long)]
    for chunk in policy_texts(token_ids_B_T, mask_B_T, pieces):
        begin_m, end_m = [], []
        for words in _words_of_runs(chunk.text):
            for start in range(0, max(1, len(words) - window + stride), stride):
                inside = words[start : start + window]
                begin_m.append(inside[0].start())
                end_m.append(inside[-1].end())
                text = " ".join(word.group() for word in inside)
                text_M.append(number.setdefault(text, len(number)))
        ends.append(torch.stack(chunk.tokens(begin_m, end_m)))

    is_planning_N = torch.zeros(len(number), dtype=torch.bool)
    texts = sorted(number, key=lambda text: (len(text), text))
    for top in range(0, len(texts), batch_size):
        batch = texts[top : top + batch_size]
        text_n_D = _encoded(batch, encode, planning_P_D.shape[1])
        planning_n = (text_n_D @ planning_P_D.T).amax(dim=1)
        execution_n = (text_n_D @ execution_E_D.T).amax(dim=1)
        is_planning_N[[number[text] for text in batch]] = (planning_n > execution_n + threshold) & (
            planning_n > minimum
        )
    marked_M = is_planning_N[torch.tensor(text_M, dtype=torch.long)]
    first_M, last_M = torch.cat(ends, dim=1)[:, marked_M]
    return mark(first_M, last_M, token_ids_B_T.shape).to(mask_B_T.device)


def _words_of_runs(text: str) -> Iterator[list[re.Match]]:
    """The words of each run of policy tokens that contains words."""
    word = re.compile(rf"[^\s{BARRIER}]+")
    for run in re.finditer(f"[^{BARRIER}]+", text):
        if words := list(word.finditer(text, *run.span())):
            yield words


def _anchors(name: str, anchors: Sequence[str], encode: Encode) -> torch.Tensor:
    if isinstance(anchors, str) or not all(isinstance(anchor, str) and anchor.strip() for anchor in anchors):
        raise ValueError(f"{name}={anchors!r}; expected a list of sentences, none of them blank")
    if not len(anchors):
        raise ValueError(f"{name} is empty; expected at least one sentence")
    return _encoded(list(anchors), encode)


def _encoded(texts: list[str], encode: Encode, width: int | None = None) -> torch.Tensor:
    """Unit vectors texts x D in float64 on the CPU."""
    with torch.no_grad():
        vectors_N_D = encode(texts)
    shape = tuple(vectors_N_D.shape)
    if len(shape) != 2 or shape[0] != len(texts) or width not in (None, shape[1]):
        raise ValueError(
            f"encode returned shape {shape} for {len(texts)} texts; expected ({len(texts)}, {width or 'D'})"
        )
    vectors_N_D = vectors_N_D.detach().to("cpu", torch.float64)
    bad_N = ~vectors_N_D.isfinite().all(dim=1)
    if bad_N.any():
        raise ValueError(f"encode returned a value that is not finite for {texts[int(bad_N.nonzero()[0])]!r}")
    return torch.nn.functional.normalize(vectors_N_D, dim=1)
