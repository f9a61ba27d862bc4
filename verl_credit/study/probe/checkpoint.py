"""A checkpoint of verl's FSDP engines: whole parameters and AdamW's state by name, read in one process.

    global_step_N/actor/model_world_size_W_rank_R.pt    the weights by name, one shard per rank
    global_step_N/actor/optim_world_size_W_rank_R.pt    AdamW's state_dict(), by index
    global_step_N/actor/huggingface/config.json         the model
    global_step_N/actor/fsdp_config.json                FSDP_version, world_size

Weights are DTensors (plain tensors for FSDP1 on one rank). An index of the optimiser stands for

    FSDP2                           a parameter; DTensors
    FSDP1 with use_orig_params      a parameter; the stretch of its elements that the rank holds, none on some ranks
    FSDP1                           a wrapped unit: its parameters end to end, padded to equal shares of the ranks

with indices and parameters in the order of ``named_parameters``, tied weights once, and units in the order of the modules,
the root's first. Files are loaded with ``weights_only``.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard  # what weights_only may load
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl_credit.errors import ConfigError
from verl_credit.study.probe.update import OptimizerState, parameter_state

_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A policy and its optimiser after ``step`` steps of training."""

    step: int
    parameters: dict[str, torch.Tensor]
    """Whole tensors on the CPU, in the order of ``named_parameters``; tied weights stand here once."""
    buffers: dict[str, torch.Tensor]
    """The buffers that the model saves; few models have any."""
    optimizer: OptimizerState | None
    """The optimiser is not read where `read_checkpoint` has ``optimizer=False``."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The coarsest dtype of the weights. With bfloat16 a step of the learning rate can vanish in rounding."""
        return min({tensor.dtype for tensor in self.parameters.values()}, key=lambda t: torch.finfo(t).bits)


def read_checkpoint(folder: str | Path, *, optimizer: bool = True) -> Checkpoint:
    """The checkpoint in ``folder``, a ``global_step_N`` of verl; without ``optimizer`` the policy alone.

    Raises ConfigError for a missing folder or file, an optimiser that was not saved or is not AdamW, and tensors that
    are not those of the model in huggingface/config.json.
    """
    folder = Path(folder)
    actor = folder / "actor"
    number = _STEP.fullmatch(folder.name)
    if not number or not actor.is_dir():
        expected = "no folder global_step_N of verl with an actor in it"
        raise _refused(folder, f"{expected}; {_steps_beside(folder)}")
    settings = actor / "fsdp_config.json"
    if not settings.is_file():
        raise _refused(actor, "fsdp_config.json is missing: only checkpoints of verl's FSDP engines are read")
    ranks = json.loads(settings.read_text())["world_size"]
    if optimizer and not list(actor.glob("optim_world_size_*.pt")):
        must = "actor_rollout_ref.actor.checkpoint.save_contents of the run must list optimizer"
        raise _refused(folder, f"the checkpoint was saved without its optimiser: {must}")
    with torch.device("meta"):  # names, order and shapes
        model = AutoModelForCausalLM.from_config(_config(actor), attn_implementation="eager")
    weights = _load(actor, "model", ranks)
    try:
        tensors = _weights(weights, model)
        names = dict(model.named_parameters())
        return Checkpoint(
            step=int(number[1]),
            parameters={name: tensors[name] for name in names},
            buffers={name: tensor for name, tensor in tensors.items() if name not in names},
            optimizer=_optimizer(_load(actor, "optim", ranks), model, weights[0]) if optimizer else None,
        )
    except _Unfit as problem:
        raise _refused(actor, str(problem)) from None


