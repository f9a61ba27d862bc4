"""verl's FSDP2 with fake tensors beside `verl-credit plan`: python evidence/plan/fake_fsdp.py [--layers N] [--tokens N]

Fake tensors have sizes and no memory, so that a CPU follows every allocation of an update on eight GPUs: the recipe's
model in its width, vocabulary and dtypes, wrapped by verl's own `apply_fsdp2` over a process group that sends nothing,
LoRA as verl applies it, our log-probs, AdamW; `FSDPMemTracker` adds the storages that are alive. Not seen: the allocator's
fragmentation, NCCL's buffers, kernels' own workspaces, vLLM.

Every shipped recipe x {1, 8} ranks x {full, LoRA}, with fewer layers and tokens; recipes that give the same case share it.
Each runs a log-prob forward and two updates of two micro-batches. The second update has the moments of AdamW; its first
micro-batch has the peaks of an update of one, its second those of one that accumulates gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.fsdp_utils import apply_fsdp2

from verl_credit.cli.recipe.plan import _load
from verl_credit.config.log_prob_path import OURS
from verl_credit.policy.attention.implementation import choice, install, named
from verl_credit.policy.attention.pack import PACK, pack_rows
from verl_credit.policy.log_prob_chunks import chunk_tokens
from verl_credit.policy.log_probs import log_probs_from_logits, token_values
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.model_shape import ModelShape
from verl_credit.recipe.plan.plan import make_plan
from verl_credit.recipe.plan.update_memory import log_prob_parts, state, update_parts
from verl_credit.recipe.recipe_files import shipped_recipes

RANKS = (1, 8)
LORA_RANK = 32
LAYERS, TOKENS = 3, 2048
NEEDED = {"search_cpu": ["actor_rollout_ref.model.path=HuggingFaceTB/SmolLM2-135M"]}
"""Keys that a recipe leaves to its user."""
RECIPES = [recipe for recipe in shipped_recipes() if recipe != "verl"]
"""Recipe `verl` leaves the model and all sizes to its user."""
DTYPES = {4: torch.float32, 2: torch.bfloat16}
STATE = {"weights": "Sharded Param", "gradients": "Sharded Grad", "optimizer": "OptState"}
"""Parts of a plan and the tracker's kinds."""


@dataclass(frozen=True)
class Case:
    """A model under FSDP2, as a plan's shape and job."""

    shape: ModelShape
    job: Job

    def __str__(self) -> str:
        adapter = f"LoRA {self.job.lora_rank}" if self.job.lora_rank else "full"
        return f"{self.shape.name}, {self.job.shards} x, {adapter}"


@cache
def planned_recipe(recipe: str):
    return make_plan(_load(recipe, NEEDED.get(recipe, [])), recipe=recipe)


def case_of(recipe: str, ranks: int, adapter: bool, layers: int = LAYERS, tokens: int = TOKENS) -> Case:
    plan = planned_recipe(recipe)
    shape = replace(plan.shape, layers=layers, name=plan.shape.name.rsplit("/", 1)[-1], positions=None)
    return case(shape, plan.job, ranks, (plan.job.lora_rank or LORA_RANK) if adapter else 0, tokens)


def cases(layers: int = LAYERS, tokens: int = TOKENS) -> dict[Case, list[str]]:
    """Cases and the recipes that give them."""
    found = {}
    for recipe, ranks, adapter in product(RECIPES, RANKS, (False, True)):
        found.setdefault(case_of(recipe, ranks, adapter, layers, tokens), []).append(recipe)
    return found


def case(shape: ModelShape, job: Job, ranks: int, lora_rank: int, tokens: int) -> Case:
    """What decides the bytes of an update of two micro-batches; the rest of ``job`` is left at its defaults."""
    kept = ("checkpointing", "attention", "device_type", "unit_temperature")
    kept += ("weight_bytes", "compute_bytes", "reduce_bytes", "reshard")
    return Case(shape, Job(
        per_node=ranks, shards=ranks, lora_rank=lora_rank, update_tokens=tokens, log_prob_tokens=tokens,
        prompts=1, mini_batch=1, rollouts=2 * ranks, max_prompt=tokens // 2, max_response=tokens - tokens // 2,
        log_prob_path=OURS, **{name: getattr(job, name) for name in kept},
    ))  # fmt: skip


class Tracker(FSDPMemTracker):
    """The parent, with the peak between two calls, and tied gradients added in place.

    Autograd adds the second gradient of a tied weight to the first one in place, but not under a dispatch mode.
    """

    def __init__(self, module, optimizer, tied_shape) -> None:
        super().__init__(module, optimizer)
        self._tied_shape = tied_shape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is torch.ops.aten.add.Tensor
            and not torch.is_grad_enabled()
            and args[0].shape == self._tied_shape
        ):
            func = torch.ops.aten.add_.Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)

    def peak(self) -> dict[str, int]:
        """Bytes by kind ("Total": all) at the highest moment since the last call."""
        (found,) = self.get_tracker_snapshot("peak").values()
        self._peak_mem = dict.fromkeys(self._peak_mem, 0)
        return {getattr(kind, "value", kind): size for kind, size in found.items()}


@contextmanager
def ranks(number: int):
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (number,), mesh_dim_names=("fsdp",))
    finally:
        dist.destroy_process_group()


