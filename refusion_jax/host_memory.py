"""The C allocator's setting for computation on CPUs."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Makes glibc keep large freed blocks instead of returning them to the system; elsewhere it does nothing.

    XLA's CPU backend allocates its temporaries anew in every call. Fresh pages from the system are zeroed at first
    touch, which a small model's training step would spend a good part of its time on. Call before the first
    computation.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_ARENA_MAX, 1)
