"""What a figure was measured on: versions, processor, threads, compiler, load."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch

import zshard
from zshard import _C
from zshard.errors import InputError
from zshard.whole_files import write_whole


def processor() -> str:
    """The processor's name, as the system tells it; of an x86 one its family and model, too.

    Several generations may have one name ("AMD EPYC"): family 25 is Zen 3 and 4, 26 is Zen 5.
    """
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = facts.get("model name") or platform.processor() or platform.machine()
    if not {"cpu family", "model"} <= facts.keys():
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


def _ticks() -> tuple[int, int] | None:
    """Of all processors together: ticks that a hypervisor gave to others, and all but idle ones."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return steal, user + nice + system + irq + softirq + steal


_TICKS_AT_START = _ticks()


def stolen() -> float | None:
    """The share of what was to be computed since the start that the host had wait for others.

    Of a virtual machine, by all its processes; where it is more than a few percent, times are not
    this machine's. None where the system does not tell.
    """
    now = _ticks()
    if now is None or _TICKS_AT_START is None:
        return None
    steal, busy = (end - start for end, start in zip(now, _TICKS_AT_START, strict=True))
    return steal / busy if busy else 0.0


def describe(device: torch.device) -> dict[str, object]:
    """Everything that a reader needs in order to judge the figures."""
    facts: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "zshard": zshard.__version__,
        "extension": dict(_C.build_info()),
        "isa": os.environ.get("ZSHARD_ISA", "auto"),
        "python": platform.python_version(),
        "processor": processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "load_at_start": round(os.getloadavg()[0], 2),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_memory_bytes"] = properties.total_memory
        facts["gpu_l2_bytes"] = properties.L2_cache_size
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def headline(facts: dict[str, object]) -> str:
    """The facts in a few lines."""
    where = facts.get("gpu", f"{facts['processor']} with {facts['vectors']}")
    built = facts["extension"]
    assert isinstance(built, dict)
    return (
        f"{where}, {facts['cores']} cores, {facts['threads']} thread(s), torch {facts['torch']}, "
        f"extension by {built['compiler']} (CUDA {built['cuda']}), {facts['date']}, "
        f"load {facts['load_at_start']} at the start"
    )


def write_json(path: str, report: dict[str, object]) -> None:
    """Write ``report`` and what was stolen to the file ``path``; its folder is made.

    Raises:
        InputError: for a path that cannot be written; what was there stays.
    """
    text = json.dumps({**report, "stolen": stolen()}, indent=1) + "\n"
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from error
    write_whole(path, lambda part: part.write_text(text))
