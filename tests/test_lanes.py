"""Lanes and marks on torch's own streams and events: on two GPUs that only tell what is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zshard.streams import Lane, compute_waits, current_stream, mark_here
from zshard.tracing.clock import Clock

TESTS = Path(__file__).parent

# The model is on the second GPU, and the current device is the first.
SCRIPT = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])  # before torch looks for GPUs
import torch
torch.cuda._lazy_init = lambda: None
from zshard.streams import Lane, compute_waits, mark_here

def say(*words):
    print(*words, flush=True)

gpu = torch.device("cuda", 1)
lane, other = Lane(gpu), Lane(gpu)
with lane.after_compute():
    say("lane", lane.is_current, other.is_current)
    with lane.after_compute():
        say("again", lane.is_current)
    with other.after_compute():
        say("other", lane.is_current, other.is_current)
    say("lane", lane.is_current, other.is_current)
say("compute", lane.is_current)
mark = lane.mark()
compute_waits(mark)
compute_waits(mark)
here = mark_here(gpu)
with lane.after_compute():
    compute_waits(here)
try:
    with lane.after_compute():
        raise KeyError
except KeyError:
    say("raised", lane.is_current)
compute_waits(None)
say("goes")
del lane
"""

ORDER = """
record 1.0
wait 1.1
lane True False
record 1.1
wait 1.1
again True
record 1.1
wait 1.2
other False True
lane True False
compute False
record 1.1
wait 1.0
wait 1.0
record 1.0
record 1.0
wait 1.1
wait 1.1
record 1.0
wait 1.1
raised False
goes
record 1.1
wait 1.0
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has GPUs of its own")
def test_what_is_asked_of_the_gpu_of_the_model_whichever_is_current(tmp_path: Path) -> None:
    root = Path(torch.__file__).parent
    library = tmp_path / "fake_gpus.so"
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}"]
    libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *flags, "-o", library, TESTS / "fake_gpus.cpp", *libraries]
    subprocess.run(command, check=True, timeout=300)
    run = [sys.executable, "-c", SCRIPT, library]
    said = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
    assert "\n" + said == ORDER


if torch.cuda.is_available():  # else the case does not exist

    @pytest.mark.cuda
    def test_a_lane_runs_after_compute_and_compute_after_its_mark() -> None:
        gpu = torch.device("cuda", 0)
        lane, before = Lane(gpu), current_stream(gpu)
        a = torch.empty(1 << 26, device=gpu)
        copied = torch.empty_like(a)
        for _ in range(5):
            a.fill_(0.0)
            for _ in range(20):
                a.add_(1.0)
            with lane.after_compute():
                assert lane.is_current and current_stream(gpu) != before
                copied.copy_(a)
            assert current_stream(gpu) == before and not lane.is_current
            compute_waits(lane.mark())
            a.fill_(-1.0)
            compute_waits(mark_here(gpu))
            assert copied.eq(20.0).all()

    @pytest.mark.cuda
    def test_a_clock_tells_how_long_a_stream_was_busy() -> None:
        gpu = torch.device("cuda", 0)
        a, clock = torch.ones(1 << 26, device=gpu), Clock(gpu)
        begin = clock.now()
        for _ in range(50):
            a.add_(1.0)
        end = clock.now()
        clock.synchronize()
        assert 1e-3 < clock.seconds(end) - clock.seconds(begin) < 1.0
