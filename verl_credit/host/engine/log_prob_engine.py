"""verl's FSDP engine with the project's log-probs and entropies when flash-attn's loss does not run.

Without that loss verl loops over tokens in Python, and its chunked entropy recompiles for every number of tokens until
Dynamo gives up. verl computes both in `prepare_model_outputs`, therefore that method is overridden.
"""

from __future__ import annotations

import os

import torch
import verl.utils.torch_functional as verl_F
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_credit.policy.log_probs import (
    FLASH,
    LOOP,
    OURS,
    describe,
    entropy_from_logits,
    log_prob_path,
    token_values,
)

WANT_LOGITS = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")
"""Options of a batch that need verl's scaled logits. verl's v1 trainer sets them only for distillation."""
SWITCH = "VERL_DISABLE_FLASH_ATTN_CE"


def option(batch, key: str, default=False):
    """Returns the value that verl's trainer has set for a batch."""
    return tu.get_non_tensor_data(data=batch, key=key, default=default)


def no_flash_loss() -> str:
    """The reason why flash-attn's loss does not run in this process; "" when it does."""
    if get_device_name() != "cuda":
        return f"device {get_device_name()}"
    if not verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        return "no flash-attn"
    return f"{SWITCH}=1" if os.environ.get(SWITCH, "0") == "1" else ""


class LogProbEngine:
    """This mixin stands before `FSDPEngineWithLMHead`, for every forward of the actor and of the reference."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.engine_config.entropy_from_logits_with_chunking:
            # Used with flash-attn's loss, in place of verl's function, which is wrapped in torch.compile by default.
            self.compute_entropy_from_logits = entropy_from_logits

    def describe_log_probs(self, *, distills: bool = False) -> str:
        """Returns one line: which code computes the log-probs in this process, why, and its memory."""
        path = self.usual_path(distills=distills)
        vocabulary = self.model_config.hf_config.get_text_config().vocab_size
        line = describe(path, vocabulary, get_device_name(), no_flash_loss())
        if path in (FLASH, LOOP):
            config = self.engine_config
            chunked = f"the project's own, {config.entropy_from_logits_chunk_size} tokens at a time"
            whole = f"verl's, {'compiled' if config.use_torch_compile else 'over all tokens at once'}"
            line += f"; entropies: {chunked if config.entropy_from_logits_with_chunking else whole}"
        return line

    def usual_path(self, *, distills: bool = False) -> str:
        """The code that computes the log-probs in this process."""
        fused = bool(self.model_config.use_fused_kernels)
        return log_prob_path(flash=not no_flash_loss(), fused=fused, distills=distills)

    def log_prob_path(self, micro_batch) -> str:
        """The code that computes the log-probs of this micro-batch (`log_probs.path`)."""
        distills = any(option(micro_batch, key) for key in WANT_LOGITS)
        fused = option(micro_batch, "use_fused_kernels")
        return log_prob_path(flash=not no_flash_loss(), fused=fused, distills=distills)

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        if self.log_prob_path(micro_batch) != OURS:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        offsets = micro_batch["input_ids"].offsets()
        packed = option(micro_batch, "use_remove_padding", True)
        logits, temperature = (_packed if packed else _unpadded)(output.logits, output_args, offsets)
        values = token_values(
            logits,
            output_args["input_ids_rmpad_rolled"],
            temperature,
            entropy=option(micro_batch, "calculate_entropy"),
            inplace_backward=True,  # nothing else reads the logits, so the gradient may overwrite them
        )
        if packed:  # gather sequence-parallel ranks, and remove the padding to a round length
            pad = output_args["pad_size"]
            values = {name: self._gather_and_unpad_packed(value, pad) for name, value in values.items()}
        return {
            name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in values.items()
        }


def _packed(logits_1_T_V, output_args: dict, offsets) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits, temperature) of one stream; the temperature is None when it is 1."""
    temperature = None if output_args.get("temperature_is_one") else output_args["temperature_rmpad"]
    return whole_vocabulary(logits_1_T_V).squeeze(0), temperature


def _unpadded(logits_B_T_V, output_args: dict, offsets) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same for padded rows, concatenated without their padding."""
    lengths = offsets.diff()
    rows = [row[:n] for row, n in zip(whole_vocabulary(logits_B_T_V), lengths.tolist(), strict=True)]
    temperature = None if output_args.get("temperature_is_one") else output_args["temperature"]
    return torch.cat(rows), None if temperature is None else temperature.repeat_interleave(lengths)


def whole_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """The logits over the whole vocabulary, which tensor-parallel engines shard."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
