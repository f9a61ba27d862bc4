"""The bytes that a forward keeps for the backward, and its temporary bytes, for one micro-batch on one device.

Counted from transformers' operations for the qwen families. ``c`` is the bytes of a number in the forward (2 in bf16, 4
in fp32), ``h`` the hidden size, ``q`` and ``k`` the widths of queries and keys, ``f`` that of the MLP. In bf16 a norm
works in fp32 and keeps that copy; in fp32 its input is the copy.
"""

from __future__ import annotations

from math import isqrt

from verl_credit.config.log_prob_path import FLASH, FUSED, LOOP, OURS
from verl_credit.policy.attention.pack import KEY_TOKENS, MASK_NUMBERS
from verl_credit.policy.log_prob_chunks import HELD_BYTES, chunk_tokens
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.model_shape import ModelShape

FUSED_CHUNK = 512
"""Tokens whose logits verl's fused kernel holds at a time."""


def norm(width: int, c: int, *, frozen: bool = False) -> int:
    """Bytes per token of a norm: the input in fp32, the output, and for the gradient of its weight the normalised input."""
    return 4 * width + (1 if frozen else 2) * c * width


def layer(shape: ModelShape, c: int, attention: str, lora_rank: int = 0) -> int:
    """Bytes per token that one decoder layer keeps. An adapter keeps its input, as a trained matrix does, and its middle."""
    frozen = lora_rank > 0
    adapters = c * lora_rank * (7 if shape.dense_layers else 4)
    norms = 2 * norm(shape.hidden, c, frozen=frozen)
    return norms + _attention(shape, c, attention, frozen) + _mlp(shape, c) + adapters


def _attention(shape: ModelShape, c: int, attention: str, frozen: bool) -> int:
    q, k = shape.q_width, shape.kv_width
    # The projection in fp32 and normalised; RoPE keeps only its own output, not the norm's.
    head_norms = (4 if frozen else 4 + c) * (q + k) if shape.has_head_norms else 0
    # SDPA keeps the output of every piece, and the whole output in token order.
    outputs, statistics = 2 if attention == "sdpa" else 1, 4 * shape.heads
    return head_norms + c * (q + 2 * k + outputs * q) + statistics


def _mlp(shape: ModelShape, c: int) -> int:
    """Gate, activated gate, up, product. An expert layer keeps these per active expert, plus its input and output."""
    dense = 4 * c * shape.intermediate
    if not shape.expert_layers:
        return dense
    expert = shape.active_experts * c * (4 * shape.expert_intermediate + 2 * shape.hidden) + 8 * shape.experts
    return max(expert, dense if shape.dense_layers else 0)


def passing(shape: ModelShape, c: int) -> int:
    """Temporary bytes per token in a layer's backward: gradients of the product, of its two factors, of the stream."""
    width = shape.active_experts * shape.expert_intermediate if shape.expert_layers else shape.intermediate
    return c * (3 * width + 2 * shape.hidden)


def kept(shape: ModelShape, job: Job) -> int:
    """Bytes that all layers and the final norm keep until the backward reaches them."""
    final = norm(shape.hidden, job.compute_bytes, frozen=job.lora_rank > 0)
    return kept_by(shape, job, shape.layers) + job.update_tokens * final


def kept_by(shape: ModelShape, job: Job, layers: int) -> int:
    """Bytes that this many layers keep, and RoPE's cosines and sines, which all layers share."""
    c = job.compute_bytes
    per_layer = c * shape.hidden if job.checkpointing else layer(shape, c, job.attention, job.lora_rank)
    return job.update_tokens * (layers * per_layer + 2 * c * shape.head_dim)


def one_layer(shape: ModelShape, job: Job) -> int:
    """Bytes of the backward inside a layer; with checkpointing these include its recomputed activations."""
    c = job.compute_bytes
    recomputed = layer(shape, c, job.attention, job.lora_rank) if job.checkpointing else 0
    return job.update_tokens * (recomputed + passing(shape, c))


def logits(shape: ModelShape, job: Job, tokens: int) -> int:
    """Bytes of the logits themselves, or of their gradient; verl's fused kernel never has them whole."""
    return 0 if job.log_prob_path == FUSED else job.compute_bytes * tokens * shape.vocabulary


