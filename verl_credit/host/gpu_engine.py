"""verl's FSDP engine on NVIDIA GPUs, with our attention and branches."""

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from verl_credit.host.branch_engine import BranchEngine


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda"], vendor=["nvidia"]
)
class CreditFSDPEngineWithLMHead(BranchEngine, FSDPEngineWithLMHead):
    """Looked up by verl before its own, which is registered for the device without a vendor."""
