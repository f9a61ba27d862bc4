"""A launch in a shell script is read as bash hands it on, or its unknown parts are named; nothing of it has an effect."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from kit.fuzz import FUZZ_CASES
from kit.shell_scripts import CONSTRUCTS, LAUNCH, LAUNCHES, LOSSY, drawn, wrong
from verl_credit.errors import ConfigError
from verl_credit.recipe.adopt import dialog, follow, script
from verl_credit.recipe.adopt.entry import MAIN
from verl_credit.recipe.adopt.programs import is_script
from verl_credit.recipe.adopt.script import read_script

MADE = (
    "cat run.sh | bash",
    "sed s/a/b/ < run.sh | tail -n 3 | bash -s x",
    "bash < run.sh",
    "env X=1 ./run.sh",
)
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")


@pytest.fixture
def read(tmp_path, monkeypatch):
    def reading(text, number=None, **environment):
        (tmp_path / "run.sh").write_bytes(text.encode(errors="surrogateescape"))
        monkeypatch.chdir(tmp_path)
        return read_script("run.sh", {"HOME": "/home/me", "PATH": os.environ["PATH"], **environment}, number)

    return reading


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_each_construct_is_as_bash_has_it_or_not_known(construct, tmp_path):
    assert wrong(f"{construct}\n{LAUNCH}\n", tmp_path) == ""


@pytest.mark.parametrize("launch", LAUNCHES)
def test_each_form_of_a_launch_is_as_bash_has_it_or_not_known(launch, tmp_path):
    assert wrong(f"n=8; m=4; A=(a.q=1)\n{launch}\n", tmp_path, launches=True) == ""


@pytest.mark.parametrize("launch", LOSSY)
@pytest.mark.parametrize("end", ["", " 2>&1 | tee log", " & wait", " & for i in {1..30}; do :; done; wait"])
def test_a_word_without_a_mark_is_not_known_wherever_the_launch_stands(launch, end, tmp_path):
    first, *rest = launch.split("\n")
    assert wrong("\n".join([first + end, *rest]) + "\n", tmp_path) == ""


def test_a_pipe_is_no_script_and_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # so that a reader would not wait
    os.write(pipe, b"#!/bin/sh\n")
    assert not is_script("./pipe", str(tmp_path))
    (tmp_path / "file").write_bytes(os.read(pipe, 100))
    assert is_script("./file", str(tmp_path)) and not is_script("file", str(tmp_path))
    os.close(pipe)


def test_a_function_in_the_background_may_start_after_the_next_command_of_the_script(monkeypatch):
    sent = []

    def ask(code, count):
        sent.append(code)
        return ["function" if "type -t -- run" in code else ""] * max(count, 0)

    monkeypatch.setattr(follow, "parent", {"shell of run": "script", "shell of probe": "shell of run"}.get)
    follower, call = follow.Follower(ask), "run $(probe | wc -l)"
    follower.start("script", "run.sh", "")
    for pid, functions, text in [
        ("script", [], call),
        ("shell of probe", [], "probe"),
        ("script", [], "wait"),
        ("shell of run", ["run", "main"], call),
    ]:
        follower.event(pid, "1", "run.sh", "/", text, *functions)
    assert sent[-1].startswith('set -- "${@/*/\x02')


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
        (f"python -um {MAIN} a=1", MAIN),
        (f"python -m{MAIN} a=1", MAIN),
        (f"accelerate launch --module --num_processes 8 {MAIN} a=1", MAIN),
        (f"python -m torch.distributed.run --nproc 8 -m {MAIN} a=1 algorithm.gamma=1", MAIN),
        (f"\\time -p python -m {MAIN} a=1", MAIN),
        (f"exec -a x python -m {MAIN} a=1", MAIN),
        (f"(cd there && exec python -m {MAIN} a=1)", MAIN),
        (f"flock -w 5 lock taskset -c 0-15 python -m {MAIN} a=1", MAIN),
        (f"runuser -u me taskset -c 0 python -m {MAIN} a=1", MAIN),
        (f"su -s /bin/bash -lc'python -m {MAIN} a=1' me", MAIN),
        (f"su - me --shell=/bin/sh --session-command='python -m {MAIN} a=1'", MAIN),
        (f'srun -N 1 docker run image bash -lc "cd /x && python -m {MAIN} a=1"', MAIN),
    ],
)
def test_the_launch_is_found_wherever_it_stands(text, entry, read):
    launch = read(text)
    assert (launch.entry, launch.arguments[0]) == (entry, "a=1")


@pytest.mark.parametrize(
    "text, value",
    [
        ("env LR=2 bash inner.sh", 2),
        ("sbatch --export=ALL,LR=2 inner.sh", 2),
        ("srun --export=ALL,LR=2 bash inner.sh", 2),
        ("conda run -n v env LR=2 sh -c 'LAUNCH a.n=${LR:-1}'", 2),
        ("env -i bash inner.sh", 1),
        ("SLURM_EXPORT_ENV=NONE srun bash inner.sh", 1),
        ("SBATCH_EXPORT=NONE sbatch inner.sh", 1),
        ("docker run --entrypoint=env --no-healthcheck --entrypoint bash i -c 'LAUNCH a.n=${LR:-1}'", 1),
        ("ssh -oBatchMode=yes n1 'cd /x && LAUNCH a.n=${LR:-1}'", 1),
        ("sbatch in.sbatch", 3),
        ("sbatch --export=ALL in.sbatch", 5),
        ("bash in.sbatch", 5),
        ("APPTAINERENV_LR=2 apptainer exec image bash inner.sh", 2),
        ("LR=(2); docker run -e LR=3 i bash inner.sh", 3),
        ("env -u LR bash inner.sh", 1),
        ("env X=1 stdbuf -i 0 bash inner.sh", 5),
        ("env X=1 torchrun -u LR bash inner.sh", 5),
        *(
            (f"{name} 'LAUNCH a.n=${{LR:-1}}'", 1)
            for name in ("docker run i bash -c", "ssh n1", "kubectl exec p -- sh -c")
        ),
    ],
)
def test_an_inner_shell_has_the_variables_that_its_program_hands_on(text, value, read, tmp_path):
    launch = f"python3 -m {MAIN}"
    (tmp_path / "inner.sh").write_text(f"{launch} a.n=${{LR:-1}}\n")
    (tmp_path / "in.sbatch").write_text(f"#!/bin/bash\n#SBATCH --export=NONE,LR=3\n{launch} a.n=${{LR:-1}}\n")
    found = read("export LR=5\n" + text.replace("LAUNCH", launch))
    assert (found.arguments, found.unknown) == ([f"a.n={value}"], {})


@pytest.mark.parametrize(
    "directive, values",
    [
        ("#SBATCH --export=NONE", "1 1"),
        ("#SBATCH -N 1 --export=ALL,LR=3", "3 6"),
        ("#SBATCH --export LR", "5 1"),
        ("#SBATCH --export=ALL", "5 6"),
        ('#SBATCH --export="LR=3"  # don\'t: --export=NONE', "3 1"),
        ("#SBATCH --comment='a # --export=ALL' --export=LR=3", "3 1"),
        ("#SBATCH --export=ALL --export='LR=3,M=4 # 5'", "3 4 # 5"),
        ("#SBATCH --export-file=x #--export=NONE", "5 6"),
        ("echo\n#SBATCH --export=NONE", "5 6"),
    ],
)
def test_a_batch_script_gets_the_variables_that_its_directive_names(directive, values, read):
    text = f'#!/bin/bash\n#SBATCH -J x\n{directive}\npython3 -m {MAIN} "a.n=${{LR:-1}} ${{M:-1}}"'
    launch = read(text, LR="5", M="6")
    assert launch.arguments == [f"a.n={values}"]
    assert any("line 3: sbatch" in note for note in launch.notes) == (values[-1] != "6")


def test_launches_in_the_background_have_the_scripts_order(tmp_path, read):
    with pytest.raises(ConfigError) as caught:
        read(f"for n in 1 2 3 4 5 6; do python3 -m {MAIN} a.n=$n & done; wait")
    assert [str(caught.value).index(f"a.n={n}") for n in range(1, 7)] == sorted(
        str(caught.value).index(f"a.n={n}") for n in range(1, 7)
    )


@pytest.mark.parametrize(
    "text, arguments, unknown",
    [
        ("echo a.n=2 | xargs LAUNCH a.x=1", ["a.x=1"], "an argument"),
        ("seq 3 | xargs -n 1 -I {} LAUNCH a.x=1 a.n={}", ["a.x=1"], "a.n=?"),
        ("parallel -j 2 LAUNCH a.x=1 a.n={1} ::: 3 4", ["a.x=1"], "a.n=?"),
        ("parallel LAUNCH a.x=1 ::: a.n=3", ["a.x=1"], "an argument"),
        ("seq 3 | xargs ./inner.sh a.x=1", ["a.x=1"], "an argument"),
    ],
)
def test_what_a_program_reads_and_hands_on_is_not_known(text, arguments, unknown, read, tmp_path):
    (tmp_path / "inner.sh").write_text(f'python3 -m {MAIN} "$@"\n')
    launch = read(text.replace("LAUNCH", f"python3 -m {MAIN}"))
    assert (launch.arguments, [*launch.unknown]) == (arguments, [unknown])
    assert "of line 1 makes it of what it reads" in launch.unknown[unknown]
    assert any("line 1 starts a program as often as" in note for note in launch.notes)


def test_a_file_of_variables_is_not_read(read, tmp_path):
    (tmp_path / "vars").write_text("n=5\n")
    launch = read(f"docker run --env-file vars i bash -c 'm=2; python3 -m {MAIN} a.n=${{n:-1}} a.m=$m'")
    assert (launch.arguments, [*launch.unknown]) == (["a.m=2"], ["a.n=?"])
    assert "line 1 takes the variables of vars" in launch.unknown["a.n=?"]


@pytest.mark.parametrize("option", ["-o SendEnv=n", "-oSetEnv=n=3"])
def test_a_variable_that_the_server_of_ssh_may_take_is_not_known(option, read):
    launch = read(f"export n=5; ssh {option} h 'python3 -m {MAIN} a.n=${{n:-1}}'")
    assert (launch.arguments, [*launch.unknown]) == ([], ["a.n=?"])


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
        (f'a=1\n[ -n "$1" ] || exit 1\npython -m {MAIN} a=1', "its last command is `exit 1` in line 2"),
        (
            f"cat > made.sh <<EOF\npython -m {MAIN} a=1\nEOF\nbash made.sh",
            "line 4 starts a script that is not read",
        ),
        ("printf x > made.sh\nbash made.sh\n./made.sh", "line 3 starts a script that is not read"),
        *((f"printf x > run.sh\n{by}", "line 2 starts a script that is not read") for by in MADE),
        ('printf x > run.sh\neval "$(cat run.sh)"', "line 2 runs a command that is not known"),
        ("curl http://x | sh", "line 1 runs a command that is not known"),
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


EFFECTS = [
    "echo x > new; echo x >> kept; : > kept; { echo x; } > kept; exec 9> kept; echo x >&9; echo x | tee kept",
    "rm kept; /bin/rm -f kept; mv kept moved; /bin/mv kept moved; ln -s kept link; /bin/ln kept link",
    "sed -i s/k/x/ kept; sort -o kept kept; sed -n 'w new' kept; awk '{print > \"new\"}' kept; uniq kept new",
    "chmod 777 kept; /bin/chmod 777 kept; touch -d 2001-01-01 kept; truncate -s 0 kept; /usr/bin/truncate -s 0 kept",
    "mkdir new; /bin/mkdir new; rmdir folder; /bin/rmdir folder; mkfifo new",
    "kill -9 VICTIM; builtin kill -9 VICTIM; /bin/kill -9 VICTIM; kill -9 -1; enable -f /nowhere/x.so x",
    "echo x > /dev/tcp/127.0.0.1/PORT; exec 3<> /dev/tcp/127.0.0.1/PORT; echo x > /dev/udp/127.0.0.1/PORT",
    '/usr/bin/env touch new; PYTHON -c \'open("new", "w")\'; command touch new; builtin command touch new',
    "/lib64/ld-linux-x86-64.so.2 /bin/touch new; (exec /bin/touch new); exec -a sed /bin/touch new",
    "set -m; touch new & wait; (sleep 1; echo x > new; /bin/touch new) & disown; trap 'echo x > new; /bin/touch new' EXIT",
    "echo 'touch new' > lib.sh; . ./lib.sh; . ./there.sh; bash there.sh; bash -c 'echo x > new; /bin/rm kept'",
    "trap - DEBUG; touch new; echo x >> kept; unset -f command touch; /bin/rm kept",
    "builtin trap - DEBUG; touch new; echo x >> kept; /bin/rm kept; builtin kill -9 VICTIM; (/bin/rm kept &)",
]


@pytest.mark.parametrize("tries", EFFECTS)
def test_nothing_of_a_script_has_an_effect_outside_its_process_group(tries, tmp_path, read):
    """Each way alone; the files, the victim and the port are as they were, and no process is left."""
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    folder.mkdir()
    kept.write_text("kept\n")
    kept.chmod(0o640)
    (tmp_path / "there.sh").write_text("echo x > new; /bin/touch new; /bin/rm kept; echo x >> kept\n")
    before = {one: one.stat() for one in (kept, folder, tmp_path / "there.sh")}
    victim = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.settimeout(0)
        for word, value in {
            "VICTIM": victim.pid,
            "PORT": port.getsockname()[1],
            "PYTHON": sys.executable,
        }.items():
            tries = tries.replace(word, str(value))
        with suppress(ConfigError):
            read(tries, MARKER=str(tmp_path))
        try:
            assert victim.poll() is None
            with pytest.raises(BlockingIOError):
                port.accept()
        finally:
            victim.kill()
            victim.wait()
    assert {one.name for one in tmp_path.iterdir()} == {"kept", "folder", "there.sh", "run.sh"}
    for one, was in before.items():
        now = one.stat()
        assert (now.st_size, now.st_mode, now.st_mtime_ns) == (was.st_size, was.st_mode, was.st_mtime_ns)
    left = [one for one in psutil.process_iter() if _has(one, f"MARKER={tmp_path}")]
    assert left == []


CALLS = [
    "os.chmod('kept', 0o777)", "os.utime('kept')", "os.truncate('kept', 0)", "os.remove('kept')", "os.rename('kept', 'new')",
    "os.link('kept', 'new')", "os.symlink('kept', 'new')", "os.mkdir('new')", "os.rmdir('folder')", "os.mkfifo('new')",
    "os.chown('kept', os.getuid(), os.getgid())", "os.setxattr('kept', 'user.x', b'x')", "os.kill(os.getppid(), 0)",
    "os.setsid()", "os.setpgid(0, 0)", "os.setpriority(os.PRIO_PROCESS, 0, 1)", "socket.socket(type=socket.SOCK_DGRAM)",
    "socket.socket(socket.AF_UNIX)", "os.execv('/bin/touch', ['touch', 'new'])", "os.execv(sys.executable, ['python'])",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_confined_process_is_refused_each_call(call, tmp_path):
    """Linux refuses it, whatever the script and `shell.bash` do."""
    (tmp_path / "kept").write_text("kept\n")
    (tmp_path / "folder").mkdir()
    ours, theirs = socket.socketpair()
    code = (
        f"import os, runpy, socket, sys; confined = runpy.run_path({dialog.confine.__file__!r})['confine']\n"
        f"confined({theirs.fileno()})\ntry:\n    {call}\nexcept PermissionError:\n    os._exit(7)"
    )
    command = [sys.executable, "-c", code, "", "", shutil.which("bash")]
    with ours, theirs:
        done = subprocess.run(command, cwd=tmp_path, pass_fds=[theirs.fileno()], capture_output=True)
    assert done.returncode == 7, done.stderr


def test_an_open_that_a_signal_interrupts_leaves_the_later_ones_answered(monkeypatch):
    """Its question is taken back while the parent comes to read it: a child of bash has ended, say."""
    (ours, theirs), (wait, go), ioctl = socket.socketpair(), os.pipe(), dialog.fcntl.ioctl
    code = (
        f"import os, runpy, signal\nsignal.signal(signal.SIGUSR1, lambda *_: os.read({wait}, 1))\n"
        f"runpy.run_path({dialog.confine.__file__!r})['confine']({theirs.fileno()})\n"
        "os.open(os.devnull, os.O_RDONLY)\nos.open(os.devnull, os.O_RDONLY)\nos._exit(7)"
    )

    def interrupted(descriptor, request, *rest):
        monkeypatch.undo()
        process.send_signal(signal.SIGUSR1)
        while select.select([descriptor], [], [], 0)[0]:
            pass
        try:
            return ioctl(descriptor, request, *rest)
        finally:
            os.write(go, b"x")

    command = [sys.executable, "-c", code, "", "", shutil.which("bash")]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno(), wait]) as process:
        opened = dialog._listener(ours, process)
        monkeypatch.setattr(dialog.fcntl, "ioctl", interrupted)
        dialog._serve_opens(opened, follow.Follower(lambda code, count: []))
    assert process.returncode == 7


def _has(process, text):
    with suppress(psutil.Error):
        return text in map("=".join, process.environ().items())


@pytest.mark.parametrize(
    "text, arguments, unknown",
    [
        (
            "read n; read -p 'go on? ' m; cat; LAUNCH a.n=$n a.m=$m a=1",
            ["a=1"],
            {"a.n=?": "line 1", "a.m=?": "line 1"},
        ),
        ("n=1\nLAUNCH a.n=$n a.m=$UNSET", ["a.n=1"], {"a.m=": "UNSET (line 2)"}),
        ("exec > log.txt 2>&1\nn=3\nexec LAUNCH a.n=$n\nn=4", ["a.n=3"], {}),
        ("trap 'echo bye; n=4' EXIT INT TERM; n=3; LAUNCH a.n=$n", ["a.n=3"], {}),
        ("trap 'n=4' ERR; n=3; LAUNCH a.n=$n", [], {"a.n=?": "the trap of line 1"}),
        ("n=; f() { [ $1 = 0 ] || { n=$n$1; f $(($1 - 1)); }; }; f 3; LAUNCH a.n=$n", ["a.n=321"], {}),
        (
            "n=$(nproc); LAUNCH a.n=$n a.m=$HOSTNAME a.x=$(uname -s)",
            ["a.x=Linux"],
            {"a.n=?": "nproc", "a.m=?": "HOSTNAME"},
        ),
        (
            "[ -e /dev/nvidia0 ] && n=2; m=$(grep -c x /proc/cpuinfo); LAUNCH a.n=$n a.m=$m",
            [],
            {"a.n=?": "/dev/nvidia0", "a.m=?": "/proc/cpuinfo"},
        ),
        (
            "ulimit -n 9 && n=2; m=$(ulimit -n); LAUNCH a.n=$n a.m=$m",
            [],
            {"a.n=?": "how ulimit", "a.m=?": "what ulimit"},
        ),
        (
            "printf -v n '%(%Y)T'; m=$(printf '%(%Y)T'); LAUNCH a.n=$n a.m=$m",
            [],
            {"a.n=?": "a time", "a.m=?": "a time"},
        ),
        (
            "[ -t 1 ] && n=2; m=$(sort -R x); LAUNCH a.n=$n a.m=$m",
            [],
            {"a.n=?": "a terminal", "a.m=?": "output of sort"},
        ),
        (
            "export n=2; myrun bash -c 'x=3; LAUNCH a.n=$n a.x=$x'",
            ["a.x=3"],
            {"a.n=?": "line 1 starts a shell by myrun"},
        ),
        ("export n=2; tmux send-keys 'LAUNCH a.n=$n' C-m", [], {"a.n=?": "line 1 starts a shell by tmux"}),
        ("n='\udcff'; m=3; LAUNCH a.n=$n a.m=$m", ["a.m=3"], {"a.n=\udcff": "not UTF-8"}),
    ],
)
def test_odd_scripts_are_read_and_what_is_not_known_has_its_line(text, arguments, unknown, read):
    launch = read(text.replace("LAUNCH", f"python3 -m {MAIN}"))
    assert (launch.arguments, {*launch.unknown}) == (arguments, {*unknown})
    assert all(why in launch.unknown[key] for key, why in unknown.items())


@pytest.mark.parametrize(
    "text, says",
    [
        (f"python3 -m {MAIN} a=1\nif then fi", "line 2: syntax error"),
        (f"python3 -m {MAIN} a=1\ncd nowhere || exit 1", ""),
        (f"python3 -m {MAIN} a=1\nsource nowhere/env.sh", "line 2 sources nowhere/env.sh"),
    ],
)
def test_what_makes_a_script_doubtful_is_noted(text, says, read):
    launch = read(text)
    assert launch.arguments == ["a=1"] and any(says in note for note in launch.notes or [""])


@pytest.mark.parametrize(
    "body",
    [
        "while :; do :; done",
        "f() { f; }; f",
        "bash run.sh",
        "f() { f | f & }; f",
        "x=a; while :; do x=$x$x; done",
    ],
)
def test_a_script_without_an_end_is_read_up_to_the_deadline(body, read, monkeypatch):
    monkeypatch.setattr(script, "SECONDS", 0.7)
    launch = read(f'[ -n "$AGAIN" ] || python3 -m {MAIN} a=1\nexport AGAIN=1\n{body}\n')
    assert launch.arguments == ["a=1"] and any("had not ended after 0.7 s" in note for note in launch.notes)


@pytest.mark.slow
def test_a_script_of_five_megabytes_is_read(read, monkeypatch):
    monkeypatch.setattr(script, "SECONDS", 120)
    assert read("# a comment of some length\n" * 200_000 + f"n=3\npython3 -m {MAIN} a.n=$n\n").arguments == [
        "a.n=3"
    ]


def test_a_launch_that_calls_itself_does_not_fill_the_screen(read):
    with pytest.raises(
        ConfigError, match="30 launches are in it: --launch 1.*--launch 20: .*; [.]{3}$"
    ) as caught:
        read(f"for n in {{1..30}}; do python3 -m {MAIN} a.n=$n; done")
    assert len(caught.value.accepted) == 30


@pytest.mark.parametrize("ending", ["a=$n\r\n", "a=$n\r"])
def test_a_line_that_ends_with_a_carriage_return_is_refused_by_its_number(ending, read):
    with pytest.raises(ConfigError, match="line 2") as caught:
        read(f"n=1\npython3 -m {MAIN} {ending}")
    assert caught.value.key == "--from"


@pytest.mark.parametrize("name", ["nowhere.sh", "."])
def test_a_file_that_is_none_is_refused(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_script(name, {})
    assert (caught.value.key, caught.value.value) == ("--from", name)


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
