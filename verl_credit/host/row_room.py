"""Tokens that a micro-batch has to hold at the least: the longest row and the answers scored with it."""

from __future__ import annotations

SCORED_ANSWER = 32  # tokens kept free for the pseudo-answer behind the longest context
SHORT_ANSWER = 8  # of the answer tag and a short answer, behind every context


def least_update_tokens(row: int) -> int:
    """``row``: data.max_prompt_length + data.max_response_length."""
    return row + SCORED_ANSWER


def least_log_prob_tokens(row: int, turns: int) -> int:
    """Where answers ride behind their row: one of them for each of ``turns`` contexts."""
    return row + max(SCORED_ANSWER, turns * SHORT_ANSWER)
