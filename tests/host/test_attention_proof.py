"""The start-up proof through verl's engine: right models pass in every precision, wrong masks do not."""

import re
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from kit.families import since
from kit.tiny_engine import build_engine, single_rank
from kit.tiny_models import VOCABULARY, tiny_config, tiny_model
from verl_credit.errors import IntegrityError
from verl_credit.host.actor import worker
from verl_credit.host.engine import attention_proof, log_prob_engine
from verl_credit.host.engine.attention_proof import BRANCH_SHAPES, PACK_TOKENS, ROWS, prove
from verl_credit.host.engine.log_prob_engine import BranchEngine
from verl_credit.policy.attention import kernels
from verl_credit.policy.attention.implementation import chosen, sliding_layers
from verl_credit.policy.attention.pack import pack_rows

RIGHT = kernels.KERNELS["sdpa"]


def leaking(query, key, value, pack, **options):
    """One row: all see all that stands before them in the stream."""
    return RIGHT(query, key, value, pack_rows([pack.length]), **options)


def acausal(query, key, value, pack, *, scaling, **_):
    """Packed and alone alike: a token sees what follows it in its row."""
    groups = query.shape[1] // key.shape[1]
    places = [range(row.start, row.start + row.length) for row in pack.rows]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, row],
            *(x[:, :, row].repeat_interleave(groups, dim=1) for x in (key, value)),
            scale=scaling,
        )
        for row in map(list, places)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def windowless(query, key, value, pack, *, window, **options):
    return RIGHT(query, key, value, pack, **options)


def misplaced(query, key, value, pack, **options):
    """One branch of the packed rows sees a token more than it should."""
    bases = [[(base + (base == 128), tokens) for base, tokens in row.branches] for row in pack.rows]
    return RIGHT(query, key, value, pack_rows([row.trunk for row in pack.rows], bases), **options)


def too_short(query, key, value, pack, **options):
    """Every branch of the packed rows sees a token less than it should."""
    bases = [[(base - 1, tokens) for base, tokens in row.branches] for row in pack.rows]
    return RIGHT(query, key, value, pack_rows([row.trunk for row in pack.rows], bases), **options)


def too_long(query, key, value, pack, **options):
    """A token more, where the row has one."""
    bases = [[(min(base + 1, row.trunk), tokens) for base, tokens in row.branches] for row in pack.rows]
    return RIGHT(query, key, value, pack_rows([row.trunk for row in pack.rows], bases), **options)


WRONG = (leaking, acausal, windowless)
CASES = {  # precision, family, changes
    "fp32": ("fp32", "mistral", {}),
    "bf16": ("bf16", "mistral", {}),
    "bf16, 36 layers": ("bf16", "qwen3", {"num_hidden_layers": 36}),
    "bf16, 28 sliding layers": ("bf16", "mistral", {"num_hidden_layers": 28}),
    "bf16, 24 layers of experts": ("bf16", "qwen3_moe", {"num_hidden_layers": 24}),
}


def wrongs(case) -> list:
    return [wrong for wrong in WRONG if wrong is not windowless or CASES[case][1] == "mistral"]


LIMITS = {
    "fp32": ("0.001", "0.001", "0.001", "0.001", "float32"),
    "bf16": ("3", "0.3", "0.75", "0.15", "bfloat16"),
}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
WINDOWS = {
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen2_moe, no window": ("qwen2_moe", EXPERTS | {"use_sliding_window": False, "sliding_window": 20}),
    "phimoe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
}  # fmt: skip


@pytest.fixture(scope="module")
def process():
    with single_rank():
        yield


@pytest.fixture(scope="module")
def proved(process, tmp_path_factory):
    """Returns the message of the proof of a case with a kernel."""
    folder = tmp_path_factory.mktemp("models")

    def proof_of(engine) -> str:
        try:
            return prove(engine, VOCABULARY)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"

    @cache
    def right(case):
        """Returns the engine, and its proof with the right kernel.

        A process tries a kernel once per kind of tensors and remembers the result. All trials have to be of the right
        kernel: a trial refuses a wrong one, and then the proof would never run with it.
        """
        precision, family, changes = CASES[case] if case in CASES else ("fp32", *WINDOWS[case])
        tiny_model(family, attention="sdpa", **changes).save_pretrained(folder / case)
        with mock.patch.object(log_prob_engine, "refuse_model"):  # which knows some of these by name
            engine = build_engine(f"{folder}/{case}", precision=precision)
        message = proof_of(engine)
        chosen(engine.module_attention)  # a refused window ends the proof before the trial with gradients
        return engine, message

    def of(case, kernel=RIGHT) -> str:
        engine, message = right(case)
        if kernel is RIGHT:
            return message
        without_advice = mock.patch.object(attention_proof, "WAYS", ())  # its measurement takes as long again
        with mock.patch.dict(kernels.KERNELS, sdpa=kernel), without_advice:
            return proof_of(engine)

    return of


