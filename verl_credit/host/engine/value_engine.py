"""verl's critic with our attention: its FSDP engine with a value head, loaded as the configuration says."""

from __future__ import annotations

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from verl_credit.host.engine.log_prob_engine import BranchEngine

POLICY, CRITIC = "ForCausalLM", "ForTokenClassification"


@EngineRegistry.register(
    model_type="value_model", backend=["fsdp", "fsdp2"], device=["cuda"], vendor=["nvidia"]
)
@EngineRegistry.register(model_type="value_model", backend=["fsdp2"], device=["cpu"])
class ValueEngine(BranchEngine, FSDPEngineWithValueHead):
    """verl's `load_valuehead_model` asks for flash-attn, whatever ``attn_implementation`` is. Therefore the model is loaded
    as verl loads a policy, by the class that its config.json names: the policy's class becomes the one with a head.

    Departure from verl: the head of a model that had none is 0 and not drawn, so that all values are 0 at first.
    """

    def _build_module(self) -> torch.nn.Module:
        model, config = self.model_config, self.model_config.hf_config
        [named, *_] = config.architectures or [""]
        if not named.endswith((POLICY, CRITIC)):
            raise ValueError(f"critic.model: a model of class {named} has no value head; expected *{POLICY}")
        config.architectures = [named.removesuffix(POLICY) + CRITIC if named.endswith(POLICY) else named]
        config.num_labels, config.classifier_dropout = 1, 0.0
        role, model.model_type = model.model_type, "language_model"
        try:
            module = super()._build_module()
        finally:
            model.model_type = role
        if named.endswith(POLICY):
            for weight in module.score.parameters():
                torch.nn.init.zeros_(weight)
        return module
