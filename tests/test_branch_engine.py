"""verl's FSDP2 engine with branches, over real gloo ranks: against rows of their own, and against itself without them."""

import os
from contextlib import contextmanager

import pytest
import torch
import torch.multiprocessing as mp
from tiny_models import VOCABULARY, tiny_config, tiny_model

from verl_credit.host.answer_template import PseudoAnswer
from verl_credit.host.gain_branches import decode_branches, encode_branches, plan_branches
from verl_credit.host.gain_requests import Request

TRUNKS = [(5, 12), (3, 20), (5, 1), (7, 9), (4, 17)]  # prompt and response tokens
ANSWERS = [
    PseudoAnswer((7, 8, 9, 10, 11), 1, 4),
    PseudoAnswer((12, 13), 0, 2),
    PseudoAnswer((14, 15, 16), 2, 3),
]


class Trajectories:
    """As much of a `TurnBatch` as branches read."""

    def __init__(self, rows, seed=0):
        random = torch.Generator().manual_seed(seed)
        draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=random).tolist()  # noqa: E731
        shared = draw(5)
        self.prompt_ids = [shared if p == 5 else draw(p) for p, _ in rows]
        self.response_ids = [draw(r) for _, r in rows]

    def requests(self):
        """The bare prompt and two contexts of every row but the third, which has its prompt alone."""
        found = []
        for row, (prompt, response) in enumerate(zip(self.prompt_ids, self.response_ids, strict=True)):
            ends = [0] if len(response) == 1 else [0, len(response) // 2, len(response)]
            for column, end in enumerate(ends):
                for alias in range(1 + (row == 0)):
                    answer = ANSWERS[(row + 2 * alias) % 3]
                    found.append(Request(row, column, alias, len(prompt) + end, answer))
        return found


def batch(turns, plan=None, **settings):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from verl_credit.host.fields import BRANCHES, SCORE_BRANCHES

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    whole = [p + r for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)]
    ones = nested([[1] * len(row) for row in turns.response_ids])
    fields = {
        "input_ids": nested(whole),
        "position_ids": nested([list(range(len(row))) for row in whole]),
        "response_mask": ones,
        "loss_mask": ones,
    }
    if plan is not None:
        fields[BRANCHES] = plan.field()
        settings[SCORE_BRANCHES] = True
    data = TensorDict(fields, batch_size=len(whole))
    defaults = {
        "calculate_entropy": True, "compute_loss": False, "temperature": 0.7, "use_remove_padding": True,
        "use_dynamic_bsz": True, "max_token_len_per_gpu": 64, "use_fused_kernels": False,
    }  # fmt: skip
    tu.assign_non_tensor(data, **defaults | settings)
    return data


def build_engine(folder, attention="auto", **model):
    from verl_credit.host.register import register_all, register_engines

    register_all()
    from verl.workers.config import FSDPEngineConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from verl_credit.host.cpu.register import register_engine

    register_engine()
    register_engines()
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=folder, load_tokenizer=False, override_config={"attn_implementation": attention}, **model
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            forward_only=True,
            use_torch_compile=False,
            model_dtype="fp32",
            mixed_precision=fp32,
        ),
        optimizer_config=None,
        checkpoint_config=None,
    )
    engine.initialize()
    torch.manual_seed(3)  # LoRA's B is 0 at first: an adapter that does something
    for name, weight in engine.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return engine


def infer(engine, data):
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]


def rank_main(rank, ranks, folder, store, results):
    os.environ |= {
        "VERL_PLATFORM": "cpu", "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
    }  # fmt: skip
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    for case, (family, model) in (CASES if ranks == 1 else TWO_RANKS).items():
        results[case, rank] = measure(f"{folder}/{family}", rank, ranks, model)
    torch.distributed.destroy_process_group()


@contextmanager
def masks_made():
    """[what was asked for], a line for every branch mask that is built."""
    from verl_credit.host.attention import pack

    build, made = pack._branch_mask, []
    pack._branch_mask = lambda *asked: (made.append(asked), build(*asked))[1]
    try:
        yield made
    finally:
        pack._branch_mask = build


def proofs(engine):
    """The start-up proof, and what it says of a kernel in which rows see each other."""
    from verl_credit.host.attention import kernels, pack_rows
    from verl_credit.host.attention_proof import prove

    right = kernels.KERNELS["sdpa"]

    def leaking(query, key, value, pack, **options):
        return right(query, key, value, pack_rows([pack.length]), **options)

    def blind(
        query, key, value, pack, **options
    ):  # packed and alone alike: a token sees all but itself and the first
        return right(query, key.roll(1, dims=2), value.roll(1, dims=2), pack, **options)

    said, refused = prove(engine, VOCABULARY), {}
    for kernel in (leaking, blind):
        kernels.KERNELS["sdpa"] = kernel
        try:
            prove(engine, VOCABULARY)
        except RuntimeError as error:
            refused[kernel.__name__] = str(error)
        finally:
            kernels.KERNELS["sdpa"] = right
    return {"proof": said, "refused": refused.get("leaking", ""), "blind": refused.get("blind", "")}


