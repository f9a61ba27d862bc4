"""The engines that verl's workers find in its registry: verl's FSDP engine with our attention, branches and log-probs.

On a CPU the rollouts of a prompt are one packed row, so that their prompt is computed once. A GRPO micro-batch holds several
rollouts of a prompt. A token attends to the same tokens in such a row, so its log-prob and its gradient are the same, up to
rounding (`policy/packed.py`). Logits are made for response tokens alone.
"""

import dataclasses
import inspect

import torch
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from verl_credit.config.log_prob_path import OURS
from verl_credit.host.engine.log_prob_engine import BranchEngine, LogProbEngine, option, whole_vocabulary
from verl_credit.names import SCORE_BRANCHES
from verl_credit.policy.attention.pack import PACK, pack_rows
from verl_credit.policy.log_probs import token_values
from verl_credit.policy.packed import Reads, groups_of, reads

SHARED = "shared_prompts"
COMPUTED = "actor/computed_tokens_share"
"""Metric of an update: tokens that the model computed, as a share of the tokens of the rows; the mean of micro-batches."""


class SharedPromptEngine:
    """A mixin before `BranchEngine`.

    Outputs have verl's shape: nested over whole rows. The values at a prompt's own tokens, which verl does not read, are 0
    where rows share prompts. A micro-batch is computed as before if its rows share no prompt or have branches.
    """

    def describe_log_probs(self, *, distills: bool = False) -> str:
        line = super().describe_log_probs(distills=distills)
        if self.usual_path(distills=distills) != OURS:
            return line
        reason = self._cannot_share
        return f"{line}; a prompt's rollouts {f'have it each ({reason})' if reason else 'share it within a micro-batch'}"

    def forward_step(self, micro_batch, loss_function, forward_only):
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if not forward_only:
            output["metrics"][COMPUTED] = self._computed_share
        return loss, output

    def prepare_model_inputs(self, micro_batch):
        self._computed_share = 1.0
        if not self._shares(micro_batch):
            return super().prepare_model_inputs(micro_batch)
        prompts, responses = (micro_batch[name].unbind() for name in ("prompts", "responses"))
        ids = [prompt.tolist() for prompt in prompts]
        order = sorted(range(len(ids)), key=lambda row: ids.index(ids[row]))  # neighbours: rows of one prompt
        prompts, responses = [prompts[row] for row in order], [responses[row] for row in order]
        members = groups_of(prompts, responses)
        read = reads(
            members, prompts, responses, vocabulary=self.model_config.hf_config.get_text_config().vocab_size
        )
        pack = pack_rows([one.trunk for one in members], [one.shape for one in members])
        row_ids, stream = micro_batch["input_ids"], torch.cat([one.stream for one in members])
        self._computed_share = len(stream) / len(row_ids.values())
        model_inputs = {
            "input_ids": stream[None],
            "attention_mask": None,
            "position_ids": pack.position_ids()[None].to(stream.device),
            "logits_to_keep": read.place_P,
            PACK: pack,
        }
        ends = row_ids.offsets()[1:].tolist()
        slots = [
            torch.arange(ends[row] - 1 - len(response), ends[row] - 1)
            for row, response in zip(order, responses, strict=True)
        ]
        return model_inputs, {SHARED: (read, torch.cat(slots).to(stream.device))}

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        if SHARED not in output_args:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        read: Reads
        read, slot_N = output_args[SHARED]
        logits_P_V = whole_vocabulary(output.logits).squeeze(0)
        temperature = _one_temperature(micro_batch)
        values = token_values(
            logits_P_V,
            read.label_P,
            None if temperature == 1 else torch.full_like(read.label_P, temperature, dtype=torch.float32),
            entropy=option(micro_batch, "calculate_entropy"),
            inplace_backward=True,
        )
        offsets = micro_batch["input_ids"].offsets()
        tokens = micro_batch["input_ids"].values().shape[0]
        return {
            name: torch.nested.nested_tensor_from_jagged(
                value_P.new_zeros(tokens).index_copy(0, slot_N, value_P[read.pair_N]), offsets
            )
            for name, value_P in values.items()
        }

    @property
    def _cannot_share(self) -> str:
        """The reason why this engine's micro-batches cannot share prompts; "" when they can; the proof changes it."""
        if not self.packs:
            return f"attn_implementation={self.module_attention}"
        if not self.branches:
            return "Gated-DeltaNet layers"
        if self.pad_to_length:
            return "pad_to_length"
        base = self.module.get_base_model() if hasattr(self.module, "get_base_model") else self.module
        if "logits_to_keep" not in inspect.signature(base.forward).parameters:
            return f"{type(base).__name__} makes all logits"
        return ""

    def _shares(self, micro_batch) -> bool:
        if (
            self._cannot_share
            or option(micro_batch, SCORE_BRANCHES)
            or not option(micro_batch, "use_remove_padding", True)
            or self.log_prob_path(micro_batch) != OURS
            or "routed_experts" in micro_batch  # verl has them for every token of every row
            or extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", []))
            or not all(
                name in micro_batch and micro_batch[name].is_nested for name in ("prompts", "responses")
            )
            or _one_temperature(micro_batch) is None
        ):
            return False
        prompts = [tuple(prompt.tolist()) for prompt in micro_batch["prompts"].unbind()]
        return len(set(prompts)) < len(prompts)


def _one_temperature(micro_batch) -> float | None:
    """The temperature of all rows; None where they differ."""
    temperature = micro_batch["temperature"]
    if not isinstance(temperature, torch.Tensor):
        return float(temperature)
    return float(temperature.flatten()[0]) if bool((temperature == temperature.flatten()[0]).all()) else None


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda"], vendor=["nvidia"]
)
class CreditFSDPEngineWithLMHead(BranchEngine, LogProbEngine, FSDPEngineWithLMHead):
    """verl registers its own engine for the device without a vendor, and looks for device and vendor first."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])
class CPUFSDPEngineWithLMHead(SharedPromptEngine, BranchEngine, LogProbEngine, FSDPEngineWithLMHead):
    """FSDP2 without parameter offloading, since the parameters are in main memory already.

    verl gives a forward-only model (the reference policy) `CPUOffloadPolicy(pin_memory=True)`, and pinning needs an
    accelerator's driver; therefore the module is built as if it were trained. FSDP1 is not registered, because it
    broadcasts module states through an accelerator.
    """

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        config = self.engine_config
        if config.offload_policy:
            raise ValueError(
                "fsdp_config.offload_policy=True pins memory for an accelerator: use False on the CPU"
            )
        self.engine_config = dataclasses.replace(config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config
