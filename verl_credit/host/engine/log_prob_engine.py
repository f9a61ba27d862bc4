"""Mixins for verl's FSDP engine: log-probs where flash-attn's loss does not run, and attention with branches.

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

from verl_credit.config.log_prob_path import FLASH, LOOP, OURS, describe, log_prob_path
from verl_credit.errors import IntegrityError
from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.policy.attention.implementation import NAMES
from verl_credit.policy.attention.pack import PACK, pack_rows
from verl_credit.policy.delta_net import is_delta_net, keep_rows_apart
from verl_credit.policy.families import WITHOUT_OURS, family_of
from verl_credit.policy.log_probs import entropy_from_logits, token_values
from verl_credit.turns.score.branches import decode_branches

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
        path, config = self.usual_path(distills=distills), self.engine_config
        vocabulary = self.model_config.hf_config.get_text_config().vocab_size
        line = describe(path, vocabulary, get_device_name(), no_flash_loss())
        if path not in (FLASH, LOOP):
            return line
        entropies = f"verl's, {'compiled' if config.use_torch_compile else 'over all tokens at once'}"
        if config.entropy_from_logits_with_chunking:
            entropies = f"the project's own, {config.entropy_from_logits_chunk_size} tokens at a time"
        return f"{line}; entropies: {entropies}"

    def usual_path(self, *, distills: bool = False) -> str:
        """The code that computes the log-probs in this process."""
        fused = bool(self.model_config.use_fused_kernels)
        return log_prob_path(flash=not no_flash_loss(), fused=fused, distills=distills)

    def log_prob_path(self, micro_batch) -> str:
        """The code that computes the log-probs of this micro-batch."""
        distills = any(option(micro_batch, key) for key in WANT_LOGITS)
        fused = option(micro_batch, "use_fused_kernels")
        return log_prob_path(flash=not no_flash_loss(), fused=fused, distills=distills)

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        if self.log_prob_path(micro_batch) != OURS:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        offsets = micro_batch["input_ids"].offsets()
        packed, logits = option(micro_batch, "use_remove_padding", True), whole_vocabulary(output.logits)
        temperature = None
        if not output_args.get("temperature_is_one"):
            temperature = output_args.get("temperature_rmpad" if packed else "temperature")
        if packed:
            logits = logits.squeeze(0)
        else:  # padded rows: they are concatenated without their padding
            lengths = offsets.diff()
            logits = torch.cat([row[:n] for row, n in zip(logits, lengths.tolist(), strict=True)])
            temperature = None if temperature is None else temperature.repeat_interleave(lengths)
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


def whole_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """The logits over the whole vocabulary, which tensor-parallel engines shard."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


