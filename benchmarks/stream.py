"""The ceiling of an optimizer step on CPU: its reads and writes alone, compiled on the spot."""

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

_LINE = 32  # bf16 elements: threads begin where a line of the copy does


def compile_stream() -> Callable[..., None] | None:
    """Return ``stream(p, m, v, g)`` for flat fp32 tensors of one size; None without a compiler.

    ``stream(p, m, v, g, s)`` likewise, ``g`` bf16, writes a bf16 copy of ``p`` to ``s``, which
    begins at a cache line. As many threads work as torch has now.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    source = Path(__file__).with_name("stream.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "stream.so")
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    functions = {4: loaded.four_read_three_write, 5: loaded.four_read_four_write}
    for operands, function in functions.items():
        function.argtypes = [ctypes.c_void_p] * operands + [ctypes.c_int64] * 2
        function.restype = None
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)

    def stream(*tensors: Tensor) -> None:
        function, numel = functions[len(tensors)], tensors[0].numel()
        pointers = [tensor.data_ptr() for tensor in tensors]
        cuts = [numel // _LINE * part // threads * _LINE for part in range(threads)] + [numel]
        if threads == 1:
            function(*pointers, *cuts)
            return
        # ctypes releases the interpreter's lock, so these run side by side.
        calls = [pool.submit(function, *pointers, *cuts[i : i + 2]) for i in range(threads)]
        for call in calls:
            call.result()

    return stream
