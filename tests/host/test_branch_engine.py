"""verl's FSDP2 engine with branches, over real gloo ranks: against rows of their own, and against itself without them.

In float32 and in float64, with the norms' cast to float32 taken out; with layers that run checkpointed, too.
"""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kit.families import since
from kit.recipes import load_config
from kit.tiny_engine import (
    ANSWERS,
    TRUNKS,
    Trajectories,
    batch,
    build_engine,
    gloo_rank,
    infer,
    on_ranks,
    single_rank,
)
from kit.tiny_models import VOCABULARY, tiny_config, tiny_model
from verl_credit.errors import IntegrityError
from verl_credit.turns.score.branches import decode_branches, encode_branches, plan_branches
from verl_credit.turns.score.requests import Request


def rank_main(rank, ranks, folder, store, results):
    with gloo_rank(rank, ranks, store):
        for case, (family, options) in (CASES if ranks == 1 else TWO_RANKS).items():
            results[case, rank] = measure(f"{folder}/{family}", rank, ranks, options)


@contextmanager
def masks_made():
    """[(number of the pack, first and last token, window)], a line for every mask that is built."""
    from verl_credit.policy.attention import sdpa

    build, made, packs = sdpa._mask, [], []

    def mask(pack, first, last, keys, window, device):
        packs.extend([] if pack in packs else [pack])
        made.append((packs.index(pack), first, last, window))
        return build(pack, first, last, keys, window, device)

    sdpa._mask = mask
    try:
        yield made
    finally:
        sdpa._mask = build


def measure(folder, rank, ranks, options):
    from verl.utils import tensordict_utils as tu

    from verl_credit.host.engine.attention_proof import prove
    from verl_credit.host.step.store import score_rows
    from verl_credit.names import BRANCH_LOG_PROBS
    from verl_credit.turns.score.scorers.scorer import RowScorer

    engine = build_engine(folder, **{"enable_gradient_checkpointing": False} | options)
    # layers are checkpointed in training mode only
    mode = engine.train_mode if options.get("training") else engine.eval_mode
    rows = TRUNKS if ranks == 1 else (TRUNKS[:3], TRUNKS[3:])[rank]
    turns = Trajectories(rows, seed=rank)
    plan = plan_branches(turns.requests(), turns)
    plain = infer(engine, batch(turns), mode)
    with masks_made() as masks:
        grown = infer(engine, batch(turns, plan), mode)

    def rows_forward(data):
        packed = {"use_remove_padding": True, "use_dynamic_bsz": True, "max_token_len_per_gpu": 64}
        tu.assign_non_tensor(data, use_fused_kernels=False, **packed)
        return infer(engine, data, mode)

    forward = SimpleNamespace(score_rows=lambda rows: score_rows(rows_forward, rows, dp_size=1))
    kept = [
        float((a[:-1] - b[:-1]).abs().max())
        for name in ("log_probs", "entropy")
        for a, b in zip(plain[name].unbind(), grown[name].unbind(), strict=True)
    ]
    return {
        "proof": prove(engine, VOCABULARY),
        "new": set(grown) - set(plain),
        "masks": masks,
        "kept": max(kept),
        "lengths": [len(row) for row in grown["log_probs"].unbind()] == [p + r for p, r in rows],
        "branch": plan.scores(list(grown[BRANCH_LOG_PROBS].unbind())),
        "rows": RowScorer().score(SimpleNamespace(turns=turns, requests=turns.requests()), forward),
    }


