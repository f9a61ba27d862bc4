"""Tokens behind the longest row for answers scored with it: in a micro-batch of log-probs, in the engine's sequence."""

from __future__ import annotations

SHORT_ANSWER = 8  # of the answer tag and a short answer, behind every context

MASKED_OBSERVATION = 24  # tokens of the shortest tool message with a placeholder, for the turn signal infopo


def least_log_prob_tokens(row: int, contexts: int) -> int:
    """``row``: data.max_prompt_length + data.max_response_length. Answers ride behind it, one for each context."""
    return row + contexts * SHORT_ANSWER


# Left for an answer, with its header, prefix and template, that the rollout server scores.
SERVED_ANSWER = 256


def engine_tokens(row: int, served: bool) -> int:
    """``rollout.max_model_len=auto``: the longest sequence that is sent to the engine, and one token that it writes.

    ``served``: the rollout server scores answers behind the row (info_gain_scorer=server).
    """
    return row + served * (SERVED_ANSWER + 1)
