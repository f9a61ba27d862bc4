"""verl's FSDP engine with the project's log-probs and entropies where flash-attn's loss does not run.

verl's own without it loop over tokens in Python, and its entropy in chunks recompiles for every number of tokens until
Dynamo gives up. Both are made in `prepare_model_outputs`, which is overridden here: every forward of the actor and of the
reference passes through it, for `old_log_probs`, for the reference's, and for the update.
"""

from __future__ import annotations

import os

import torch
import verl.utils.torch_functional as verl_F
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_credit.log_probs.chunks import entropy_from_logits, log_probs_and_entropy, log_probs_from_logits
from verl_credit.log_probs.path import FLASH, LOOP, OURS, log_prob_path, said

WANT_LOGITS = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")
"""What a batch can ask for that needs verl's scaled logits. verl's v1 trainer asks for it in distillation only."""
SWITCH = "VERL_DISABLE_FLASH_ATTN_CE"


def no_flash_loss() -> str:
    """Why flash-attn's loss does not run in this process; empty where it does."""
    if get_device_name() != "cuda":
        return f"device {get_device_name()}"
    if not verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        return "no flash-attn"
    return f"{SWITCH}=1" if os.environ.get(SWITCH, "0") == "1" else ""


class LogProbEngine:
    """Mixed in before `FSDPEngineWithLMHead`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.engine_config.entropy_from_logits_with_chunking:
            # Read where flash-attn's loss runs. verl's is wrapped in torch.compile by default.
            self.compute_entropy_from_logits = entropy_from_logits

    def log_probs_said(self, *, distills: bool = False) -> str:
        """One line: what makes the log-probs in this process, why, and what it holds."""
        path = log_prob_path(
            flash=not no_flash_loss(), fused=bool(self.model_config.use_fused_kernels), distills=distills
        )
        vocabulary = self.model_config.hf_config.get_text_config().vocab_size
        line = said(path, vocabulary, get_device_name(), no_flash_loss())
        if path in (FLASH, LOOP):
            config = self.engine_config
            chunked = f"the project's own, {config.entropy_from_logits_chunk_size} tokens at a time"
            whole = f"verl's, {'compiled' if config.use_torch_compile else 'over all tokens at once'}"
            line += f"; entropies: {chunked if config.entropy_from_logits_with_chunking else whole}"
        return line

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        def asked(key: str, default: bool = False) -> bool:
            return tu.get_non_tensor_data(data=micro_batch, key=key, default=default)

        path = log_prob_path(
            flash=not no_flash_loss(),
            fused=asked("use_fused_kernels"),
            distills=any(map(asked, WANT_LOGITS)),
        )
        if path != OURS:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        offsets = micro_batch["input_ids"].offsets()
        packed = asked("use_remove_padding", True)
        logits, temperature = (_packed if packed else _unpadded)(output.logits, output_args, offsets)
        # Nothing else reads the logits, so that their gradient may take their place.
        given = (logits, output_args["input_ids_rmpad_rolled"], temperature)
        if asked("calculate_entropy"):
            log_prob, entropy = log_probs_and_entropy(*given, inplace_backward=True)
            found = {"log_probs": log_prob, "entropy": entropy}
        else:
            found = {"log_probs": log_probs_from_logits(*given, inplace_backward=True)}
        if packed:  # over several ranks a sequence, or padded to a round length
            pad = output_args["pad_size"]
            found = {name: self._gather_and_unpad_packed(value, pad) for name, value in found.items()}
        return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in found.items()}


def _packed(logits_1_T_V, output_args: dict, offsets) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits, temperature) of one stream; no temperature where it is 1."""
    temperature = None if output_args.get("temperature_is_one") else output_args["temperature_rmpad"]
    return _whole(logits_1_T_V).squeeze(0), temperature


def _unpadded(logits_B_T_V, output_args: dict, offsets) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same of padded rows, one behind the other without their padding."""
    lengths = offsets.diff()
    rows = [row[:n] for row, n in zip(_whole(logits_B_T_V), lengths.tolist(), strict=True)]
    temperature = None if output_args.get("temperature_is_one") else output_args["temperature"]
    return torch.cat(rows), None if temperature is None else temperature.repeat_interleave(lengths)


def _whole(logits: torch.Tensor) -> torch.Tensor:
    """Tensor parallel engines shard the vocabulary."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
