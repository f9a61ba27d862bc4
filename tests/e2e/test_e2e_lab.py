"""The demo's recipe on the tiny lab: train on loopback, save, Ctrl-C, report, resume; two ranks and two nodes.

One update a step, so that no row's mini-batch depends on how rows are shared out.
"""

from collections import Counter
from contextlib import suppress
from ipaddress import ip_address
from itertools import islice
from types import SimpleNamespace

import psutil
import pyarrow.parquet as parquet
import pytest
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader.sampler import RandomSampler
from transformers import AutoTokenizer

from kit.ray_cluster import TOKEN, RayCluster
from kit.run_values import assert_agree, measured_by_run
from kit.stored_facts import facts_of
from kit.train_run import TrainRun, train
from kit.twin_batch import adamw_of, objective_of, turns_of
from verl_credit.cli import main
from verl_credit.cli.another_run import collect
from verl_credit.config.settings import CreditSettings
from verl_credit.policy.attention.implementation import AUTO, install
from verl_credit.policy.packed import PackedPolicy
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, read_json_lines
from verl_credit.records.run.rollouts import read_samples, token_steps
from verl_credit.records.run.table_files import TURNS, tables_of
from verl_credit.records.run.validation import read_held_out
from verl_credit.study.probe.checkpoint import build_model, read_checkpoint
from verl_credit.study.probe.kept_rollouts import read_rollouts
from verl_credit.study.probe.policy import ModelPolicy, Sampling, gradient, norm
from verl_credit.study.probe.update import adamw_step, credit_weights
from verl_credit.study.twin_step import credited, update
from verl_credit.turns.step.assign import CreditRun, group_numbers

pytestmark = pytest.mark.e2e

SEED = 2
"""No draw is close to the border of two tokens; with seed 1 one is 3e-9 from it, and rounding decides."""
SETTINGS = [
    "--config-name",
    "lab",
    "lab.size=tiny",
    "data.val_max_samples=8",
    f"seed={SEED}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "algorithm.info_gain_norm_mode=turn-group-v1d",
    "algorithm.transform_mode=gtpo_sepa_hicra",
    "algorithm.sepa.delay_steps=0",
    "algorithm.sepa.steps=10",
    "algorithm.sepa.correct_rate_gate=0",
    "algorithm.info_gain_warmup_steps=1",
]
STAGES = [
    "the machine is checked", "starting Ray and the workers", "Ray is up", "the task runner is up",
    "the actor's process is up", "the actor is loaded", "the attention is proven",
    "the rollout engine is up", "the rollout engine has the actor's weights",
    "the first rollouts are finished", "the first step is finished",
]  # fmt: skip
SAME = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "credit/outcome/em",
    "credit/advantage/token_std",
    "response_length/mean",
)