LORA = {"lora_rank": 4, "target_modules": "all-linear"}
CHECKPOINTED = {"enable_gradient_checkpointing": True, "training": True}
CASES = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "lora": ("qwen3", LORA),
    "checkpointed": ("qwen3", CHECKPOINTED),
    "sliding and checkpointed": ("mistral", CHECKPOINTED),
    "experts and checkpointed": ("qwen3_moe", CHECKPOINTED),
    "lora, checkpointed": ("qwen3", LORA | CHECKPOINTED),
}
CASES |= {
    f"{case}, fp64": (family, options | {"precision": "fp64"}) for case, (family, options) in CASES.items()
}
TWO_RANKS = {"two ranks": ("qwen3", {})}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """{(case, rank): what came out}; all cases of a number of ranks share their processes."""
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _ in CASES.values()}:
        stock = "eager" if family == "gemma2" else "sdpa"
        tiny_model(family, attention=stock).save_pretrained(folder / family)
    return {key: value for ranks in (1, 2) for key, value in on_ranks(ranks, rank_main, folder).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rank"), [*((case, 0) for case in CASES), ("two ranks", 0), ("two ranks", 1)]
)
def test_branches_through_the_engine(case, rank, measured):
    """Branches read as rows of their own at temperature 1; what verl knows by name is what it is without them."""
    result, limit = measured[case, rank], 1e-10 if case.endswith("fp64") else 2e-5
    assert result["new"] == {"credit_branch_log_probs"} and result["lengths"]
    assert result["kept"] < limit
    assert result["masks"] and len(result["masks"]) == len(set(result["masks"])), (
        "made again in another layer"
    )
    assert result["proof"].startswith("attention: sdpa (within")
    torch.testing.assert_close(result["branch"], result["rows"], rtol=0, atol=limit)
    assert result["branch"].std() > 0.1


# --- in this process ---


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", attention="sdpa").save_pretrained(folder)
    with single_rank():
        yield build_engine(str(folder), enable_gradient_checkpointing=False)


@pytest.mark.slow
def test_a_branch_reads_as_its_row_with_the_answer_behind_it(engine):
    """At temperature 1, where the row itself is read at the run's."""
    from verl_credit.names import BRANCH_LOG_PROBS

    turns = Trajectories([(5, 6), (3, 4)])
    requests = [Request(0, 1, 0, 9, ANSWERS[0]), Request(1, 1, 0, 7, ANSWERS[2])]
    plan = plan_branches(requests, turns)
    found = infer(engine, batch(turns, plan))
    scores = plan.scores(list(found[BRANCH_LOG_PROBS].unbind()))
    whole = [p + r for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)]
    for request, score in zip(requests, scores.tolist(), strict=True):
        answer, alone = request.answer, Trajectories([])
        alone.prompt_ids = [whole[request.row][: request.base]]
        alone.response_ids = [list(answer.token_ids)]
        log_probs = infer(engine, batch(alone, temperature=1.0))["log_probs"][0]
        gold = slice(request.base + answer.gold_start - 1, request.base + answer.gold_end - 1)
        assert score == pytest.approx(float(log_probs[gold].mean()), abs=2e-5)
    plain = infer(engine, batch(turns))["log_probs"]
    for ours, row in zip(found["log_probs"].unbind(), plain.unbind(), strict=True):
        torch.testing.assert_close(ours[:-1], row[:-1], rtol=0, atol=2e-5)


def test_the_engine_reads_no_value_of_a_row_back_from_the_device(engine, monkeypatch):
    """Every such call waits for a GPU. Some are made per micro-batch, and none per row."""
    counted, calls = [], ("item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__float__", "__index__")
    of = type(engine)
    prepare = of.prepare_model_inputs

    def prepared(self, micro_batch):
        reads = []
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                made = getattr(torch.Tensor, name)
                patch.setattr(
                    torch.Tensor, name, lambda *of, made=made, name=name: (reads.append(name), made(*of))[1]
                )
            result = prepare(self, micro_batch)
        counted.append((len(micro_batch), len(reads)))
        return result

    monkeypatch.setattr(of, "prepare_model_inputs", prepared)
    for rows in (TRUNKS[:2], TRUNKS):
        turns = Trajectories(rows)
        infer(engine, batch(turns, plan_branches(turns.requests(), turns), max_token_len_per_gpu=500))
    (few, reads_of_few), (many, reads_of_many) = counted
    assert (few, many) == (2, 5) and reads_of_few == reads_of_many > 0


def test_rows_are_packed_where_a_batch_does_not_say_how(engine):
    """As verl's own engine has it."""
    from verl.utils import tensordict_utils as tu

    said, unsaid = batch(Trajectories(TRUNKS)), batch(Trajectories(TRUNKS))
    unsaid.pop("use_remove_padding")
    for ours, row in zip(
        infer(engine, unsaid)["log_probs"].unbind(), infer(engine, said)["log_probs"].unbind(), strict=True
    ):
        assert torch.equal(ours, row)
    tu.assign_non_tensor(said, use_remove_padding=False)
    with pytest.raises(ValueError, match="needs actor_rollout_ref.model.use_remove_padding=true"):
        infer(engine, said)