def build_model(
    folder: str | Path, parameters: dict[str, torch.Tensor], dtype: torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    """The checkpoint's model with these weights, in evaluation mode, tied weights tied.

    Attention is ``eager``: forward-mode differentiation works through it. ``parameters`` are those of a `Checkpoint`, with
    its buffers where it has any. Raises ConfigError where one is missing or is not the model's.
    """
    actor = Path(folder) / "actor"
    model = AutoModelForCausalLM.from_config(_config(actor), attn_implementation="eager", dtype=dtype)
    missing, unknown = model.load_state_dict(parameters, strict=False)
    tied = _tied(model)
    lacking = [name for name in missing if name not in tied]
    if lacking or unknown:
        raise _refused(actor, f"weights missing: {lacking or 'none'}; not the model's: {unknown or 'none'}")
    return model.to(device=device, dtype=dtype).eval()


class _Unfit(ValueError):
    """Files do not belong to the model; `read_checkpoint` adds the folder."""


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(key="checkpoint", value=path, accepted=why)


def _steps_beside(folder: Path) -> str:
    """A sentence with the steps that could be read instead."""
    for place in (folder, folder / "checkpoints", folder.parent, folder.parent / "checkpoints"):
        names = [path.parent.name for path in place.glob("global_step_*/actor/")]
        if steps := sorted(int(name[1]) for name in map(_STEP.fullmatch, names) if name):
            return f"steps with one in {place}: {', '.join(map(str, steps))}"
    return f"there is none in {folder.parent} either"


def _config(actor: Path):
    if not (actor / "huggingface" / "config.json").is_file():
        raise _refused(actor, "huggingface/config.json is missing: the model is built from it")
    return AutoConfig.from_pretrained(
        actor / "huggingface",
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="eager",  # the saved name may be one of ours, which only training registers
    )


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Second names of tied weights, and the names that ``named_parameters`` has for them."""
    first = {weight: name for name, weight in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[weight] for name, weight in every if name != first[weight]}


def _load(actor: Path, kind: str, ranks: int) -> list[dict]:
    """The file of every rank, mapped into memory."""
    logger = logging.getLogger("torch.distributed.device_mesh")  # warns that there is no process group
    loaded, level = [], logger.level
    for rank in range(ranks):
        path = actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt"
        if not path.is_file():
            raise _refused(actor, f"{path.name} is missing: copy the files of all {ranks} ranks here")
        logger.setLevel(logging.ERROR)
        try:
            loaded.append(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            why = str(error).strip().split("\n")[0]
            raise _refused(path, f"not a file of tensors that loads with weights_only=True: {why}") from error
        finally:
            logger.setLevel(level)
    return loaded


def _weights(ranks: list[dict], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers by name, in the order of the model; their names and shapes are the model's."""
    expected, tied = model.state_dict(keep_vars=True), _tied(model)
    unknown = [name for name in ranks[0] if name not in expected]
    if any("lora_" in name for name in unknown):
        raise _Unfit(f"{unknown[0]}: the run trained a LoRA adapter, expected one that trained all weights")
    if unknown:
        raise _Unfit(f"{unknown[0]} is no weight of the model in huggingface/config.json")
    weights = {}
    for name, like in expected.items():
        if name not in ranks[0]:
            if name in tied:
                continue
            raise _Unfit(f"{name} is missing in the files of the weights")
        whole = _joined([rank[name] for rank in ranks], name)
        if whole.shape != like.shape:
            own = f"huggingface/config.json says {tuple(like.shape)}"
            raise _Unfit(f"{name} has shape {tuple(whole.shape)}, {own}")
        if name not in tied:
            weights[name] = whole
        elif not torch.equal(whole, weights[tied[name]]):
            raise _Unfit(f"{name} differs from {tied[name]}, to which huggingface/config.json ties it")
    return {name: weights[name] for name in [*dict(model.named_parameters()), *weights]}


def _joined(pieces: list[torch.Tensor], name: str) -> torch.Tensor:
    """A copy of the whole tensor from every rank's piece: shards of a DTensor, or the same plain tensor on all ranks."""
    first = pieces[0]
    if not isinstance(first, DTensor):
        if any(not torch.equal(first, other) for other in pieces[1:]):
            raise _Unfit(f"{name} is not sharded and differs between ranks")
        return first.clone()
    if [placement for placement in first.placements if not placement.is_replicate()] not in ([], [Shard(0)]):
        raise _Unfit(f"{name} has placements {first.placements}, expected one Shard(0), beside it Replicate")
    whole = torch.cat([pieces[rank].to_local() for rank in _holders(first)])
    if whole.shape != first.shape:
        raise _Unfit(f"{name} has shape {tuple(first.shape)}, its shards make {tuple(whole.shape)}")
    return whole


def _holders(tensor: DTensor) -> list[int]:
    """The ranks that hold the shards of one replica, in order."""
    along = tuple(slice(None) if placement.is_shard() else 0 for placement in tensor.placements)
    return tensor.device_mesh.mesh[along].flatten().tolist()


def _optimizer(saved: list[dict], model: PreTrainedModel, weights: dict) -> OptimizerState:
    """AdamW's state by name. ``weights``: a rank's, whose shards tell which ranks' files make one replica."""
    sharded = next((tensor for tensor in weights.values() if isinstance(tensor, DTensor)), None)
    holders = [0] if sharded is None else _holders(sharded)
    groups = saved[0]["param_groups"]
    if len(groups) != 1:
        raise _Unfit(f"the optimiser has {len(groups)} parameter groups, expected verl's one")
    group, parameters, states = groups[0], dict(model.named_parameters()), {}
    for index, names in zip(group["params"], _units(model, len(group["params"])), strict=True):
        entries = [rank["state"].get(index, {}) for rank in saved]
        divided = _divided(entries, holders, {name: parameters[name] for name in names})
        for name, entry in divided.items():
            try:
                states[name] = parameter_state(entry, group, torch.empty_like(parameters[name], device="cpu"))
            except ValueError as problem:
                raise _Unfit(f"{name}: {problem}") from None
    return OptimizerState(lr=float(group["lr"]), parameters={name: states[name] for name in parameters})


def _units(model: PreTrainedModel, count: int) -> list[list[str]]:
    """The parameters of each of the optimiser's ``count`` indices: see the top of this file."""
    names, wrapping = [name for name, _ in model.named_parameters()], model._no_split_modules or ()
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in wrapping]
    wrapped = {block: [] for block in ["", *blocks]}
    for name in names:
        inside = [block for block in blocks if name.startswith(f"{block}.")]
        wrapped[max(inside, key=len, default="")].append(name)
    for units in ([[name] for name in names], [unit for unit in wrapped.values() if unit], [names]):
        if len(units) == count:
            return units
    raise _Unfit(
        f"the optimiser has {count} entries; the model has {len(names)} parameters in {len(wrapped)} wrapped units. "
        f"{_INSTEAD}"
    )


