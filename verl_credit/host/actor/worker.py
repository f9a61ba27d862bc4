"""verl's actor worker with our loss, and a probe of what its process has registered."""

from __future__ import annotations

from functools import partial

from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig

from verl_credit.host.actor.entropy_probe import KeptParameters, measure
from verl_credit.host.actor.policy_loss import credit_ppo_loss
from verl_credit.host.engine import process_group  # noqa: F401  (the import registers loopback://)
from verl_credit.host.engine.attention_proof import prove
from verl_credit.host.engine.log_prob_engine import BranchEngine, LogProbEngine
from verl_credit.host.registry import register_engines, register_parts, registered_names
from verl_credit.names import LOSS_MODE
from verl_credit.records.run import events


class CreditWorker(ActorRolloutRefWorker):
    """verl's worker; after ``init_model`` the actor's loss is ``credit_ppo_loss``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self._stage("the actor's process is up")
        register_parts()
        register_engines()
        super().init_model()
        self._stage("the actor is loaded")
        if self._is_actor and self.config.actor.policy_loss.loss_mode == LOSS_MODE:
            if self.distillation_enabled:
                raise ValueError(f"policy_loss.loss_mode={LOSS_MODE} and distillation cannot be combined")
            self.loss_fn = partial(credit_ppo_loss, config=self.loss_fn.keywords["config"])
            self.actor.set_loss_fn(self.loss_fn)
        engine = self.actor.engine if self._is_actor else None
        self._attention = _proven(engine)
        if self._attention:
            self._stage("the attention is proven")
        if self.ref is not None:
            _proven(self.ref.engine)
        self._log_probs = None
        if isinstance(engine, LogProbEngine):
            self._log_probs = engine.describe_log_probs(distills=self.distillation_enabled)
        elif engine is not None:
            self._log_probs = f"log-probs: verl's own, in {type(engine).__name__}"

    def _stage(self, text: str) -> None:
        """Records a stage of the start, once for all actor workers."""
        if self._is_actor and self.rank == 0 and (run_dir := self.config.get("run_dir")):
            events.record(run_dir, events.STAGE, text)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def credit_probe(self) -> dict:
        """The names registered in this process, the actor's loss, its attention and its log-probs."""
        function = getattr(self.loss_fn, "func", self.loss_fn)
        lines = {"attention": self._attention, "log_probs": self._log_probs}
        return {**registered_names(), "actor_loss": function.__name__, **lines}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_parameters(self) -> None:
        """The actor's parameters as they are now, for the entropy probe; what was kept before is dropped."""
        self._kept = None
        self._kept = KeptParameters(self.actor.engine)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def measure_update(self, data: TensorDict) -> TensorDict:
        """`entropy_probe.measure` with the engine's training micro-batches, from the kept parameters to the present ones."""
        engine, config = self.actor.engine, self.actor.engine_config
        tu.assign_non_tensor(
            data,
            use_remove_padding=self.actor.model_config.get("use_remove_padding", False),
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.max_token_len_per_gpu,
            micro_batch_size_per_gpu=config.micro_batch_size_per_gpu,
            use_fused_kernels=config.use_fused_kernels,
        )
        kept, self._kept = self._kept, None
        return measure(engine, kept, data)


class CriticWorker(TrainingWorker):
    """verl's critic. Our engines are registered before it looks for one."""

    def __init__(self, config: TrainingWorkerConfig):
        register_parts()
        register_engines()
        super().__init__(config)


def _proven(engine) -> str | None:
    """What the proof of this engine found; None for an engine that is not ours.

    peft wraps routers of some mixtures of experts (glm4_moe, deepseek_v3, dots1, phimoe with ``all-linear``), which their
    blocks cannot call then. ValueError: the layers of the attention that can have adapters.
    """
    if not isinstance(engine, BranchEngine):
        return None
    config = engine.model_config
    try:
        return prove(engine, config.hf_config.get_text_config().vocab_size)
    except AttributeError as error:
        wrapped = [
            name.split(".") for name, layer in engine.module.named_modules() if hasattr(layer, "lora_A")
        ]
        names = sorted({path[-1] for path in wrapped if "self_attn" in path})
        if not names:
            raise
        raise ValueError(
            f"actor_rollout_ref.model.target_modules={config.target_modules}: peft has wrapped a layer of "
            f"{config.hf_config.model_type} that the model cannot call then ({error}); accepted are its attention "
            f"projections, [{','.join(names)}]"
        ) from error
