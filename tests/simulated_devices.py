"""Test files that run as scripts on several simulated devices, which have to be asked for before JAX starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

DEVICES = 8
TESTS = Path(__file__).parent


def results_of_script(script, path, names, timeout):
    """Runs a test file with `path` and names: the JSON that it wrote to `path`."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS))),
    }
    command = [sys.executable, script, str(path), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())
