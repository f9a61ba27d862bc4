"""Starts bash so that nothing it runs has an effect outside its process group. Linux gives the guarantee, not `shell.bash`.

Landlock lets the group read files, write none, and execute bash and `READERS` alone. A seccomp filter refuses what
Landlock does not govern: sockets, signals, process groups, clocks, modes and owners of files. The parent sees each open of
a file, and hands out /dev/null in the place of one for writing, so that a redirection succeeds and writes nothing. The
parent runs this file as a program of its own, with the standard library alone: the confinement holds from the first
instruction of bash on.

Sources: Linux, Documentation/userspace-api/landlock.rst and seccomp_filter.rst; seccomp_unotify(2).
"""

from __future__ import annotations

import array
import ctypes
import glob
import os
import platform
import resource
import shutil
import socket
import struct
import sys

CONTENTS = ("awk", "cat", "cut", "grep", "head", "sed", "sort", "tail", "tr", "uniq", "wc")
"""Programs that read files."""
READERS = (
    *CONTENTS, "basename", "dirname", "expr", "id", "ls", "readlink", "realpath", "seq", "uname", "whoami",
)  # fmt: skip
"""Programs that only read, and whose output is what it would be in the launch."""
MEMORY = 2**31
"""The bytes of address space that a process of the group may have."""
_EXECUTE, _CHANGES = 1, (1, *range(4, 16))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OPENS = {"x86_64": (2, 257), "aarch64": (56,)}
"""The system calls that open a file."""
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {  # by name: the numbers of x86_64 and aarch64; 0 where the machine has none
    "truncate": (76, 45), "socket": (41, 198), "io_uring_setup": (425, 425), "creat": (85, 0), "openat2": (437, 437),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_writev": (311, 271), "setpgid": (109, 154), "setsid": (112, 157),
    "setpriority": (141, 140), "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, 0), "fchown": (93, 55), "lchown": (94, 0), "fchownat": (260, 54), "utime": (132, 0), "utimes": (235, 0),
    "futimesat": (261, 0), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162), "mount": (165, 40), "umount2": (166, 39), "reboot": (169, 142), "bpf": (321, 280),
    "add_key": (248, 217), "keyctl": (250, 219), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
}  # fmt: skip
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_ERRNO, _ASK, _ALLOW, _KILL = 0x00050001, 0x7FC00000, 0x7FFF0000, 0x80000000


def confine(channel: int) -> None:
    """Confines this process and its children for good, and sends the parent the descriptor of their opens for writing."""
    libc, machine = ctypes.CDLL(None, use_errno=True), platform.machine()
    if machine not in _ARCHITECTURE:
        raise OSError(f"bash is confined on {' and '.join(_ARCHITECTURE)}, and this machine is {machine}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _landlock(libc)
    _seccomp(libc, machine, channel)


def _called(libc: ctypes.CDLL, what: str, *arguments: object) -> int:
    value = libc.syscall(*arguments)
    if value < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return value


def _landlock(libc: ctypes.CDLL) -> None:
    version = _called(libc, "this kernel has no Landlock", 444, None, 0, 1)
    last = {1: 12, 2: 13, 3: 14, 4: 14}.get(version, 15)
    files = sum(1 << bit for bit in _CHANGES if bit <= last) | _EXECUTE
    attributes = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _called(libc, "Landlock refuses the rules", 444, attributes, len(attributes), 0)
    programs = [sys.argv[3], *filter(None, map(shutil.which, READERS))]
    for path in {
        os.path.realpath(path) for path in (*programs, *glob.glob("/lib*/ld-*"), *glob.glob("/lib/*/ld-*"))
    }:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _called(libc, f"Landlock refuses {path}", 445, rules, 1, struct.pack("=Qi", _EXECUTE, place), 0)
        os.close(place)
    _called(libc, "Landlock refuses this process", 446, rules, 0)
    os.close(rules)


def _seccomp(libc: ctypes.CDLL, machine: str, channel: int) -> None:
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    filters = [(load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURE[machine]), (give, 0, 0, _KILL), (load, 0, 0, 0)]
    filters += [(above, 0, 1, 0x40000000), (give, 0, 0, _ERRNO)]  # x86_64's second table of numbers
    place = [*_ARCHITECTURE].index(machine)
    for numbers in _REFUSED.values():
        if numbers[place]:
            filters += [(equal, 0, 1, numbers[place]), (give, 0, 0, _ERRNO)]
    for number in _OPENS[machine]:
        filters += [(equal, 0, 1, number), (give, 0, 0, _ASK)]
    filters.append((give, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code)))
    why = "this kernel refuses the filter of system calls"
    listener = _called(libc, why, _SECCOMP[machine], 1, 8, program)
    with socket.socket(fileno=channel) as parent:
        parent.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
    os.close(listener)


if __name__ == "__main__":  # confine.py CHANNEL DESCRIPTOR:DESCRIPTOR,... BASH ARGUMENT ...
    for pair in sys.argv[2].split(","):
        old, new = map(int, pair.split(":"))
        os.dup2(old, new)
        os.close(old)
    try:
        confine(int(sys.argv[1]))
    except OSError as error:
        sys.exit(str(error))
    os.execv(sys.argv[3], ["bash", *sys.argv[4:]])
