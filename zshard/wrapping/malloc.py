"""What the C library does with memory that was freed.

[Note: what the C library keeps]
A unit's gradients are autograd's, and are freed together once they are packed. glibc gives back to
the kernel what is free at the end of its heap, beyond a threshold, and maps blocks above another
one by themselves; the next unit's gradients would fault all of it in again, page by page. Both
thresholds follow the program's largest freed block only as chance has it, so they are set.
"""

from __future__ import annotations

import ctypes
import os

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_IN_HEAP = 32 << 20  # bytes; glibc takes no more, and comes to as much by itself
_LARGEST_INT = (1 << 31) - 1

# By which a user may have set the thresholds, among glibc's other tunables.
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_kept = 0  # bytes that may be free at the heap's end, by the largest model so far


def keep_freed(nbytes: int) -> None:
    """Keep freed memory of this size in the process, for the next gradients.

    Blocks of up to 32 MiB come from the heap, and twice ``nbytes`` (64 MiB, if that is more) may be
    free at its end: never less than glibc would allow after a block of that size, nor than an
    earlier call has. Where the environment sets glibc's thresholds, and with another C library,
    all stays as it is.
    """
    global _kept
    wanted = min(2 * max(nbytes, _LARGEST_IN_HEAP), _LARGEST_INT)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or wanted <= _kept or any(map(os.environ.get, _SETTINGS)):
        return
    _kept = wanted
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
    mallopt(_M_TRIM_THRESHOLD, wanted)
