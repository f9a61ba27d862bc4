"""The rollout server's model: from files or a configuration to its device, and away from it while the server sleeps."""

import copy
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_credit.policy.families import family_of, positions, why_not_decoded
from verl_credit.recipe.plan.hf_engine import GIB, PREFILL_TOKENS, SHARE, HFEngine
from verl_credit.recipe.plan.model_shape import shape_of


def build_model(model_config: HFModelConfig, config: RolloutConfig, device: torch.device) -> torch.nn.Module:
    """The model in `rollout.dtype`, of the class that verl trains; `rollout.load_format=dummy` gives random weights. Raises
    ValueError for a family that cannot be decoded."""
    dtype = PrecisionType.to_dtype(config.dtype)
    hf_config = copy.deepcopy(model_config.hf_config)
    if why := why_not_decoded(hf_config.to_dict()):
        raise ValueError(why)
    # The trainer's attention works only on packed rows. transformers 5.21 and later have no sdpa for a model with a softcap.
    attention = family_of(hf_config).stock[0]
    hf_config._attn_implementation = attention
    options = {"trust_remote_code": model_config.trust_remote_code, "attn_implementation": attention}
    auto_class = get_hf_auto_model_class(hf_config)
    if config.load_format == "dummy":
        with device:  # billions of random numbers take minutes on a CPU
            model = auto_class.from_config(hf_config, dtype=dtype, **options)
    else:
        model = auto_class.from_pretrained(model_config.local_path, config=hf_config, dtype=dtype, **options)
    return model.to(device).eval()


class Bound(NamedTuple):
    """What one batch may take: rows, tokens of cache over all rows, tokens of prompts in a forward; a line for the start."""

    rows: int
    tokens: float
    prefill_tokens: int | None
    line: str


def batch_bound(hf_config: Any, config: RolloutConfig, device: torch.device, memory: float) -> Bound:
    """The bound on a device of ``memory`` bytes: rows of prompt_length + response_length tokens that its share holds; on a
    CPU `rollout.max_num_seqs` alone. Raises ValueError with key and value where not even one row fits."""
    most = config.max_num_seqs
    if device.type == "cpu":
        line = f"rollouts: transformers on cpu, at most {most} rows at a time (rollout.max_num_seqs)"
        return Bound(most, inf, None, line)
    number = PrecisionType.to_dtype(config.dtype).itemsize
    shape = shape_of(hf_config.get_text_config().to_dict())
    engine = HFEngine(shape, number, config.prompt_length + config.response_length)
    share = config.gpu_memory_utilization
    if problem := engine.too_small(memory, share):
        raise ValueError(problem)
    fit = engine.rows(memory, share)
    why = "rollout.max_num_seqs" if most <= fit else f"{SHARE}={share:g}; rollout.max_num_seqs={most}"
    line = (
        f"rollouts: transformers on {device}, at most {min(most, fit)} rows at a time ({why}): of "
        f"{memory * share / GIB:.1f} GiB weights take {engine.weights / GIB:.1f}, a forward of prompts "
        f"{engine.forward / GIB:.1f}, and a row of {engine.row_tokens} tokens {engine.row / GIB:.2f}; further rows wait"
    )
    return Bound(min(most, fit), fit * engine.row_tokens, PREFILL_TOKENS, line)


def leave_device(model: torch.nn.Module, *, keep: bool) -> Callable[[], None]:
    """Free the memory of all weights and persistent buffers; the returned function takes it again, with random values
    unless they were kept in the host's memory (``keep``). Tensors stay the same objects and keep what they share."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in model.state_dict().values()}
    left = []
    for storage in storages.values():
        copy = torch.UntypedStorage(storage.nbytes()).copy_(storage) if keep else None
        left.append((storage, storage.nbytes(), copy))
        storage.resize_(0)

    def come_back() -> None:
        for storage, size, copy in left:
            storage.resize_(size)
            if copy is not None:
                storage.copy_(copy)

    return come_back


def max_model_len(hf_config: Any, configured: int | None) -> int:
    """`rollout.max_model_len`, by default all positions of the model; raises ValueError for more."""
    most = positions(hf_config)
    if configured is None:
        return most
    if configured > most:
        raise ValueError(f"rollout.max_model_len={configured}: the model has only {most} positions")
    return configured


def eos_token_ids(model_config: HFModelConfig) -> tuple[int, ...]:
    """The ids of generation config and tokenizer that end a request; raises ValueError without any."""
    of_model = getattr(model_config.generation_config, "eos_token_id", None)
    ids = [*(of_model if isinstance(of_model, list) else [of_model]), model_config.tokenizer.eos_token_id]
    found = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not found:
        raise ValueError(
            f"model.path={model_config.path}: neither generation config nor tokenizer has an eos"
        )
    return found
