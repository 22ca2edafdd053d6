"""Runs one program in isolation; a script of three processes, which `sandbox` starts and which imports nothing else.

The keeper enters new namespaces, keeps the time and answers. The first process of the new PID namespace makes the file
system, gives up its privileges, and ends as soon as the program does, whereupon the kernel kills all that is left in
the namespace. The program's process limits itself and runs it.

The keeper reads a request (`marshal`) from stdin and writes ("done", passed, result) or ("denied", sentence) to stdout.
"""

import marshal
import os
import resource
import select
import signal
import sys
import time
from typing import NoReturn

sys.path.append(os.path.dirname(__file__))
import sandbox_kernel as kernel

sys.path.pop()

_WORK = "/sandbox"  # no Python lies below it, as one might below /tmp
_BASE = "/sys"  # covered by the new root until that is the root
_SHOWN = ("/usr", "/bin", "/lib", "/lib64")
_DEVICES = ("null", "zero", "random", "urandom")
_FIRST_USER, _USERS = 1_900_000_000, 200_000_000  # above what systemd gives to containers
_INNER_USER = 1000  # in a user namespace
_SET_UP_SECONDS = 60
_OPEN_FILES, _STACK_BYTES, _INODES = 64, 8 << 20, 4096
_REPORT_BYTES, _MESSAGE_CHARACTERS = 4096, 200


def main() -> None:
    """Is the keeper."""
    request = marshal.loads(sys.stdin.buffer.read())
    answer: tuple[object, ...]
    try:
        answer = ("done", *_keep(request))
    except kernel.Denied as denied:
        answer = ("denied", str(denied))
    sys.stdout.buffer.write(marshal.dumps(answer))
    sys.stdout.buffer.flush()


def _keep(request: dict) -> tuple[bool, str]:
    """Runs the program and says whether it passed, and how it ended."""
    user, drop_groups = _enter_namespaces()
    _die_with_parent()
    if os.getppid() != request["parent"]:
        os._exit(1)  # it died before
    token = os.urandom(16).hex().encode()
    (alive, keep_alive), (report, reporting), (status, telling) = os.pipe(), os.pipe(), os.pipe()
    first = os.fork()
    if not first:
        for descriptor in (keep_alive, report, status):
            os.close(descriptor)
        _be_first(request, user, drop_groups, token, alive, reporting, telling)
    for descriptor in (alive, reporting, telling):
        os.close(descriptor)
    try:
        if _await(status, _SET_UP_SECONDS) != b"started":
            raise kernel.Denied("the first process of a PID namespace (it ended)")
        ended = _await(status, request["wall_seconds"])
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)  # returns when nothing of the namespace is left
    if ended is None:
        return False, "timed out"
    return _judge(report, token, int(ended or -signal.SIGKILL))


def _enter_namespaces() -> tuple[int, bool]:
    """Returns the user that the program will be, and whether that user's groups are to be dropped."""
    flags = (
        kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    )  # fmt: skip
    # Limits on processes count those of a user: one that nobody else is.
    unique = _FIRST_USER + int.from_bytes(os.urandom(8)) % _USERS
    is_root = os.geteuid() == 0
    if is_root and kernel.has_capability(kernel.CAP_SYS_ADMIN):
        kernel.unshare(flags)
        return unique, True
    if not is_root:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        _write_maps("self", f"{_INNER_USER} {user} 1", f"{_INNER_USER} {group} 1", "deny")
        return _INNER_USER, False
    # Root without that capability maps a second user, which only a process outside the new namespace may do.
    (ready, told), (mapped, done) = os.pipe(), os.pipe()
    target, mapper = os.getpid(), os.fork()
    if not mapper:
        os.close(told)
        os.close(mapped)
        _map_from_outside(target, ready, done, f"0 0 1\n{_INNER_USER} {unique} 1")
    for descriptor in (ready, done):
        os.close(descriptor)
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    os.write(told, b"x")
    problem = os.read(mapped, _REPORT_BYTES).decode()
    for descriptor in (told, mapped):
        os.close(descriptor)
    os.waitpid(mapper, 0)
    if problem:
        raise kernel.Denied(problem)
    return _INNER_USER, True