def listening(processes):
    """{(process, address)} of every TCP socket that listens."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline()) or process.name()
            for socket in process.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    found.add((name.strip(), ip_address(socket.laddr.ip.removeprefix("::ffff:"))))
    return found


@pytest.fixture(scope="module")
def one_rank(tiny_lab, tmp_path_factory):
    """A run that is interrupted after step 2, and goes on to step 3."""
    root = tmp_path_factory.mktemp("lab")
    found = SimpleNamespace(lab=tiny_lab.root, run_dir=root / "one")
    settings = [*SETTINGS, f"lab.dir={found.lab}", f"run_dir={found.run_dir}"]
    run = TrainRun(
        root / "first.log",
        *settings,
        "trainer.total_training_steps=50",
        "trainer.save_freq=2",
        "keep_checkpoints=[1]",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.test_freq=2",
    )
    run.wait_for("held-out EM after step 2: lab-greedy")
    processes = [psutil.Process(run.process.pid)]
    processes += processes[0].children(recursive=True)
    found.sockets = listening(processes)
    run.interrupt()
    found.first = run.wait(), run.output
    found.alive = psutil.wait_procs(processes[1:], timeout=30)[1]
    found.files = {path.name for path in found.run_dir.iterdir()}
    found.second = train(
        root / "second.log", *settings, "trainer.total_training_steps=3", "trainer.test_freq=-1"
    )
    found.rows = read_json_lines(found.run_dir / METRICS)
    return found


def test_train_save_interrupt_and_report(one_rank):
    code, output = one_rank.first
    assert code == 130, output
    for name in ("gcs_server", "raylet", "verl_credit_retriever", "TransferQueueController", "WorkerDict"):
        assert any(name in who for who, _ in one_rank.sockets), (name, one_rank.sockets)
    assert [(who, str(address)) for who, address in one_rank.sockets if not address.is_loopback] == []
    assert "goes on from the last checkpoint" in output and not one_rank.alive
    assert f"using the lab in {one_rank.lab}" in output
    assert "advantage=turn-group-v1d | " in output and "algorithm.transform_mode=gtpo_sepa_hicra" in output
    rows = one_rank.rows[:2]
    for row in rows:
        assert isinstance(row["actor/pg_loss"], float)
        assert row["credit/planning/token_share"] > 0 and row["credit/token_weight/std"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["actor/computed_tokens_share"] < 0.95, "no prompt was shared by its rollouts"
    # the first step is plain GRPO, which learns nothing from groups that all fail
    assert [row["credit/gain/scored"] for row in rows] == [0, 1]
    assert rows[1]["credit/sync/weights_changed"] == 1.0
    assert rows[1]["credit/gain/turns"] > 0 and rows[1]["credit/clip_scale/std"] > 0
    assert "report.html" in one_rank.files
    # step 1 is none that save_freq saves, and the newer one of step 2 would have taken its place
    assert read_checkpoint(one_rank.run_dir / "checkpoints/global_step_1").step == 1


def test_resume(one_rank):
    code, output = one_rank.second
    assert code == 0, output
    assert "using the lab in" in output and "resume: exact, from step 2" in output
    assert [row["step"] for row in one_rank.rows] == [1, 2, 3]
    assert [row["credit/sepa_lambda"] for row in one_rank.rows] == [0.1, 0.2, 0.3]
    assert list(tables_of(one_rank.run_dir, TURNS)) == list(token_steps(one_rank.run_dir)) == [1, 2, 3]
    # step 2 was evaluated before the resume and is not evaluated again
    assert [row["step"] for row in read_json_lines(one_rank.run_dir / VALIDATION)] == [0, 2]
    events = [row for row in read_json_lines(one_rank.run_dir / EVENTS) if row["kind"] != "stage"]
    start = ["banner", "attention", "log_probs", "rollouts"]
    assert [row["kind"] for row in events] == [
        *("start", "idle", *start, "small_groups", "end"),
        *("start", "idle", "resume", *start, "small_groups", "end"),
    ]
    assert "the clip can never act" in events[1]["text"]
    assert [row["reason"] for row in events if row["kind"] == "end"] == ["interrupted", "done"]
    (line,) = {row["text"] for row in events if row["kind"] == "rollouts"}
    assert line.startswith("rollouts: transformers on cpu, at most "), line


@pytest.fixture(scope="module")
def fresh(one_rank, tmp_path_factory):
    """Another step of the run, from its last checkpoint: 6 prompts of 8 rollouts, one update, and the run stays as it is."""
    before, folder = contents(one_rank.run_dir), tmp_path_factory.mktemp("fresh") / "step"
    # so few rollouts of this policy may hold no planning token, which would stop the step
    plain = ["algorithm.transform_mode=none"]
    path = collect(one_rank.run_dir / "global_step_3", folder, prompts=6, overrides=plain, save=True)
    assert contents(one_rank.run_dir) == before
    rollouts, facts = read_rollouts(path)[0], facts_of(path)
    old, new = (
        read_checkpoint(root / "checkpoints" / step)
        for root, step in ((one_rank.run_dir, "global_step_3"), (folder, "global_step_4"))
    )
    (metrics,) = (row for row in read_json_lines(folder / METRICS) if row["step"] == 4)
    return SimpleNamespace(folder=folder, rollouts=rollouts, facts=facts, old=old, new=new, metrics=metrics)


def test_fresh_rollouts_of_a_checkpoint(one_rank, fresh):
    rollouts, facts, folder = fresh.rollouts, fresh.facts, fresh.folder
    rows = range(len(rollouts))
    assert (facts.step, facts.policy_step, facts.updates, facts.rows) == (4, 3, 1, 48)
    assert len(rollouts.prompts) == len(set(facts.uid)) == 6 and len(rollouts) == 48 == 8 * 6
    assert facts.loss_tokens == rollouts.written_B_T.sum()
    assert torch.equal(rollouts.written_B_T, facts.turn_ids_B_T >= 0) and torch.equal(
        rollouts.trained, rollouts.written_B_T
    )
    log_prob_t, entropy_t = (
        facts.log_prob_B_T[rollouts.written_B_T],
        facts.entropy_B_T[rollouts.written_B_T],
    )
    assert log_prob_t.isfinite().all() and (log_prob_t <= 1e-6).all() and (entropy_t > 0).all()
    assert rollouts.advantage_B_T[~rollouts.written_B_T].abs().max() == 0 < rollouts.advantage_B_T.abs().max()
    # what the ids say is what the step showed
    tokenizer = AutoTokenizer.from_pretrained(one_rank.lab / "policy")
    said = {tuple(texts_of(tokenizer, rollouts.response_ids[row], facts.turn_ids_B_T[row])) for row in rows}
    asked = {tokenizer.decode(ids) for ids in rollouts.prompt_ids}
    data = parquet.read_table(one_rank.lab / "train.parquet").column("prompt").to_pylist()
    order = RandomSampler(data, generator=torch.Generator().manual_seed(SEED))
    assert all(any(data[row][-1]["content"] in prompt for prompt in asked) for row in islice(order, 6))
    shown = [row for row in read_samples(folder)[0] if row["step"] == 4]
    assert shown
    for row in shown:
        assert tuple(turn["text"] for turn in row["turns"]) in said
        assert any(row["question"] in prompt for prompt in asked)
    # the update of the same step
    mean, old, new = float(entropy_t.mean()), fresh.old, fresh.new
    assert fresh.metrics["actor/entropy"] == pytest.approx(mean, rel=1e-4)
    model = build_model(
        one_rank.run_dir / "checkpoints" / "global_step_3", old.parameters, torch.float64, "cpu"
    )
    policy, objective = ModelPolicy(model, rollouts, Sampling(facts.temperature)), facts.objective
    weight_B_T = credit_weights(rollouts, objective["loss_agg_mode"], objective["loss_scale_factor"], 1)
    loss_gradient = gradient(policy, weight_B_T, torch.zeros_like(weight_B_T), 8)
    v = adamw_step(policy.parameters, loss_gradient, old.optimizer, max_grad_norm=objective["grad_clip"])
    real = {name: new.parameters[name].double() - old.parameters[name].double() for name in v}
    off = {name: old.optimizer.lr * v[name] - real[name] for name in v}
    assert norm(real) > 0 and norm(off) < 1e-3 * norm(real)


def test_the_twin_makes_the_trainers_step(one_rank, fresh):
    """On the same rollouts: log-probs, advantages of turn-group-v1d with its gains, clip scales, loss, norm, new weights."""
    rollouts, facts = fresh.rollouts, fresh.facts
    install()
    folder = one_rank.run_dir / "checkpoints" / "global_step_3"
    model = build_model(folder, fresh.old.parameters, torch.float32, "cpu")
    model.set_attn_implementation(AUTO)
    policy = PackedPolicy(model, temperature=facts.temperature)
    tokenizer = AutoTokenizer.from_pretrained(one_rank.lab / "policy")
    data = parquet.read_table(one_rank.lab / "train.parquet").to_pylist()
    run = CreditRun.of(CreditSettings.from_config(OmegaConf.load(fresh.folder / "config.yaml")), tokenizer)
    turns, group_B = turns_of(rollouts, facts, tokenizer, data), group_numbers(facts.uid)
    batch, _, _ = credited(run, policy, turns, facts.outcome_B, group_B, step=4, planned_steps=4)
    mask = rollouts.written_B_T
    assert (batch.old_log_prob_B_T - facts.log_prob_B_T)[mask].abs().max() < 1e-5
    assert (
        (batch.advantage_B_T - rollouts.advantage_B_T)[mask].abs().max()
        < 1e-5
        < rollouts.advantage_B_T.abs().max()
    )
    assert (batch.clip_scale_B_T - facts.clip_scale_B_T)[mask].abs().max() < 1e-5
    (made,) = update(policy, adamw_of(model, fresh.old.optimizer), batch, objective_of(facts))
    assert made["loss"] == pytest.approx(fresh.metrics["actor/pg_loss"], abs=1e-6)
    assert made["grad_norm"] == pytest.approx(fresh.metrics["actor/grad_norm"], rel=1e-5)
    moved = {
        name: (fresh.new.parameters[name] - value).double() for name, value in fresh.old.parameters.items()
    }
    named = dict(model.named_parameters())
    off = {name: (named[name].detach() - fresh.new.parameters[name]).double() for name in moved}
    assert 0 < norm(off) < 1e-4 * norm(moved)


@pytest.mark.nightly
def test_values_by_the_runs_own_rollouts_are_those_of_the_sampler(one_rank, tmp_path):
    before = contents(one_rank.run_dir)
    found = measured_by_run(one_rank.run_dir, tmp_path, step=3)
    assert contents(one_rank.run_dir) == before
    assert "this run: turn-group-v1d" in found.output
    assert_agree(found)


@pytest.mark.nightly
def test_a_checkpoint_and_its_first_model_are_evaluated(one_rank, tmp_path, capsys):
    """The trajectories have the means that verl computes of the same evaluation."""
    before = contents(one_rank.run_dir)
    batches = ["data.val_max_samples=8", "data.val_batch_size=3"]
    command = ["evaluate", str(one_rank.run_dir), *batches, "--samples", "2"]
    for step in ("0", "3"):
        assert main([*command, "--step", step, "--out", str(tmp_path / step)]) == 0, capsys.readouterr()
    assert contents(one_rank.run_dir) == before
    for step in (0, 3):
        folder = tmp_path / str(step)
        rows = read_held_out(folder, step)
        assert Counter(row["mode"] for row in rows) == {"greedy": 8, "sampled": 16}
        assert all(row["turns"] and row["question"] for row in rows) and not (folder / METRICS).exists()
        (own,) = read_json_lines(folder / VALIDATION)
        for measure in ("em", "f1"):
            mean = sum(row["scores"][measure] for row in rows if row["mode"] == "sampled") / 16
            (name,) = (key for key in own if key.endswith(f"/lab-sampled/{measure}/mean@2"))
            assert own[name] == pytest.approx(mean)
    capsys.readouterr()
    assert main(["evaluate", "compare", str(tmp_path / "3"), str(tmp_path / "0")]) == 0
    assert "lab, greedy, 8 questions" in capsys.readouterr().out


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def texts_of(tokenizer, ids, turn_ids):
    """What the policy wrote in each turn."""
    turns = turn_ids[: len(ids)]
    return [tokenizer.decode(ids[turns == turn]) for turn in range(int(turns.max()) + 1)]


@pytest.fixture
def cluster(tmp_path):
    """Two raylets; each says that it has a GPU (verl asks for one per rank)."""
    with RayCluster(tmp_path / "nodes.log", ["--num-cpus=8", "--num-gpus=1"]) as running:
        yield running.address


def test_two_nodes_straight_on_have_the_losses_of_one_rank_that_was_interrupted_and_not_probed(
    one_rank, cluster
):
    """Its third step came after a resume. The entropy probe measures the first two updates of the two nodes, each in the
    step after it."""
    run_dir = one_rank.run_dir.with_name("nodes")
    code, output = train(
        run_dir.with_suffix(".log"), *SETTINGS, f"lab.dir={one_rank.lab}", f"run_dir={run_dir}",
        "trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "trainer.save_freq=-1", "trainer.nnodes=2", f"+ray_kwargs.ray_init.address='{cluster}'",
        "ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null",
        "ray_kwargs.ray_init.object_store_memory=null", "ray_kwargs.ray_init.include_dashboard=null",
        "probe.every=1", "probe.budget=0.9",
        environment=TOKEN,
    )  # fmt: skip
    assert code == 0, output
    rows = read_json_lines(run_dir / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[1]["actor/grad_norm"] > 0
    for ours, expected in zip(rows, one_rank.rows, strict=True):
        gain = ("credit/gain/mean",) if ours["step"] > 1 else ()
        for key in (*SAME, *gain):
            assert ours[key] == pytest.approx(expected[key], rel=2e-3, abs=2e-6), (ours["step"], key)
    events = read_json_lines(run_dir / EVENTS)
    assert [
        row["text"] for row in events if row["kind"] == "stage" and "retriever" not in row["text"]
    ] == STAGES
    (network,) = [row["text"] for row in events if row["kind"] == "network"]
    assert f"others can reach the nodes of the Ray cluster at {cluster}" in network
    assert not any(name.startswith("credit/probe/") for name in rows[0] | one_rank.rows[1])
    for step, row in enumerate(rows[1:], 1):
        found = {
            name.removeprefix("credit/probe/"): v
            for name, v in row.items()
            if name.startswith("credit/probe/")
        }
        assert found["of_step"] == step and found["rows"] == 8 * found["prompts"] > 0
        assert 0 < found["time_share"] < 1 and 0 < found["ess"] <= found["rows"] and found["clipped"] == 0
        apart = found["delta_h"] - found["delta_h1"]
        assert abs(apart) <= 4 * (found["delta_h_se"] ** 2 + found["delta_h1_se"] ** 2) ** 0.5 + 1e-6
    # update 1 has no gradient; update 2 changes the entropy, and the prediction has its size
    assert found["delta_h"] != 0 and found["delta_h1"] != 0 and found["grad_norm"] > 0
