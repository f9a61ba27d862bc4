"""What differs between releases of verl, each with its release; `make contacts VERL=PATH` names what another one changes.

The tests run with 0.9.1. What a default argument or an import that all of them have settles stands where it is used.
"""

from __future__ import annotations

import logging

from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

# 0.9.1 appends "context" messages, 0.9.0 and the development version of August 2026 "non-assistant" ones.
MERGE_TOKENS, MERGE_MESSAGES = (
    ("_merge_context_token_ids", "ct_merge_context_msg")
    if hasattr(ContinuousTokenBuilder, "_merge_context_token_ids")
    else ("_merge_non_assistant_token_ids", "ct_merge_non_assistant_msg")
)
FAILED = "Error executing tool"
"""verl's observation begins so when a tool raised."""
BAD_JSON = "Invalid JSON in arguments for"
"""verl's observation begins so when a call cannot be parsed."""


def quiet_separate_async() -> None:
    """0.9.1: with hybrid_engine=false verl logs a line with an argument that its logger does not take (``flush``)."""
    from verl.trainer.ppo.v1 import trainer_separate_async

    trainer_separate_async.logger.setLevel(logging.WARNING)
