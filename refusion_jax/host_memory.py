"""The C allocator's setting for computation on CPUs."""

import ctypes
import importlib.util
import platform

from refusion_jax.accelerators import PLUGINS

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Where CPUs compute, makes glibc keep large freed blocks instead of returning them to the system.

    XLA's CPU backend allocates its temporaries anew in every call. Fresh pages from the system are zeroed at first
    touch, which a small model's training step would spend a good part of its time on.

    Call it before anything starts JAX's backend: glibc gives the threads that exist then memory of their own. So it
    asks for installed accelerator plugins, not for the devices, which would start it.
    """
    plugins = (name for names in PLUGINS.values() for name in names)
    if platform.libc_ver()[0] != "glibc" or any(map(importlib.util.find_spec, plugins)):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_ARENA_MAX, 1)
