"""Calls of tools in the text of a turn: what a parser of ours reads, and how many calls a turn shows, read or not.

A parser leaves out a call that it cannot read and says nothing. The agent loop counts the calls that a turn shows, so
that a broken call is a mistake of the policy in every format.
"""

from verl_credit.turns.rollout.calls.llama3 import read_llama3
from verl_credit.turns.rollout.calls.marks import marked
from verl_credit.turns.rollout.calls.mistral import read_mistral
from verl_credit.turns.rollout.calls.turn import Call, TurnCalls

NO_TOOL = "hermes"
"""The format of a run whose policy calls no tool: verl makes a parser all the same."""
PARALLEL_CALLS = 4
"""``max_parallel_calls=auto``, but for templates that take one call a message."""
READERS = {"llama3": read_llama3, "mistral": read_mistral}
"""Our readers by ``multi_turn.format``, for the families that no parser of verl 0.9.1 reads."""


def shown_calls(text: str, form: str) -> tuple[int, int]:
    """(calls that the turn begins, calls that it also ends) in this format, and in Hermes' tags, in which any policy may
    write a call that the run does not read."""
    if (reader := READERS.get(form)) is None:
        return marked(text, form)
    own, (opened, closed) = reader(text), marked(text, NO_TOOL)
    return own.opened + opened, own.closed + closed


__all__ = ["NO_TOOL", "PARALLEL_CALLS", "READERS", "Call", "TurnCalls", "shown_calls"]
