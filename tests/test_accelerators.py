"""Settings of TPUs and GPUs, on a machine that has none."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from refusion_jax import accelerators


@pytest.fixture
def installed(monkeypatch):
    """Makes it look as if these modules were installed, in an environment without flags."""
    for name in ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        # Set first, so that what the test makes of it is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(accelerators.xla_bridge, "backends_are_initialized", lambda: False)
    accelerators._warn.cache_clear()

    def install(*names):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)

    return install


def test_flags_are_set_where_a_gpus_plugin_is_installed(installed):
    installed("libtpu")
    accelerators.set_flags()
    assert not {"XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION"} & set(os.environ)
    installed("jax_cuda13_plugin")
    accelerators.set_flags()
    assert os.environ["XLA_FLAGS"].split() == list(accelerators.GPU_FLAGS)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    accelerators.set_flags()  # a second time changes nothing
    assert os.environ["XLA_FLAGS"].split() == list(accelerators.GPU_FLAGS)


def test_what_the_user_has_set_wins(installed, monkeypatch):
    installed("jax_cuda12_plugin")
    given = "--xla_dump_to=/tmp/a --xla_gpu_enable_latency_hiding_scheduler=false"
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    accelerators.set_flags()
    assert os.environ["XLA_FLAGS"] == given
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize(
    "given", ["flags.txt", " /tmp/-flags", "--xla_dump_to='/tmp/a b", "--xla_a=1 b --xla_c=2", " "]
)
def test_a_value_behind_which_xla_reads_no_flag_is_left_alone(given, installed, monkeypatch):
    """A file's name, or a quote that is not closed."""
    installed("jax_cuda12_plugin")
    monkeypatch.setenv("XLA_FLAGS", given)
    accelerators.set_flags()
    assert os.environ["XLA_FLAGS"] == given
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.9"


@pytest.mark.parametrize(
    "given",
    [
        "--xla_dump_to='/tmp/a  b'",
        ' --xla_dump_to="/tmp/\\" b"\t--xla_a\n',
        "--xla_a='--xla_gpu_enable_latency_hiding_scheduler'",
    ],
)
def test_what_the_user_gave_is_never_rewritten(given, installed, monkeypatch):
    installed("jax_cuda12_plugin")
    monkeypatch.setenv("XLA_FLAGS", given)
    accelerators.set_flags()
    assert os.environ["XLA_FLAGS"] == f"{given} {accelerators.GPU_FLAGS[0]}"


def test_settings_that_come_too_late_are_told_once(installed, monkeypatch, capsys):
    installed("jax_cuda12_plugin")
    monkeypatch.setattr(accelerators.xla_bridge, "backends_are_initialized", lambda: True)
    accelerators.set_flags()
    accelerators.set_flags()
    assert not {"XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION"} & set(os.environ)
    err = capsys.readouterr().err
    assert err.startswith("Warning: JAX has started already, without --xla_gpu") and err.count("\n") == 1
    assert "XLA_CLIENT_MEM_FRACTION=0.9" in err


def test_nothing_is_told_when_jax_has_started_with_the_settings(installed, monkeypatch, capsys):
    installed("jax_cuda12_plugin")
    accelerators.set_flags()
    monkeypatch.setattr(accelerators.xla_bridge, "backends_are_initialized", lambda: True)
    accelerators.set_flags()
    assert capsys.readouterr().err == ""


def run_jax(flags):
    code = f"import jax, os\nos.environ['XLA_FLAGS'] = {flags!r}\njax.devices()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_flags_of_gpus_are_known():
    """Also to JAX without GPUs, which reads all flags; it ends at one that it does not know."""
    done = run_jax(" ".join(accelerators.GPU_FLAGS))
    assert done.returncode == 0, done.stderr
    assert "--xla_gpu_unheard_of" in run_jax("--xla_gpu_unheard_of=true").stderr


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A process on a GPU that may keep programs, in a cache directory of its own; restores JAX's settings."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    accelerators._warn.cache_clear()
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = [getattr(jax.config, name) for name in names]
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "refusion_jax" / "xla"
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def test_programs_are_kept_in_a_directory_of_the_user_alone(gpu, capsys):
    accelerators.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(gpu)
    assert gpu.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err == ""


def test_programs_of_cpus_are_not_kept(gpu, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    accelerators.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None and not gpu.exists()


def test_a_directory_that_is_named_is_used_and_a_cache_switched_off_stays_so(gpu, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    accelerators.keep_programs()
    assert jax.config.jax_compilation_cache_dir == "elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    accelerators.keep_programs()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_enable_compilation_cache", False)
    accelerators.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None and not gpu.exists()


FAULTS = {
    "a file": "refusion_jax is a file, not a directory",
    "a file in its place": "xla is a file, not a directory",
    "a link to nothing": "xla is a link to nothing",
    "writable for all": "others may write to",
    "a parent that is writable for the group": "others may write to",
    "of another user": "belongs to another user",
    "no home": "there is no home directory",
}


def make_fault(fault, directory, monkeypatch):
    if fault == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", "")
    elif fault == "a file":
        directory.parent.write_text("")
    else:
        directory.parent.mkdir(mode=0o700)
    if fault == "a file in its place":
        directory.write_text("")
    elif fault == "a link to nothing":
        directory.symlink_to("nowhere")
    elif fault == "writable for all":
        directory.mkdir()
        directory.chmod(0o777)
    elif fault == "a parent that is writable for the group":
        directory.parent.chmod(0o770)
    elif fault == "of another user":
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_directory_that_cannot_be_used_is_told_once_and_nothing_more(fault, gpu, monkeypatch, capsys):
    make_fault(fault, gpu, monkeypatch)
    accelerators.keep_programs()
    accelerators.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    err = capsys.readouterr().err
    assert err.startswith("Warning: compiled programs are not kept (") and err.count("\n") == 1
    assert FAULTS[fault] in err


def test_the_parent_is_made_for_the_user_alone_whatever_the_umask(gpu):
    before = os.umask(0)
    try:
        accelerators.keep_programs()
    finally:
        os.umask(before)
    assert gpu.parent.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(gpu)


@pytest.mark.parametrize(
    ("home", "directory"), [("/home/me", "/home/me/.cache/refusion_jax/xla"), ("me", None), ("", None)]
)
def test_the_cache_directory_is_the_users(home, directory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", home)
    assert accelerators.cache_directory() == (Path(directory) if directory else None)