def build(case: Case, mesh):
    """The model as verl's FSDP engine builds it, with parameters of no memory."""
    shape, job = case.shape, case.job
    install()
    config = AutoConfig.for_model(
        shape.family, vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    # transformers' own SDPA holds what flash-attn holds: the output and a statistic.
    attention = named("sdpa") if job.attention == "sdpa" else "sdpa"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=DTYPES[job.weight_bytes]
        )
        if job.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if job.lora_rank:
            model.enable_input_require_grads()
            lora = {"r": job.lora_rank, "lora_alpha": 2 * job.lora_rank, "target_modules": "all-linear"}
            model = get_peft_model(
                model,
                LoraConfig(task_type=TaskType.CAUSAL_LM, bias="none", **lora),
                autocast_adapter_dtype=False,
            )
    _leave_meta(model)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[job.compute_bytes], reduce_dtype=DTYPES[job.reduce_bytes], cast_forward_inputs=True
    )
    options = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": None,
        "reshard_after_forward": job.reshard,
    }
    apply_fsdp2(model, options, {})
    return model.train()


def _leave_meta(model) -> None:
    """Replace parameters and buffers of the device meta by fake ones of the CPU; tied ones stay tied."""
    made = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in made:
                fake = torch.empty_like(tensor, device="cpu")
                trains = tensor.requires_grad
                made[id(tensor)] = torch.nn.Parameter(fake, trains) if name in module._parameters else fake
            setattr(module, name, made[id(tensor)])


def measure(case: Case) -> dict[tuple[str, int], dict[str, int]]:
    """Peaks in bytes by (moment, micro-batches of the update); the log-prob forward has 0."""
    _try_attention(case)
    with ranks(case.job.shards) as mesh, FakeTensorMode():
        return dict(_peaks(case, build(case, mesh)))


def _try_attention(case: Case) -> None:
    """Our attention tries its kernel once on real numbers, which fake tensors do not have."""
    shape, kind = case.shape, DTYPES[case.job.compute_bytes]
    query, key = (
        torch.zeros(1, heads, 1, shape.head_dim, dtype=kind) for heads in (shape.heads, shape.kv_heads)
    )
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            choice(named("sdpa"), query, key)


def _peaks(case: Case, model) -> Iterator[tuple]:
    shape, job = case.shape, case.job
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        foreach=job.device_type == "cuda",
        weight_decay=0.01,
    )
    tracker = Tracker(model, optimizer, (shape.vocabulary, shape.hidden))
    ids = torch.zeros(job.update_tokens, dtype=torch.long)
    given = {"position_ids": torch.arange(job.update_tokens)[None], "use_cache": False}
    if job.attention == "sdpa":
        given[PACK] = pack_rows([job.update_tokens])
    temperature = None if job.unit_temperature else torch.ones(job.update_tokens)
    chunk = {"inplace_backward": True, "chunk_size": chunk_tokens(shape.vocabulary, job.device_type)}
    in_bf16 = torch.autocast("cpu", torch.bfloat16) if job.compute_bytes == 2 else nullcontext()

    def forward(compute):
        tracker.reset_mod_stats()
        with in_bf16:
            logits = model(input_ids=ids[None], **given).logits.squeeze(0)
            if not torch.is_grad_enabled():
                release()
            return compute(logits, ids, temperature, **chunk)

    # LoRA's input needs a gradient; the tracker's hooks would keep both for ever.
    inputs = []
    if job.lora_rank:
        model.get_input_embeddings().register_forward_hook(lambda *call: inputs.append(call[-1]))

    def release() -> None:
        for tensor in inputs:
            tensor.grad = None
            tensor.untyped_storage().resize_(0)
        inputs.clear()

    with tracker:
        for _ in ("no moments", "moments"):
            for micro in (1, 2):
                tracker.peak()
                loss = forward(log_probs_from_logits).sum()
                yield ("loss", micro), tracker.peak()
                loss.backward()
                yield ("backward", micro), tracker.peak()
                release()
            optimizer.step()
            yield ("optimizer step", 2), tracker.peak()
            optimizer.zero_grad()
        with torch.no_grad():
            tracker.peak()
            forward(token_values)
            yield ("log-prob", 0), tracker.peak()


def planned(case: Case) -> dict[tuple[str, int], dict[str, float]]:
    """The plan's parts for the same moments."""
    shape, job = case.shape, case.job
    held = state(shape, job)
    resident = {name: held[name] for name in ("weights", "optimizer")}
    found = {("log-prob", 0): {**resident, **log_prob_parts(shape, job, tokens=job.log_prob_tokens)}}
    for micro in (1, 2):
        parts = update_parts(shape, replace(job, rollouts=micro * job.shards))
        found |= {(moment, micro): parts[moment] for moment in ("loss", "backward")}
    return found | {("optimizer step", 2): parts["optimizer step"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    print(
        "| model, ranks | recipes | moment | plan MiB | fake tensors MiB | off |\n|---|---|---|---|---|---|"
    )
    worst = 0.0
    for one, recipes in cases(arguments.layers, arguments.tokens).items():
        found = measure(one)
        for key, parts in planned(one).items():
            plan, fake = sum(parts.values()), found[key]["Total"]
            worst = max(worst, abs(plan / fake - 1), key=abs)
            print(
                f"| {one} | {', '.join(recipes)} | {key[0]}{', accumulating' * (key[1] == 2)} "
                f"| {plan / 2**20:,.0f} | {fake / 2**20:,.0f} | {plan / fake - 1:+.1%} |", flush=True,
            )  # fmt: skip
    print(f"\nlargest difference: {worst:.1%}")


if __name__ == "__main__":
    main()