def name_of(value) -> str:
    return getattr(value, "__name__", value)


def marks(case, *wrong):
    """Half precision takes long, and deep models longer: ``make test`` has only that they are right, and the bases that
    are one too short, which move their log-probs least."""
    deep = "layers" in case and wrong not in ((), (too_short,))
    return pytest.mark.nightly if deep else () if case == "fp32" else pytest.mark.slow


def each(pairs):
    return [pytest.param(*pair, marks=marks(*pair)) for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("case", each((case,) for case in CASES))
def test_a_right_model_passes(case, proved):
    line = proved(case)
    assert line.startswith("attention: sdpa (within")
    assert "alone as with eager attention within" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "wrong"), each((case, wrong) for case in CASES for wrong in wrongs(case)), ids=name_of
)
def test_a_wrong_mask_does_not(case, wrong, proved):
    *limits, dtype = LIMITS[CASES[case][0]]
    line = proved(case, wrong)
    assert line.startswith("IntegrityError: attention: sdpa (within") and f"in torch.{dtype} " in line
    assert re.findall(r"at most (\d+(?:[.]\d+)?)", line) == limits


@pytest.mark.slow
def test_a_base_off_by_one_at_the_border_of_a_block_does_not_in_float32(proved):
    assert proved("fp32", misplaced).startswith("IntegrityError: attention: sdpa (within")


@pytest.mark.parametrize(
    ("case", "wrong"),
    each(
        [
            *((case, too_short) for case in CASES if case != "fp32"),
            # A token too many in six of seven branches goes unnoticed in the model of experts, which is flat.
            *((case, too_long) for case in CASES if case not in ("fp32", "bf16, 24 layers of experts")),
        ]
    ),
    ids=name_of,
)
def test_bases_off_by_one_do_not_in_half_precision(case, wrong, proved):
    assert proved(case, wrong).startswith("IntegrityError: attention: sdpa (within")


def test_the_pack_has_several_blocks_and_bases_on_both_sides_of_their_borders():
    pack = pack_rows(ROWS, BRANCH_SHAPES)
    ends = {row.start + base for row in pack.rows for base, _ in row.branches}
    assert {127, 128, 129, 511, 512, 513} <= ends
    assert 600 <= pack.length <= PACK_TOKENS


# --- models whose window is in the mask alone ---


@pytest.mark.parametrize(
    ("family", "changes", "count", "key"),
    [
        ("mistral", {}, 2, "sliding_window"),
        ("mistral", {"sliding_window": None}, 0, "sliding_window"),
        ("gemma2", {}, 1, "layer_types"),
        ("qwen2", {"sliding_window": 7}, 0, "sliding_window"),  # use_sliding_window=false
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            1,
            "layer_types",
        ),
        ("qwen3_moe", {"sliding_window": 7, "use_sliding_window": True}, 2, "sliding_window"),
    ],
)
def test_how_many_layers_slide(family, changes, count, key):
    assert sliding_layers(tiny_config(family, **changes)) == (count, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("qwen2_moe", "layer_types of .* gives 1 layers a sliding window of 20, but only 0 .* use_sliding_window=false"),
        ("phimoe", "sliding_window of .* gives 2 layers a sliding window of 20, but only 0 .* sliding_window=null"),
    ],
)  # fmt: skip
def test_a_window_that_no_layer_asks_for_is_refused(case, text, proved):
    """Rows shorter than the window, as the proof's are beside a real model's, read the same without it."""
    line = proved(case)
    assert line.startswith("IntegrityError: ") and re.search(text, line)


@pytest.mark.slow
def test_such_a_model_passes_without_its_window(proved):
    assert proved("qwen2_moe, no window").startswith("attention: sdpa (within")


# --- every other attention ---

