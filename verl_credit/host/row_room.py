"""Tokens that a micro-batch of log-probs has to hold at the least: the longest row and the answers scored with it."""

from __future__ import annotations

SHORT_ANSWER = 8  # of the answer tag and a short answer, behind every context


def least_log_prob_tokens(row: int, contexts: int) -> int:
    """``row``: data.max_prompt_length + data.max_response_length. Answers ride behind it, one for each context."""
    return row + contexts * SHORT_ANSWER
