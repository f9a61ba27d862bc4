"""Live tensors of the actor's process in a log-prob forward and in an update, under verl's FSDP2.

verl's `apply_fsdp2` makes a group of every layer, and, when embedding and head are not tied, of each of these. Tied, they
are in the root's group, whose copy lives from the start of a pass to its end. A group's forward and backward work on a
copy of the whole group in the forward's dtype; with several shards the all-gather's output exists beside it, of the next
group, too. The backward makes whole gradients of a group, which a reduce-scatter sums in ``reduce_dtype``: its input
lives until the next group's. A moment is the largest of the points below (tests/recipe/plan/test_plan_fake_fsdp.py
follows every allocation).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from verl_credit.recipe.plan import activations
from verl_credit.recipe.plan.job import Job
from verl_credit.recipe.plan.model_shape import ModelShape

Parts = dict[str, float]
KEPT = "parameters before the update"


def trained(shape: ModelShape, job: Job) -> int:
    return shape.lora_parameters(job.lora_rank) if job.lora_rank else shape.parameters


def state(shape: ModelShape, job: Job) -> Parts:
    """Sharded state of one device.

    verl's FSDP updates the stored weights (model_dtype, fp32 by default) without a master copy; both moments and the
    gradients have the same dtype. An adapter has its base's dtype.
    """
    weights = shape.parameters + (trained(shape, job) if job.lora_rank else 0)
    own = trained(shape, job) * job.weight_bytes / job.shards
    return {"weights": weights * job.weight_bytes / job.shards, "gradients": own, "optimizer": 2 * own}


def micro_batches(job: Job) -> int:
    """Micro-batches in a mini-batch on one device, with rows at full length."""
    rows = max(1, -(-job.mini_batch * job.rollouts // job.data_parallel))
    return max(1, -(-rows * job.longest_row // max(1, job.update_tokens * job.sequence_parallel)))


class Groups:
    """Bytes of FSDP2's groups; all are 0 in a plain process (``fsdp=False``)."""

    def __init__(self, shape: ModelShape, job: Job) -> None:
        c = job.compute_bytes * job.fsdp
        sends = job.shards > 1
        self.whole = 0 if job.reshard else c * shape.parameters
        """With reshard_after_forward=false the copies of all groups stay."""
        self.embedding = c * shape.embedding
        self.layer = c * (shape.largest_layer + shape.lora_parameters(job.lora_rank) // shape.layers)
        self.root = self.embedding if shape.tied else 0
        self.sent_layer = self.layer * sends
        # One device sends nothing, but casts a parameter before it copies it.
        self.sent_embedding = self.embedding * (sends or job.compute_bytes != job.weight_bytes)

    def gathered(self, copies: float, sent: float = 0) -> Parts:
        return {"gathered weights": max(self.whole, copies) + sent}


def _largest(points: Iterable[Parts]) -> Parts:
    return max(points, key=lambda parts: sum(parts.values()))


def log_prob_parts(
    shape: ModelShape, job: Job, *, tokens: int, answers: int = 0, entropy: bool = True
) -> Parts:
    """Gathered weights, activations and logits of a forward without a backward, at its fullest point."""
    groups = Groups(shape, job)
    stream = 2 * tokens * shape.hidden * job.compute_bytes  # of the last norm: its input and its output
    layer = activations.forward_only(shape, job, tokens=tokens, answers=answers)
    loss = activations.log_prob_loss(shape, job, tokens=tokens, entropy=entropy)
    masks = activations.answers_masks(job, answers=answers)
    return {**_largest((
        _first_gather(shape, job, tokens),
        {**groups.gathered(groups.root + groups.layer, groups.sent_layer), "activations": layer},
        {**_head(shape, groups), "activations": stream, "logits": activations.logits(shape, job, tokens)},
        {**groups.gathered(0), "logits": loss},
    )), "answers' masks": masks}  # fmt: skip


def _first_gather(shape: ModelShape, job: Job, tokens: int) -> Parts:
    """The first layer's copy is made while the all-gather's output of the embedding still lives."""
    groups = Groups(shape, job)
    first = (groups.layer, groups.sent_layer) if shape.tied and job.shards > 1 else (0, 0)
    copies = groups.gathered(groups.embedding + first[0], groups.sent_embedding + first[1])
    return {**copies, "activations": tokens * shape.hidden * job.compute_bytes}


def _head(shape: ModelShape, groups: Groups) -> Parts:
    """The forward of the output head; the all-gather's output of the last layer (untied: of the head) still lives."""
    return groups.gathered(groups.embedding, groups.sent_layer if shape.tied else groups.sent_embedding)


def update_parts(shape: ModelShape, job: Job) -> dict[str, Parts]:
    """The three moments at which an update can peak: the forward and the loss, the backward, the optimiser's step."""
    held = state(shape, job)
    resident = {"weights": held["weights"], "optimizer": held["optimizer"]}
    gradients = held["gradients"]
    # The first micro-batch has no gradients: they are set to None between updates.
    before = gradients if micro_batches(job) > 1 else 0.0
    groups, kept = Groups(shape, job), activations.kept(shape, job)
    loss = {**groups.gathered(0), "activations": kept, "logits": activations.loss(shape, job)}
    logits = activations.logits(shape, job, job.update_tokens)
    forward = (
        _first_gather(shape, job, job.update_tokens),
        {**_head(shape, groups), "activations": kept, "logits": logits},
        loss,
    )
    # torch's multi-tensor AdamW, its default on CUDA, holds a further copy; one by one, the root and quotient of a matrix.
    one_by_one = 2 * largest_matrix(shape, job) * job.weight_bytes / job.shards
    temporaries = one_by_one if job.device_type == "cpu" else gradients
    return {
        "loss": {**resident, "gradients": before, **_largest(forward)},
        "backward": {**resident, **_largest((
            {"gradients": before, **loss}, *_backward(shape, job, gradients, before)
        ))},
        "optimizer step": {**resident, "gradients": gradients, "temporaries": min(2 * gradients, temporaries)},
    }  # fmt: skip


def _backward(shape: ModelShape, job: Job, gradients: float, before: float) -> Iterable[Parts]:
    """The points of a backward: the head, the last layer, the layer before it, the first layer, the embedding.

    ``before``: gradients of earlier micro-batches. Without any, the gradients of a layer replace its activations.
    """
    groups, c, r = Groups(shape, job), job.compute_bytes, job.reduce_bytes * job.fsdp
    full = not job.lora_rank
    stream = job.update_tokens * shape.hidden * c
    kept, logits = activations.kept(shape, job), activations.logits(shape, job, job.update_tokens)
    of_layer = trained(shape, job) / shape.layers if job.lora_rank else shape.largest_layer
    embedding = shape.embedding if full else 0
    sharded = job.weight_bytes / job.shards
    unsharded = {}
    if job.unsharded_gradients and job.shards > 1:
        unsharded["unsharded gradients"] = trained(shape, job) * job.reduce_bytes
    reduced = r * (1 + 1 / job.shards)
    """Bytes of a reduce-scatter's input and output, per number."""

    def point(
        copies: Parts, activation: float, whole: float, sent: float = 0.0, grown: float = 0.0, **more
    ) -> Parts:
        """``whole``: gradients of a group; ``sent``: a reduce-scatter's bytes; ``grown``: sharded gradients so far."""
        parts = {**copies, "gradients": before or grown, "whole gradients": whole, "reduce-scatter": sent}
        return {**parts, **unsharded, "activations": activation, **more}

    yield point(groups.gathered(groups.embedding, groups.sent_embedding), kept, 0, logits=logits)
    at_head = groups.gathered(groups.embedding, groups.sent_layer)
    yield point(at_head, kept + stream, c * embedding, logits=logits)
    if not shape.tied:
        yield point(groups.gathered(0, groups.sent_layer), kept, c * embedding, reduced * embedding)

    copies = groups.gathered(groups.root + groups.layer, groups.sent_layer)
    waits = c * embedding if shape.tied else 0  # a tied weight's gradient waits for its second half
    last = 0 if shape.tied else embedding
    # In the MLP's backward most activations live, and one matrix has its gradient; at the layer's end all have theirs.
    down = min(of_layer, shape.down_projection)
    of_norm = job.update_tokens * activations.norm(shape.hidden, c)
    for activation, whole in (
        (activations.one_layer(shape, job), c * down),
        (of_norm + stream, c * of_layer),
    ):
        for layers in {shape.layers, max(1, shape.layers - 1), 1}:
            done = shape.layers - layers
            sent = (reduced if before else r) * of_layer if done else r * last
            kept_by = activations.kept_by(shape, job, layers)
            yield point(copies, kept_by + activation, waits + whole, sent, sharded * (last + done * of_layer))

    rest = gradients - sharded * embedding
    both = c * embedding * (2 if shape.tied else 1)
    yield point(groups.gathered(groups.embedding if full else 0), stream, both, r * of_layer, rest)
    whole, sent = max((c, r), (0, reduced), key=sum)
    yield point(groups.gathered(0), 0, whole * embedding, sent * embedding, rest)


def probe_parts(shape: ModelShape, job: Job) -> Parts:
    """The entropy probe's comparison, at its fullest point: an update's forward and backward with entropies, beside the
    parameters before the update; or the exchange of the two, which copies one shard at a time."""
    held, update = state(shape, job), update_parts(shape, replace(job, update_entropy=True))
    shard = largest_matrix(shape, job) * job.weight_bytes / job.shards
    exchange = {"weights": held["weights"], "optimizer": held["optimizer"], "exchanged shard": shard}
    return {**_largest((update["loss"], update["backward"], exchange)), KEPT: kept_parameters(shape, job)}


def kept_parameters(shape: ModelShape, job: Job) -> float:
    """The entropy probe's second copy of the trainable shards, from an update to the next one."""
    return state(shape, job)["gradients"] if job.probes else 0.0


def largest_matrix(shape: ModelShape, job: Job) -> int:
    """Numbers of the largest trained matrix."""
    return (
        shape.lora_matrix(job.lora_rank) if job.lora_rank else max(shape.embedding, shape.largest_layer // 3)
    )


def actor_peak(shape: ModelShape, job: Job) -> float:
    """Peak bytes of live tensors in the actor's process during an update, as a measurement would find."""
    return max(sum(parts.values()) for parts in update_parts(shape, job).values())
