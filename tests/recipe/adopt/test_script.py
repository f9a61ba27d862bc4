"""A launch in a shell script is read as the shell would hand it on, and nothing is executed."""

import subprocess

import pytest

from verl_credit.errors import ConfigError
from verl_credit.recipe.adopt.script import FULLY_ASYNC, MAIN, read_script

ENVIRONMENT = {"HOME": "/home/me", "PWD": "/there", "SET": "from outside"}
SCRIPT = r"""#!/usr/bin/env bash
set -x
# model=commented
export NAME='a name'  # a comment
n=16; m=$((n * 2 + 1))
files="['$HOME/train set.parquet']"
given=${GIVEN:-"default $n"}
empty=""
DATA=(
    data.train_files="${files}"
    # data.val_files=commented
    data.max_prompt_length=$(( (1024 + m) * 2 ))
)
DATA+=("trainer.name=$NAME")
EXTRA=()
FLAGS="a.b=1 a.c=2"
if [ "$DEVICE" = npu ]; then
    n=8
fi
LAUNCH=(python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" "${EXTRA[@]}" $FLAGS \
    algorithm.adv_estimator=grpo \
    rollout.n=$n set="$SET" given="${given}" plus=${empty:-filled} first=${1:-vllm} \
    'logger=["console","wandb"]' list=['console','wandb'] path=$(pwd)/x cost=\$5 single='$n' \
    "$@" 2>&1 | tee run.log
echo done=1
"""
READ = [
    "data.train_files=['/home/me/train set.parquet']",
    "data.max_prompt_length=2114",
    "trainer.name=a name",
    "a.b=1",
    "a.c=2",
    "algorithm.adv_estimator=grpo",
    "rollout.n=16",
    "set=from outside",
    "given=default 16",
    "plus=filled",
    "first=vllm",
    'logger=["console","wandb"]',
    "list=[console,wandb]",
    "path=/there/x",
    "cost=$5",
    "single=$n",
]


def test_the_arguments_are_those_of_the_shell():
    launch = read_script(SCRIPT, "run.sh", ENVIRONMENT)
    assert (launch.entry, launch.arguments, launch.unknown) == (MAIN, READ, {})


def test_bash_hands_on_the_same_arguments(tmp_path):
    """The oracle: bash runs the script with a python3 that prints its arguments."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/bash\nshift 2; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = SCRIPT.replace("set -x\n", f"PATH={tmp_path}:$PATH\n").replace(" | tee run.log", "")
    given = ENVIRONMENT | {"PATH": "/usr/bin:/bin", "PWD": str(tmp_path)}
    shell = subprocess.run(
        ["bash", "-c", script], env=given, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    read = read_script(script, "run.sh", given)
    assert read.arguments == shell.stdout.splitlines()[:-1]


def test_what_only_a_run_would_know_is_left_out_with_the_reason(tmp_path):
    text = f"""
    ROOT=$(mkdir -p {tmp_path}/made && cd {tmp_path}/made && pwd)
    touch {tmp_path}/touched; `touch {tmp_path}/ticked`
    for i in 1 2; do seed=$i; done
    python -m {MAIN} data.train_files=$ROOT/x a=1 seed=$seed b=${{UNSET:?why}} c=${{A[0]}} 2>> log
    """
    launch = read_script(text, "run.sh", {})
    assert launch.arguments == ["a=1"]
    assert launch.unknown["data.train_files=$ROOT/x"].startswith("ROOT: it is the output of `mkdir")
    for written in ("seed=$seed", "b=${UNSET:?why}", "c=${A[0]}"):
        assert launch.unknown[written].endswith("set neither in the script nor in the environment")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text, entry",
    [
        (f"ray job submit --no-wait -- python3 -m {MAIN} a=1", MAIN),
        ("torchrun verl/trainer/main_ppo.py a=1", MAIN),
        (f"if true; then\n  PYTHONUNBUFFERED=1 python -m {FULLY_ASYNC} a=1\nfi", FULLY_ASYNC),
        (f"python -m {MAIN} a=1 &> log &", MAIN),
        (f"python -m {MAIN} \\\r\n  a=1\r\n", MAIN),
        (f"(cd there && exec python -m {MAIN} a=1)", MAIN),
    ],
)
def test_the_launch_is_found_wherever_it_stands(text, entry):
    launch = read_script(text, "run.sh", {})
    assert (launch.entry, launch.arguments) == (entry, ["a=1"])


@pytest.mark.parametrize(
    "text, says",
    [
        ("echo hello", "it starts no module of Python"),
        ("", "it starts no module of Python"),
        ("python -m trl.scripts.grpo --model x", "it starts trl.scripts.grpo"),
        ("torchrun train/run_sft.py", "it starts run_sft"),
        ("python3 -m verl.trainer.sft_trainer data.x=1", "it starts verl.trainer.sft_trainer"),
        ('echo "unclosed', "it starts no module of Python"),
        ("A=(1 2", "it starts no module of Python"),
    ],
)
def test_a_script_without_a_launch_is_refused_in_one_sentence(text, says):
    with pytest.raises(ConfigError) as caught:
        read_script(text, "run.sh", {})
    assert says in str(caught.value) and "python -m verl.trainer.main_ppo KEY=VALUE" in str(caught.value)
