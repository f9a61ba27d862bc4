"""Gated-DeltaNet layers over packed rows, against transformers' own layers and one row per forward."""

from functools import cache, partial

import pytest
import torch
import transformers
from packaging.version import Version

from kit.delta_models import TEXTS, delta_config, delta_model, no_casts
from kit.tiny_models import VOCABULARY, tiny_config
from verl_credit.policy import delta_net
from verl_credit.policy.attention.implementation import AUTO
from verl_credit.policy.attention.pack import PACK, pack_rows

KERNELS_OF_A_MODULE = Version(transformers.__version__) >= Version("5.15")
LENGTHS = (5, 1, 70, 2, 64, 3)
"""Shorter than the convolution, at the rule's block of 64 tokens, and after it."""


@pytest.fixture(scope="module")
def rows():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw) for n in LENGTHS]


def outputs(model, ids, positions=None, pack=None):
    """The logits of a stream."""
    positions = torch.arange(len(ids)) if positions is None else positions
    extra = {} if pack is None else {PACK: pack}
    return model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **extra).logits[0]


def packed(model, streams):
    pack = pack_rows([len(ids) for ids in streams])
    return outputs(model, torch.cat(streams), pack.position_ids(), pack).split([len(ids) for ids in streams])


def total(logits, ids):
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None]).sum()


def separate(family):
    model = delta_model(family, AUTO)
    delta_net.keep_rows_apart(model)
    return model


@pytest.fixture(scope="module")
def stock(rows):
    """(logits per row, gradients) of transformers' model, one row per forward."""

    @cache
    def of(family):
        model = delta_model(family).double()
        with no_casts(model):
            alone = [outputs(model, ids) for ids in rows]
            sum(map(total, alone, rows)).backward()
        return alone, {name: weight.grad for name, weight in model.named_parameters()}

    return of


@pytest.mark.parametrize(
    "family, checkpointed",
    [
        pytest.param(
            family, checkpointed, marks=[pytest.mark.slow] * ((family, checkpointed) != (TEXTS[0], True))
        )
        for family in TEXTS
        for checkpointed in (True, False)
    ],
)
def test_values_and_gradients_are_those_of_single_rows(family, checkpointed, rows, stock):
    """Two packs before one backward: recomputation has to find the pack of its own forward."""
    model = separate(family).double()
    with no_casts(model):
        packed(model, rows)  # the trial of our attention's kernel has to run outside checkpointed layers
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        ours = [*packed(model, rows[:3]), *packed(model, rows[3:])]
        sum(map(total, ours, rows)).backward()
    alone, gradients = stock(family)
    for one, other in zip(ours, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    for name, weight in model.named_parameters():
        assert (weight.grad - gradients[name]).norm() <= 1e-10 * gradients[name].norm(), name


@torch.no_grad()
@pytest.mark.parametrize("family", TEXTS)
def test_values_in_float32(family, rows):
    model = delta_model(family)
    alone = [outputs(model, ids) for ids in rows]
    for one, other in zip(packed(separate(family), rows), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@torch.no_grad()
def test_without_a_pack_the_layers_are_transformers_own(rows):
    ours, theirs = delta_model("qwen3_5_text"), delta_model("qwen3_5_text")
    delta_net.keep_rows_apart(ours)
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in rows], batch_first=True)
    for given in (
        {"input_ids": batch, "attention_mask": mask},
        {"input_ids": rows[0][None], "use_cache": True},
    ):
        torch.testing.assert_close(ours(**given).logits, theirs(**given).logits, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.skipif(KERNELS_OF_A_MODULE, reason="a layer has no kernels of its own")
@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.parametrize("convolution", [True, False])
def test_installed_kernels_get_the_borders(rule, convolution, rows):
    """They stand in for flash-linear-attention and causal-conv1d, which need a GPU, and split the stream as those do."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as torch_rule

    def fla_rule(*tensors, g, beta, cu_seqlens, **options):
        sizes = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(sizes, dim=1) for x in (*tensors, g, beta)), strict=True)
        return torch.cat([torch_rule(*p[:3], g=p[3], beta=p[4], **options)[0] for p in parts], dim=1), None

    def kernel(x, weight, bias, activation, seq_idx):
        sizes = seq_idx[0].bincount().tolist()
        one = partial(delta_net.packed_convolution, None)
        return torch.cat(
            [one(pack_rows([part.shape[2]]), part, weight) for part in x.split(sizes, dim=2)], dim=2
        )

    model = separate("qwen3_5_text")
    without = packed(model, rows)
    fla_rule.__module__ = "fla.ops.gated_delta_rule"
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.chunk_gated_delta_rule = fla_rule if rule else torch_rule
            layer.linear_attn.causal_conv1d_fn = kernel if convolution else None
    for ours, kernels in zip(without, packed(model, rows), strict=True):
        torch.testing.assert_close(ours, kernels, rtol=0, atol=1e-5)


def test_rows_of_similar_length_are_padded_together():
    """Padding all rows to the longest would cost 17 x 8,000 tokens here."""
    lengths = [8000, *range(400, 1040, 40)]
    pack = pack_rows(lengths)
    groups = list(delta_net._groups(pack, torch.device("cpu")))
    assert sorted(torch.cat([at_N for _, _, at_N, _ in groups]).tolist()) == [*range(sum(lengths))]
    assert sum(rows * longest for rows, longest, _, _ in groups) <= 2 * sum(lengths)


def test_a_stream_that_is_not_the_packs_is_refused(rows):
    model, pack = separate("qwen3_5_text"), pack_rows([6])
    with pytest.raises(RuntimeError, match="1 x 5 tokens for a pack of 6.*sequence-parallel"):
        outputs(model, rows[0], torch.arange(5), pack)


@pytest.mark.parametrize("family", [*TEXTS, "qwen3_5", "qwen3_5_moe"])
def test_which_models_have_such_layers(family):
    assert delta_net.is_delta_net(delta_config(family))
    assert not delta_net.is_delta_net(tiny_config("qwen3"))
