"""The ceiling of an optimizer step on CPU: its 4-read 3-write pattern, compiled on the spot."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor


def compile_stream() -> Callable[[Tensor, Tensor, Tensor, Tensor], None] | None:
    """Return ``stream(p, m, v, g)`` for flat fp32 tensors of one size; None without a compiler.

    It uses as many threads as torch does now.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    source = Path(__file__).with_name("stream.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "stream.so")
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).four_read_three_write
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2
    function.restype = None
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)

    def stream(p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
        pointers = [tensor.data_ptr() for tensor in (p, m, v, g)]
        cuts = [p.numel() * part // threads for part in range(threads + 1)]
        if threads == 1:
            function(*pointers, *cuts)
            return
        # ctypes releases the interpreter's lock, so these run side by side.
        calls = [pool.submit(function, *pointers, *cuts[i : i + 2]) for i in range(threads)]
        for call in calls:
            call.result()

    return stream
