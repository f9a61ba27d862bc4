"""Kernels over rows and branches: each against the definition, and models that cannot tell a branch from a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.tiny_models import FAMILIES, VOCABULARY, in_float64, log_probs, tiny_model
from verl_credit.errors import IntegrityError
from verl_credit.policy.attention import implementation
from verl_credit.policy.attention import sdpa as sdpa_kernel
from verl_credit.policy.attention import varlen as varlen_kernel
from verl_credit.policy.attention.implementation import NAMES, attention, choose, forced
from verl_credit.policy.attention.kernels import KERNELS, TOLERANCE, Heads, row_by_row, trial
from verl_credit.policy.attention.pack import pack_rows


def documented(
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


def varlen(*tensors, **options):
    return KERNELS["varlen"](*tensors, call=documented, **options)


METHODS = {"sdpa": KERNELS["sdpa"], "flex": KERNELS["flex"], "varlen": varlen}
CPU, SMALL = torch.device("cpu"), Heads(4, 2, 8)


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
@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=[pytest.mark.slow] * (one == "flex")) for one in METHODS]
)
@given(pack=trees(), window=st.sampled_from([None, 1, 3, 50]), softcap=st.sampled_from([None, 1.5]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_every_kernel_is_the_definition(method, pack, window, softcap):
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    ours = METHODS[method](*tensors(pack), pack, **options)
    expected = row_by_row(*tensors(pack), pack.rows, **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.fixture
def small_pieces(monkeypatch):
    """Budgets so small that everything is done in pieces."""
    monkeypatch.setattr(sdpa_kernel, "MASK_NUMBERS", 24)
    monkeypatch.setattr(sdpa_kernel, "LEAST_QUERIES", 2)
    monkeypatch.setattr(varlen_kernel, "KEY_TOKENS", 9)


@pytest.mark.parametrize("method", ["sdpa", "varlen"])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_pieces_are_the_whole(method, window, softcap, small_pieces):
    """Values and gradients."""
    pack = pack_rows([11, 3, 1], [[(11, 2), (7, 1), (2, 4), (9, 1), (10, 9)], [], [(1, 3), (1, 1)]])
    grads = []
    for run in (METHODS[method], lambda *t, **o: row_by_row(*t[:3], t[3].rows, **o)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors(pack)]
        out = run(*leaves, pack, scaling=0.3, window=window, softcap=softcap)
        out.pow(2).sum().backward()
        grads.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_what_is_held_at_a_time_is_bounded(small_pieces):
    """But for one branch that alone asks for more."""
    pack = pack_rows([40, 3], [[(base, 2) for base in range(40, 4, -3)] + [(40, 30)], [(3, 1), (1, 1)]])
    places = [*range(40, 94), 97, 98]  # of the branches' tokens
    for most in (9, 90, 200):
        some = list(varlen_kernel._branches(pack, most, CPU))
        assert all(len(key_N) <= most or len(keys) == 2 for _, key_N, (_, keys, *_) in some)
        assert torch.cat([query_N for query_N, *_ in some]).tolist() == places
    for window in (None, 5):
        pieces = list(sdpa_kernel._pieces(pack, window, CPU))
        assert [p.end for p in pieces[:-1]] == [p.start for p in pieces[1:]] and pieces[-1].end == pack.length
        sizes = [(p.end - p.start, p.mask.numel()) for p in pieces if p.mask is not None]
        assert all(numbers <= 24 or tokens in (2, 30) for tokens, numbers in sizes)  # those of one branch


def test_long_branches_are_pieces_of_their_own_and_short_ones_are_together():
    """Together every query is scored with the places of all the others, which none of them sees."""
    for tokens, expected in ((300, [300] * 4), (12, [48])):
        pack = pack_rows([400], [[(300, tokens)] * 4])
        pieces = [piece for piece in sdpa_kernel._pieces(pack, None, CPU) if piece.mask is not None]
        assert [piece.end - piece.start for piece in pieces] == expected


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


def largest_difference(model, pack, ids):
    packed = log_probs(model, ids, pack.position_ids(), pack)
    return max(
        float((packed[list(places)] - own).abs().max()) for places, own in read_apart(model, pack, ids)
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "family, kernel",
    [
        *((family, "sdpa") for family in FAMILIES),
        pytest.param("gemma2", "flex", marks=pytest.mark.slow),  # windows and a softcap
        *(pytest.param(one, "flex", marks=pytest.mark.nightly) for one in FAMILIES if one != "gemma2"),
    ],
)
def test_a_branch_is_a_row_of_its_own(family, kernel):
    pack = pack_rows(TRUNKS, BRANCHES)
    ids, model = stream(pack), tiny_model(family)
    with forced(kernel):
        assert largest_difference(model, pack, ids) < 2e-5
        assert largest_difference(in_float64(model), pack, ids) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_reads_as_in_the_stock_implementation(family):
    """Gemma's softcap is computed by `eager` alone, whose softmax is float32."""
    stock, exact = ("eager", 2e-5) if family == "gemma2" else ("sdpa", 1e-10)
    ids, pack = stream(pack_rows([23])), pack_rows([23])
    ours, stock = (tiny_model(family, name) for name in ("auto", stock))
    if family != "gemma2":
        ours, stock = in_float64(ours), in_float64(stock)
    torch.testing.assert_close(log_probs(ours, ids, pack=pack), log_probs(stock, ids), rtol=0, atol=exact)


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