class BranchEngine:
    """A mixin before `FSDPEngineWithLMHead`.

    With one of our attention implementations every packed forward gets the places of its rows, so that no row sees
    another. With ``SCORE_BRANCHES`` on a forward-only batch, each row's branches are appended to it, and every output is
    cut back to its row afterwards, so that verl's outputs contain no branch tokens.
    """

    @property
    def packs(self) -> bool:
        return self.module_attention in NAMES

    @property
    def module_attention(self) -> str | None:
        return getattr(self.model_config.hf_config, "_attn_implementation", None)

    @property
    def branches(self) -> bool:
        """Whether answers can be appended to packed rows: a Gated-DeltaNet layer would need its state at their base."""
        return self.packs and not is_delta_net(self.model_config.hf_config)

    def initialize(self):
        config, attention = self.model_config.hf_config, self.module_attention
        refuse_model(config, attention, self.model_config.use_remove_padding)
        if self.packs and (vision := getattr(config, "vision_config", None)):
            vision._attn_implementation = "sdpa"  # verl's Qwen3.5 runs it on an empty image, without a pack
        try:
            super().initialize()
        except KeyError as error:  # transformers looks the name up in the module's own table
            if error.args != (attention,):
                raise
            why = f"{config.model_type} has a table of attention classes of its own, without attn_implementation={attention}"
            raise IntegrityError(f"{why}; {WITHOUT_OURS}") from error

    def _build_module(self):
        module = super()._build_module()
        if is_delta_net(self.model_config.hf_config):
            keep_rows_apart(module)
        return module

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        if not (forward_only and option(data, SCORE_BRANCHES)):
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        if not self.branches:  # they would see each other, or lack a state, unnoticed
            raise ValueError(
                f"algorithm.info_gain_scorer=branch cannot score {self.model_config.hf_config.model_type} with "
                f"attn_implementation={self.module_attention}: it needs {'|'.join(NAMES)} and no Gated-DeltaNet layers; "
                "use rows"
            )
        decoded = [decode_branches(row) for row in data[BRANCHES].unbind()]
        row_lengths = data["input_ids"].offsets().diff().tolist()
        with_branches = _with_branches(data, decoded)
        output = super().forward_backward_batch(with_branches, loss_function, forward_only=True)
        if output.get("model_output"):
            output["model_output"] = _cut(output["model_output"], row_lengths)
        return output

    def prepare_model_inputs(self, micro_batch):
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        if not self.packs:
            return model_inputs, output_args
        if not option(micro_batch, "use_remove_padding", True):
            raise ValueError(
                f"attn_implementation={self.module_attention} needs actor_rollout_ref.model.use_remove_padding=true"
            )
        lengths = micro_batch["input_ids"].offsets().diff().tolist()
        branches = [[] for _ in lengths]
        if option(micro_batch, SCORE_BRANCHES):
            branches = tu.get(micro_batch, BRANCHES)
        rows = [n - sum(tokens for _, tokens in row) for n, row in zip(lengths, branches, strict=True)]
        padding = model_inputs["input_ids"].shape[1] - sum(lengths)
        if padding:  # the packed length is rounded up, and its tail belongs to no row
            rows, branches = [*rows, padding], [*branches, []]
        pack = pack_rows(rows, branches)
        model_inputs[PACK] = pack
        if any(branches) and not output_args.get("temperature_is_one"):
            # Information gain does not depend on the sampling temperature: branches have 1.
            temperature = output_args["temperature_rmpad"].clone()
            for row in pack.rows:
                temperature[row.start + row.trunk : row.start + row.length] = 1.0
            output_args["temperature_rmpad"] = temperature
        return model_inputs, output_args


def refuse_model(hf_config, attention: str | None, packed: bool) -> None:
    """Refuses what the table of families calls wrong. `train` does so before Ray, where it can read the config.json."""
    if fault := family_of(hf_config).fault(attention, packed):
        raise IntegrityError(fault[1])


def nested(rows) -> torch.Tensor:
    """The tensors as rows of one tensor, as verl's engines take them."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _with_branches(data, decoded):
    """A shallow copy of the batch whose rows end with their branches. BRANCHES is (base, length) of each row's branches, and
    no tensor: reading a tensor would wait for the device once per row."""
    ids, positions = [], []
    rows = zip(data["input_ids"].unbind(), data["position_ids"].unbind(), decoded, strict=True)
    for row_ids, row_positions, (shape, tokens) in rows:
        ids.append(torch.cat([row_ids, tokens.to(row_ids)]))
        parts = [torch.arange(base, base + n).to(row_positions) for base, n in shape]
        positions.append(torch.cat([row_positions, *parts]))
    copy = data.copy()
    copy["input_ids"], copy["position_ids"] = nested(ids), nested(positions)
    tu.assign_non_tensor_stack(copy, BRANCHES, [shape for shape, _ in decoded])
    return copy


def _cut(model_output: dict, row_lengths: list[int]) -> dict:
    """The outputs of the rows alone, and the log-probs of the tokens after them as BRANCH_LOG_PROBS."""
    cut = {}
    for name, value in model_output.items():
        pairs = [*zip(value.unbind(), row_lengths, strict=True)]
        cut[name] = nested([row[:n] for row, n in pairs])
        if name == "log_probs":  # a row without branches has one 0, because nested tensors have no empty rows
            cut[BRANCH_LOG_PROBS] = nested(
                [row[n:] if len(row) > n else row.new_zeros(1) for row, n in pairs]
            )
    return cut
