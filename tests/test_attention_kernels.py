"""Kernels over rows and branches: each against the definition, and models that cannot tell a branch from a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, VOCABULARY, in_float64, log_probs, tiny_model

from verl_credit.host.attention import forced, pack_rows
from verl_credit.host.attention.implementation import NAMES, attention, choose
from verl_credit.host.attention.kernels import KERNELS, flash, row_by_row


def varlen(
    q,
    k,
    v,
    cu_q,
    cu_k,
    longest_q,
    longest_k,
    *,
    dropout_p,
    softmax_scale,
    causal,
    window_size=(-1, -1),
    softcap=0.0,
):
    """flash_attn_varlen_func as its documentation says: bottom-right causal alignment, window, softcap."""
    assert causal and dropout_p == 0 and longest_q == max(cu_q.diff()) and longest_k == max(cu_k.diff())
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    out = torch.zeros_like(q)
    for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        back = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)[None]
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[c:d])
    return out


def flash_as_documented(*tensors, **options):
    return flash(*tensors, varlen=varlen, **options)


METHODS = {"sdpa": KERNELS["sdpa"], "flex": KERNELS["flex"], "varlen": flash_as_documented}


@st.composite
def trees(draw):
    """Rows of different lengths with any number of branches, at any base, in any order."""
    trunks = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    branches = [
        draw(st.lists(st.tuples(st.integers(1, trunk), st.integers(1, 4)), max_size=4)) for trunk in trunks
    ]
    return pack_rows(trunks, branches)


def tensors(pack, seed=0):
    random = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, 4, pack.length, 8, generator=random, dtype=torch.float64) for _ in range(3)
    )
    return query, key[:, :2], value[:, :2]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("method", METHODS)
@given(pack=trees(), window=st.sampled_from([None, 1, 3, 50]), softcap=st.sampled_from([None, 1.5]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_every_kernel_is_the_definition(method, pack, window, softcap):
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    ours = METHODS[method](*tensors(pack), pack, **options)
    expected = row_by_row(*tensors(pack), pack.rows, **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_gradients_flow_through_trunks_and_branches():
    pack = pack_rows([5, 3], [[(5, 2), (2, 2)], []])
    grads = []
    for method in (KERNELS["sdpa"], lambda *t, **o: row_by_row(*t[:3], t[3].rows, **o)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors(pack)]
        weight = torch.randn(
            1, pack.length, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        (method(*leaves, pack, scaling=0.3) * weight).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


# --- whole models: a branch is a row of its own ---

TRUNKS, BRANCHES = [17, 9, 12], [[(17, 3), (11, 2), (11, 4), (1, 3)], [], [(12, 2), (5, 3)]]


def stream(pack, seed=0):
    return torch.randint(3, VOCABULARY, (pack.length,), generator=torch.Generator().manual_seed(seed))


def read_apart(model, pack, ids):
    """[(places in the stream, log-probs)] of every trunk and every branch, each in a forward of its own."""
    found = []
    for row in pack.rows:
        trunk, at = ids[row.start : row.start + row.trunk], row.start + row.trunk
        own = log_probs(model, trunk, pack=pack_rows([row.trunk]))
        found.append((range(row.start, row.start + row.trunk - 1), own))
        for base, tokens in row.branches:
            whole = torch.cat([trunk[:base], ids[at : at + tokens]])
            own = log_probs(model, whole, pack=pack_rows([len(whole)]))
            found.append((range(at, at + tokens - 1), own[base:]))
            at += tokens
    return found


def largest_difference(model, pack, ids, positions=None, told=None):
    packed = log_probs(model, ids, pack.position_ids() if positions is None else positions, told or pack)
    return max(
        float((packed[list(places)] - own).abs().max()) for places, own in read_apart(model, pack, ids)
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_branch_is_a_row_of_its_own(family, kernel):
    pack = pack_rows(TRUNKS, BRANCHES)
    ids, model = stream(pack), tiny_model(family)
    with forced(kernel):
        assert largest_difference(model, pack, ids) < 2e-5
        assert largest_difference(in_float64(model), pack, ids) < 1e-10


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_a_row_reads_as_in_the_stock_implementation(family):
    """Gemma's softcap is computed by `eager` alone, whose softmax is float32."""
    ids = stream(pack_rows([23]))
    ours, stock = in_float64(tiny_model(family)), in_float64(tiny_model(family, "sdpa"))
    torch.testing.assert_close(
        log_probs(ours, ids, pack=pack_rows([23])), log_probs(stock, ids), rtol=0, atol=1e-10
    )