KEYS = "actor_rollout_ref.model.override_config.attn_implementation={}, actor_rollout_ref.model.use_remove_padding={}"
SCORERS = " and algorithm.info_gain_scorer=rows this model's rows read as alone"
HYBRID = {"layer_types": ["conv", "full_attention"]}
OTHERS = {  # case: (precision, family, changes, attention, remove padding), what the proof says
    "sdpa packed": (("fp32", "qwen3", {}, "sdpa", True), "attention: sdpa; packed rows read as alone within"),
    "sdpa padded": (("fp32", "qwen3", {}, "sdpa", False), "attention: sdpa; padded rows read as alone within"),
    "eager packed": (("fp32", "mistral", {}, "eager", True), "attention: eager; packed rows read as alone"),
    "a hybrid, padded": (("fp32", "lfm2", HYBRID, "sdpa", False), "attention: sdpa; padded rows read as alone"),
    "half precision": (("bf16", "qwen3", {}, "sdpa", True), "attention: sdpa; packed rows read as alone within"),
    "a hybrid": (("fp32", "lfm2", HYBRID, "sdpa", True), KEYS.format("sdpa", "false") + SCORERS),
    "a hybrid in half precision": (
        ("bf16", "lfm2", HYBRID, "sdpa", True), "another first row changes the others by",
    ),
    "a softcap that sdpa drops": (("fp32", "gemma2", {}, "sdpa", False), KEYS.format("auto", "true")),
    "sinks": (
        ("fp32", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "auto", True),
        f"passes s_aux, which would be ignored. With {KEYS.format('eager', 'false')}{SCORERS}",
    ),
    "chunks": (
        ("fp32", "llama4_text", {"attention_chunk_size": 32, "intermediate_size_mlp": 48, "moe_layers": [],
            "layer_types": ["chunked_attention", "full_attention"]}, "sdpa", True),
        KEYS.format("sdpa", "false") + SCORERS,
    ),
    "nothing is right": (
        ("fp32", "llama", {"max_position_embeddings": 128, "rope_parameters":
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "sdpa", True),
        "No other setting that was tried reads rows as alone",
    ),
}  # fmt: skip
ACCEPTED = ("sdpa packed", "sdpa padded", "eager packed", "a hybrid, padded", "half precision")


# What transformers mended, or refuses itself: the version with which it was found.
SINCE = {"a softcap that sdpa drops": "5.21", "nothing is right": "5.19"}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_every_attention_is_proven(case, process, tmp_path):
    if case in SINCE and since(SINCE[case]):
        pytest.skip(f"not so with transformers {SINCE[case]} and later")
    (precision, family, changes, attention, packed), says = OTHERS[case]
    tiny_model(family, attention="eager", **changes).save_pretrained(tmp_path)
    options = {"precision": precision, "use_remove_padding": packed}
    with mock.patch.object(
        log_prob_engine, "refuse_model"
    ):  # which knows most of these from their config.json
        engine = build_engine(str(tmp_path), attention=attention, **options)
    if case in ACCEPTED:
        assert prove(engine, VOCABULARY).startswith(says)
    else:
        with pytest.raises(IntegrityError, match=re.escape(says)):
            prove(engine, VOCABULARY)
    assert engine.module_attention == attention


@pytest.mark.skipif(since("5.21"), reason="transformers has no sdpa for it")
@pytest.mark.slow
def test_a_setting_that_the_table_of_families_refuses_is_not_advised(process, tmp_path):
    """Without the table it would be `auto` here, as above."""
    tiny_model("gemma2", attention="eager").save_pretrained(tmp_path)
    with mock.patch.object(log_prob_engine, "refuse_model"):
        engine = build_engine(str(tmp_path), attention="sdpa", use_remove_padding=False)
    refused = mock.patch.object(attention_proof, "refuse_model", side_effect=IntegrityError("refused"))
    with refused, pytest.raises(IntegrityError, match=KEYS.format("eager", "false")):
        prove(engine, VOCABULARY)


@pytest.mark.parametrize("reference", [True, False])
def test_a_worker_proves_its_actor_and_its_reference(reference, monkeypatch):
    from verl.workers.engine_workers import ActorRolloutRefWorker

    def part(name):
        engine = BranchEngine()
        engine.name = name
        engine.model_config = SimpleNamespace(hf_config=tiny_config("qwen3"))
        return SimpleNamespace(engine=engine)

    proven = []
    monkeypatch.setattr(worker, "prove", lambda engine, vocabulary: proven.append(engine.name) or engine.name)
    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: None)
    monkeypatch.setattr(worker.CreditWorker, "rank", 0)
    made = object.__new__(worker.CreditWorker)
    made.config = OmegaConf.create({"actor": {"policy_loss": {"loss_mode": "vanilla"}}})
    made._is_actor, made.distillation_enabled = True, False
    made.actor, made.ref = part("actor"), part("reference") if reference else None
    made.init_model()
    assert proven == ["actor", "reference"][: 1 + reference] and made._attention == "actor"
