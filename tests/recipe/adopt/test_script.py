"""A launch in a shell script is read as bash hands it on, or its unknown parts are named; nothing of it has an effect."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from kit.fuzz import FUZZ_CASES
from kit.shell_scripts import CONSTRUCTS, LAUNCH, LAUNCHES, drawn, wrong
from verl_credit.errors import ConfigError
from verl_credit.recipe.adopt import dialog, script
from verl_credit.recipe.adopt.entry import MAIN
from verl_credit.recipe.adopt.script import read_script

FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")


@pytest.fixture
def read(tmp_path, monkeypatch):
    def reading(text, number=None, **environment):
        (tmp_path / "run.sh").write_text(text)
        monkeypatch.chdir(tmp_path)
        return read_script("run.sh", {"HOME": "/home/me", "PATH": os.environ["PATH"], **environment}, number)

    return reading


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_each_construct_is_as_bash_has_it_or_not_known(construct, tmp_path):
    assert wrong(f"{construct}\n{LAUNCH}\n", tmp_path) == ""


@pytest.mark.parametrize("launch", LAUNCHES)
def test_each_form_of_a_launch_is_as_bash_has_it_or_not_known(launch, tmp_path):
    assert wrong(f"n=8; m=4; A=(a.q=1)\n{launch}\n", tmp_path) == ""


@pytest.mark.slow
def test_drawn_scripts_are_as_bash_has_them_or_not_known(tmp_path):
    """The law over scripts of up to five constructs; ``make fuzz CASES=2000`` draws 2,000."""
    for seed in range(FUZZ_CASES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert wrong(drawn(seed), folder) == "", f"seed {seed}:\n{drawn(seed)}"
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "text, arguments",
    [
        ("n=8; g=8; if [ $g -ge 8 ]; then n=16; fi", ["a.b=16"]),
        ("n=8; ((n*=2))", ["a.b=16"]),
        ("n=8\ncat <<EOF\nn=2\nEOF", ["a.b=8"]),
        ("n=$(basename /x/y)", ["a.b=y"]),
        ("function f {\n  n=3\n}\nn=8", ["a.b=8"]),
        ('[ -n "$DEBUG" ] && n=2; n=${n:-8}', ["a.b=8"]),
    ],
)
def test_the_shells_own_logic_decides(text, arguments, read):
    launch = read(f"{text}\npython3 -m {MAIN} a.b=$n\n")
    assert (launch.entry, launch.arguments, launch.unknown) == (MAIN, arguments, {})


def test_what_only_a_run_would_know_is_named_by_its_key_and_its_line(read):
    launch = read(
        "n=4\nnvidia-smi > /dev/null && n=2\nA=(a.a=1 a.t=run_$(date +%s) a.f=$F)\n"
        f'python3 -m {MAIN} "${{A[@]}}" a.n=$n a.c=$1\n'
    )
    assert launch.arguments == ["a.a=1"]
    reasons = {"a.t=run_?": "date (line 3)", "a.f=": "F (line 3)", "a.n=?": "line 2", "a.c=": "argument 1"}
    assert {*launch.unknown} == {*reasons}
    assert all(why in launch.unknown[key] for key, why in reasons.items())


@pytest.mark.parametrize(
    "text, entry",
    [
        (f"ray job submit --no-wait -- python3 -m {MAIN} a=1", MAIN),
        ("torchrun verl/trainer/main_ppo.py a=1", MAIN),
        ("python main_ppo.py a=1", "main_ppo.py"),
        ("python -m verl.trainer.main_agent_ppo a=1", "verl.trainer.main_agent_ppo"),
        ("python -u train.py a=1 algorithm.gamma=1", "train.py"),
        (f"if true; then\n  PYTHONUNBUFFERED=1 python -m {FULLY_ASYNC} a=1\nfi", FULLY_ASYNC),
        (f"python -m {MAIN} a=1 &> log &", MAIN),
        (f"(cd there && exec python -m {MAIN} a=1)", MAIN),
        (f'srun -N 1 docker run image bash -lc "cd /x && python -m {MAIN} a=1"', MAIN),
    ],
)
def test_the_launch_is_found_wherever_it_stands(text, entry, read):
    launch = read(text)
    assert (launch.entry, launch.arguments[0]) == (entry, "a=1")


@pytest.mark.parametrize(
    "text, says",
    [
        ("echo hello", "it starts no module of Python"),
        ("", "it starts no module of Python"),
        ("python -m trl.scripts.grpo --model x", "it starts trl.scripts.grpo"),
        ("torchrun train/run_sft.py", "it starts run_sft"),
        ("python train.py --lr 1 --model x", "it starts train.py, whose arguments are not verl's keys"),
        ("python3 -m verl.trainer.sft_trainer data.x=1", "it starts verl.trainer.sft_trainer"),
        ('echo "unclosed', "it starts no module of Python"),
        ("cat > run.txt <<EOF\npython -m verl.trainer.main_ppo a=1\nEOF", "it starts no module of Python"),
    ],
)
def test_a_script_without_a_launch_is_refused_in_one_sentence(text, says, read):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert caught.value.key == "--from" and says in str(caught.value)


def test_several_launches_are_named_and_a_number_chooses(read):
    text = f"for seed in 1 2; do python3 -m {MAIN} a.x=1 seed=$seed; done\n"
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert (caught.value.key, caught.value.accepted) == ("--launch", ["1", "2"])
    assert "seed=1" in str(caught.value) and "seed=2" in str(caught.value)
    assert read(text, 2).arguments == ["a.x=1", "seed=2"]


def test_nothing_of_a_script_has_an_effect(tmp_path, read):
    """Each line tries another way; the files, the victim and the socket are as they were."""
    kept = tmp_path / "kept"
    kept.write_text("kept\n")
    kept.chmod(0o640)
    victim = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        launch = read(
            f"echo x > new; echo x >> {kept}; : > {kept}; {{ echo x; }} > {kept}; exec 9> {kept}; echo x >&9\n"
            f"rm {kept}; /bin/rm -f {kept}; mv {kept} moved; /bin/mv {kept} moved\n"
            f"sed -i s/k/x/ {kept}; sort -o {kept} {kept}\n"
            f"kill -9 {victim.pid}; builtin kill -9 {victim.pid}; enable -f /nowhere/x.so x; chmod 777 {kept}\n"
            "echo x > /dev/tcp/127.0.0.1/9; echo x > /dev/udp/127.0.0.1/9\n"
            f'/usr/bin/env touch new; {sys.executable} -c \'open("new", "w")\'\n'
            f"command touch new; set -m; touch new & wait\n"
            f"echo 'touch new' > lib.sh; . ./lib.sh; bash -c 'echo x > new'; bash -c '/bin/rm {kept}'\n"
            f"trap - DEBUG; touch new; echo x >> {kept}\n"
            f"builtin trap - DEBUG; touch new; echo x >> {kept}; /bin/rm {kept}; builtin kill -9 {victim.pid}\n"
        )
    except ConfigError:
        launch = None
    try:
        assert launch is None and victim.poll() is None
        assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "run.sh"]
        assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("kept\n", 0o640)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()


def test_a_script_that_never_ends_is_read_up_to_the_deadline(read, monkeypatch):
    monkeypatch.setattr(script, "SECONDS", 0.5)
    launch = read(f"python3 -m {MAIN} a=1\nwhile :; do :; done\n")
    assert launch.arguments == ["a=1"] and "had not ended after 0.5 s" in launch.notes[0]


def test_a_file_that_bash_cannot_read_is_refused_with_the_line(read):
    with pytest.raises(ConfigError, match="line 2") as caught:
        read(f"n=1\npython3 -m {MAIN} a=$n\r\n")
    assert caught.value.key == "--from"


def test_without_landlock_the_second_way_is_named(read, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(dialog.shutil, "which", lambda name: None)
        with pytest.raises(ConfigError, match="verl-credit run -- bash run.sh"):
            read(f"python3 -m {MAIN} a=1\n")
    denied = tmp_path / "confine.py"
    denied.write_text("import sys\nsys.exit('this kernel has no Landlock: Function not implemented')\n")
    monkeypatch.setattr(dialog.confine, "__file__", str(denied))
    with pytest.raises(ConfigError, match="no Landlock.*verl-credit run -- bash run.sh"):
        read(f"python3 -m {MAIN} a=1\n")
