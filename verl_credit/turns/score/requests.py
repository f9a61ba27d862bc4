"""The scores that a batch needs: contexts and the pseudo-answers (a short template around the gold answer) after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from verl_credit.config.keys import AUTO
from verl_credit.config.settings import CreditSettings
from verl_credit.lazy import torch
from verl_credit.turns.rollout.book import TurnBatch
from verl_credit.turns.rollout.header import answer_prefix, assistant_header
from verl_credit.turns.rollout.reward.golds import gold_answers
from verl_credit.turns.rollout.reward.qa import stated_form

ANSWER_TAG = "<answer>{answer}</answer>"
BOXED = "\\boxed{{answer}}"
LONGEST_TAIL = 32


@dataclass(frozen=True)
class Request:
    """A context and its answer: the first ``base`` tokens of a row's prompt and response, then ``answer``."""

    row: int
    column: int
    """0: the bare prompt; k: after tool turn k."""
    alias: int
    base: int
    answer: PseudoAnswer


def gain_requests(turns: TurnBatch, settings: CreditSettings, tokenizer) -> list[Request]:
    """Every valid row's bare prompt and the context after each of its tool turns, once per scored gold alias."""
    planner = RowPlanner(tokenizer, settings)
    requests = []
    for row in turns.valid_rows:
        ids = turns.prompt_ids[row], turns.response_ids[row], turns.turn_ids_B_T[row]
        requests += planner.requests(row, *ids, turns.ground_truths[row])
    return requests


def aliases_that_count(truth, aliases: str) -> list[str]:
    """The gold answers of a row that ``info_gain_aliases`` scores: the first, or every different one."""
    golds = gold_answers(truth)
    return golds[:1] if aliases == "first" else list(dict.fromkeys(golds))


class RowPlanner:
    """The requests of single rows; repeated answers are tokenised once."""

    def __init__(self, tokenizer, settings: CreditSettings):
        self.settings = settings
        self.writer = AnswerWriter(tokenizer, settings)
        self._write = lru_cache(maxsize=4096)(self.writer.write)
        self._template_of = lru_cache(maxsize=4096)(self.writer.template_of)

    def requests(
        self,
        row: int,
        prompt: Sequence[int],
        response: Sequence[int],
        turn_ids: Sequence[int] | torch.Tensor,
        truth,
    ) -> list[Request]:
        golds = aliases_that_count(truth, self.settings.algorithm.info_gain_aliases)
        ids, template = [*prompt, *response], self._template_of(tuple(prompt), stated_form(truth))
        requests = []
        for column, end in enumerate([0, *context_ends(turn_ids, self.settings.algorithm.info_gain_context)]):
            base = len(prompt) + end
            context = ids[max(0, base - self.writer.reads) : base]
            tail = self.writer.tail(context)
            written = self.writer.prefix_at(context, column > 0) + template
            for alias, gold in enumerate(golds):
                dropped, answer = self._write(tail, gold, written, column > 0)
                requests.append(Request(row, column, alias, base - dropped, answer))
        return requests


def context_ends(turn_ids: Sequence[int] | torch.Tensor, where: str) -> list[int]:
    """Exclusive end, in response tokens, of the context after each tool turn (all turns but the last).

    ``observation``: up to the first token of the next turn, including the observation and the assistant header.
    ``call``: up to the end of the turn's own tokens, before its observation (the released convention, which never
    measures the last retrieved result).
    """
    spans = turn_spans(turn_ids)
    if where == "observation":
        return [first for first, _ in spans[1:]]
    return [end for _, end in spans[:-1]]


def turn_spans(turn_ids: Sequence[int] | torch.Tensor) -> list[tuple[int, int]]:
    """[first, end) of each turn's own tokens, in response tokens."""
    first: dict[int, int] = {}
    ends: dict[int, int] = {}
    end = 0
    runs = torch.unique_consecutive(torch.as_tensor(turn_ids), return_counts=True)
    for turn, tokens in zip(*(column.tolist() for column in runs), strict=True):
        start, end = end, end + tokens
        if turn >= 0:
            first.setdefault(turn, start)
            ends[turn] = end
    return [(first[turn], ends[turn]) for turn in range(len(first))]


def score_table(
    requests: Sequence[Request], score_N: torch.Tensor, rows: int, columns: int, aliases: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score_B_K1, requested_B_K1): mean log-probs of the gold tokens, float64, combined over aliases.

        first   the first alias
        max     the best one
        mean    log of the mean over aliases of exp(score)

    One score that is not finite makes its context's score NaN.
    """
    if not requests:
        return torch.zeros(rows, columns, dtype=torch.float64), torch.zeros(rows, columns, dtype=torch.bool)
    n_alias = 1 + max(request.alias for request in requests)
    all_B_K1_A = torch.full((rows, columns, n_alias), -torch.inf, dtype=torch.float64)
    known_B_K1_A = torch.zeros(rows, columns, n_alias, dtype=torch.bool)
    row_N, column_N, alias_N = torch.tensor([(r.row, r.column, r.alias) for r in requests]).T
    all_B_K1_A[row_N, column_N, alias_N] = score_N.double()
    known_B_K1_A[row_N, column_N, alias_N] = True
    requested_B_K1 = known_B_K1_A.any(dim=2)
    failed_B_K1 = (known_B_K1_A & ~all_B_K1_A.isfinite()).any(dim=2)
    if aliases == "mean":
        joined_B_K1 = all_B_K1_A.logsumexp(dim=2) - known_B_K1_A.sum(dim=2).clamp(min=1).log()
    else:
        joined_B_K1 = all_B_K1_A.amax(dim=2)
    score_B_K1 = torch.where(requested_B_K1, joined_B_K1, 0.0)
    return torch.where(failed_B_K1, torch.nan, score_B_K1), requested_B_K1


def auto_template(form: str | None, prompt: Callable[[], str]) -> str:
    """The template of ``auto``: of the row's ``form``, else the template that the text of ``prompt()`` requests."""
    boxed = "\\boxed" in prompt() if form is None else form == "boxed"
    return BOXED if boxed else ANSWER_TAG