def _map_from_outside(target: int, ready: int, done: int, table: str) -> None:
    if os.read(ready, 1):
        try:
            _write_maps(str(target), table, table, "allow")
        except kernel.Denied as denied:
            os.write(done, str(denied).encode())
    os._exit(0)


def _write_maps(process: str, users: str, groups: str, setgroups: str) -> None:
    for name, text in (("setgroups", setgroups), ("uid_map", users), ("gid_map", groups)):
        with kernel.Step(f"write of /proc/{process}/{name}"), open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def _die_with_parent() -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def _await(status: int, seconds: float) -> bytes | None:
    """The line that is told next, b"" when all have ended; None when the time is over.

    Raises:
      Denied: when it says that the set-up failed.
    """
    poll, deadline, told = select.poll(), time.monotonic() + seconds, b""
    poll.register(status, select.POLLIN)
    while not told.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        byte = os.read(status, 1)
        if not byte:
            return b""
        told += byte
    if told.startswith(b"denied "):
        raise kernel.Denied(told.removeprefix(b"denied ").decode().strip())
    return told.strip()


def _judge(report: int, token: bytes, status: int) -> tuple[bool, str]:
    """Whether a program that ended by itself passed, which only its end says, and how it ended."""
    os.set_blocking(report, False)
    try:
        told = os.read(report, _REPORT_BYTES)
    except BlockingIOError:  # cannot be: nobody has the other end any more
        told = b""
    proof, _, result = told.partition(b" ")
    if proof == token and status == 0:
        return result == b"passed", result.decode("utf-8", "replace")
    if status < 0:
        return False, "timed out" if status == -signal.SIGXCPU else f"failed: killed by {_signal_name(-status)}"
    return False, f"failed: left with status {status} before its end"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _be_first(
    request: dict, user: int, drop_groups: bool, token: bytes, alive: int, reporting: int, telling: int
) -> NoReturn:
    """Is the first process of the PID namespace."""
    with _TellingFailure(telling):
        # Without Python's handlers the kernel spares a first process all signals from inside.
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        with kernel.Step("write of /proc/self/oom_score_adj"), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, this goes, not the evaluator
        _make_root(user, request["disk_bytes"])
        kernel.set_host_name("sandbox")
        kernel.become(user, drop_groups)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # not traced by the program, whose user is the same
        kernel.deny_calls(os.uname().machine)
        _die_with_parent()  # which a change of user had undone
        if select.select([alive], [], [], 0)[0]:
            os._exit(1)  # the keeper died before
        os.close(alive)
        with kernel.Step("fork"):
            program = os.fork()
        if not program:
            # The first process has the same user, and for an ordinary one the keeper, too.
            _be_program(request, 1 if drop_groups else 2, token, reporting, telling)
        os.close(reporting)
        while True:
            child, status = os.wait()  # all orphans are its children
            if child == program:
                os.write(telling, b"%d\n" % os.waitstatus_to_exitcode(status))
                os._exit(0)


class _TellingFailure:
    """Tells the keeper what fails in its block, and ends the process whatever happens there."""

    def __init__(self, telling: int):
        self._telling = telling

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: object, trace: object) -> NoReturn:
        if kind is not None:
            sentence = str(error) if kind is kernel.Denied else f"{kind.__name__}: {error}"
            os.write(self._telling, b"denied " + sentence.replace("\n", " ").encode()[:_REPORT_BYTES] + b"\n")
        os._exit(1)


