"""A mixin for verl's FSDP engine: hidden states at chosen spans of the rows, read in the old_log_probs forward.

``HIDDEN_SPANS`` of a row is [first token, tokens] of each span, one after the other, at least one a row. Its
``HIDDEN_STATES`` are the spans' states, one after the other, because every output of verl's engine is a row of numbers.
``READ_HIDDEN`` is their layer, below 0; without it nothing is done.
"""

from __future__ import annotations

import torch

from verl_credit.host.engine.log_prob_engine import option
from verl_credit.names import HIDDEN_SPANS, HIDDEN_STATES, READ_HIDDEN
from verl_credit.policy.hidden import hidden_states, span_means

PLACES = "credit_places"
"""In ``output_args``: the place of every token of the rows in the packed row; absent where rows follow each other."""


class HiddenEngine:
    """This mixin stands before all others, so that its rows are those of the model's own forward."""

    def forward_step(self, micro_batch, loss_function, forward_only):
        layer = forward_only and option(micro_batch, READ_HIDDEN)
        if not layer:
            return super().forward_step(micro_batch, loss_function, forward_only)
        if self.ulysses_sequence_parallel_size > 1 or not option(micro_batch, "use_remove_padding", True):
            raise ValueError("hidden states are read from packed rows that one rank holds whole")
        with hidden_states(self.module, layer) as self._hidden:
            return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        values = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if not (hidden := self.__dict__.pop("_hidden", None)):
            return values
        (hidden_1_N_D,) = hidden
        spans, offsets = micro_batch[HIDDEN_SPANS], micro_batch["input_ids"].offsets()
        row_P = torch.repeat_interleave(spans.offsets().diff() // 2)
        first_P, tokens_P = spans.values().long().view(-1, 2).unbind(1)
        state_P_D = span_means(hidden_1_N_D[0], offsets[row_P] + first_P, tokens_P, output_args.get(PLACES))
        ends = spans.offsets() // 2 * state_P_D.shape[1]
        return values | {HIDDEN_STATES: torch.nested.nested_tensor_from_jagged(state_P_D.flatten(), ends)}
