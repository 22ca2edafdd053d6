"""Hostile programs fail and harm nothing: not the evaluator, not its files, not the programs beside them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from refusion_jax.config import ConfigError
from refusion_jax.evaluation import sandbox
from refusion_jax.evaluation.sandbox import Limits, Outcome, SandboxError, run_program, run_programs

ELSEWHERE = Path(__file__).with_name("sandbox_elsewhere.py")
QUICK = Limits(wall_seconds=2.5)
PASSED = Outcome(True, "passed")

# Name -> (program, what its result must match).
HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "BlockingIOError|timed out"),
    "fork bomb that goes on": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "timed out",
    ),
    "endless loop": ("while True: pass", "timed out"),
    "endless sleep": ("import time\ntime.sleep(1000)", "timed out"),
    "10 GB": ("x = bytearray(10 << 30)", "MemoryError"),
    "memory of System V": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.shmget(0, 1 << 20, 0o1600) < 0: raise OSError(os.strerror(ctypes.get_errno()))",
        "not permitted",
    ),
    "memory in a file without a name": ("import os\nos.memfd_create('x')", "not permitted"),
    "deleted working directory": ("import os\nos.rmdir(os.getcwd())", "busy|Read-only|Permission"),
    "one large file": ("open('x', 'wb').write(bytes(17 << 20))", "File too large"),
    "many files": (
        "for n in range(9):\n    with open(str(n), 'wb') as file: file.write(bytes(8 << 20))",
        "No space left",
    ),
    "many empty files": ("n = 0\nwhile True:\n    n += 1\n    open(str(n), 'w').close()", "No space left"),
    "root's directory": ("open('/x', 'w')", "Read-only"),
    "system files": ("open('/usr/x', 'w')", "Read-only|Permission"),
    "Python's files": ("import os\nopen(os.__file__, 'a')", "Read-only|Permission"),
    "mode of a device": ("import os\nos.chmod('/dev/null', 0)", "Read-only|not permitted"),
    "device": ("import os\nos.mknod('x', 0o60600, os.makedev(254, 0))", "not permitted"),
    "first process": ("import os\nos.kill(1, 9)\nimport time\ntime.sleep(0.1)\nassert os.getppid() != 1", "Assertion"),
    "memory of the first process": ("open('/proc/1/mem')", "Permission"),
    "its root": ("import os\nos.listdir('/proc/1/root')", "Permission"),
    "user namespace": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(1 << 28): raise OSError(os.strerror(ctypes.get_errno()))",
        "not permitted",
    ),
    "chroot": ("import os\nos.mkdir('x')\nos.chroot('x')", "not permitted"),
    "other user": ("import os\nos.setuid(0)", "not permitted|Invalid"),
    "terminal": ("open('/dev/tty')", "No such file"),
    "no limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "not allowed",
    ),
    "_exit": ("import os\nos._exit(0)", "left with status 0"),
    "exit": ("import sys\nsys.exit(0)", "SystemExit: 0"),
    "exit in an exception's text": (
        "import os\nclass E(Exception):\n    def __str__(self): os._exit(0)\nraise E",
        "left with status 0",
    ),
    "end in a child alone": ("import os\nif os.fork(): os._exit(0)", "left with status 0"),
    "closed descriptors": ("import os\nos.closerange(0, 64)", "left with status 1"),
    "false report": ("import os\nos.write(3, b'passed')\nos._exit(0)", "left with status 0"),
    "flooded report": ("import os\nwhile True: os.write(3, bytes(4096))", "timed out"),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timed out"),
    "ignored signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "timed out",
    ),
    "all exceptions caught": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "timed out",
    ),
    "deep recursion": ("def f(): f()\nf()", "RecursionError"),
    "deeper recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)",
        "SIGSEGV|MemoryError|RecursionError|timed out",
    ),
    "null pointer": ("import ctypes\nctypes.string_at(0)", "killed by SIGSEGV"),
    "no program": ("def", "SyntaxError"),
    "no text": ("'\udce4'", "UnicodeEncodeError"),
    "null": ("1\0", "SyntaxError|ValueError"),
}


@pytest.fixture(autouse=True)
def unharmed(isolation):
    """No mount and no process is left afterwards."""
    mounts, before = Path("/proc/self/mountinfo").read_text(), children(os.getpid())
    yield
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not Path("/sandbox").exists()
    assert children(os.getpid()) <= before


def children(process):
    """All descendants of a process, those that have ended left out."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended
            continue
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found, new = set(), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_ends_passes():
    assert run_program("import json, decimal, subprocess, tempfile\nassert json.loads('[1]') == [1]") == PASSED
    assert run_program("import os, atexit\nos._exit = os.write = None\natexit.register(print)") == PASSED
    assert run_program("import sys\nfor each in (sys.stdin, sys.stdout, sys.stderr): each.close()") == PASSED


