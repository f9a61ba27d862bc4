"""Whether a model decodes what it reads: a batch with padding and a cache, against a forward of each row alone."""

from __future__ import annotations

import torch

from verl_credit.policy.decoding import decoding
from verl_credit.policy.generation import BatchGenerator
from verl_credit.policy.sampling import SamplingParams

NEW_TOKENS = 16
EXACT = 1e-3
"""Nats that the largest difference may have in float32."""
HALF = 0.3
"""What the mean of all differences may be in half precision, in standard deviations of the log-probs (0.1 to 1 nats)."""


@torch.inference_mode()
def prove_decoding(generator: BatchGenerator) -> float:
    """The largest difference in nats between the log-probs of sampled tokens and those of transformers' eager attention.

    Two prompts with a common start and different lengths; windows longer than 30 tokens are not reached. Raises
    RuntimeError for more than rounding: divided as the limit is, tiny random models in bfloat16 have means of at most 0.05
    (0.13 where a router is close to a tie), a wrong one had 0.66.
    """
    model, ids = generator.model, [(31 * n + 7) % generator.vocabulary for n in range(14)]
    prompts = [ids[:5], [*ids[:4], *ids[5:]]]
    outputs = generator.generate(
        prompts, [SamplingParams(NEW_TOKENS - 4 * row, seed=row) for row in range(2)]
    )
    sampled, expected = [], []
    with decoding(model, "eager"):
        for prompt, output in zip(prompts, outputs, strict=True):
            row = torch.tensor([[*prompt, *output.token_ids]], device=model.device)
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            following = row[0, len(prompt) :, None]
            expected.append(logits.log_softmax(dim=-1).gather(1, following)[:, 0].cpu())
            sampled.append(torch.tensor(output.log_probs))
    difference = (torch.cat(sampled) - torch.cat(expected)).abs()
    if model.dtype == torch.float32:
        found, limit, kind = float(difference.max()), EXACT, "largest"
    else:
        limit = HALF * float(torch.cat(expected).std().clamp(0.1, 1.0))
        found, kind = float(difference.mean()), "mean"
    if not found <= limit:
        raise RuntimeError(
            f"actor_rollout_ref.rollout.name=hf: log-probs of the tokens that model_type={model.config.model_type} samples "
            f"differ from a forward of each row alone: {kind} difference {found:.2g} nats, expected at most {limit:.2g} in "
            f"{model.dtype}; use actor_rollout_ref.rollout.name=vllm"
        )
    return float(difference.max())
