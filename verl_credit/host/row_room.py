"""Tokens that must have room for the longest row and the answers that are scored with it: in a micro-batch of log-probs, and
in a sequence of the rollout engine."""

from __future__ import annotations

SHORT_ANSWER = 8  # of the answer tag and a short answer, behind every context


def least_log_prob_tokens(row: int, contexts: int) -> int:
    """``row``: data.max_prompt_length + data.max_response_length. Answers ride behind it, one for each context."""
    return row + contexts * SHORT_ANSWER


SERVED_ANSWER = (
    256  # left for an answer, with its header, prefix and template, that the rollout server scores
)


def engine_tokens(row: int, served: bool) -> int:
    """``rollout.max_model_len=auto``: the longest sequence that is sent to the engine, and one token that it writes.

    ``served``: the rollout server scores answers behind the row (info_gain_scorer=server).
    """
    return row + served * (SERVED_ANSWER + 1)