def test_it_may_write_to_its_directory_and_start_programs():
    program = """
import os, pathlib, subprocess, tempfile, multiprocessing
assert os.listdir() == [] and os.getcwd() == os.path.expanduser('~') == tempfile.gettempdir()
pathlib.Path('x').write_text('hi')
assert subprocess.run(['cat', 'x'], capture_output=True, check=True).stdout == b'hi'
open('/dev/null', 'w').write('x')
assert len(open('/dev/urandom', 'rb').read(3)) == 3
"""
    assert run_programs([program, program], Limits()) == [PASSED, PASSED]  # the first's file is not there any more


def test_a_failure_says_why_in_one_short_line():
    assert run_program("assert 1 == 2, 'one\\ntwo'").result == "failed: AssertionError: one"
    assert run_program("raise KeyError").result == "failed: KeyError"
    result = run_program("raise ValueError('x' * 1000)").result
    assert result.startswith("failed: ValueError: xxx") and result.endswith("...") and len(result) == 200


def test_hostile_programs_fail_beside_others_that_pass():
    programs = [program for program, _ in HOSTILE.values()]
    mixed = [text for program in programs for text in (program, "assert 1 + 1 == 2")]
    done = {}
    outcomes = run_programs(mixed, QUICK, workers=4, on_done=done.__setitem__)
    assert [done[index] for index in range(len(mixed))] == outcomes
    assert outcomes[1::2] == [PASSED] * len(programs)
    for (name, (_, expected)), outcome in zip(HOSTILE.items(), outcomes[::2], strict=True):
        assert not outcome.passed, name
        assert re.search(expected, outcome.result), (name, outcome.result)


def test_the_limits_are_those_given():
    few = Limits(memory_bytes=128 << 20, processes=3, file_bytes=100, disk_bytes=8192, wall_seconds=5.0)
    fork = "import os, time\nfor n in range(9):\n    try:\n        if not os.fork(): time.sleep(9)\n"
    fork += "    except OSError: raise ValueError(n)"
    programs = ["bytearray(160 << 20)", "with open('x', 'wb') as file: file.write(bytes(101))", fork]
    results = [outcome.result for outcome in run_programs(programs, few)]
    assert "MemoryError" in results[0] and "too large" in results[1]
    assert results[2] == "failed: ValueError: 2"  # itself and two more
    assert run_programs(["bytearray(60 << 20)", "open('x', 'wb').write(bytes(100))"], few) == [PASSED] * 2
    assert run_program("while True: pass", Limits(cpu_seconds=1)).result == "timed out"


def test_nothing_of_the_user_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "swordfish")
    (tmp_path / "secret").write_text("swordfish")
    places = [tmp_path, tmp_path / "secret", Path.home() / ".bashrc", Path(__file__), Path.cwd(), Path("/etc/passwd")]
    held = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(held, True)
    program = f"""
import os, sys
for place in {[str(place) for place in places]}:
    assert not os.path.exists(place), place
assert sorted(os.environ) == ['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR'], os.environ
assert 'swordfish' not in open('/proc/self/environ').read() if os.access('/proc/self/environ', os.R_OK) else True
open_ones = []
for number in range(256):
    try: os.fstat(number)
    except OSError: continue
    open_ones.append(number)
assert open_ones == [0, 1, 2, 3], open_ones  # the last being where the report goes
# Of the way to Python only its directories are there.
parts = sys.base_prefix.strip('/').split('/')
for depth in range(1, len(parts)):
    path = '/' + '/'.join(parts[:depth])
    assert path.startswith('/usr') or os.listdir(path) == [parts[depth]], path
"""
    assert run_program(program) == PASSED
    os.close(held)


def test_no_process_outside_can_be_seen():
    program = """
import os
numbers = [int(name) for name in os.listdir('/proc') if name.isdecimal()]
assert sorted(numbers) == [1, os.getpid()], numbers
for number in range(3, 40000):
    try: os.kill(number, 0)
    except ProcessLookupError: continue
    raise AssertionError(number)
os.kill(-1, 9)  # whom it may signal: nobody
"""
    assert run_program(program).result == "failed: ProcessLookupError: [Errno 3] No such process"


def test_a_program_has_no_privileges():
    program = """
lines = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)
assert all(int(lines[name], 16) == 0 for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')), lines
assert lines['NoNewPrivs'] == '1' and lines['Seccomp'] == '2' and '0' not in lines['Uid'].split(), lines
import os
assert os.getsid(0) == os.getpid() and os.uname().nodename == 'sandbox'
import resource
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
"""
    assert run_program(program) == PASSED


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as hidden:
        port = server.getsockname()[1]
        name = f"\0{uuid.uuid4()}"
        hidden.bind(name)
        hidden.listen()
        with socket.create_connection(("127.0.0.1", port)):  # which this process can reach
            server.accept()[0].close()
        programs = [
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)",
            f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})",
            "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']",
        ]
        results = [outcome.result for outcome in run_programs(programs, QUICK)]
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "unreachable" in results[0] and "refused" in results[1] and results[2] == "passed"


