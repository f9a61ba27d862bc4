"""Scorer ``server``: a context, the answer behind it and the token that the server draws have to fit its longest sequence.

    context + answer + 1 <= actor_rollout_ref.rollout.max_model_len

verl's vLLM server raises for what is longer. Before the start the longest context is the row that the length limits
allow; in a rollout every request is looked at before it is sent. With max_model_len=null the engine takes all positions
of the model, and refuses by itself what is beyond them.
"""

from __future__ import annotations

from verl_credit.config.resolved import Config

MODEL_LEN = "actor_rollout_ref.rollout.max_model_len"
DRAWN = 1  # a server that only scores draws a token all the same


def does_not_fit(context: int, answer: int, max_model_len: int | None) -> str:
    """Why a request of so many tokens would be refused; "" where it fits."""
    needed = context + answer + DRAWN
    if max_model_len is None or needed <= max_model_len:
        return ""
    return (
        f"{MODEL_LEN}={max_model_len} cannot hold a context of {context} tokens, an answer of {answer} and the one that is "
        f"drawn: {needed}"
    )


def longest(config: Config) -> int | None:
    """``rollout.max_model_len``."""
    return config.actor_rollout_ref.rollout.get("max_model_len")
