"""Small scripts with a launch, and what bash makes of them: the oracle for `recipe.adopt.script`.

In the oracle `python3` notes its arguments. The programs that only a cluster has are there, too, and answer as a
`World` says: a script is read without them, so that what is read has to hold in each world, or to be named as not known.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from verl_credit.errors import ConfigError
from verl_credit.recipe.adopt.script import Launch, launches_of

MODULE = "verl.trainer.main_ppo"
LAUNCH = f'python3 -m {MODULE} a.n=$n a.m=$m a.g="$g" a.s=${{s:-none}} "${{A[@]}}" $F'


class World(NamedTuple):
    gpus: int
    status: int


WORLDS = (World(8, 0), World(2, 1))
EXPORTS = '''alone= kept=(PATH="$PATH" NOTED="$NOTED" GPUS="$GPUS" STATUS="$STATUS")
while [[ $1 == -* ]]; do
    [[ $1 == *=* || $1 != OPTION ]] || { set -- "$1=$2" "${@:3}"; }
    if [[ $1 == OPTION=* ]]; then
        IFS=, read -ra listed <<< "${1#OPTION=}"
        [[ ${listed[*]} == *ALL* ]] || alone=1
        for one in "${listed[@]}"; do
            if [[ $one == *=* ]]; then kept+=("$one"); elif [ -v "$one" ]; then kept+=("$one=${!one}"); fi
        done
    fi
    shift
done
ALONE
[ -z "$alone" ] || set -- -i "${kept[@]}" "$@"
[ -n "$alone" ] || set -- "${kept[@]}" "$@"
exec env "$@"'''
"""A program that hands on the variables of its option alone, as Slurm's and containers' do."""
PROGRAMS = {
    "nvidia-smi": 'i=0; while [ $i -lt $GPUS ]; do echo "GPU $i: x"; i=$((i+1)); done',
    "probe": "echo probed-$GPUS; exit $STATUS",
    "date": "echo 2026-$GPUS",
    "git": "echo abc$GPUS",
    "mkdir": "",
    "srun": EXPORTS.replace("OPTION", "--export").replace("ALONE", ""),
    "sbatch": EXPORTS.replace("OPTION", "--export").replace("ALONE", 'set -- bash "$@"'),
    "docker": '[ "$2" != --entrypoint ] || set -- run "$4" "$3" "${@:5}"; shift; '
    + EXPORTS.replace("OPTION", "-e").replace("ALONE", "alone=1; shift"),
    "ssh": "o=46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:P:p:Q:R:S:W:w:; while getopts $o x; do :; done; "
    "shift $OPTIND; OPTIND=1; while getopts $o x; do :; done; shift $((OPTIND - 1)); "
    '[ $# -gt 0 ] || set -- bash -s; exec env -i PATH="$PATH" NOTED="$NOTED" GPUS="$GPUS" STATUS="$STATUS" '
    'bash -c "$*"',
    "flock": 'while getopts sxenoFuw:E: x; do :; done; shift $OPTIND; [ "$1" != -c ] || exec bash -c "$2"; exec "$@"',
    "script": 'code=""; for part in 1 2; do while getopts aefqB:I:O:E:m:T:o:c: x; do [ $x != c ] || code=$OPTARG; done; '
    'shift $((OPTIND - 1)); OPTIND=1; [ $part = 2 ] || shift; done; [ -z "$code" ] || exec bash -c "$code"; exec "$@"',
    "taskset": 'shift 2; exec "$@"',
    "apptainer": """shift; kept=(PATH="$PATH" NOTED="$NOTED" GPUS="$GPUS" STATUS="$STATUS"); while [[ $1 == -* ]]; do
    [ "$1" != --cleanenv ] || alone=-i; [ "$1" != --env ] || { kept+=(${2//,/ }); shift; }; shift; done
shift; exec env $alone "${kept[@]}" "$@\"""",
    "mywrap": 'exec env -u n m=7 "$@"',
    "parallel": """while [ "$1" != ::: ]; do command+=("$1"); shift; done; shift
for one in "$@"; do
    [ -n "$command" ] || { bash -c "$one"; continue; }
    if [[ ${command[*]} == *{}* ]]; then "${command[@]//'{}'/$one}"; else "${command[@]}" "$one"; fi
done""",
    "timeout": 'shift; exec "$@"',
    "tee": "cat > /dev/null",
    "sleep": "",
    "nohup": 'exec "$@"',
    "python3": '''while [[ $1 != -m && $1 != *.py && $# -gt 0 ]]; do shift; done
[ "$1" != -m ] || shift; shift; printf "%s\\0" $# "$@" >> "$NOTED"''',
    "torchrun": 'exec python3 "$@"',
}
CONSTRUCTS = [
    'n=8; [ "$g" = 1 ] && n=2',
    "n=8; [[ $m == 4 ]] && n=2",
    'n=8; [ -z "$UNSET" ] || n=2',
    'n=8; g=8; if [ "$g" -ge 8 ]; then n=16; fi',
    "n=0; case $s in small) n=1;; *) n=2;; esac",
    "n=8; ( n=2 )",
    "cat > /dev/null <<EOF\nn=2\nEOF",
    "cat <<'EOF'\nfor i in 1 2\nif x\nn=2\nEOF",
    "function f {\n  n=3\n}",
    "function f {\n  n=3\n}\nf",
    "n=8; ((n*=2))",
    "g=3; ((n=g*2))",
    "n=0; while [ $n -lt 3 ]; do n=$((n+1)); done",
    "n=4; unset n",
    "n=$((-7/2)); m=$((-3%2))",
    "n=$[2 * 4]",
    "let n=5+1",
    ': "${n:=8}"',
    "declare -i n=3; n+=4",
    "typeset -r R=5; n=$R",
    "export n m=2",
    "n=model.tar.gz; m=${n%.*}; g=${n##*.}; s=${n//o/0}",
    "s=ABC; s=${s,,}",
    "A=(a.x=1 a.y=2); n=${#A[@]}; m=${A[-1]}",
    "n=$((2**10)); m=$((1<<4)); g=$((n > m ? 1 : 2))",
    "n=$(echo 4); m=$(basename /x/y.z); g=$(dirname /x/y)",
    "n=$(( $(echo 3) + 1 ))",
    's=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
    's=$(realpath "$0")',
    "for n in 1 2 3; do m=$n; done",
    "for ((n=0; n<4; n++)); do :; done",
    "A+=(a.x=$n)",
    "A=(a.x=1 a.t=run_$(date +%s) a.z=3)",
    'A=("${A[@]}" a.w="$s")',
    'F="b.x=1 b.y=$n"',
    'F="b.k=$(git rev-parse HEAD)"',
    "g=$(nvidia-smi -L | wc -l)",
    "g=$(nvidia-smi -L | wc -l); n=$((g * 2))",
    "g=$(nvidia-smi -L | wc -l); if [ $g -ge 8 ]; then n=8; else n=1; fi",
    "g=$(nvidia-smi -L | wc -l); (( g > 4 )) && n=7",
    "g=$(nvidia-smi | head -1 | cut -d: -f1); s=${g#GPU }",
    "n=4; if probe; then n=2; fi",
    "n=4; probe && n=2",
    "n=4; probe || n=2",
    "if ! probe > /dev/null 2>&1; then A+=(a.x=9); fi",
    "n=$(probe); s=${#n}",
    "s=$RANDOM; n=$((RANDOM % 7))",
    "s=run_$$",
    "m=$(probe | sed 's/[a-z-]*//')",
    'n=$([ -n "$g" ] && echo 3 || echo 4)',
    "n=$(if probe > /dev/null; then echo 1; else echo 2; fi)",
    'check() { [ "$(nvidia-smi -L | wc -l)" -gt 4 ]; }\nif check; then n=5; fi',
    "check() { probe >/dev/null; }\ncheck && n=5",
    "pick() { if [ $1 -gt 3 ]; then echo big; else echo small; fi; }\ns=$(pick 5)",
    "fn() { local n=9; m=$n; }\nfn",
    "s=\"it's $n\"; m='$n'",
    "read -r n m <<< '5 6'",
    'IFS=, read -ra P <<< "1,2,3"; n=${P[1]}',
    "while read -r l; do m=$l; done <<EOF\n1\n2\nEOF",
    "printf -v n %03d 7",
    "mkdir -p out && n=1",
    "mkdir -p out; [ -d out ] && n=1",
    "echo 'n=99' > made.sh; [ -f made.sh ] && . ./made.sh",
    "source there.sh",
    "source missing.sh",
    "[ -f there.sh ] && n=6",
    "n=$(cat there.txt)",
    "n=$(< there.txt)",
    "n=$(grep -c x there.txt)",
    "set -euo pipefail",
    "set -- 7 8; n=$1; m=$#",
    "shopt -s nullglob; A+=(a.f=$(echo *.none))",
    "n=${UNSET:-5}; m=${UNSET-6}; s=${UNSET:+x}",
    "n=$UNSET",
    "A+=(a.u=$UNSET)",
    "V=n; n=3; m=${!V}",
    'eval "n=3"',
    "n=1; { n=2; m=3; } > log.txt 2>&1",
    "trap 'echo bye' EXIT",
    "n=5 # n=6 \\\nm=4",
    "cd /; n=1; cd - > /dev/null",
    "(cd / && n=2); m=1",
    "select_() { n=4; return 1; }\nselect_ || m=3",
    "until [ ${n:-0} -ge 3 ]; do n=$((${n:-0}+1)); done",
    "n=3; n=$((n++ + ++n))",
    "for x in $(nvidia-smi -L); do n=$x; done",
    "i=0; while [ $i -lt $(nvidia-smi -L | wc -l) ]; do i=$((i+1)); n=$i; done",
    "probe; n=$?",
    "probe; if [ $? -ne 0 ]; then n=3; fi",
    "nvidia-smi -L | while read l; do n=$l; done",
    "declare -A M=([a]=1 [b]=2); n=${M[b]}",
    "n=~/x",
    "arr=($(nvidia-smi -L)); n=${#arr[@]}; m=${arr[0]}",
    "n=$(nvidia-smi -L | wc -l | tr -d ' ')",
    "n=${n:-$(nvidia-smi -L | wc -l)}",
    "[[ $(date +%Y) > 2026-3 ]] && n=3",
    "case $(nvidia-smi -L | wc -l) in 8) n=8;; *) n=1; A+=(a.small=1);; esac",
    "n=$(date +%s | md5sum | cut -c1)",
    "for i in 1 2 3; do [ $i = 2 ] && break; n=$i; done",
    "for i in 1 2 3; do probe && break; n=$i; done",
    "f() { probe && return; n=9; }\nf",
    'if [ "$n" = 5 ]; then A+=(a.five=1); elif [ "$m" = 3 ]; then A+=(a.three=1); else A+=(a.no=1); fi',
    "n=$n$m",
    's="$A"',
    "m=$((n+1))",
    "echo 5 > f.txt; n=$(< f.txt)",
    "echo 5 > f.txt; read n < f.txt",
    "echo 5 > f.txt; while read l; do n=$l; done < f.txt",
    "n=8; for i in 1 2; do n=$i; done < missing.txt",
    "n=$(wc -l < missing.txt); m=$(grep -c x missing.txt)",
    "touch x.csv; for f in *.csv; do n=$f; done",
    "n=8; cd missing && n=2",
    "n=8; cd missing || n=2",
    "cd missing; n=$PWD; cd - > /dev/null; m=$(basename $PWD)",
    "n=$(echo 5 | tee log.txt)",
    "RANDOM=42; n=$RANDOM",
    "n=$PPID; m=$BASHPID",
    "n=8; probe | cat; m=${PIPESTATUS[0]}",
    "n=8; probe && n=2; V=n; m=${!V}",
    "A=(a.x=1 a.y=2); probe && A=(a.z=3)",
    "f() { probe || return 1; echo 7; }; n=$(f || echo 3)",
    "g=$(nvidia-smi -L | wc -l); f() { n=$1; }; f $((g*2))",
    'f() { f2 "$@"; }; f2() { n=$1; }; f $(probe)',
    "f() { n=$2; m=$#; }; f $(nvidia-smi -L) 5",
    'f() { n=$2; m=$#; }; f "$(probe)" 5',
    "f() { n=$1; m=${3:-7}; }; g=$(nvidia-smi -L); f 5 $g",
    "set -- $(nvidia-smi -L) 5; n=$2; m=$#",
    "n=8; trap 'n=2' DEBUG; m=3; trap - DEBUG",
    'while IFS== read -r k v; do export "$k=$v"; done < <(echo n=3)',
    "export $(cat there.txt | sed 's/^/n=/')",
    "export $(cat missing.env); n=${n:-3}",
    "P=$(probe); n=4; declare $P=5",
    "n=4; command -v nvidia-smi > /dev/null && n=2",
    "set -- --n 5; while [[ $# -gt 0 ]]; do case $1 in --n) n=$2; shift 2;; *) shift;; esac; done",
    "declare -i n=3; probe && n=4",
    "declare -i n=3; f() { n=$(probe); s=${#n}; }; f",
    "n=${1:-4}; m=$#",
    "n=8; source missing.sh; ( n=2 )",
    'probe && {\ns="it\'s $n"\nif probe; then\nn=1\nfi\n}',
    "probe && HOME=/x; n=$HOME",
    "mkdir -p out/x; n=$_",
    "echo a b; m=$_; : 7; n=$_",
    "set -e; [[ $- == *e* ]] && n=2",
    "( sleep 1; n=2 ) & n=5",
    "probe & if wait $!; then n=2; fi",
    "probe & { probe && n=2; }",
    "probe & wait -n; n=$?",
    "IFS=,; g=$(nvidia-smi -L | wc -l); f() { n=$1; m=$2; }; f $((g * 2)) 6",
]
KINDS = {
    "words": [
        LAUNCH,
        f"{LAUNCH} > log.txt 2>&1 c.d=2",
        f"> log.txt {LAUNCH}",
        f"PY=python3; $PY -m {MODULE} a.n=$((n + 1)) a.m=${{m%x}} a.l=${{#s}}",
        f'C=(python3 -m {MODULE}); "${{C[@]}}" a.n="$n" "${{A[@]}}"',
        f"cmd='{LAUNCH}'; eval \"$cmd\"",
        f"python3 -m {MODULE} a.g=$(nvidia-smi -L | wc -l) a.n=${{n:-1}}",
        f"X=1 n=7 {LAUNCH}",
        f"python3 -m {MODULE} \\\n  a.n=$n \\\n  a.m=$m",
    ],
    "conditions": [
        f'if [ "$n" = 8 ]; then {LAUNCH} c.x=1; else {LAUNCH} c.x=2; fi',
        f"if probe; then {LAUNCH} c.x=1; fi",
        f"if probe; then {LAUNCH} c.x=1; else {LAUNCH} c.x=2; fi",
        f"case ${{n:-8}} in 8) {LAUNCH} c.x=1 ;; *) {LAUNCH} c.x=2 ;; esac",
        f"cd there || cd / && {LAUNCH} c.x=1",
    ],
    "loops": [
        f"for i in 1 2; do {LAUNCH} c.seed=$i; done",
        f"i=0; while (( i < 2 )); do {LAUNCH} c.seed=$i; i=$((i + 1)); done",
        f"for lr in 1e-6 2e-6; do for k in 1 2; do {LAUNCH} c.lr=$lr c.k=$k; done; done",
        f"until {LAUNCH} c.x=1; do sleep 1; done",
    ],
    "functions": [
        f'run() {{ {LAUNCH} c.x=$1 "${{@:2}}"; }}; run 5 c.d=3',
        f'run() {{ {LAUNCH} "$@" > log.txt 2>&1; }}; run c.d="$n"',
        f'main() {{ local lr=$1; shift; {LAUNCH} c.lr="$lr" "$@"; }}; main 1e-6 c.d=$m',
    ],
    "heredocs": [
        f"bash <<EOF\npython3 -m {MODULE} a.n=$n\nEOF",
        f"export n; bash -s <<'EOF'\npython3 -m {MODULE} a.n=$n\nEOF",
        f"cat <<EOF\npython3 -m {MODULE} a.n=0\nEOF\n{LAUNCH}",
        f": <<'EOF'\npython3 -m {MODULE} a.n=0\nEOF\n{LAUNCH}",
    ],
    "wrappers": [
        f"export n m g s F; srun --gpus=8 bash -c 'python3 -m {MODULE} a.n=$n a.m=$m a.s=${{s:-none}} $F'",
        f"timeout 5 {LAUNCH} | tee log.txt",
        f"{{ {LAUNCH}; }} > log.txt",
        f"( {LAUNCH} ) & wait",
        f"exec {LAUNCH}",
        f"bash -c \"python3 -m {MODULE} a.n=$n a.m='$m'\"",
        f"set -x; {LAUNCH} 2>&1 | tee log.txt",
        f"env X=1 {LAUNCH}",
        f"nohup {LAUNCH} > log.txt 2>&1 &\nwait",
        f"g=$(nvidia-smi -L | wc -l)\n( {LAUNCH} ) & wait",
    ],
    "shells of other programs": [
        f"{LAUNCH} > >(tee log.txt) 2>&1",
        f"docker run --entrypoint bash image -c 'python3 -m {MODULE} a.n=${{n:-1}} a.m=$m'",
        f"ssh host python3 -m {MODULE} a.n='${{n:-1}}' a.m=$m",
        f"ssh host <<'E'\nn=3\npython3 -m {MODULE} a.n=$n a.m=${{m:-2}}\nE",
        f"bash -s x <<'E'\nprobe && r=2\npython3 -m {MODULE} a.r=${{r:-0}} a.k=$# a.x=$1\nE",
        *(
            f"export n; {by}"
            for by in (
                "docker run --entrypoint ./inner.sh image a.z=1",
                "ssh host ./inner.sh a.z=1",
                "ssh host bash -s < inner.sh",
                "flock lock -c './inner.sh a.z=1'",
                "flock lock ./inner.sh a.z=1",
                "script -qec 'bash inner.sh a.z=1' log",
                "apptainer exec --env m=3,s=4 image ./inner.sh",
                "apptainer exec --cleanenv --env m=3 image bash inner.sh",
                "mywrap bash inner.sh",
                "ssh -oBatchMode=yes host bash inner.sh",
                "ssh -v -p2222 -lme host ./inner.sh a.z=1",
                "ssh -L8080:localhost:80 host bash inner.sh",
                "ssh -tto ProxyCommand='nc %h' -oBatchMode=yes host1 bash inner.sh",
                "ssh host -t -p 22 -- bash inner.sh",
                "ssh -- host bash inner.sh",
                "flock lock taskset -c 0-15 bash inner.sh",
                "flock -xw5 lock taskset -c 0-15 ./inner.sh a.z=1",
                "flock -xw 5 lock -c 'bash inner.sh a.z=1'",
                "script -q log -- taskset -c 0 bash inner.sh",
                "script -qec'bash inner.sh' log",
                "script -O in.log log -qc 'bash inner.sh'",
                "docker run --entrypoint= image bash inner.sh",
                "docker run image ./inner.sh a.z=1 --entrypoint bash",
                "env -vS'm=3 bash inner.sh'",
                "env --split-string='m=3 ./inner.sh' a.z=1",
                """env -iS"m=3 PATH=$PATH NOTED=$NOTED bash" inner.sh""",
                "IFS=,; docker run -e m=3 image ./inner.sh",
            )
        ),
    ],
    "inner scripts": [
        *(
            f"export n m; {by} a.z=1"
            for by in (
                "env X=1 ./inner.sh",
                "env n=9 X=1 ./inner.sh",
                "env -u n ./inner.sh",
                'env -i m=3 PATH="$PATH" NOTED="$NOTED" ./inner.sh',
                "timeout 5 srun ./inner.sh",
                "sbatch ./inner.sh",
                "bash -x -- inner.sh",
                "./started",
                "srun --export=NONE ./inner.sh",
                "srun --export ALL,m=9 bash inner.sh",
                "sbatch --export=m,X=1 inner.sh",
                "srun --export=NONE docker run -e m image bash inner.sh",
                "docker run image ./inner.sh",
                "docker run -e n image bash inner.sh",
                "docker run -e m=2 -e n image ./inner.sh",
                "srun docker exec name bash inner.sh",
                "env n=5 docker run -e n image ./inner.sh",
            )
        ),
        "./inner.sh $(nvidia-smi -L) 5",
        "readonly n; export n; docker run image ./inner.sh",
        "n=6; docker run -e n image ./inner.sh",
        *(
            f"export n; {by}"
            for by in (
                "cat inner.sh | bash",
                "cat inner.sh | cat | bash -s a.z=1",
                "bash < inner.sh",
                "env m=3 bash -s -- a.z=1 < inner.sh",
                "bash <<E\nprobe && n=7\nbash inner.sh a.y=\\$n\nE",
            )
        ),
    ],
    "words that are read": [
        f"echo 5 | xargs -I{{}} python3 -m {MODULE} a.n={{}} a.m=$m",
        f"echo 5 | xargs -n 1 -I % python3 -m {MODULE} a.n=% a.m=$m",
        f"echo 5 | xargs --replace python3 -m {MODULE} a.n={{}}-{{}} a.m=$m",
        f"echo a.n=5 | xargs python3 -m {MODULE} a.m=$m",
        "echo 5 | xargs -I{} ./inner.sh a.z={}",
        "echo a.z=5 a.y=6 | xargs ./inner.sh",
        f"echo 5 | xargs bash -c 'python3 -m {MODULE} a.n=${{1:-8}} a.m=$0'",
        f"echo 5 | xargs bash -c 'python3 -m {MODULE} a.n=${{1:-8}} a.m=${{2:-9}}' _",
        f"echo 5 | xargs -I{{}} bash -c 'python3 -m {MODULE} a.n={{}}'",
        f"parallel python3 -m {MODULE} a.n={{}} a.m=$m ::: 3",
        f"parallel python3 -m {MODULE} a.m=$m ::: a.n=3",
        "parallel ./inner.sh a.z={} ::: 3",
        f"parallel ::: 'python3 -m {MODULE} a.n=3' 'python3 -m {MODULE} a.n=4'",
    ],
    "entry points": [
        'python3 -m verl.experimental.fully_async_policy.fully_async_main a.n=$n "${A[@]}"',
        "python3 -u verl/trainer/main_ppo.py a.n=$n a.m=$m",
        'torchrun --nproc=1 verl/trainer/main_ppo.py a.n="$n"',
    ],
    "own YAML": [
        f"{LAUNCH} --config-path=. --config-name=mine",
        f'python3 -m {MODULE} --config-path="$PWD/conf" --config-name=mine a.n=$n',
        f"cat > mine.yaml <<EOF\na: 1\nEOF\npython3 -m {MODULE} --config-dir . --config-name mine a.n=$n",
    ],
    "several launches": [
        f"echo {LAUNCH}; {LAUNCH}",
        f"{LAUNCH}\n{LAUNCH} last=1",
        f"{LAUNCH} && {LAUNCH} last=1",
        f"{LAUNCH} c.x=1 & wait; {LAUNCH} c.x=2 & wait",
    ],
}
LOSSY = [
    f"python3 -m {MODULE} a.x=1 a.g=$(nvidia-smi -L | wc -l)",
    f"python3 -m {MODULE} a.x=1 a.g=$(cat missing.txt)",
    f"python3 -m {MODULE} a.x=1 a.g=$(< missing.txt)",
    f"python3 -m {MODULE} a.x=1 a.g=$(( $(nvidia-smi -L | wc -l) * 2 ))",
    f"python3 -m {MODULE} a.x=1 a.g=$(( $(probe) * 2 ))",
    f"python3 -m {MODULE} a.x=1 a.g=$(date +%s) a.h=$(nvidia-smi -L | wc -l)",
    f"python3 -m {MODULE} a.g=1 a.g=$(nvidia-smi -L | wc -l)",
    f"run() {{ python3 -m {MODULE} a.g=$1; }}; run $(nvidia-smi -L | wc -l)",
    f"g=$(nvidia-smi -L | wc -l); run() {{ python3 -m {MODULE} a.g=$1; }}; run $((g + 1))",
    f'bash -c "python3 -m {MODULE} a.g=$(nvidia-smi -L | wc -l)"',
    f'eval "python3 -m {MODULE} a.g=$(nvidia-smi -L | wc -l)"',
    f"bash -s $(nvidia-smi -L | wc -l) <<'E'\npython3 -m {MODULE} a.g=$1\nE",
]
"""Launches with a word in which a program's output leaves no mark."""
REFUSED = (
    "is decided by what is not known",
    "had not ended",
    "starts a script that is not read",
    "a command that is not known",
)
"""Reasons for which a script with a launch may be refused."""
LAUNCHES = [form for forms in KINDS.values() for form in forms]
INNER = f"""#!/bin/bash
[ "${{n:-1}}" = 8 ] && q=1
probe && r=2
python3 -m {MODULE} a.n=${{n:-1}} a.m=${{m:-2}} a.q=${{q:-0}} a.r=${{r:-0}} a.k=$# "$@"
"""
FILES = {
    "there.sh": "n=41\nexport s=sourced\n", "there.txt": "12\n", "data.csv": "x\n", "inner.sh": INNER, "started": INNER,
}  # fmt: skip


AROUND = [
    *["@"] * 6, "if probe; then\n@\nfi", 'if [ "$n" = 8 ]; then\n@\nfi', "for z in 1 2; do\n@\ndone", "(\n@\n)",
    "g#() {\n@\n}\ng#", "probe && {\n@\n}", "{\n@\n} > log.txt",
]  # fmt: skip


def drawn(seed: int) -> str:
    """A script of one to five constructs and a launch, some inside a condition, a loop, a function or a subshell.

    In each third script they are pairs, the second of which may stand inside the block of the first.
    """
    rng = random.Random(seed)
    lines = []
    for n in range(rng.randint(1, 5)):
        text = rng.choice(CONSTRUCTS)
        if seed % 3 == 0:
            inner = rng.choice(AROUND).replace("#", f"{n}_").replace("@", rng.choice(CONSTRUCTS))
            text = f"{text}\n{inner}"
        lines.append(rng.choice(AROUND).replace("#", str(n)).replace("@", text))
    return "\n".join([*lines, rng.choice(LAUNCHES)]) + "\n"


def by_bash(script: str, folder: Path, world: World) -> list[list[str]]:
    """The arguments of every launch, from bash itself."""
    programs, noted, work = folder / "bin", folder / "noted", folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    programs.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    _write(work, script)
    noted.write_bytes(b"")
    environment = environment_of(folder) | {
        "PATH": f"{programs}:{os.environ['PATH']}", "NOTED": str(noted), "GPUS": str(world.gpus),
        "STATUS": str(world.status),
    }  # fmt: skip
    subprocess.run(
        ["bash", "run.sh"],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
    )
    fields = iter(noted.read_bytes().decode().split("\0"))
    return [[next(fields) for _ in range(int(count))] for count in fields if count]


def _write(work: Path, script: str) -> None:
    for name, text in {**FILES, "run.sh": script}.items():
        (work / name).write_text(text)
        (work / name).chmod(0o755)


def environment_of(folder: Path) -> dict[str, str]:
    return {"HOME": "/home/me", "PATH": os.environ["PATH"], "PWD": str(folder / "work"), "LANG": "C.UTF-8"}


def wrong(script: str, folder: Path, launches: bool = False) -> str:
    """Where the reading of the script is neither bash's nor says that it does not know; "" where it is right.

    ``launches``: bash itself launches something in one of the worlds.
    """
    oracle = [by_bash(script, folder, world) for world in WORLDS]
    if launches and not any(oracle):
        return "bash launches nothing"
    work = folder / "work"
    shutil.rmtree(work)
    work.mkdir()
    _write(work, script)
    before = os.getcwd()
    os.chdir(work)
    try:
        found = launches_of("run.sh", environment_of(folder))
    except ConfigError as error:
        named = any(reason in str(error) for reason in REFUSED)
        return "" if named or not any(oracle) else str(error)
    finally:
        os.chdir(before)
    if {file.name for file in work.iterdir()} != {*FILES, "run.sh"}:
        return f"files: {sorted(file.name for file in work.iterdir())}"
    return next(filter(None, (_mismatch(launches, found) for launches in oracle)), "")


def _mismatch(oracle: list[list[str]], found: list[Launch]) -> str:
    at = 0
    for given in oracle:
        faults = []
        while at < len(found):
            fault = _differs(given, found[at])
            at += 1
            if not fault:
                break
            faults.append(fault)
        else:
            return "; ".join(faults) or f"not found: {given}"
    return ""


def _differs(given: list[str], launch: Launch) -> str:
    unknown = {one.partition("=")[0] for one in launch.unknown}
    read = [one for one in launch.arguments if "=" in one or not unknown]
    claimed = {key: value for key, _, value in (one.partition("=") for one in read)}
    if unknown:  # a value that is not known may be several words
        given = [one for one in given if "=" in one]
    for key, value in {key: value for key, _, value in (one.partition("=") for one in given)}.items():
        if key in claimed and claimed[key] != value and key not in unknown:
            return f"{key}: bash {value!r}, read {claimed[key]!r}"
        if (
            key not in claimed
            and key not in unknown
            and not any("?" in one or one == "an argument" for one in unknown)
        ):
            return f"{key}={value}: not read"
    extra = {*claimed} - {key for key, _, _ in (one.partition("=") for one in given)} - unknown
    return f"not in bash: {sorted(extra)}" if extra else ""
