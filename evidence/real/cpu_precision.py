"""How fast this CPU is with SmolLM2-135M in fp32 and in bf16: tokens a second, of a forward and with its gradient.

    python evidence/real/cpu_precision.py --policy DIR/policy

One thread; one row of 600 random tokens, 50 of them with logits, after one pass to warm up. Writes cpu_precision.json; with
--keep it prints alone.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import HERE, machine, write
from transformers import AutoModelForCausalLM

from verl_credit.machine.precision import cpu_precision

TOKENS, SCORED = 600, 50


def speed(model, ids, *, bf16: bool) -> dict[str, float]:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        times = []
        for gradient in (False, False, True):
            began = time.perf_counter()
            with torch.set_grad_enabled(gradient):
                hidden_1_T_D = model.model(input_ids=ids, use_cache=False).last_hidden_state
                loss = model.lm_head(hidden_1_T_D[0, -SCORED:]).float().logsumexp(-1).sum()
            if gradient:
                loss.backward()
            times.append(time.perf_counter() - began)
    return {"forward": round(TOKENS / times[1], 1), "with gradient": round(TOKENS / times[2], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", required=True)
    parser.add_argument("--keep", action="store_true", help="write no file")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.policy, dtype=torch.float32)
    ids = torch.randint(0, 40_000, (1, TOKENS))
    found = {name: speed(model, ids, bf16=name == "bf16") for name in ("fp32", "bf16")}
    print(found)
    if not given.keep:
        facts = {
            "machine": machine("torch", "transformers"),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
        write(HERE / "cpu_precision.json", {**facts, "auto": cpu_precision(), "tokens a second": found})


if __name__ == "__main__":
    main()
