"""verl's FSDP engine with our attention and, when log-probs are computed, branches after the rows."""

from __future__ import annotations

import torch

from verl_credit.host.engine.log_prob_engine import option
from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.policy.attention.implementation import NAMES
from verl_credit.policy.attention.pack import PACK, pack_rows
from verl_credit.turns.branches import decode_branches


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

    def initialize(self):
        if self.packs:
            refuse_model(self.model_config.hf_config)
        super().initialize()

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        if not (forward_only and option(data, SCORE_BRANCHES)):
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        self._check_can_branch(data)
        decoded = [decode_branches(row) for row in data[BRANCHES].unbind()]
        row_lengths = data["input_ids"].offsets().diff().tolist()
        with_branches = _with_branches(data, decoded)
        _check_budget(with_branches)
        output = super().forward_backward_batch(with_branches, loss_function, forward_only=True)
        if output.get("model_output"):
            output["model_output"] = _cut(output["model_output"], row_lengths)
        return output

    def prepare_model_inputs(self, micro_batch):
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        if not self.packs:
            return model_inputs, output_args
        if self.use_ulysses_sp:
            raise NotImplementedError(
                f"attn_implementation={self.module_attention} with ulysses_sequence_parallel_size="
                f"{self.ulysses_sequence_parallel_size}: set it to 1, or use flash_attention_2 and "
                "algorithm.info_gain_scorer=rows"
            )
        if not option(micro_batch, "use_remove_padding", True):
            raise ValueError(
                f"attn_implementation={self.module_attention} needs actor_rollout_ref.model.use_remove_padding=true"
            )
        lengths = micro_batch["input_ids"].offsets().diff().tolist()
        branches = [[] for _ in lengths]
        if option(micro_batch, SCORE_BRANCHES):
            branches = [decode_branches(row)[0] for row in micro_batch[BRANCHES].unbind()]
        rows = [n - sum(tokens for _, tokens in row) for n, row in zip(lengths, branches, strict=True)]
        padding = model_inputs["input_ids"].shape[1] - sum(lengths)
        if padding:  # the packed length is rounded up, and its tail belongs to no row
            rows, branches = [*rows, padding], [*branches, []]
        pack = pack_rows(rows, branches)
        model_inputs[PACK] = pack
        _unit_temperature(output_args, pack)
        return model_inputs, output_args

    def _check_can_branch(self, data) -> None:
        if not self.packs:
            raise ValueError(
                f"algorithm.info_gain_scorer=branch needs attn_implementation={'|'.join(NAMES)}, not "
                f"{self.module_attention}"
            )
        if BRANCHES not in data:
            raise RuntimeError(f"the batch has {SCORE_BRANCHES!r} but no {BRANCHES!r}")
        if data["position_ids"].dim() != 2:
            raise NotImplementedError("algorithm.info_gain_scorer=branch: multimodal position ids (mRoPE)")
        if option(data, "use_fused_kernels"):
            raise NotImplementedError(
                "algorithm.info_gain_scorer=branch with use_fused_kernels=true: one temperature for all tokens"
            )


def refuse_model(hf_config) -> None:
    """Refuses models in which a token's result depends on more than its position and the tokens it attends to."""
    text = hf_config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    other = kinds - {"full_attention", "sliding_attention"}
    if other:
        raise NotImplementedError(
            f"{text.model_type}: layers of the kind {sorted(other)} depend on other rows of the packed stream; use "
            "another attention and algorithm.info_gain_scorer=rows"
        )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for entry in [rope, *[value for value in rope.values() if isinstance(value, dict)]]:
        kind = entry.get("rope_type") or entry.get("type")
        if kind in ("dynamic", "longrope") or "mrope_section" in entry:
            raise NotImplementedError(
                f"{text.model_type}: rotary embedding {kind or 'mrope'!r} depends on the length of the whole stream"
            )


def nested(rows) -> torch.Tensor:
    """The tensors as rows of one tensor, as verl's engines take them."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _with_branches(data, decoded):
    """A shallow copy of the batch whose rows end with their branches."""
    ids, positions = [], []
    for row_ids, row_positions, (shape, tokens) in zip(
        data["input_ids"].unbind(), data["position_ids"].unbind(), decoded, strict=True
    ):
        ids.append(torch.cat([row_ids, tokens.to(row_ids)]))
        parts = [torch.arange(base, base + n).to(row_positions) for base, n in shape]
        positions.append(torch.cat([row_positions, *parts]))
    copy = data.clone(recurse=False)
    copy["input_ids"], copy["position_ids"] = nested(ids), nested(positions)
    return copy


def _check_budget(data) -> None:
    """Refuses a row that exceeds the budget, with its key. verl's own assertion does not name the key."""
    if not option(data, "use_dynamic_bsz", True):
        return
    longest = int(data["input_ids"].offsets().diff().max())
    budget = option(data, "max_token_len_per_gpu", None)
    if budget is not None and longest > budget:
        raise ValueError(
            f"a row and its answer branches have {longest} tokens, more than "
            f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={budget} allows"
        )


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


def _unit_temperature(output_args: dict, pack) -> None:
    """Sets temperature 1 for the branches: information gain does not depend on the sampling temperature."""
    if output_args.get("temperature_is_one") or not any(row.branches for row in pack.rows):
        return
    temperature = output_args["temperature_rmpad"].clone()
    for row in pack.rows:
        temperature[row.start + row.trunk : row.start + row.length] = 1.0
    output_args["temperature_rmpad"] = temperature
