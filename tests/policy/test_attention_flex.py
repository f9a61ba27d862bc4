"""FlexAttention as a GPU would run it, compiled, but with a backend that only counts: how often, and what at the limit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.tiny_models import tiny_model
from verl_credit.policy.attention import flex, implementation
from verl_credit.policy.attention.implementation import forced
from verl_credit.policy.attention.kernels import BRANCHES, TRUNKS, row_by_row
from verl_credit.policy.attention.pack import PACK, pack_rows

CPU = torch.device("cpu")
FAMILIES = (
    pytest.param("qwen3", marks=pytest.mark.nightly),
    "gemma2",
)  # the second has windows in every second layer, and a softcap
ROLLOUTS = [  # micro-batches of old_log_probs: rows, and answers behind them
    ([200, 150, 90], [[(200, 6), (120, 4)], [(150, 6)], []]),
    ([301], [[(301, 5), (256, 5), (128, 5), (30, 5)]]),
    ([128, 128], [[], []]),
    ([30, 20], [[(30, 3), (9, 3)], []]),
    ([511, 13], [[(500, 8)] * 9, [(13, 2)]]),
]
UPDATES = [[200, 150, 90], [301], [128, 128], [70], [511, 13]]


@pytest.fixture
def compiled(monkeypatch):
    """[1 for every graph that Dynamo made]."""
    made = []

    def backend(graph, inputs):
        made.append(1)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(flex, "BACKENDS", {"cpu": backend})
    monkeypatch.setattr(implementation, "_choices", {})
    # A CPU has no backward of FlexAttention's kernels; the backend "eager" needs none.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *given: None)
    flex.function_for.cache_clear()
    yield made
    flex.function_for.cache_clear()
    torch._dynamo.reset()


def read(model, trunks, branches=None, gradients=False):
    pack = pack_rows(trunks, branches)
    ids = torch.randint(3, 61, (1, pack.length), generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(gradients):
        logits = model(
            input_ids=ids, position_ids=pack.position_ids()[None], use_cache=False, **{PACK: pack}
        ).logits
        if gradients:
            logits.pow(2).mean().backward()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_compiles_a_few_times_and_then_no_more(family, compiled):
    """The order of a run: the proof's forwards with the trials of the kernel, then old_log_probs and update, twice.

    Forward and training are compiled for packs of several blocks and for those of one; the trial has a softcap of its own.
    """
    model, counts = tiny_model(family), []
    with forced("flex"):
        read(model, TRUNKS, BRANCHES)  # a trial without gradients, then the forward
        implementation.chosen("credit_flex")  # and one with
        for trunk in TRUNKS:
            read(model, [trunk])
        counts.append(len(compiled))
        for _ in range(2):
            for trunks, branches in ROLLOUTS:
                read(model, trunks, branches)
            counts.append(len(compiled))
            for trunks in UPDATES:
                read(model.train(), trunks, gradients=True)
            counts.append(len(compiled))
    trials, forward, training = 4, 2, 2
    assert (
        counts
        == [trials + 1, trials + forward, trials + forward + training] + [trials + forward + training] * 2
    )


def draw(n, gradients=False):
    random = torch.Generator().manual_seed(n)
    return [torch.randn(1, heads, n, 16, generator=random).requires_grad_(gradients) for heads in (4, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 1.5)])
def test_compiled_it_is_the_definition(window, softcap, compiled):
    for trunks, branches in ROLLOUTS:
        pack = pack_rows(trunks, branches)
        for gradients in (False, True):
            found = []
            for run, rows in ((flex.flex, pack), (row_by_row, pack.rows)):
                leaves = draw(pack.length, gradients)
                with torch.set_grad_enabled(gradients):
                    out = run(*leaves, rows, scaling=0.3, window=window, softcap=softcap)
                grads = torch.autograd.grad(out.pow(2).sum(), leaves) if gradients else ()
                found.append([out.detach(), *grads])
            for ours, expected in zip(*found, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert len(compiled) == 4


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_running_out_of_compilations_is_an_error(gradients, compiled, monkeypatch):
    """And not the form that holds all scores. What is compiled already runs on."""
    monkeypatch.setattr(flex, "LIMIT", 1)
    purpose = "training" if gradients else "forward"
    with torch.set_grad_enabled(gradients):
        flex.flex(*draw(300, gradients), pack_rows([300]), scaling=0.3)
        with pytest.raises(
            RuntimeError, match=rf"FlexAttention \({purpose}\) was compiled 1 times, .*credit_sdpa"
        ):
            flex.flex(*draw(50, gradients), pack_rows([50]), scaling=0.3)
        flex.flex(*draw(400, gradients), pack_rows([400]), scaling=0.3)


@pytest.mark.slow
@torch.no_grad()
def test_uncompiled_where_it_is_to_be_compiled_is_an_error(compiled):
    flex.flex(*draw(300), pack_rows([300]), scaling=0.3)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="should be compiled but runs uncompiled"),
    ):
        flex.flex(*draw(300), pack_rows([300]), scaling=0.3)


@given(
    trunks=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    branches=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 150)), max_size=6),
    window=st.sampled_from([None, 1, 100, 128, 300]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_block_mask_is_the_one_of_all_pairs(trunks, branches, window):
    from torch.nn.attention.flex_attention import create_block_mask

    pack = pack_rows(trunks, [[(min(base, trunks[0]), n) for base, n in branches], *[[] for _ in trunks[1:]]])
    reach = pack.reach(window, CPU)
    ours = flex.block_mask(pack, window, CPU)
    expected = create_block_mask(
        lambda b, h, q, k: reach.sees(q, k), None, None, pack.length, pack.length, device="cpu"
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert torch.equal(ours.to_dense(), expected.to_dense())
