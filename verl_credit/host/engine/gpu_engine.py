"""verl's FSDP engine on NVIDIA GPUs, with our attention, branches and log-probs."""

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from verl_credit.host.engine.branch_engine import BranchEngine
from verl_credit.host.engine.log_prob_engine import LogProbEngine


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda"], vendor=["nvidia"]
)
class CreditFSDPEngineWithLMHead(BranchEngine, LogProbEngine, FSDPEngineWithLMHead):
    """verl finds this engine before its own, which is registered for the device without a vendor."""
