"""The engines that verl's workers find in its registry: verl's FSDP engine with our attention, branches and log-probs."""

import dataclasses

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from verl_credit.host.engine.branch_engine import BranchEngine
from verl_credit.host.engine.log_prob_engine import LogProbEngine
from verl_credit.host.engine.shared_prompt_engine import SharedPromptEngine


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