@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "time.sleep(100)"])
def test_what_a_program_started_ends_with_it(end):
    mark = f"1000.{uuid.uuid4().int}"
    program = f"""
import os, subprocess, time
for _ in range(3):
    child = subprocess.Popen(['sleep', '{mark}'], start_new_session=True)
if not os.fork():
    os.setsid()
    while True: time.sleep(1)
{end}
"""
    assert run_program(program, QUICK).passed == (end == "pass")
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(mark.encode() in line for line in running)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_programs_die_with_the_evaluator(number):
    request = {"programs": ["import os, time\nos.fork()\ntime.sleep(300)"], "limits": {"wall_seconds": 300.0}}
    evaluator = subprocess.Popen(
        [sys.executable, ELSEWHERE, "evaluate"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    evaluator.stdin.write(json.dumps(request))
    evaluator.stdin.close()
    # The keeper, the first process, the program and its child; before that, those of the trivial program.
    wait_until(lambda: len(children(evaluator.pid)) == 4)
    started = children(evaluator.pid)
    evaluator.send_signal(number)
    evaluator.wait()
    wait_until(lambda: not any(is_alive(process) for process in started))


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def elsewhere(circumstances, programs=("x = 1",), **limits):
    request = json.dumps({"programs": list(programs), "limits": limits})
    command = [sys.executable, str(ELSEWHERE), circumstances]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("circumstances", ["ordinary_user", "root_without_sys_admin"])
def test_other_evaluators(circumstances):
    if circumstances == "root_without_sys_admin" and os.geteuid():
        pytest.skip("needs root")
    names = [name for name, (_, expected) in HOSTILE.items() if "timed out" not in expected]
    home = f"import os\nassert not os.path.exists({str(ELSEWHERE)!r})\nopen('x', 'w').write('x')"
    answer = elsewhere(circumstances, [*(HOSTILE[name][0] for name in names), home, "x = 1"], wall_seconds=5.0)
    if isinstance(answer, dict):
        pytest.skip(answer["error"])
    assert answer[-2:] == [[True, "passed"]] * 2
    for name, (passed, result) in zip(names, answer, strict=False):
        assert not passed and re.search(HOSTILE[name][1], result), (name, result)


@pytest.mark.parametrize("call", ["unshare", "mount"])
def test_without_isolation_nothing_runs(call):
    error = elsewhere(call)["error"]
    assert error.startswith(f"Generated code cannot be isolated here: denied was {call} of")
    assert "(Operation not permitted); run as root with CAP_SYS_ADMIN, or let ordinary users make user" in error
    assert error.count("\n") == 0


def test_a_user_that_does_not_exist_is_no_isolation():
    assert "cannot be isolated here: denied was" in elsewhere("root_of_a_user_namespace")["error"]


def test_only_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="on darwin; evaluate it on Linux"):
        sandbox.check_sandbox.__wrapped__()


def test_a_python_that_shows_the_home_directory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(SandboxError, match=r"contains the home directory .*; use a Python"):
        sandbox.check_sandbox.__wrapped__()


def test_a_python_that_cannot_be_used_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "run_program", lambda program: Outcome(False, "failed: ImportError"))
    with pytest.raises(SandboxError, match="a trivial program failed: ImportError; every user must be able to read"):
        sandbox.check_sandbox.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "_base_executable", "/no/python")
    with pytest.raises(SandboxError, match="/no/python does not start"):
        run_program("x = 1")
    monkeypatch.setattr(sys, "_base_executable", "/bin/false")
    with pytest.raises(SandboxError, match="its sandbox ended early"):
        run_program("x = 1")


def test_a_failure_to_isolate_one_program_is_that_of_all(monkeypatch):
    ran = []

    def run(program, limits):
        ran.append(program)
        raise SandboxError("no")

    monkeypatch.setattr(sandbox, "run_program", run)
    with pytest.raises(SandboxError, match="no"):
        run_programs(["x = 1"] * 50, workers=1)
    assert len(ran) < 50


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("wall_seconds", 0.0, "at least 0.1"),
        ("wall_seconds", float("inf"), "a number of at least"),
        ("cpu_seconds", 0, "at least 1"),
        ("memory_bytes", 1 << 20, "at least 67108864"),
        ("processes", 0, "at least 1"),
        ("processes", True, "of type int"),
        ("file_bytes", -1, "at least 0"),
        ("disk_bytes", 1 << 60, "at most"),
    ],
)
def test_limits_are_checked(field, value, message):
    with pytest.raises(ConfigError, match=f"limits.{field} is .*{message}"):
        Limits(**{field: value})
    with pytest.raises(ConfigError, match="workers is 0"):
        run_programs([], workers=0)