@dataclass(frozen=True)
class PseudoAnswer:
    """Token ids after a context, and the half-open span ``[gold_start, gold_end)`` of the gold answer among them."""

    token_ids: tuple[int, ...]
    gold_start: int
    gold_end: int


def pseudo_answer(tokenizer, gold: str, template: str = ANSWER_TAG, before: str = "") -> PseudoAnswer:
    """Tokenise the text ``before`` followed by ``template`` with ``gold``; the gold span is found by offsets.

    A token belongs to the gold span when its characters overlap the answer's, also when the tokenizer merges the
    answer's first or last character with the template's. Raises ValueError when the template lacks ``{answer}`` or the
    tokenizer cannot give offsets.
    """
    head, placeholder, rest = template.partition("{answer}")
    if not placeholder:
        raise ValueError(f"algorithm.info_gain_template is {template!r}: it must contain {{answer}}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("information gain needs a fast tokenizer (character offsets); this one has none")
    text = before + head + gold + rest
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    start = len(before) + len(head)
    end = start + len(gold)
    inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < end and b > start and b > a]
    if not inside:
        raise ValueError(f"gold answer {gold!r} has no token in {text!r}")
    return PseudoAnswer(tuple(encoded["input_ids"]), inside[0], inside[-1] + 1)


class AnswerWriter:
    """Writes pseudo-answers in the policy's tokens, which may merge with the text before them.

    A context ends with the assistant header. From its last special token on (``<|im_start|>``), header and answer are
    tokenised together. If the result begins with the header's tokens, as nearly always, the answer is appended to them;
    otherwise they are replaced.
    With ``info_gain_context=call`` contexts after a turn end at its call, without the header; it is then written with the
    arguments of the rollouts' chat template (``data.apply_chat_template_kwargs``).
    """

    def __init__(self, tokenizer, settings: CreditSettings):
        algorithm, self.tokenizer = settings.algorithm, tokenizer
        self.template, self.prefix = algorithm.info_gain_template, algorithm.info_gain_prefix
        if self.prefix == AUTO:  # `train` decides it before Ray, where the tokenizer is on that machine
            written = answer_prefix(tokenizer, settings.chat_template_kwargs)
            self.prefix = "" if written.strip() and written.strip() in self.template else written
        header = algorithm.info_gain_context == "call"
        self.header = assistant_header(tokenizer, settings.chat_template_kwargs) if header else []
        self._special = set(tokenizer.all_special_ids)
        self._end = lru_cache(maxsize=4096)(tokenizer.decode)
        self.reads = max(LONGEST_TAIL + 1, len(self.prefix.encode()))  # of a context, its last tokens

    def template_of(self, prompt_ids: tuple[int, ...], form: str | None = None) -> str:
        r"""The template for a row. ``auto`` takes the one of its form (``ground_truth.form``), as the reward does; without a
        form it takes ``\boxed{...}`` for a prompt that mentions it, else the answer tag."""
        if self.template != AUTO:
            return self.template
        return auto_template(form, lambda: self.tokenizer.decode(prompt_ids))

    def prefix_at(self, context_ids: Sequence[int], after_turn: bool) -> str:
        """The text between the context and the template. It is "" when the context, or the header after it, ends with the
        prefix: Qwen3's chat template writes the empty thought itself with enable_thinking=false."""
        if not self.prefix:
            return ""
        last = self.header if after_turn and self.header else context_ids[-len(self.prefix.encode()) :]
        # Most contexts end with the same two tokens, which rarely are the prefix's end.
        end = self._end(tuple(last[-2:]))
        if not ("\ufffd" in end or self.prefix.endswith(end) or end.endswith(self.prefix)):
            return self.prefix
        return "" if self.tokenizer.decode(last).endswith(self.prefix) else self.prefix

    def tail(self, context_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens after the context's last special token, if these are at most ``LONGEST_TAIL``; else ()."""
        for n, token in enumerate(reversed(context_ids[-LONGEST_TAIL - 1 :])):
            if token in self._special:
                return tuple(context_ids[len(context_ids) - n :])
        return ()

    def write(
        self, tail: tuple[int, ...], gold: str, template: str, after_turn: bool
    ) -> tuple[int, PseudoAnswer]:
        """(number of context tokens to replace, the answer after the rest). ``after_turn`` False: at the bare prompt."""
        header = self.header if after_turn else []
        last = self.tail(header) if header else tail
        before = self.tokenizer.decode(last) if last else ""
        if before and tuple(self.tokenizer(before, add_special_tokens=False)["input_ids"]) != tuple(last):
            # Tokenising the text would give other tokens. The context keeps its own; the answer starts a new token.
            last, before = (), ""
        joint, n = pseudo_answer(self.tokenizer, gold, template, before), len(last)
        appended = joint.token_ids[:n] == tuple(last) and joint.gold_start >= n
        kept = tuple(header if appended else header[: len(header) - n])
        known = n if appended else 0  # joint tokens that the context or the header already has
        shift = len(kept) - known
        answer = PseudoAnswer(
            kept + joint.token_ids[known:], joint.gold_start + shift, joint.gold_end + shift
        )
        return (0 if appended or header else n), answer
