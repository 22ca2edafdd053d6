"""The system calls that shut a program in, which Python's `os` lacks; imported by `sandbox_child` alone.

Everything here changes the calling process. A call that the kernel refuses raises `Denied`.
"""

import ctypes
import errno
import os

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 1 << 17, 1 << 26, 1 << 27, 1 << 28
CLONE_NEWPID, CLONE_NEWNET = 1 << 29, 1 << 30
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 23, 24, 38
CAP_SYS_ADMIN = 21

# What statvfs reports of a mount -> the flag of mount(2). A user namespace may not take the inherited ones off.
_KEPT_FLAGS = (
    (os.ST_NOSUID, MS_NOSUID),
    (os.ST_NODEV, MS_NODEV),
    (os.ST_NOEXEC, MS_NOEXEC),
    (os.ST_NOATIME, 1 << 10),
    (os.ST_NODIRATIME, 1 << 11),
    (os.ST_RELATIME, 1 << 21),
)

# Calls that hold memory which no limit of a process counts (System V's objects outlive the process; files of
# memfd_create lie in no mount), that reach keys of whoever started the sandbox, or that are needless ways into the
# kernel. Machine -> (AUDIT_ARCH of <linux/audit.h>, numbers of <asm/unistd.h>).
_DENIED_CALLS = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
}
_MACHINES = {
    "x86_64": (0xC000003E, [x86 for x86, _ in _DENIED_CALLS.values()]),
    "aarch64": (0xC00000B7, [arm for _, arm in _DENIED_CALLS.values()]),
}
_X32_BIT = 0x40000000  # x86_64 has every call a second time, with this bit
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


class Denied(Exception):
    """The kernel refused something that the isolation needs; the message names the call and the kernel's reason."""


class Step:
    """Turns an OSError in its block into `Denied`, which names `call`."""

    def __init__(self, call: str):
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError):
            raise Denied(f"{self._call} ({error.strerror})") from None


def _call(name: str, described: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        raise Denied(f"{described} ({os.strerror(ctypes.get_errno())})")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces; with `CLONE_NEWPID`, its next children."""
    kind = "unshare of user and other namespaces" if flags & CLONE_NEWUSER else "unshare of namespaces"
    _call("unshare", kind, ctypes.c_int(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mounts, binds or remounts."""
    encoded = [os.fsencode(text) or None for text in (source, target, kind)]
    _call("mount", f"mount of {kind or target}", *encoded, ctypes.c_ulong(flags), data.encode() or None)


def bind_read_only(source: str, target: str, flags: int = MS_NOSUID | MS_NODEV) -> None:
    """Shows `source` and what is mounted below it at `target`, read-only and with `flags`."""
    mount(source, target, flags=MS_BIND | MS_REC)
    for point in _mounts_at(target):
        with Step(f"statvfs of {point}"):
            present = os.statvfs(point).f_flag
        kept = sum(flag for reported, flag in _KEPT_FLAGS if present & reported)
        mount("", point, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | flags | kept)


def _mounts_at(path: str) -> list[str]:
    """Mount points at or below an absolute path."""
    with Step("open of /proc/self/mountinfo"), open("/proc/self/mountinfo", "rb") as file:
        escaped = [line.split()[4] for line in file]
    points = {os.fsdecode(point.decode("unicode_escape").encode("latin-1")) for point in escaped}
    return sorted(point for point in points if point == path or point.startswith(path + "/"))


def pivot_root(new: str) -> None:
    """Makes the mount point `new` the root, and lets the old root go."""
    with Step("chdir"):
        os.chdir(new)
    # The old root is stacked upon the new one and taken off: no directory for it is needed.
    _call("pivot_root", "pivot_root", b".", b".")
    _call("umount2", "umount2 of the old root", b".", ctypes.c_int(MNT_DETACH))
    with Step("chdir"):
        os.chdir("/")


def set_host_name(name: str) -> None:
    """Names the machine, in this UTS namespace."""
    _call("sethostname", "sethostname", name.encode(), ctypes.c_size_t(len(name)))


def prctl(option: int, value: int) -> None:
    """One of `PR_*`."""
    _call("prctl", f"prctl({option}, {value})", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def has_capability(number: int) -> bool:
    """Whether this process has a capability, in its user namespace."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def become(user: int, drop_groups: bool) -> None:
    """Makes this process an ordinary one of `user` and the group of that number, without privileges, for good."""
    number = 0
    while _libc.prctl(PR_CAPBSET_READ, ctypes.c_ulong(number), *[ctypes.c_ulong(0)] * 3) >= 0:
        prctl(PR_CAPBSET_DROP, number)
        number += 1
    with Step("setgroups"):
        if drop_groups:
            os.setgroups([])
    with Step(f"setresgid to {user}"):
        os.setresgid(user, user, user)
    with Step(f"setresuid to {user}"):
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    _call("capset", "capset", header, (ctypes.c_uint32 * 6)())
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def deny_calls(machine: str, numbers: list[int] | None = None) -> None:
    """Lets system calls fail with EPERM from now on, in this process and its children.

    Args:
      machine: as `os.uname()` says.
      numbers: of the calls; by default those that a program has no business with.

    Raises:
      Denied: also for a machine whose calls are not known.
    """
    if machine not in _MACHINES:
        raise Denied(f"a filter of system calls (those of {machine} are unknown, only {', '.join(_MACHINES)})")
    architecture, default = _MACHINES[machine]
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, _X32_BIT), refuse]
    for number in default if numbers is None else numbers:
        program += [(_EQUAL, 0, 1, number), refuse]
    program.append((_RETURN, 0, 0, _ALLOW))
    whole = _Program(len(program), (_Instruction * len(program))(*(_Instruction(*each) for each in program)))
    _call("prctl", "prctl(PR_SET_SECCOMP)", PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(whole))


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("true", ctypes.c_uint8), ("false", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))