def _make_root(user: int, disk_bytes: int) -> None:
    """Replaces the file system by a read-only one with system files and Python, and enters its writable directory."""
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", _BASE, "tmpfs", safe, f"size=1m,nr_inodes={_INODES},mode=755")
    root = _BASE + "/root"
    with kernel.Step("making a file system"):
        os.umask(0o022)
        for path in ("", "/dev", "/proc", "/etc", _WORK):
            os.mkdir(root + path)
        _show_files(root)
        for name in _DEVICES:
            open(f"{root}/dev/{name}", "x").close()
            kernel.bind_read_only(f"/dev/{name}", f"{root}/dev/{name}", kernel.MS_NOSUID | kernel.MS_NOEXEC)
    try:
        kernel.mount("proc", root + "/proc", "proc", safe | kernel.MS_NOEXEC, "subset=pid")
    except kernel.Denied:  # before Linux 5.8
        kernel.mount("proc", root + "/proc", "proc", safe | kernel.MS_NOEXEC)
    sizes = f"size={disk_bytes},nr_inodes={_INODES}"
    kernel.mount("tmpfs", root + _WORK, "tmpfs", safe, f"{sizes},mode=700,uid={user},gid={user}")
    kernel.pivot_root(_BASE)
    kernel.mount("", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | safe)
    with kernel.Step("chroot"):
        # Who is chrooted cannot make user namespaces, in which it had privileges again.
        os.chroot("/root")
        os.chdir(_WORK)


def _show_files(root: str) -> None:
    """Binds what Python needs below `root`, under the names it has here."""
    shown: list[str] = []
    for path in (*_SHOWN, os.path.abspath(sys.base_prefix), os.path.abspath(sys.base_exec_prefix)):
        if not os.path.lexists(path) or any(path == other or path.startswith(other + "/") for other in shown):
            continue
        shown.append(path)
        if os.path.islink(path) and path in _SHOWN:
            os.symlink(os.readlink(path), root + path)
        else:
            os.makedirs(root + path)
            kernel.bind_read_only(path, root + path)
    cache = "/etc/ld.so.cache"
    if os.path.exists(cache):
        open(root + cache, "x").close()
        kernel.bind_read_only(cache, root + cache)


def _be_program(request: dict, own_processes: int, token: bytes, reporting: int, telling: int) -> NoReturn:
    """Limits this process and runs the program."""
    with _TellingFailure(telling):
        with kernel.Step("setsid"):
            os.setsid()
        for limit, value in _resource_limits(request, own_processes):
            with kernel.Step(f"setrlimit({limit})"):
                hard = resource.getrlimit(limit)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                # At the soft limit of CPU time comes SIGXCPU, which a program can ignore; at the hard one SIGKILL.
                resource.setrlimit(limit, (value, value + (limit == resource.RLIMIT_CPU and value != hard)))
        with kernel.Step("open of /dev/null"):
            null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.write(telling, b"started\n")
        os.dup2(reporting, 3)
        os.closerange(4, 256)
        sys.argv = [""]
        _run(request["program"], token)


def _resource_limits(request: dict, own_processes: int) -> list[tuple[int, int]]:
    return [
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_NPROC, request["processes"] + own_processes),
        (resource.RLIMIT_FSIZE, request["file_bytes"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]


def _run(program: str, token: bytes) -> NoReturn:
    """Runs the program and reports its end. A child that it forked may come here too, and has nothing to report."""
    # The program may replace what modules hold.
    write, process, leave, describe, own = os.write, os.getpid, os._exit, _describe, os.getpid()
    status = 1
    try:
        try:
            exec(compile(program, "<program>", "exec", dont_inherit=True), {})
            result = b"passed"
        except BaseException as error:
            result = describe(error)
        if process() == own:
            write(3, token + b" " + result)
        status = 0
    finally:
        leave(status)


def _describe(error: BaseException) -> bytes:
    lines = str(error).strip().splitlines()
    text = f"failed: {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    if len(text) > _MESSAGE_CHARACTERS:
        text = text[: _MESSAGE_CHARACTERS - 3] + "..."
    return text.encode("utf-8", "backslashreplace")


if __name__ == "__main__":
    main()
