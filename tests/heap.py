"""The C library's heap as a program first finds it, so that a test does not hang on its history."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
INITIAL = 128 << 10  # bytes, of both


def give_back_what_is_freed() -> None:
    """Whatever is free now, and from now on blocks above 128 KiB and the heap's end."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(TRIM_THRESHOLD, INITIAL) == 1
    assert libc.mallopt(MMAP_THRESHOLD, INITIAL) == 1
    libc.malloc_trim(0)