def test_a_softcapped_row_reads_as_in_the_stock_implementation():
    ids = stream(pack_rows([23]))
    ours, stock = tiny_model("gemma2"), tiny_model("gemma2", "eager")
    torch.testing.assert_close(
        log_probs(ours, ids, pack=pack_rows([23])), log_probs(stock, ids), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_training_on_a_pack_is_training_on_its_rows_checkpointing_or_not(family):
    """Gradients of all weights, in train mode (where checkpointing acts): packed, checkpointed, and by stock attention."""
    pack = pack_rows([17, 9, 12])
    ids = stream(pack)

    def gradients(attention, *, packs, checkpoint=False):
        model = in_float64(tiny_model(family, attention)).train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for told, tokens in packs:
            extra = {"credit_pack": told} if told else {}
            positions = told.position_ids() if told else torch.arange(len(tokens))
            logits = model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, **extra
            ).logits[0]
            logits.log_softmax(dim=-1).gather(1, tokens[:, None]).sum().backward()
        return [weight.grad for weight in model.parameters()]

    rows = [(None, ids[row.start : row.start + row.trunk]) for row in pack.rows]
    expected = gradients("sdpa", packs=rows)
    for checkpoint in (False, True):
        ours = gradients("auto", packs=[(pack, ids)], checkpoint=checkpoint)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_controls_that_must_fail():
    """Branches that see the branch before them, boundaries one short, positions off by one: far off."""
    pack = pack_rows(TRUNKS, BRANCHES)
    ids, model = stream(pack), in_float64(tiny_model("qwen3"))
    unhooked = pack_rows([row.length for row in pack.rows])
    assert largest_difference(model, pack, ids, told=unhooked) > 2
    short = pack_rows(TRUNKS, [[(max(1, base - 1), tokens) for base, tokens in row] for row in BRANCHES])
    assert largest_difference(model, pack, ids, told=short) > 0.5
    positions = pack.position_ids()
    for row in pack.rows:
        positions[row.start + row.trunk : row.start + row.length] += 1
    assert largest_difference(model, pack, ids, positions=positions) > 2


# --- the choice, and what is refused ---


def test_auto_takes_the_first_kernel_that_runs_and_is_right():
    def broken(*_, **__):
        raise ImportError("No module named 'flash_attn'")

    def wrong(*arguments, **options):
        return KERNELS["sdpa"](*arguments, **options) + 1

    cpu = torch.device("cpu")
    plain = choose("auto", cpu, torch.float32, 8)
    assert plain.kernel == "sdpa" and plain.error < 1e-5
    with pytest.raises(RuntimeError, match="varlen: ImportError: No module named 'flash_attn'"):
        choose("credit_varlen", cpu, torch.float32, 8, {"varlen": broken})
    with pytest.raises(RuntimeError, match="sdpa: off by 1 on cpu in torch.float32"):
        choose("auto", cpu, torch.float32, 8, {"sdpa": wrong})


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_plain_kernel_is_taken_in_every_precision(dtype, head_dim):
    for gradients in (False, True):
        assert choose("auto", torch.device("cpu"), dtype, head_dim, gradients=gradients).kernel == "sdpa"


@pytest.mark.parametrize("dropped", ["window", "softcap"])
def test_a_kernel_that_forgets_window_softcap_or_a_gradient_is_not_taken(dropped):
    def forgetful(*tensors, **options):
        return KERNELS["sdpa"](*tensors, **{name: v for name, v in options.items() if name != dropped})

    def without_gradient(query, *others, **options):
        return KERNELS["sdpa"](query.detach() + 0 * query, *others, **options)

    cpu = torch.device("cpu")
    for kernel in (forgetful, without_gradient):
        with pytest.raises(RuntimeError, match="sdpa: off by"):
            choose("auto", cpu, torch.float32, 8, {"sdpa": kernel})


@pytest.mark.parametrize("name", NAMES)
def test_models_can_be_built_under_every_name(name):
    """transformers reads meaning into names: one with "flash" in it would be looked for as a package."""
    assert tiny_model("qwen3", name).config._attn_implementation == name


def test_a_keyword_that_would_be_ignored_is_refused():
    query = torch.zeros(1, 2, 3, 8)
    pack, layer = pack_rows([3]), torch.nn.Identity()
    attention(
        "auto", layer, query, query, query, None, credit_pack=pack, position_ids=torch.arange(3), s_aux=None
    )
    for odd in ({"s_aux": torch.zeros(2)}, {"position_bias": torch.zeros(1)}):
        with pytest.raises(NotImplementedError, match=f"asks for {next(iter(odd))}"):
            attention("auto", layer, query, query, query, None, credit_pack=pack, **odd)
    with pytest.raises(NotImplementedError, match="is not causal"):
        attention("auto", layer, query, query, query, None, credit_pack=pack, is_causal=False)


def test_every_reason_for_passing_a_kernel_over_is_kept(monkeypatch):
    from verl_credit.host.attention import implementation

    def broken(*_, **__):
        raise ImportError("No module named 'flash_attn'")

    monkeypatch.setitem(implementation.PREFERENCE, "cpu", ("varlen", "sdpa"))
    found = choose("auto", torch.device("cpu"), torch.float32, 8, {**KERNELS, "varlen": broken})
    assert found.kernel == "sdpa"
    assert "varlen: ImportError: No module named 'flash_attn'" in str(found)


def test_without_a_pack_nothing_is_guessed():
    model, ids = tiny_model("qwen3"), stream(pack_rows([9]))
    with pytest.raises(RuntimeError, match="got no credit_pack"):
        log_probs(model, ids)
    with pytest.raises(RuntimeError, match="1 x 9 tokens for a pack of 8"):
        log_probs(model, ids, pack=pack_rows([8]))


@pytest.mark.parametrize("branch", [(0, 1), (6, 1), (3, 0)])
def test_a_branch_from_nowhere_is_refused(branch):
    with pytest.raises(
        ValueError, match=rf"row 1 of 5 tokens has a branch of {branch[1]} tokens at {branch[0]}"
    ):
        pack_rows([4, 5], [[], [branch]])