def test_the_trainer_fits_branches_by_the_budget_of_every_rank(tmp_path):
    """A rank that refused a row of its own would leave the others waiting for it. The trainer has all rows and drops or
    refuses what exceeds its budget (`fit_branches`), which is verl's of these forwards, and not the update's."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from verl_credit.host.step.v1_host import V1Host

    tiny_model("qwen3", attention="sdpa").save_pretrained(tmp_path)
    role = "actor_rollout_ref"
    budgets = (
        f"{role}.actor.ppo_max_token_len_per_gpu=3000",
        f"{role}.rollout.log_prob_max_token_len_per_gpu=2000",
    )
    model = f"{role}.model.path={tmp_path}", f"+{role}.model.load_tokenizer=false"
    config, made = load_config("lab", [*budgets, *model]), []

    class Built(Exception):
        pass

    def build(config):
        made.append(config.engine_config)
        raise Built

    worker = object.__new__(ActorRolloutRefWorker)
    worker.config, worker.role, worker.actor_worker_cls = config.actor_rollout_ref, "actor", build
    worker.distillation_enabled, worker._omega_profiler_config = False, None
    with pytest.raises(Built):
        inspect.unwrap(ActorRolloutRefWorker.init_model)(worker)
    (engine,) = made
    assert engine.use_dynamic_bsz and engine.max_token_len_per_gpu == 3000
    assert V1Host(config, None, None).budget == engine.infer_max_token_len_per_gpu == 2000


def test_an_engine_refuses_a_model_that_branches_do_not_fit_before_it_is_built(engine):
    config = tiny_config("qwen3")
    config._attn_implementation = engine.module_attention
    config.layer_types = ["mamba", "full_attention"]
    other = object.__new__(type(engine))
    other.model_config = SimpleNamespace(hf_config=config, use_remove_padding=True)
    with pytest.raises(
        IntegrityError,
        match="qwen3: its layers of the kind mamba .*; exact are .*=sdpa, .*=false and .*=rows",
    ):
        other.initialize()


def test_log_probs_are_computed_by_ours_where_the_start_says_so(engine, monkeypatch):
    from verl_credit.host.engine import log_prob_engine

    called, ours = [], log_prob_engine.token_values
    monkeypatch.setattr(
        log_prob_engine, "token_values", lambda *given, **more: called.append(1) or ours(*given, **more)
    )
    infer(engine, batch(Trajectories(TRUNKS)))
    assert engine.usual_path() == log_prob_engine.OURS and called


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
    with pytest.raises(RuntimeError, match="3 log-probs .* 4 branch tokens"):
        plan.scores([torch.zeros(3)])


@pytest.mark.skipif(since("5.19"), reason="its module has no classes of its own any more")
def test_a_model_whose_module_has_its_own_attention_classes_is_refused_with_the_way_that_works(
    tmp_path, engine
):
    """Of a family that no row of the table names, transformers' KeyError is the first sign."""
    from verl_credit.host.engine import log_prob_engine

    tiny_model("diffllama", attention="sdpa").save_pretrained(tmp_path)
    with (
        mock.patch.object(log_prob_engine, "refuse_model"),
        pytest.raises(
            IntegrityError,
            match="diffllama has a table of .*; exact without it are .*=sdpa, .*=false and .*=rows",
        ),
    ):
        build_engine(str(tmp_path))


def test_a_model_that_loads_with_another_attention_scores_no_branches():
    """Its branches would see each other, and no number would show it."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    from verl_credit.host.engine.log_prob_engine import SCORE_BRANCHES, BranchEngine

    engine = BranchEngine()
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(_attn_implementation="sdpa", model_type="qwen3")
    )
    data = TensorDict({}, batch_size=[])
    tu.assign_non_tensor(data, **{SCORE_BRANCHES: True})
    with pytest.raises(
        ValueError, match="info_gain_scorer=branch cannot score qwen3 with attn_implementation=sdpa"
    ):
        engine.forward_backward_batch(data, None, forward_only=True)
