"""The entropy probe through verl's FSDP2 engine: against the same model outside it, and without a trace in training."""

import copy
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from kit.tiny_engine import TRUNKS, Trajectories, batch, build_engine, gloo_rank, infer, on_ranks, single_rank
from kit.tiny_models import in_float64, tiny_model
from verl_credit.host.step.probe_rows import deal
from verl_credit.names import PROBE_GROUP, PROBE_PATH, PROBE_SCORE

ROWS_G = [[0, 3], [1, 2, 4]]  # of TRUNKS, in groups of two and of three rows
TEMPERATURE = 0.75  # exact in float32, as which the engine keeps it
DYNAMIC = {"small": 40, "large": 400}  # tokens of a micro-batch
CASES = {  # case: (model options, engine options)
    "plain": ({"enable_gradient_checkpointing": False}, {"reshard_after_forward": False}),
    "checkpointed": (
        {"enable_gradient_checkpointing": True},
        {"param_offload": True, "optimizer_offload": True},
    ),
    "adapters": ({"lora_rank": 4, "target_modules": ["q_proj", "down_proj"]}, {}),
}


def weights():
    """Score and path weights of every row, 0 on what the policy did not write."""
    random = torch.Generator().manual_seed(5)
    written = [torch.rand(n, generator=random) < 0.8 for _, n in TRUNKS]
    score = [torch.randn(n, generator=random, dtype=torch.float64) for _, n in TRUNKS]
    return [s * w for s, w in zip(score, written, strict=True)], [w.double() / 3 for w in written]


def training_batch(**settings):
    """As verl's trainer hands rows to `update_actor`, with what the test's loss needs."""
    turns = Trajectories(TRUNKS)
    data = batch(turns, **{"temperature": TEMPERATURE, "max_token_len_per_gpu": 400} | settings)
    for name, rows in (("prompts", turns.prompt_ids), ("responses", turns.response_ids)):
        data[name] = torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    return data


def weights_of(dealt):
    """The same of dealt rows; a row that fills a gap has none."""
    return [[values[row] * counts for row, _, counts in dealt] for values in weights()]


