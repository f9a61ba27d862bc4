"""The actor's part of the entropy probe: the parameters before an update, and the engine's gradients along the update.

The probe uses verl's own forward and backward (`forward_backward_batch`), in the engine's dtype, at the run's temperature.
It changes no gradient, no parameter, and no state of the optimiser or of a random generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_torch_device
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.names import PROBE_GROUP, PROBE_PATH, PROBE_SCORE

CHUNK = 2**24
"""Number of parameters whose products are summed in float64 at a time."""


def surrogate_loss(model_output, data, dp_group=None):
    """dp_size · Σ_rows Σ_j (score_j log π(y_j | s_j) + path_j H_j), of which the engine makes the gradient.

    Ranks' gradients are averaged by FSDP, so the factor makes them a sum over all rows; micro-batches add up. Neither
    changes the result. Both weights are 0 on tokens that are not the policy's.
    """
    weights = data.select(PROBE_SCORE, PROBE_PATH).to_padded_tensor()
    total = 0.0
    for output, name in (("log_probs", PROBE_SCORE), ("entropy", PROBE_PATH)):
        weight_B_T = weights[name]
        value_B_T = no_padding_2_padding(model_output[output], data)
        total = total + torch.where(weight_B_T != 0, weight_B_T * value_B_T, 0.0).sum()
    return total * data["dp_size"], {}


class KeptParameters:
    """θ_t: this rank's shards of the trainable parameters, where the engine keeps them between steps (in main memory with
    ``param_offload``). While the update runs and until the next step they are a second copy of the parameters."""

    def __init__(self, engine) -> None:
        _reshard(engine.module)
        get_torch_device().synchronize()  # verl offloads without waiting for the copy
        self._shards = [shard.clone() for shard in _shards(engine.module)]

    def load(self) -> None:
        """Moves the kept parameters to the forward's device."""
        self._shards = [shard.to(get_device_id()) for shard in self._shards]

    def along_update(self, engine) -> torch.Tensor:
        """(Σ gradient · (θ - θ_t), Σ gradient²) over all ranks, float64 [2]."""
        products = torch.zeros(2, dtype=torch.float64, device=get_device_id())
        with torch.no_grad():
            trainable = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
            for parameter, before in zip(trainable, self._shards, strict=True):
                if parameter.grad is None:
                    continue
                gradient, now = _local(parameter.grad).reshape(-1), _local(parameter).reshape(-1)
                for start in range(0, len(now), CHUNK):
                    part = slice(start, start + CHUNK)
                    was = before.reshape(-1)[part].to(now.device)
                    step, slope = now[part].double() - was.double(), gradient[part].double()
                    products += torch.stack([slope @ step, slope @ slope]).to(products.device)
        mesh = engine.device_mesh
        # A mesh of two dimensions is verl's (ddp, fsdp): shards are repeated over the first.
        copies = mesh.size(0) if mesh.ndim == 2 else 1
        torch.distributed.all_reduce(products)
        return products / copies

    @contextmanager
    def in_place(self, engine) -> Iterator[None]:
        """Let the engine compute with θ_t; afterwards it has its own parameters again, to the bit."""
        self._swap(engine)
        try:
            yield
        finally:
            self._swap(engine)

    def _swap(self, engine) -> None:
        _reshard(engine.module)  # or the engine would use its gathered copy of the parameters
        get_torch_device().synchronize()
        with torch.no_grad():
            for shard, kept in zip(_shards(engine.module), self._shards, strict=True):
                now = shard.clone()
                shard.copy_(kept)
                kept.copy_(now)


def measure(engine, kept: KeptParameters, data: TensorDict) -> TensorDict:
    """Measure this rank's rows. ``data`` has rows as for ``compute_log_prob``, the weights of `surrogate_loss` and their
    group (PROBE_GROUP, [rows] int64); every rank has equally many rows of every group.

    The result has ``log_probs`` and ``entropy`` at the engine's parameters and ``old_log_probs`` and ``old_entropy`` at the
    kept ones, nested per row and response token; and ``along`` [rows, G, 2] float64, the result of
    `KeptParameters.along_update` after the backward of groups 0 .. g, equal on all ranks and repeated in each row.
    """
    tu.assign_non_tensor(data, calculate_entropy=True, return_model_output=True)
    groups = data[PROBE_GROUP].tolist()
    rows_of = [[row for row, group in enumerate(groups) if group == g] for g in range(max(groups) + 1)]
    parts = [tu.index_select_tensor_dict(data, rows) for rows in rows_of]
    along = []
    if engine.is_optimizer_offload_enabled:  # then the optimiser's state has left twice this memory free
        kept.load()
    with engine.eval_mode(), _checkpoints_activations(engine.module):
        engine.optimizer_zero_grad()
        try:
            new = []
            for part in parts:
                new.append(engine.forward_backward_batch(part, surrogate_loss)["model_output"])
                along.append(kept.along_update(engine))
        finally:
            engine.optimizer_zero_grad()
        with kept.in_place(engine):
            outputs = (engine.forward_backward_batch(part, None, forward_only=True) for part in parts)
            old = [output["model_output"] for output in outputs]
    place = torch.tensor([row for rows in rows_of for row in rows]).argsort().tolist()

    def in_order(outputs, name):
        pairs = zip(outputs, parts, strict=True)
        responses = [response_from_nested(output[name], part["response_mask"]) for output, part in pairs]
        values = [row.cpu() for part in responses for row in part.unbind()]
        return nested([values[at] for at in place])

    names = ("log_probs", "entropy")
    fields = {name: in_order(new, name) for name in names}
    fields |= {f"old_{name}": in_order(old, name) for name in names}
    fields["along"] = torch.stack(along).cpu().expand(len(groups), -1, -1).clone()
    return TensorDict(fields, batch_size=len(groups))


@contextmanager
def _checkpoints_activations(module: torch.nn.Module) -> Iterator[None]:
    """Let the layers of a module in eval mode recompute activations as in training; dropout stays off."""
    layers = [layer for layer in module.modules() if getattr(layer, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True  # train() would also switch on the dropout of the modules inside
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _shards(module: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's part of every trainable parameter, without a copy."""
    return [_local(parameter.detach()) for parameter in module.parameters() if parameter.requires_grad]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reshard(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel) and part._handle is not None:
            part._handle.reshard(part._handle.uses_sharded_strategy)
            part._handle.post_reshard()
