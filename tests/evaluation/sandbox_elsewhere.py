"""A script: runs programs in the sandbox under other circumstances than the test's, named by its argument.

Reads {"programs": [...], "limits": {...}} from stdin and writes their outcomes, or {"error": ...}, as JSON. The package
is imported without its `__init__`: JAX has no part in this and takes seconds.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "refusion_jax"
USER = 12345
CALLS = {"unshare": {"x86_64": 272, "aarch64": 97}, "mount": {"x86_64": 165, "aarch64": 40}}


def load_kernel():
    spec = importlib.util.spec_from_file_location("sandbox_kernel", PACKAGE / "evaluation/sandbox_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(circumstances):
    """Changes this process before it becomes the evaluator."""
    kernel = load_kernel()
    if circumstances == "ordinary_user":
        if os.geteuid() == 0:
            open_ways(kernel)
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
    elif circumstances == "root_without_sys_admin":
        kernel.prctl(kernel.PR_CAPBSET_DROP, kernel.CAP_SYS_ADMIN)  # takes effect as it becomes the evaluator
    elif circumstances == "root_of_a_user_namespace":
        kernel.unshare(kernel.CLONE_NEWUSER)
        Path("/proc/self/uid_map").write_text("0 0 1")
    else:
        assert circumstances in CALLS
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        machine = os.uname().machine
        kernel.deny_calls(machine, [CALLS[circumstances][machine]])


def open_ways(kernel):
    """In a mount namespace, lets everybody reach Python and the package: it may lie in the home of root."""
    needed = [Path(path).resolve() for path in (sys.base_prefix, sys.prefix, PACKAGE.parent)]
    closed = {
        parent for path in needed for parent in path.parents if not os.stat(parent).st_mode & 0o001 and parent.is_dir()
    }
    outermost = [path for path in closed if not any(other in path.parents for other in closed)]
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    for cover in outermost:
        inside = [path for path in needed if cover in path.parents]
        descriptors = [os.open(path, os.O_PATH) for path in inside]
        kernel.mount("tmpfs", str(cover), "tmpfs", data="mode=755")
        for path, descriptor in zip(inside, descriptors, strict=True):
            path.mkdir(parents=True, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{descriptor}", str(path), flags=kernel.MS_BIND | kernel.MS_REC)


def evaluate():
    package = types.ModuleType("refusion_jax")
    package.__path__ = [str(PACKAGE)]
    sys.modules["refusion_jax"] = package
    from refusion_jax.evaluation.sandbox import Limits, SandboxError, run_programs

    request = json.load(sys.stdin)
    try:
        outcomes = run_programs(request["programs"], Limits(**request["limits"]))
    except SandboxError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps([[outcome.passed, outcome.result] for outcome in outcomes]))


if __name__ == "__main__":
    if sys.argv[1] == "evaluate":
        evaluate()
    else:
        prepare(sys.argv[1])
        os.environ["HOME"] = "/"
        os.execv(sys.executable, [sys.executable, __file__, "evaluate"])