def measure(folder, rank, ranks, model):
    from verl.utils import tensordict_utils as tu

    from verl_credit.host.fields import BRANCH_LOG_PROBS
    from verl_credit.host.gain_rows import score_by_rows

    engine = build_engine(folder, **{"enable_gradient_checkpointing": False} | model)
    rows = TRUNKS if ranks == 1 else (TRUNKS[:3], TRUNKS[3:])[rank]
    turns = Trajectories(rows, seed=rank)
    plan = plan_branches(turns.requests(), turns)
    plain = infer(engine, batch(turns))
    with masks_made() as masks:
        grown = infer(engine, batch(turns, plan))

    def rows_forward(data):
        packed = {"use_remove_padding": True, "use_dynamic_bsz": True, "max_token_len_per_gpu": 64}
        tu.assign_non_tensor(data, use_fused_kernels=False, **packed)
        return infer(engine, data)

    kept = [
        float((a[:-1] - b[:-1]).abs().max())
        for name in ("log_probs", "entropy")
        for a, b in zip(plain[name].unbind(), grown[name].unbind(), strict=True)
    ]
    return {
        **proofs(engine),
        "new": set(grown) - set(plain),
        "masks": [(row, window) for row, window, _ in masks],
        "kept": max(kept),
        "lengths": [len(row) for row in grown["log_probs"].unbind()] == [p + r for p, r in rows],
        "branch": plan.scores(list(grown[BRANCH_LOG_PROBS].unbind())),
        "rows": score_by_rows(turns.requests(), turns, rows_forward, dp_size=1),
    }


CASES = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "lora": ("qwen3", {"lora_rank": 4, "target_modules": "all-linear"}),
}
TWO_RANKS = {"two ranks": ("qwen3", {})}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """{(case, rank): what came out}; all cases of a number of ranks share their processes."""
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _ in CASES.values()}:
        stock = "eager" if family == "gemma2" else "sdpa"
        tiny_model(family, attention=stock).save_pretrained(folder / family)
    found = {}
    with mp.Manager() as manager:
        for ranks in (1, 2):
            results = manager.dict()
            mp.spawn(rank_main, (ranks, str(folder), str(folder / f"store{ranks}"), results), nprocs=ranks)
            found |= dict(results)
    return found


@pytest.mark.parametrize("case", [*((case, 0) for case in CASES), ("two ranks", 0), ("two ranks", 1)])
def test_branches_through_the_engine(case, measured):
    """Branches read as rows of their own at temperature 1; what verl knows by name is what it is without them."""
    result = measured[case]
    assert result["new"] == {"credit_branch_log_probs"} and result["lengths"]
    assert result["kept"] < 2e-5
    assert result["masks"] and len(result["masks"]) == len(set(result["masks"])), "made again in another layer"
    assert (
        result["proof"].startswith("attention: sdpa (within") and "as with eager attention" in result["proof"]
    )
    assert "more than 0.001 in torch.float32 is wrong" in result["refused"]
    assert "more than 0.001 in torch.float32 is wrong" in result["blind"]
    torch.testing.assert_close(result["branch"], result["rows"], rtol=0, atol=2e-5)
    assert result["branch"].std() > 0.1


# --- planning, without an engine ---


def test_requests_that_ask_the_same_share_a_branch():
    turns = Trajectories(TRUNKS)
    requests = turns.requests()
    plan = plan_branches(requests, turns)
    asked = {}
    for request, place in zip(requests, plan.place_N, strict=True):
        prompt = tuple(turns.prompt_ids[request.row])
        key = (prompt, request.answer) if request.column == 0 else (request.row, request.base, request.answer)
        assert asked.setdefault(key, place) == place
    assert len(set(plan.place_N)) == len(asked) == sum(map(len, plan.branches_B)) < len(requests)
    # rows 0 and 2 share their prompt, and row 2 asks for nothing else
    assert [len(row) for row in plan.branches_B] == [6, 3, 0, 3, 3]
    for row in plan.branches_B:
        assert [branch.base for branch in row] == sorted((branch.base for branch in row), reverse=True)


def test_a_first_gold_token_is_read_from_the_token_before_it():
    turns = Trajectories([(4, 6)])
    requests = [Request(0, 0, 0, 4, ANSWERS[1]), Request(0, 1, 0, 9, ANSWERS[1])]
    plan = plan_branches(requests, turns)
    late, bare = plan.branches_B[0]
    assert (bare.base, bare.token_ids) == (3, (turns.prompt_ids[0][3], 12, 13))
    assert (late.base, late.token_ids) == (8, (turns.response_ids[0][4], 12, 13))
    assert (bare.gold_start, bare.gold_end) == (1, 3)


def test_what_stands_behind_the_gold_tokens_is_not_computed():
    turns = Trajectories([(4, 6)])
    (branch,) = plan_branches([Request(0, 0, 0, 4, ANSWERS[0])], turns).branches_B[0]
    assert branch.token_ids == (7, 8, 9, 10)


def test_branches_travel_as_numbers():
    branches = [(9, (3, 4, 5)), (2, (6,))]
    shape, tokens = decode_branches(encode_branches(branches))
    assert (shape, tokens.tolist()) == ([(9, 3), (2, 1)], [3, 4, 5, 6])
    shape, tokens = decode_branches(encode_branches([]))
    assert shape == [] and len(tokens) == 0


def test_missing_log_probs_are_noticed():
    turns = Trajectories([(4, 6)])
    plan = plan_branches([Request(0, 0, 0, 4, ANSWERS[0])], turns)
    with pytest.raises(RuntimeError, match="3 log-probs came back for 4 branch tokens"):
        plan.scores([torch.zeros(3)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embedding 'dynamic'",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "linear_attention.* depend on more of the packed stream",
        ),
    ],
)
def test_models_whose_tokens_depend_on_the_whole_stream_are_refused(changes, said):
    from verl_credit.host.branch_engine import refuse_model

    config = tiny_config("qwen3")
    refuse_model(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(NotImplementedError, match=said):
        refuse_model(config)