def loss(shape: ModelShape, job: Job) -> int:
    """Peak bytes of the micro-batch's logits and of the log-probs (and entropy) over them.

    Our path and flash-attn's kernel overwrite the logits with the gradient. verl's loop over rows keeps the logits, a
    row's gradients and their stack in fp32; under autocast, the bf16 logits and a log-softmax (fp32 on CUDA, bf16 on a
    CPU).
    """
    c, number = job.compute_bytes, job.update_tokens * shape.vocabulary
    if job.log_prob_path == FUSED:
        return _fused(shape, job.update_tokens)
    if job.log_prob_path == OURS:
        return c * number + _chunk(shape, job, job.update_tokens, both=job.update_entropy)
    per_logit = c
    if job.log_prob_path == LOOP:
        per_logit += job.softmax_bytes if c == 2 else 8
    held = 0
    if job.update_entropy:
        # The entropy's gradient adds to that of the log-probs, for which flash-attn's kernel then needs new memory.
        per_logit += c if job.log_prob_path == FLASH else 0
        if job.entropy == "chunked":
            per_logit += c
            held = _chunk(shape, job, job.update_tokens, job.entropy_chunk, both=True)
        else:
            per_logit += 2 * job.softmax_bytes
    if not job.unit_temperature:
        per_logit += c
    return number * per_logit + held


def log_prob_loss(shape: ModelShape, job: Job, *, tokens: int, entropy: bool = True) -> int:
    """The same without a backward: logits, plus the entropy's softmax and product."""
    c = job.compute_bytes
    if job.log_prob_path == FUSED:
        return _fused(shape, tokens)
    if job.log_prob_path == OURS:
        return c * tokens * shape.vocabulary + _chunk(shape, job, tokens)
    held = tokens * shape.vocabulary * (c if job.unit_temperature else 2 * c)
    if not entropy or job.entropy == "compiled":
        return held
    if job.entropy == "chunked":
        return held + _chunk(shape, job, tokens, job.entropy_chunk)
    return held + tokens * shape.vocabulary * 2 * job.softmax_bytes


def _fused(shape: ModelShape, tokens: int) -> int:
    return min(tokens, FUSED_CHUNK) * shape.vocabulary * 12


def _chunk(
    shape: ModelShape, job: Job, tokens: int, at_a_time: int | None = None, *, both: bool = False
) -> int:
    """Bytes of our path beside the logits, for ``at_a_time`` tokens (for entropies, `entropy_from_logits_chunk_size`).

    A chunk of fp32 logits at temperature 1 needs no copy, unless the backward needs p and log p (``both``).
    """
    at_a_time = at_a_time or chunk_tokens(shape.vocabulary, job.device_type)
    once = job.compute_bytes == 4 and job.unit_temperature and not both
    return (4 if once else HELD_BYTES) * shape.vocabulary * min(tokens, at_a_time)


def forward_only(shape: ModelShape, job: Job, *, tokens: int, answers: int = 0) -> int:
    """Temporary bytes of one layer without a backward: the stream, a norm, gate, its activation, up and their product.

    ``answers`` is how many tokens are scored answers, whose attention needs more (`answers_attention`).
    """
    c = job.compute_bytes
    width = shape.active_experts * shape.expert_intermediate if shape.expert_layers else shape.intermediate
    mlp = c * (4 * width + 2 * shape.hidden)
    attention = c * (3 * shape.hidden + 4 * shape.q_width) + 4 * shape.q_width
    return max(tokens * mlp, tokens * attention + answers_attention(shape, job, answers=answers))


def answers_attention(shape: ModelShape, job: Job, *, answers: int) -> int:
    """Upper bound of the additional bytes for scored answers: gathered keys and values.

    With SDPA these are of a piece of the answers, plus its mask in the forward's dtype, twice when its rows are aligned.
    FlexAttention gathers nothing, but counts as flash-attn.
    """
    c, row = job.compute_bytes, job.longest_row
    if not answers:
        return 0
    if job.attention != "sdpa":
        return min(max(KEY_TOKENS, row), answers * row) * 2 * shape.kv_width * c
    piece = mask_piece(job, answers)
    return (row + piece) * 2 * shape.kv_width * c + piece * (row + piece) * 2 * c


def answers_masks(job: Job, *, answers: int) -> int:
    """SDPA: the answers' boolean masks, made once for all layers; each answer attends to a row and its piece."""
    return answers * (job.longest_row + mask_piece(job, answers)) if job.attention == "sdpa" else 0


def mask_piece(job: Job, answers: int) -> int:
    """The number n of a row's answer tokens that SDPA takes at a time; their mask has n (row + n) numbers."""
    row = job.longest_row
    of_a_row = -(-answers * row // max(row, job.log_prob_tokens))
    return min(of_a_row, (isqrt(row * row + 4 * MASK_NUMBERS) - row) // 2)