# --- the choice, and what is refused ---


def test_auto_takes_the_first_kernel_that_runs_and_is_right(monkeypatch):
    def broken(*_, **__):
        raise ImportError("No module named 'flash_attn'")

    def wrong(*arguments, **options):
        return KERNELS["sdpa"](*arguments, **options) + 1

    def undefined(*arguments, **options):
        return KERNELS["sdpa"](*arguments, **options) * torch.nan

    plain = choose("auto", CPU, torch.float32, SMALL)
    assert plain.kernel == "sdpa" and plain.error < 1e-5
    with pytest.raises(RuntimeError, match="varlen: ImportError: No module named 'flash_attn'"):
        choose("credit_varlen", CPU, torch.float32, SMALL, {"varlen": broken})
    with pytest.raises(RuntimeError, match="sdpa: off by 1 on cpu in torch.float32"):
        choose("auto", CPU, torch.float32, SMALL, {"sdpa": wrong})
    with pytest.raises(RuntimeError, match="sdpa: off by nan"):
        choose("auto", CPU, torch.float32, SMALL, {"sdpa": undefined})
    with pytest.raises(ValueError, match="attn_implementation='credit_flash'; .* auto, credit_varlen"):
        choose("credit_flash", CPU, torch.float32, SMALL)
    monkeypatch.setitem(implementation.PREFERENCE, "cpu", ("varlen", "sdpa"))
    found = choose("auto", CPU, torch.float32, SMALL, {**KERNELS, "varlen": broken})
    assert found.kernel == "sdpa"
    assert "varlen: ImportError: No module named 'flash_attn'" in str(found)


@pytest.mark.parametrize("head_dim", [pytest.param(8, marks=pytest.mark.slow), 32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_plain_kernel_is_taken_in_every_precision(dtype, head_dim):
    for gradients in (False, True):
        assert choose("auto", CPU, dtype, Heads(4, 2, head_dim), gradients=gradients).kernel == "sdpa"


@pytest.mark.parametrize("dropped", ["window", "softcap"])
def test_a_kernel_that_forgets_window_softcap_or_a_gradient_is_not_taken(dropped):
    def forgetful(*tensors, **options):
        return KERNELS["sdpa"](*tensors, **{name: v for name, v in options.items() if name != dropped})

    def without_gradient(query, *others, **options):
        return KERNELS["sdpa"](query.detach() + 0 * query, *others, **options)

    for kernel in (forgetful, without_gradient):
        with pytest.raises(RuntimeError, match="sdpa: off by"):
            choose("auto", CPU, torch.float32, SMALL, {"sdpa": kernel})


def misplaced(change):
    """SDPA with the branches that ``change`` makes of a row's; right under a window, where a key weighs more."""

    def kernel(query, key, value, pack, **options):
        if options.get("window") is not None:
            return KERNELS["sdpa"](query, key, value, pack, **options)
        moved = pack_rows([row.trunk for row in pack.rows], [change(row) for row in pack.rows])
        return KERNELS["sdpa"](query, key, value, moved, **options)

    return kernel


def rounded(base, trunk):
    return min(trunk, -(-base // 128) * 128)


WRONG = {
    "a base behind its border": lambda row: [(b + (b == 128), n) for b, n in row.branches],
    "a base before its border": lambda row: [(b - (b == 37), n) for b, n in row.branches],
    "bases in whole blocks": lambda row: [(rounded(b, row.trunk), n) for b, n in row.branches],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", WRONG)
def test_one_token_too_many_or_too_few_is_found_in_every_precision(wrong, dtype):
    assert trial(misplaced(WRONG[wrong]), CPU, dtype, SMALL, False) > 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_found(off, dtype):
    def kernel(*tensors, window=None, **options):
        return KERNELS["sdpa"](*tensors, window=window if window is None else window + off, **options)

    assert trial(kernel, CPU, dtype, SMALL, False) > 1.5 * TOLERANCE[dtype]


def test_the_trial_has_the_models_own_heads(monkeypatch):
    asked = []
    monkeypatch.setattr(implementation, "_choices", {})
    monkeypatch.setattr(
        implementation,
        "trial",
        lambda kernel, device, dtype, heads, gradients: asked.append((heads, gradients)) or 0.0,
    )
    log_probs(tiny_model("qwen3"), torch.arange(9), pack=pack_rows([9]))
    assert asked == [(Heads(4, 2, 8), False)]


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
        with pytest.raises(IntegrityError, match=f"passes {next(iter(odd))}"):
            attention("auto", layer, query, query, query, None, credit_pack=pack, **odd)
    with pytest.raises(IntegrityError, match="is not causal"):
        attention("auto", layer, query, query, query, None, credit_pack=pack, is_causal=False)


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
