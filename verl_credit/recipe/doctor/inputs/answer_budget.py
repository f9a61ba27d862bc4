"""Checks before the start that the data's longest answers fit beside the longest row; else a step would end the run.

With dynamic batching verl refuses a row that is longer than the forward's budget. On ``old_log_probs`` the answers
are appended to their row; with the scorers ``rows`` and ``server`` each answer has its own row or request:

    tokens = prompt + response + contexts x sum over gold aliases of (header, prefix, template up to the answer's end)

with contexts = search.max_searches + 1. The length limits give the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omegaconf import DictConfig

from verl_credit.config.fit import Place, longest_row
from verl_credit.config.keys import AUTO
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import PreflightError
from verl_credit.recipe.doctor.inputs.data import Row
from verl_credit.turns.requests import (
    AnswerWriter,
    PseudoAnswer,
    aliases_that_count,
    assistant_header,
    auto_template,
)
from verl_credit.turns.reward.qa import stated_form
from verl_credit.turns.scorers import SCORERS


def answers_fit(
    config: DictConfig, settings: CreditSettings, place: Place, tokenizer, rows: Iterable[Row]
) -> str:
    """Returns a sentence with the most tokens that the answers of these rows need.

    Raises PreflightError with the row that needs most and the budget that it needs, and for a tokenizer that cannot write
    the answers.
    """
    (key, budget, room, contexts), row, model = place, longest_row(config), config.actor_rollout_ref.model
    try:
        where, tokens, n_golds = worst_row(tokenizer, settings, rows, room // contexts)
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"actor_rollout_ref.model.path={model.path}: the gold answers cannot be written with the tokenizer of "
            f"{model.get('tokenizer_path') or model.path}: {error}"
        ) from error
    needed = contexts * tokens
    golds = "gold answer" if n_golds == 1 else f"{n_golds} gold answers"
    product = f"{contexts} x {tokens} tokens (contexts x the {golds} of {where})"
    if needed > room:
        fewer = ", or algorithm.info_gain_aliases=first" if n_golds > 1 else ""
        raise PreflightError(
            f"{key}={budget} cannot hold the longest row and its answers: data.max_prompt_length + "
            f"data.max_response_length = {row}, and {product} = {needed}. Set it to {budget + needed - room} or more{fewer}"
        )
    return f"the longest answers of a row: {product} = {needed}; {key}={budget} has room for {room}"


def worst_row(
    tokenizer, settings: CreditSettings, rows: Iterable[Row], enough: int = 0
) -> tuple[str, int, int]:
    """Returns (where, tokens after one context, number of gold answers) for the row that needs most.

    Rows are tried longest text first, until no remaining row can exceed the maximum so far (a token has a byte at least) or
    ``enough``: where all rows surely fit, the row with the longest text is returned.
    """
    counter = _Counter(tokenizer, settings)
    texts = []
    for where, prompt, truth in rows:
        golds = aliases_that_count(truth, settings.algorithm.info_gain_aliases)
        template = settings.algorithm.info_gain_template
        if template == AUTO:
            template = auto_template(stated_form(truth), lambda prompt=prompt: str(prompt))
        appended = SCORERS[settings.algorithm.info_gain_scorer].rides
        for together in [golds] if appended else [[gold] for gold in golds]:
            texts.append((counter.at_most(together, template), where, together, template))
    worst = ("", -1, 0)
    for most, where, golds, template in sorted(texts, key=lambda entry: -entry[0]):
        if most <= (max(worst[1], enough) if worst[0] else 0):
            break
        tokens = counter.tokens(golds, template)
        if tokens > worst[1]:
            worst = (where, tokens, len(golds))
    return worst


class _Counter:
    """Counts the tokens that the answers of a row add to one of its contexts."""

    def __init__(self, tokenizer, settings: CreditSettings):
        self.writer = AnswerWriter(tokenizer, settings)
        header = assistant_header(tokenizer, settings.chat_template_kwargs)
        self.end = header  # written after every context that does not end at a call
        self.beside = 2 * len(header) + 1  # header written, tail written again, the token before
        self.places = (False, True) if self.writer.header else (False,)

    def at_most(self, golds: Sequence[str], template: str) -> int:
        around = self.beside + len((self.writer.prefix + template).encode())
        return sum(around + len(gold.encode()) for gold in golds)

    def tokens(self, golds: Sequence[str], template: str) -> int:
        return max(sum(self._one(gold, template, after_turn) for gold in golds) for after_turn in self.places)

    def _one(self, gold: str, template: str, after_turn: bool) -> int:
        written = self.writer.prefix_at(self.end, after_turn) + template
        _, answer = self.writer.write(self.writer.tail(self.end), gold, written, after_turn)
        return branch_tokens(answer)


def branch_tokens(answer: PseudoAnswer) -> int:
    """The tokens of an answer's branch end with the last gold token; at least one precedes the first gold token."""
    return answer.gold_end + (answer.gold_start == 0)
