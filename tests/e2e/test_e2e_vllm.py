"""The real vLLM on a CPU, started by verl's own replica, on the tiny lab. `make test-vllm` runs it.

Engine and trainer read the same weights with different code. That they agree on every token that was sampled, before
and after an update, shows that weights arrive, that tokens are aligned, and that sampling is what the trainer assumes.
"""

import importlib.metadata
import json
import math
import os
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from packaging.version import Version

from kit import train_run
from kit.run_values import assert_agree, measured_by_run
from verl_credit.errors import ExitCode
from verl_credit.records.run.files import METRICS, VALIDATION, read_json_lines
from verl_credit.turns.score.requests import pseudo_answer

pytestmark = pytest.mark.vllm

AGREE = 1e-4  # of log-probs, and of gains that are differences of log-probs
TEMPLATE = "<answer> {answer}</answer>"  # of recipes/lab.yaml
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"+{ROLLOUT}.engine_kwargs.vllm"

SETTINGS = [
    "algorithm.info_gain_norm_mode=turn-group-v1d",
    "lab.size=tiny",
    "trainer.save_freq=-1",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.enforce_eager=true",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    f"{ROLLOUT}.free_cache_engine=true",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ENGINE}.kv_cache_memory_bytes=536870912",
    f"{ENGINE}.block_size=32",
    # The lab's tied policy has 2.2 MB, so that its head comes in another bucket than its embedding.
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1",
    # verl then reports the largest and the smallest ratio of trainer to engine over all sampled tokens.
    "algorithm.rollout_correction.rollout_is=token",
]


ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module", autouse=True)
def _shared_memory_is_left_clean():
    """Queues and weights in shared memory outlive a run; those that these runs made and nobody has open are removed."""
    before = segments()
    yield
    mapped = "\n".join(maps(process.pid) for process in psutil.process_iter())
    for segment in segments() - before:
        if str(segment) not in mapped:
            segment.unlink(missing_ok=True)


def segments():
    return {
        path for pattern in ("psm_*", "sem.mp-*", "verl_weights_*") for path in Path("/dev/shm").glob(pattern)
    }


def maps(pid):
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # another user's, or gone
        return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the lab, which the first run builds, and of the runs."""
    assert "cpu" in importlib.metadata.version("vllm"), "this is not the environment of `make test-vllm`"
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def two_steps(folder):
    """Gains by the trainer's own forward; the folder of the run."""
    return train(
        folder, "two_steps", "trainer.total_training_steps=2", "trainer.test_freq=2", "data.val_max_samples=8"
    )


def train(folder, name, *overrides):
    """The run's folder."""
    code, output = start(folder, name, *overrides)
    assert code == 0, output
    return folder / name


def start(folder, name, *overrides, **environment):
    """(exit code, everything printed)."""
    places = f"lab.dir={folder / 'lab'}", f"run_dir={folder / name}"
    return train_run.train(
        folder / f"{name}.log", "--config-name", "lab", *places, *SETTINGS, *overrides,
        environment=ENVIRONMENT | environment, seconds=900,
    )  # fmt: skip


def assert_engine_and_trainer_agree(row):
    ratios = row["rollout_corr/rollout_is_max"], row["rollout_corr/rollout_is_min"]
    assert max(abs(math.log(ratio)) for ratio in ratios) < AGREE
    assert row["training/rollout_probs_diff_max"] < AGREE


def test_engine_and_trainer_agree_and_gains_are_measured(two_steps):
    rows = read_json_lines(two_steps / METRICS)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert_engine_and_trainer_agree(row)
        assert row["credit/gain/scored"] == 1 and row["credit/gain/turns"] > 0
        assert row["credit/gain/std"] > 0 and row["credit/clip_scale/std"] > 0
        assert row["credit/rollouts_failed"] == 0
    # Step 2 was sampled from weights that step 1 had moved, somewhere past the clip range.
    assert rows[0]["actor/pg_clipfrac"] > 0
    assert [row["step"] for row in read_json_lines(two_steps / VALIDATION)] == [0, 2]


def test_a_tied_model_went_to_vllm_in_several_buckets(folder, two_steps):
    """Engine and trainer agree in both steps (above): every weight of every bucket arrived."""
    config = json.loads((folder / "lab" / "policy" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    assert (folder / "lab" / "policy" / "model.safetensors").stat().st_size > 2 << 20


def test_a_sync_that_fails_ends_the_run_with_its_words(folder):
    extension = f"{ENGINE}.worker_extension_cls=kit.failing_extension.FailingExtension"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    code, output = start(folder, "fails", extension, "trainer.total_training_steps=1", PYTHONPATH=path)
    assert code == ExitCode.FAILED, output
    assert (
        "vLLM did not take the weights" in output and "ValueError: this extension takes no weights" in output
    )


def test_values_by_vllm_are_those_of_the_sampler(two_steps, tmp_path, monkeypatch):
    """Of the policy that the run starts from: the engine has no seed for a request, so that other draws are compared."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert_agree(measured_by_run(two_steps, tmp_path, step=0, seconds=900))


def test_a_server_of_its_own_gets_every_steps_weights(folder):
    """credit_separate_async: the engine serves beside the trainer, so a step is trained on rollouts of older weights.

    Tokens of age 0 are those of the trainer's own weights: there engine and trainer agree, after every sync.
    """
    settings = (
        "trainer.v1.trainer_mode=credit_separate_async", "data.train_batch_size=8",
        "trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=false",
    )  # fmt: skip
    if Version(importlib.metadata.version("vllm")) >= Version("0.32"):  # verl 0.9.1 cannot stop its requests
        code, output = start(folder, "separate", *settings)
        assert code == ExitCode.PREFLIGHT and "pip install 'vllm<0.32'" in output
        return
    run = train(folder, "separate", *settings)
    rows = read_json_lines(run / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["credit/gain/scored"] == 1 and row["credit/rollouts_failed"] == 0
        assert row["credit/staleness/turns_unknown"] == 0
        assert row["credit/staleness/oldest"] <= row["step"] - 1
        assert row.get("credit/staleness/ratio_off_at_age_0", 0.0) < AGREE
    assert any(row["credit/staleness/mean"] > 0 for row in rows)


def reference(folder):
    """(question -> prompt, (context, gold) -> mean log-prob of the gold answer), by transformers' own attention."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model.eval()

    @torch.no_grad()
    def log_prob(context, gold):
        answer = pseudo_answer(tokenizer, gold, TEMPLATE, before=context)
        ids = torch.tensor([answer.token_ids])
        log_probs = model(ids).logits[0].double().log_softmax(-1)
        at = range(answer.gold_start, answer.gold_end)
        return math.fsum(log_probs[i - 1, ids[0, i]].item() for i in at) / len(at)

    def prompt(question):
        messages = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    return prompt, log_prob


def gains(policy, trajectory):
    """Of every turn but the last: how much its call and what it returned moved the best gold answer's log-prob."""
    prompt, log_prob = policy
    context = prompt(trajectory["question"])
    values = [max(log_prob(context, gold) for gold in trajectory["golds"])]
    for turn in trajectory["turns"][:-1]:
        context += turn["text"] + turn["observation"]
        values.append(max(log_prob(context, gold) for gold in trajectory["golds"]))
    return [after - before for before, after in pairwise(values)]
