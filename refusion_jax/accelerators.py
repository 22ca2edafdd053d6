"""Settings of GPUs and TPUs: what the compiler is told, the memory that is taken, compiled programs that are kept.

`train.py` and `decode.py` make them; importing the package changes nothing. In a notebook, before anything computes:

    import refusion_jax as rf
    rf.accelerators.configure()

What the environment says already is left as it is. See docs/accelerators.md.
"""

import importlib.util
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # the only way to know whether it is too late

PLUGINS = {
    "tpu": ("libtpu",),
    "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin"),
}
# XLA ends the process at a flag that it does not know: a test looks for each of these. libtpu needs none.
GPU_FLAGS = ("--xla_gpu_enable_latency_hiding_scheduler=true",)
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_MEMORY_SHARE = "0.9"
_DIRECTORY_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def configure() -> None:
    """Makes all settings, for a process on its own; starts JAX's backend."""
    set_flags()
    keep_programs()


def set_flags() -> None:
    """Sets XLA's flags for GPUs, and how much of their memory JAX takes, for before anything starts JAX's backend.

    Without a GPU's plugin it does nothing.
    """
    if not any(map(importlib.util.find_spec, PLUGINS["gpu"])):
        return
    given = os.environ.get("XLA_FLAGS", "")
    added = _missing(given, GPU_FLAGS)
    if added and xla_bridge.backends_are_initialized():
        print(f"Warning: JAX has started already, without {' '.join(added)}.", file=sys.stderr)
        return
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *added])
    if not any(name in os.environ for name in _MEMORY_VARIABLES):
        os.environ[_MEMORY_VARIABLES[0]] = _MEMORY_SHARE


def _missing(given: str, flags: tuple[str, ...]) -> list[str]:
    """The flags whose names are not among the given ones."""
    names = {re.split(r"[= ]", flag, maxsplit=1)[0].lstrip("-") for flag in given.split()}
    return [flag for flag in flags if flag.lstrip("-").partition("=")[0] not in names]


def keep_programs() -> None:
    """Makes JAX keep what it compiles for a TPU or GPU, in the user's cache directory; starts JAX's backend.

    Programs for CPUs are not kept: JAX compares the machines' features when it reads them, and on some machines it
    rejects with an error message what it wrote itself. A directory that cannot be used is told on stderr.
    """
    settings: Any = jax.config  # whose settings are no attributes that a type checker sees
    is_set = bool(settings.jax_compilation_cache_dir) or _DIRECTORY_VARIABLE in os.environ
    if is_set or not settings.jax_enable_compilation_cache or jax.default_backend() == "cpu":
        return
    directory = cache_directory()
    try:
        _make_private(directory)
    except OSError as error:
        print(
            f"Warning: compiled programs are not kept, since {directory} cannot be used ({error.strerror or error}); "
            f"set {_DIRECTORY_VARIABLE} to another directory, or JAX_ENABLE_COMPILATION_CACHE=false.",
            file=sys.stderr,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))


def cache_directory() -> Path:
    """Where compiled programs are kept: `refusion_jax/xla` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path has no meaning here, says the XDG specification.
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.cache")) / "refusion_jax" / "xla"


def _make_private(directory: Path) -> None:
    """Makes the directory, or sees to it that only this user writes there: who does could run code in our process.

    Raises:
      OSError: when that cannot be, or others may write to it.
    """
    if not directory.is_absolute():
        raise OSError("there is no home directory")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError("others may write to it")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError("it is not writable")
