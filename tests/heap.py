"""The C library's heap as a program first finds it, so that a test does not hang on its history."""

from __future__ import annotations

import ctypes

kTrimThreshold, kMmapThreshold = -1, -3  # from glibc's malloc.h
kInitial = 128 << 10  # bytes, of both


def give_back_what_is_freed() -> None:
    """Whatever is free now, and from now on blocks above 128 KiB and the heap's end."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(kTrimThreshold, kInitial) == 1
    assert libc.mallopt(kMmapThreshold, kInitial) == 1
    libc.malloc_trim(0)
