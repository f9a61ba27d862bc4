"""The recipe for questions, model and search server of one's own, with verl's real trainer, Ray, FSDP2, FAISS and HTTP.

They are those of the tiny lab. Every run is started the way a user starts it.
"""

import pytest

from kit.train_run import TrainRun, train
from verl_credit.records.run.files import EVENTS, METRICS, read_json_lines
from verl_credit.records.run.rollouts import read_samples
from verl_credit_retriever.launch import start_server

pytestmark = pytest.mark.e2e

N_QUESTIONS, GROUP = 8, 4
SETTINGS = [
    "algorithm.info_gain_norm_mode=turn-group-v1d",
    f"actor_rollout_ref.rollout.n={GROUP}",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "keep_rollouts.groups=8",
]


@pytest.fixture(scope="module")
def retriever(tiny_lab, tmp_path_factory):
    log = tmp_path_factory.mktemp("retriever") / "log"
    with start_server(tiny_lab.index, tiny_lab.encoder, log_path=log) as server:
        yield server


def settings(lab, url, run_dir, *overrides):
    return [
        "--config-name", "search_cpu", f"search.url={url}", f"run_dir={run_dir}",
        f"data.train_files={lab.questions('train')}", f"data.val_files={lab.questions('test')}",
        f"actor_rollout_ref.model.path={lab.policy}", "data.max_prompt_length=48", "data.max_response_length=416",
        "algorithm.info_gain_template='<answer> {answer}</answer>'", "search.require_schema=false",
        "search.max_searches=4", "search.max_new_tokens=40", "search.max_page_chars=64", *SETTINGS, *overrides,
    ]  # fmt: skip


def metrics(run_dir):
    return read_json_lines(run_dir / METRICS)


@pytest.fixture(scope="module")
def straight(tiny_lab, tmp_path_factory):
    """(run, folder) of a run whose retriever dies after two steps."""
    root = tmp_path_factory.mktemp("runs")
    with start_server(tiny_lab.index, tiny_lab.encoder, log_path=root / "retriever.log") as server:
        arguments = settings(tiny_lab, server.url, root / "straight", "trainer.total_training_steps=50")
        run = TrainRun(root / "straight.log", *arguments)
        run.wait_for("step   2/50")
        server.stop()
        run.wait()
    run.url = server.url
    return run, root / "straight"


def test_two_steps(straight):
    first, second = metrics(straight[1])[:2]
    assert (first["step"], second["step"]) == (1, 2)
    for row in (first, second):
        assert row["credit/rows_trained"] == N_QUESTIONS * GROUP and row["credit/rollouts_failed"] == 0
        assert isinstance(row["actor/pg_loss"], float) and isinstance(row["actor/grad_norm"], float)
        assert row["credit/turns_per_row"] > 1 and row["credit/gain/turns"] > 0
        assert row["credit/clip_scale/std"] > 0 and row["credit/gain/failed_rows"] == 0
        assert row["credit/sync/weights_changed"] == 1.0
        # the engine's log-probs are those of the policy that is trained
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_most_questions_see_a_successful_search(straight):
    samples = [row for row in read_samples(straight[1])[0] if row["step"] == 1]
    rows = {row["question"]: row for row in reversed(samples)}.values()  # of each group one with most turns
    assert len(rows) == N_QUESTIONS
    searched = [row for row in rows if "<tool_response>\nPage 1:" in row["turns"][0]["observation"]]
    assert len(searched) >= N_QUESTIONS // 2
    for row in searched:
        assert row["turns"][0]["reward"] is not None and row["turns"][-1]["reward"] is None


def test_report_and_banner(straight):
    (banner,) = (row for row in read_json_lines(straight[1] / EVENTS) if row["kind"] == "banner")
    assert "advantage=turn-group-v1d" in banner["text"]
    assert (straight[1] / "report.html").stat().st_size > 10_000


def test_a_lost_retriever_stops_the_run(straight):
    run, _ = straight
    assert run.wait() == 5, run.output
    assert f"masked out after faults of the search server at {run.url}" in run.output


FAILING = 3
FAILS_SOMETIMES = f"""
from verl_credit.turns.rollout.reward.qa import compute_score as score

calls = 0

def compute_score(*args, **kwargs):
    global calls
    calls += 1
    if calls <= {FAILING}:
        raise ValueError("scored too early")
    if calls > {N_QUESTIONS * GROUP}:
        raise ValueError("scored too late")
    return score(*args, **kwargs)
"""


@pytest.mark.nightly
def test_two_ranks_short_groups_kl_rollout_correction_and_a_reward_that_raises(tiny_lab, retriever, tmp_path):
    """What a plain run never meets: lost rollouts, so rows of padding; two ranks; verl's own loss terms beside ours.

    In the first step the reward function fails for fewer rows than are tolerated, in the second for all.
    """
    reward = tmp_path / "reward.py"
    reward.write_text(FAILS_SOMETIMES)
    arguments = settings(
        tiny_lab,
        retriever.url,
        tmp_path / "run",
        "trainer.total_training_steps=2",
        "trainer.n_gpus_per_node=2",
        f"reward.custom_reward_function.path={reward}",
        "faults.max_failed_rollouts=0.2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.advantage_mode=maxrl",
        "algorithm.transform_mode=gtpo",
        "algorithm.uncertainty_kind=shannon_entropy",
    )
    code, output = train(tmp_path / "log", *arguments)
    assert code == 5, output
    assert "rollouts raised" in output and "scored too late" in output
    (row,) = metrics(tmp_path / "run")
    assert row["credit/rollouts_failed"] == FAILING
    assert row["credit/rows_trained"] == N_QUESTIONS * GROUP - FAILING
    assert row["credit/groups/groups"] == N_QUESTIONS and row["credit/groups/short"] >= 1
    assert row["actor/grad_norm"] > 0 and row["credit/clip_scale/std"] > 0
    assert row["credit/token_weight/std"] > 0  # from entropies that came with old_log_probs
    # the first update starts at the reference; the later ones have left it
    assert row["actor/kl_loss"] > 0
    # the engine's policy is the trainer's, so every correction weight is 1
    assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
    assert row["credit/sync/weights_changed"] == 1.0