def probe_batch(rank, ranks, micro=1, **settings):
    """This rank's part of the dealt rows."""
    from verl.utils import tensordict_utils as tu

    dealt = deal(ROWS_G, ranks, micro)
    mine = dealt[rank * len(dealt) // ranks : (rank + 1) * len(dealt) // ranks]
    data = tu.index_select_tensor_dict(training_batch(**settings), [row for row, _, _ in mine])
    for name, values in zip((PROBE_SCORE, PROBE_PATH), weights_of(mine), strict=True):
        data[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    data[PROBE_GROUP] = torch.tensor([group for _, group, _ in mine])
    return data


def loss_of(model_output, data, dp_group=None):
    """A loss that moves the parameters, the same for any number of ranks."""
    values = model_output["log_probs"].values(), model_output["entropy"].values()
    return -(values[0].sum() + 0.5 * values[1].sum()) / 50, {}


def full(engine):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in engine.module.named_parameters()
    }


def state(engine):
    """Everything that a next update reads, and the random generator."""
    moments = engine.optimizer.state_dict()["state"]
    tensors = {f"{n}/{key}": value for n, of in moments.items() for key, value in of.items()}
    return full(engine) | {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in tensors.items()} | {
        "random": torch.get_rng_state(), "lr": torch.tensor(engine.optimizer.param_groups[0]["lr"]),
        "gradients": torch.tensor(sum(p.grad is not None for p in engine.module.parameters())),
    }  # fmt: skip


def update(engine, lr):
    engine.optimizer.param_groups[0]["lr"] = lr
    with engine.train_mode():
        return engine.train_batch(training_batch(), loss_of)["metrics"]["grad_norm"]


def rank_main(rank, ranks, folder, store, results):
    with gloo_rank(rank, ranks, store):
        from verl_credit.host.actor.entropy_probe import KeptParameters, measure

        for case, (model, options) in CASES.items():
            engine = build_engine(f"{folder}/qwen3", precision="fp64", training=True, engine=options, **model)
            before = full(engine)
            infer(engine, training_batch())  # as the trainer does before an update
            kept = KeptParameters(engine)
            update(engine, 1e-3)
            calls, found = [], {"before": before, "after": full(engine)}
            layer = next(m for name, m in engine.module.named_modules() if name.endswith("layers.0.mlp"))
            layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            for name, tokens in DYNAMIC.items():
                output = measure(engine, kept, probe_batch(rank, ranks, max_token_len_per_gpu=tokens))
                found[name] = {key: list(value.unbind()) for key, value in output.items()}
            rows = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
            output = measure(engine, kept, probe_batch(rank, ranks, micro=2, **rows))
            found["rows"] = {"along": list(output["along"].unbind())}
            results[case, rank] = found | {"calls": len(calls)}
        if ranks == 2:
            results["flat", rank] = [flat_parameters(original) for original in (False, True)]
        else:
            results["trace"] = [two_updates(folder, probed) for probed in (False, True)]


def flat_parameters(original):
    """Of FSDP1, whose engine does not run on a CPU: found and expected products, and outputs before, at the kept parameters
    and after."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from verl_credit.host.actor.entropy_probe import KeptParameters

    torch.manual_seed(0)
    linear, x = torch.nn.Linear, torch.arange(20.0).view(4, 5) / 10
    plain = torch.nn.Sequential(linear(5, 7), torch.nn.Tanh(), linear(7, 3), torch.nn.Tanh(), linear(3, 1))
    module = FullyShardedDataParallel(
        copy.deepcopy(plain), use_orig_params=original, device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({linear}),
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    engine = SimpleNamespace(module=module, device_mesh=mesh)
    first = module(x).detach()
    kept, before = KeptParameters(engine), [p.detach().clone() for p in plain.parameters()]
    for model in (module, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).square().sum().backward()
    expected = sum(float((p.grad * (p - b)).sum()) for p, b in zip(plain.parameters(), before, strict=True))
    found, now = kept.along_update(engine), module(x).detach()
    with kept.in_place(engine), torch.no_grad():
        then = module(x)
    return float(found[0]), expected, (first, then), (now, module(x).detach())


def two_updates(folder, probed):
    """In float32, with the probe between them or without."""
    from verl_credit.host.actor.entropy_probe import KeptParameters, measure

    torch.manual_seed(0)
    engine = build_engine(f"{folder}/qwen3", training=True, enable_gradient_checkpointing=False)
    kept = KeptParameters(engine) if probed else None
    norms, found = [update(engine, 1e-3)], {}
    found["between"] = state(engine)
    if probed:
        measure(engine, kept, probe_batch(0, 1))
    found["then"] = state(engine)
    norms.append(update(engine, 1e-3))
    return found | {"end": state(engine), "norms": norms}


def outside(case, found):
    """(δH₁ of each group, Σ gradient², log-probs and entropies at both points): the model alone, row by row."""
    model, turns = in_float64(tiny_model("qwen3", "sdpa")), Trajectories(TRUNKS)
    if case == "adapters":
        return None
    names = [name for name, _ in model.named_parameters()]
    read = {}
    for point in ("before", "after"):
        model.load_state_dict(found[point])
        read[point] = []
        for prompt, response in zip(turns.prompt_ids, turns.response_ids, strict=True):
            with torch.enable_grad():
                logits = (
                    model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
                )
                log_p = logits.log_softmax(1)
                own = log_p.gather(1, torch.tensor(response)[:, None]).squeeze(1)
                read[point].append((own, -(log_p.exp() * log_p).sum(1)))
    scores, paths = weights()
    along, total = [], dict.fromkeys(names, 0.0)
    for rows in ROWS_G:
        value = sum((scores[r] * read["after"][r][0] + paths[r] * read["after"][r][1]).sum() for r in rows)
        gradient = dict(
            zip(names, torch.autograd.grad(value, list(model.parameters()), retain_graph=True), strict=True)
        )
        along.append(
            sum(float((g * (found["after"][n] - found["before"][n])).sum()) for n, g in gradient.items())
        )
        total = {n: total[n] + g for n, g in gradient.items()}
    return along, sum(float((g * g).sum()) for g in total.values()), read


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model("qwen3", attention="sdpa").save_pretrained(folder / "qwen3")
    return {ranks: on_ranks(ranks, rank_main, folder) for ranks in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["plain", "checkpointed"])
def test_the_engine_finds_what_the_model_alone_gives(measured, case, ranks):
    results = measured[ranks]
    along, squared, read = outside(case, results[case, 0])
    assert min(map(abs, along)) > 1e-3
    for rank in range(ranks):
        found = results[case, rank]
        for way in (*DYNAMIC, "rows"):
            cumulative = found[way]["along"][0]
            torch.testing.assert_close(
                cumulative[:, 0],
                torch.tensor(list(accumulate(along)), dtype=torch.float64),
                rtol=1e-9,
                atol=1e-12,
            )
            assert float(cumulative[-1, 1]) == pytest.approx(squared, rel=1e-9)
        dealt = deal(ROWS_G, ranks, 1)
        mine = dealt[rank * len(dealt) // ranks : (rank + 1) * len(dealt) // ranks]
        for at, (row, _, _) in enumerate(mine):
            for prefix, point in (("", "after"), ("old_", "before")):
                for number, name in enumerate(("log_probs", "entropy")):
                    ours = found["small"][f"{prefix}{name}"][at]
                    torch.testing.assert_close(ours, read[point][row][number].detach(), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_activations_are_dropped_as_in_training(measured):
    """A layer is computed in a forward at each point, and with gradient checkpointing once more in the backward."""
    plain, checkpointed = (measured[1][case, 0]["calls"] for case in ("plain", "checkpointed"))
    assert checkpointed == 3 / 2 * plain > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_adapters_only_their_own_parameters_move_and_count(measured, ranks):
    found = measured[ranks]["adapters", 0]
    moved = {n for n, value in found["after"].items() if not torch.equal(value, found["before"][n])}
    assert moved and all("lora_" in name for name in moved)
    first, *others = (found[way]["along"][0] for way in (*DYNAMIC, "rows"))
    assert first[:, 0].abs().min() > 0
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-12)


def check_flat(found, expected, at_kept, afterwards):
    assert found == pytest.approx(expected, rel=1e-6) and abs(expected) > 0.1
    assert torch.equal(*at_kept) and torch.equal(*afterwards) and not torch.equal(at_kept[0], afterwards[0])


@pytest.mark.slow
def test_flat_parameters_are_kept_and_put_in_place_alike(measured):
    for rank in range(2):
        for result in measured[2]["flat", rank]:
            check_flat(*result)


@pytest.mark.slow
def test_training_goes_on_to_the_bit_as_without_the_probe(measured):
    without, probed = measured[1]["trace"]
    assert without["norms"] == probed["norms"] and min(probed["norms"]) > 0
    for when in ("between", "then", "end"):
        assert without[when].keys() == probed[when].keys()
        for name, value in without[when].items():
            assert torch.equal(value, probed[when][name]), (when, name)
    assert not torch.equal(without["end"]["lm_head.weight"], without["then"]["lm_head.weight"])


# --- in this process ---


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with a model; this process is the only rank."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", attention="sdpa").save_pretrained(folder)
    with single_rank():
        yield str(folder)


@pytest.mark.parametrize("original", [False, True])
def test_flat_parameters_of_a_single_rank(alone, original):
    check_flat(*flat_parameters(original))


@pytest.mark.slow
def test_what_is_found_along_a_small_update_is_what_it_changed(alone):
    """Of each group of rows: the weighted change of log-probs and entropies that are measured at both points."""
    from verl_credit.host.actor.entropy_probe import KeptParameters, measure

    engine = build_engine(alone, precision="fp64", training=True, enable_gradient_checkpointing=False)
    before = infer(engine, training_batch())
    kept = KeptParameters(engine)
    update(engine, 1e-6)
    found, dealt = measure(engine, kept, probe_batch(0, 1)), deal(ROWS_G, 1, 1)
    changed_G, prompts = [0.0] * len(ROWS_G), [p for p, _ in TRUNKS]
    for at, ((row, group, _), weight) in enumerate(
        zip(dealt, zip(*weights_of(dealt), strict=True), strict=True)
    ):
        for name, weight_T in zip(("log_probs", "entropy"), weight, strict=True):
            now, then = found[name][at], found[f"old_{name}"][at]
            torch.testing.assert_close(then, before[name][row][prompts[row] - 1 : -1], rtol=0, atol=1e-12)
            changed_G[group] += float((weight_T * (now - then)).sum())
    along = found["along"][0, :, 0].tolist()
    assert along == pytest.approx(list(accumulate(changed_G)), rel=1e-3) and min(map(abs, changed_G)) > 1e-7