_INSTEAD = (
    "Flat parameters are read for verl's own wrap_policy only; with any other, "
    "train with actor.fsdp_config.strategy=fsdp2 or actor.fsdp_config.use_orig_params=True"
)


def _divided(ranks: list[dict], holders: list[int], parameters: dict[str, torch.Tensor]) -> dict[str, dict]:
    """The state of an index of the optimiser by parameter. ``ranks``: every rank's entry; {} where a rank holds nothing."""
    divided, of = {name: {} for name in parameters}, ", ".join(parameters)
    present = [ranks[rank] for rank in holders if ranks[rank]]
    if not present:
        return divided  # never had a gradient
    sizes = [parameter.numel() for parameter in parameters.values()]
    padded = math.ceil(sum(sizes) / len(holders)) * len(holders)
    sharded = any(isinstance(value, DTensor) for value in present[0].values())
    if any(entry.keys() != present[0].keys() for entry in (ranks if sharded else present)):
        raise _Unfit(f"the ranks' files disagree on what the optimiser holds for {of}")
    for key, first in present[0].items():
        if key == "step" or not isinstance(first, torch.Tensor):
            divided = {name: entry | {key: first} for name, entry in divided.items()}
            continue
        if sharded:
            flat = _joined([entry[key] for entry in ranks], f"{key} of {of}").flatten()
        else:
            flat = torch.cat([entry[key].flatten() for entry in present])
        if len(flat) != padded and (len(flat) != sum(sizes) or len(parameters) > 1):
            raise _Unfit(f"{key} of {of} has {len(flat)} elements, expected {padded}. {_INSTEAD}")
        for (name, parameter), piece in zip(parameters.items(), flat[: sum(sizes)].split(sizes), strict=True):
            divided[name][key] = piece.view(parameter.shape)
    return divided
