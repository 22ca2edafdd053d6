"""Settings of GPUs and TPUs: what the compiler is told, the memory that is taken, compiled programs that are kept.

`train.py` and `decode.py` make them; importing the package changes nothing. In a notebook, before anything computes:

    import refusion_jax as rf
    rf.accelerators.configure()

What the environment says already is left as it is. See docs/accelerators.md.
"""

import functools
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
# XLA reads flags as long as one follows another; a value that does not begin with one it takes for a file's name.
_SPACE = r"[ \t\r\n]"
_FLAG = r"""(?P<name>-[A-Za-z0-9_-]*+)(?:="(?:\\.|[^"\\])*"|='[^']*'|(?!=["'])[^ \t\r\n]*)"""
_DIRECTORY_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def configure() -> None:
    """Makes all settings, for a process on its own; starts JAX's backend."""
    set_flags()
    keep_programs()


def set_flags() -> None:
    """Sets XLA's flags for GPUs, and how much of their memory JAX takes, for before anything starts JAX's backend.

    Without a GPU's plugin it does nothing. Where JAX has started already it changes nothing, and says so once.
    """
    if not any(map(importlib.util.find_spec, PLUGINS["gpu"])):
        return
    given = os.environ.get("XLA_FLAGS", "")
    flags = _missing(given, GPU_FLAGS)
    is_memory_set = any(name in os.environ for name in _MEMORY_VARIABLES)
    memory = [] if is_memory_set else [f"{_MEMORY_VARIABLES[0]}={_MEMORY_SHARE}"]
    if xla_bridge.backends_are_initialized():
        if flags or memory:
            _warn(f"JAX has started already, without {' '.join([*flags, *memory])}; set them before anything computes.")
        return
    if flags:
        os.environ["XLA_FLAGS"] = " ".join([given, *flags] if given else flags)
    if not is_memory_set:
        os.environ[_MEMORY_VARIABLES[0]] = _MEMORY_SHARE


def _missing(given: str, flags: tuple[str, ...]) -> list[str]:
    """The flags to append to the given ones: those of other names, none where XLA would not read them there."""
    if given and not re.fullmatch(rf"{_SPACE}*(?:{_FLAG}(?:{_SPACE}+|$))+", given):
        return []
    names = {match["name"].lstrip("-") for match in re.finditer(_FLAG, given)}
    return [flag for flag in flags if flag.lstrip("-").partition("=")[0] not in names]


@functools.cache
def _warn(text: str) -> None:
    """Warns on stderr, of the same thing once per process."""
    print(f"Warning: {text}", file=sys.stderr)


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
        if directory is None:
            raise OSError("there is no home directory")
        for place in (directory.parent, directory):
            _make_private(place)
    except OSError as error:
        fault = f"{error.filename}: {error.strerror}" if error.filename else error
        _warn(
            f"compiled programs are not kept ({fault}); "
            f"set {_DIRECTORY_VARIABLE} to another directory, or JAX_ENABLE_COMPILATION_CACHE=false."
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))


def cache_directory() -> Path | None:
    """Where compiled programs are kept: `refusion_jax/xla` in `$XDG_CACHE_HOME`, by default `~/.cache`.

    None without a home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which has no meaning here, says the XDG specification
        home = os.path.expanduser("~") if os.environ.get("HOME") != "" else ""
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return Path(base) / "refusion_jax" / "xla"


def _make_private(directory: Path) -> None:
    """Makes the directory, or sees to it that only this user writes there: who does could run code in our process.

    Raises:
      OSError: when that cannot be, or others may write to it.
    """
    for place in (*reversed(directory.parents), directory):
        if os.path.lexists(place) and not place.is_dir():
            raise OSError(f"{place} is {'a link to nothing' if not place.exists() else 'a file, not a directory'}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid():
        raise OSError(f"{directory} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others may write to {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError(f"{directory} is not writable")
