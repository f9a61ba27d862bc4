"""Predicted against measured tensor peak of the actor: python evidence/plan/measure_lab.py --policy DIR [--json FILE]

A plain process repeats the actor's work: packed rows through the project's attention and log-probs, a clipped ratio,
two micro-batches, gradient clipping, AdamW; twice, so that the second update has the moments. The torch
profiler reports every allocation and release of the allocator, temporaries of kernels included, and their running sum
over the weights is the peak. The interpreter is not in it.

Shapes: the lab's policy (--policy) and a random Qwen3 (hidden 512, 8 layers, vocabulary 8192, 2048 tokens), with and without
gradient checkpointing, on a CPU. Predicted: `verl_credit.recipe.plan.update_memory.actor_peak`.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_credit.policy.attention.implementation import chosen, install
from verl_credit.policy.attention.pack import PACK, pack_rows
from verl_credit.policy.log_probs import token_values
from verl_credit.recipe.plan.activations import answers_masks, forward_only, log_prob_loss
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.update_memory import actor_peak

TOLERANCE = 0.20
ANSWER = 8  # tokens of a scored answer
LARGER = {
    "model_type": "qwen3", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 8192,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def build(config, *, device: str = "cpu", dtype=torch.float32, checkpointing: bool = False):
    """A random model of ``config`` (a mapping, or a folder with a config.json) on the project's attention."""
    install()
    torch.manual_seed(0)
    if not isinstance(config, dict):
        config = AutoConfig.from_pretrained(config).to_dict()
    config = AutoConfig.for_model(**{k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")})
    attention = "credit_sdpa" if device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).to(device)
    for gradients in (False, True):  # kernels are tried before anything is measured
        with torch.set_grad_enabled(gradients):
            _forward(model, torch.zeros(2, dtype=torch.long, device=device), pack_rows([2]))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def job_of(model, *, rows: int, length: int, checkpointing: bool, micro_batches: int = 2) -> Job:
    """The process's work as a plan's job: no sharding, micro-batches of ``rows`` rows."""
    number = next(model.parameters()).element_size()
    on_cpu = next(model.parameters()).device.type == "cpu"
    kernels = {choice.kernel for choice in chosen(model.config._attn_implementation)}
    return Job(
        prompts=1, rollouts=micro_batches * rows, mini_batch=1, max_prompt=length // 2, max_response=length - length // 2,
        update_tokens=rows * length, log_prob_tokens=rows * length, checkpointing=checkpointing,
        attention="sdpa" if "sdpa" in kernels else "flash", log_prob_path="ours", device_type="cpu" if on_cpu else "cuda",
        weight_bytes=number, compute_bytes=number, fsdp=False,
    )  # fmt: skip


def _forward(model, ids, pack, *, entropy: bool = False):
    """Log-probs, or (log-probs, entropies), as the engine computes them."""
    given = {"position_ids": pack.position_ids().to(ids.device)[None], "use_cache": False, PACK: pack}
    in_bf16 = next(model.parameters()).dtype == torch.bfloat16
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=in_bf16):
        logits = model(input_ids=ids[None], **given).logits.squeeze(0)
        values = token_values(logits, ids.roll(-1), entropy=entropy, inplace_backward=True)
        return tuple(values.values()) if entropy else values["log_probs"]


def updates(model, *, rows: int, length: int, micro_batches: int = 2) -> None:
    """Two updates, so that the second has the moments."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    random = torch.Generator().manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            ids = torch.randint(0, model.config.vocab_size, (rows * length,), generator=random).to(device)
            log_prob = _forward(model, ids, pack_rows([length] * rows))
            ratio = torch.exp(log_prob - log_prob.detach())
            (-torch.minimum(ratio, ratio.clamp(0.98, 1.028)).mean() / micro_batches).backward()
            del log_prob, ratio
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def log_prob_pass(model, *, rows: int, length: int, answers: int = 0) -> None:
    """The forward for old_log_probs and entropies, with this many answers of 8 tokens after every row."""
    pack = pack_rows([length] * rows, [[(length - i, ANSWER) for i in range(answers)]] * rows)
    ids = torch.randint(
        0, model.config.vocab_size, (pack.length,), generator=torch.Generator().manual_seed(1)
    )
    _forward(model, ids.to(next(model.parameters()).device), pack, entropy=True)


def tensor_peak(model, run) -> int:
    """Bytes of the weights, and the peak of ``run``."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    if not events:
        raise RuntimeError(
            "the profiler reported no allocation: profile_memory does not work with this torch"
        )
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return weights + peak


def compare_log_prob(model, shape, job, *, rows: int, length: int, answers: int = 0) -> dict:
    """Predicted and measured peak of a log-prob forward."""
    scored = rows * answers * ANSWER
    tokens = job.log_prob_tokens + scored
    parts = (
        forward_only(shape, job, tokens=tokens, answers=scored),
        log_prob_loss(shape, job, tokens=tokens),
    )
    found = {
        "measured": tensor_peak(
            model, lambda: log_prob_pass(model, rows=rows, length=length, answers=answers)
        ),
        "predicted": shape.parameters * job.weight_bytes + max(parts) + answers_masks(job, answers=scored),
    }
    return {**found, "off": found["predicted"] / found["measured"] - 1}


def compare(
    config, *, rows: int, length: int, checkpointing: bool, device: str = "cpu", dtype=torch.float32
) -> dict:
    """Predicted and measured peak of an update and of a log-prob forward."""
    model = build(config, device=device, dtype=dtype, checkpointing=checkpointing)
    shape = shape_of(config if isinstance(config, dict) else model.config.to_dict())
    job = job_of(model, rows=rows, length=length, checkpointing=checkpointing)
    forward = compare_log_prob(model, shape, job, rows=rows, length=length)
    update = {
        "measured": tensor_peak(model, lambda: updates(model, rows=rows, length=length)),
        "predicted": actor_peak(shape, job),
    }
    update["off"] = update["predicted"] / update["measured"] - 1
    return {
        "parameters": shape.parameters, "tokens": rows * length, "checkpointing": checkpointing, "device": device,
        "dtype": str(dtype).removeprefix("torch."), "update": update, "log_prob": forward,
    }  # fmt: skip


def cases(policy: Path | None) -> list[tuple[str, dict]]:
    found = []
    for checkpointing in (False, True):
        if policy is not None:
            found.append(
                ("lab", {"config": policy, "rows": 12, "length": 170, "checkpointing": checkpointing})
            )
        larger = {"config": LARGER, "rows": 8, "length": 256, "checkpointing": checkpointing}
        found.append(("qwen3-512x8", larger))
        found.append(("qwen3-512x8", {**larger, "dtype": torch.bfloat16}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=Path, help="the lab's policy, LAB_DIR/policy")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print("| model | device, dtype | tokens | checkpointing | phase | measured MiB | predicted MiB | off |")
    print("|---|---|---|---|---|---|---|---|")
    for name, case in cases(arguments.policy):
        result = {"model": name, **compare(**case)}
        results.append(result)
        for phase in ("update", "log_prob"):
            one = result[phase]
            print(
                f"| {name} | {result['device']}, {result['dtype']} | {result['tokens']} | {result['checkpointing']} "
                f"| {phase} | {one['measured'] / 2**20:.1f} | {one['predicted'] / 2**20:.1f} | {one['off']:+.1%} |",
                flush=True,
            )
    if arguments.json:
        found = {
            "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
            "results": results,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    worst = max(abs(result["update"]["off"]) for result in results)
    print(f"\nlargest difference of an update: {worst:.1%} (allowed {TOLERANCE:.0%})")
    raise SystemExit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
