"""Tries the attention kernels that this machine's GPU has to run, each as at the start of a run."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.settings import ATTENTION
from verl_credit.errors import ConfigError
from verl_credit.policy.attention.implementation import AUTO, named
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.software import wants_cuda
from verl_credit.recipe.doctor.inputs.hub import cached_config
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.recipe.machine.gather import in_a_process
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.world import MODEL

VARLEN, SDPA, FLEX = named("varlen"), named("sdpa"), named("flex")
TRIAL_S = 240.0  # a first compilation takes tens of seconds, more where the assembler starts from cold disks
HEADS = (32, 8, 128)  # (query heads, key heads, head size) of Qwen3-4B and 8B

TRIAL = """
import sys, torch
from verl_credit.policy.attention.implementation import Heads, choose
name, device, heads = sys.argv[1], torch.device(sys.argv[2]), Heads(*map(int, sys.argv[3:]))
found = [choose(name, device, torch.bfloat16, heads, gradients=gradients) for gradients in (False, True)]
print("agrees:", max(found, key=lambda choice: choice.error))
"""

Trial = Callable[..., tuple[int | None, str]]


def run_trial(name: str, heads: tuple[int, int, int], device: str = "cuda") -> tuple[int | None, str]:
    """Runs the start's trial in a separate process: rows with appended answers, compared with the definition, in bf16."""
    return in_a_process(["-c", TRIAL, name, device, *map(str, heads)], TRIAL_S)


def check_flash(context: Context, trial: Trial = run_trial) -> Result:
    """Runs flash-attn, because a wheel for another torch or device can be imported and then fails in the first call."""
    facts, config = context.facts, context.config
    version, attention = facts.packages.get("flash-attn"), _attention(config)
    required = wants_cuda(config) and attention in (VARLEN, "flash_attention_2")
    if version is None:
        if required:
            return failed(f"not installed, and {ATTENTION}={attention}", "flash-attn for this torch and CUDA",
                          f"pip install flash-attn --no-build-isolation, or {ATTENTION}={AUTO}")  # fmt: skip
        return skipped("not installed; SDPA stands in for it, and our log-probs for its loss")
    if not facts.devices:
        return skipped(f"flash-attn {version} is installed, and there is no CUDA device to run it on")
    fix = (
        "reinstall it for this torch (pip install --force-reinstall --no-build-isolation flash-attn), "
        f"or leave it out: {ATTENTION}={AUTO} takes SDPA"
    )
    return _tried(f"flash-attn {version}", VARLEN, config, trial, failed if required else warned, fix)


def check_sdpa(context: Context, trial: Trial = run_trial) -> Result:
    """Checks SDPA, which `auto` takes where flash-attn is absent or does not run."""
    facts, config, attention = context.facts, context.config, _attention(context.config)
    if not facts.devices:
        return skipped("no CUDA device; on a CPU attention is SDPA, row by row")
    if attention not in (None, AUTO, SDPA):
        return skipped(f"{ATTENTION}={attention}")
    alone = attention == SDPA or "flash-attn" not in facts.packages
    judge = failed if wants_cuda(config) and alone else warned
    fix = "a torch built for this device; it needs one of SDPA's fused backends (flash, memory-efficient)"
    return _tried("SDPA", SDPA, config, trial, judge, fix)


def check_flex(context: Context, trial: Trial = run_trial) -> Result:
    """Checks that FlexAttention compiles, which takes triton, a C compiler and an assembler that knows the device."""
    config, attention = context.config, _attention(context.config)
    if not context.facts.devices:
        return skipped("no CUDA device")
    if attention != FLEX:
        return skipped(f"not asked for: {ATTENTION}={AUTO} takes flash-attn or SDPA before it")
    fix = "see ptxas; a C compiler and Python.h are needed too (apt install gcc python3-dev)"
    return _tried("FlexAttention", FLEX, config, trial, failed if wants_cuda(config) else warned, fix)


def heads_of(config: DictConfig | None) -> tuple[int, int, int]:
    """The heads of the recipe's model, from its folder, its name or its config.json in the hub's cache; else `HEADS`."""
    path = None if config is None else OmegaConf.select(config, MODEL)
    for model in (path, cached_config(path) if isinstance(path, str) else None):
        try:
            if model:
                shape = shape_of(str(model).removesuffix("/config.json"))
                return shape.heads, shape.kv_heads, shape.head_dim
        except ConfigError:
            continue
    return HEADS


def _attention(config: DictConfig | None) -> str | None:
    return None if config is None else OmegaConf.select(config, ATTENTION)


def _tried(what: str, kernel: str, config, trial: Trial, judge, fix: str) -> Result:
    heads = heads_of(config)
    code, printed = trial(kernel, heads)
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if code is None:
        return judge(f"{what}: not done after {TRIAL_S:g} s ({last[:200]})", "a small call that ends", fix)
    if code != 0 or not last.startswith("agrees:"):
        return judge(
            f"{what} does not run: {last[:300]}", "a small call that agrees with the definition", fix
        )
    widths = f"{heads[0]} heads of queries, {heads[1]} of keys, {heads[2]} wide"
    return passed(f"{what} runs on {widths}, in bf16: {last.removeprefix('agrees: ')}")
