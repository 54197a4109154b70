"""The compilers that build zshard._C, and their command lines.

Switches (environment), read here and nowhere else:
  ZSHARD_CUDA        auto (default) = compile CUDA where nvcc is found; 1 = require it; 0 = omit it
  ZSHARD_CUDA_ARCHS  compute capabilities to compile for, "80,90,100,120" unless given
  ZSHARD_MAX_JOBS    compiler processes at a time; the number of processors unless given
  ZSHARD_WERROR      1 = a warning ends the build, as in CI; 0 (default) = it does not: who builds
                     zshard may have a compiler that is newer than all of ours
  CUDA_HOME, CXX     where nvcc is (else PATH), and the C++ compiler (else g++)
"""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from build_backend import Torch

STABLE_ABI_TARGET = "0x020b000000000000"  # torch 2.11, as TORCH_TARGET_VERSION spells it
DEFAULT_CUDA_ARCHS = "80,90,100,120"

CXX_WARNINGS = ["-Wall", "-Wextra"]
# No contraction and nothing that changes values: every ISA, CPU and CUDA alike, must give the same
# bits. The two -fno- flags drop errno and traps, which nothing reads; loops with sqrt vectorise
# only without them. No -march: the instruction set is chosen at run time.
CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
CXX_FLAGS += ["-fvisibility=hidden", "-fvisibility-inlines-hidden"]
NVCC_FLAGS = ["-O3", "-fmad=false", "--expt-relaxed-constexpr"]
# Every kernel's use of resources is reported; that one spills registers is a warning.
PTXAS_FLAGS = ["-v", "--warn-on-spills"]
# What makes an error of a warning.
CXX_WERROR, NVCC_WERROR, PTXAS_WERROR = "-Werror", ["-Werror", "all-warnings"], "--warning-as-error"


class BuildError(SystemExit):
    """Stops the build with a message instead of a traceback."""


@dataclass(frozen=True)
class Cuda:
    """The CUDA compiler in use."""

    nvcc: str
    version: str  # "13.0"
    archs: list[str]  # compute capabilities, ["80", "90"]


def run(command: list[str]) -> str:
    """Run a command and return all it printed; a failure ends the build and shows the same."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise BuildError(
            f"cannot run {command[0]!r} ({error.strerror}): install g++ 11 or newer, or set CXX to "
            "the path of a C++ compiler, without arguments"
        ) from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}\nexit status {done.returncode}")
    return done.stdout


def max_jobs() -> int:
    """Return how many compilers may run at a time."""
    value = os.environ.get("ZSHARD_MAX_JOBS", str(os.cpu_count() or 1))
    if not value.isdecimal() or int(value) == 0:
        raise BuildError(f"ZSHARD_MAX_JOBS={value!r} is not a positive number")
    return int(value)


def warnings_are_errors() -> bool:
    """Return whether a warning ends the build."""
    switch = os.environ.get("ZSHARD_WERROR", "0")
    if switch not in ("0", "1"):
        raise BuildError(f"ZSHARD_WERROR={switch!r} is not one of 0, 1")
    return switch == "1"


def find_cuda(torch: Torch) -> Cuda | None:
    """Return the CUDA compiler to use beside this torch; None = build for CPU only."""
    switch = os.environ.get("ZSHARD_CUDA", "auto")
    if switch not in ("auto", "0", "1"):
        raise BuildError(f"ZSHARD_CUDA={switch!r} is not one of auto, 0, 1")
    if switch == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    if nvcc is not None:
        return _inspect(nvcc)
    place = f"CUDA_HOME={home}" if home else "PATH, and CUDA_HOME is not set"
    if switch == "1":
        raise BuildError(f"ZSHARD_CUDA=1, but there is no nvcc in {place}")
    if torch.cuda is not None:
        raise BuildError(
            f"the installed torch {torch.version} is a CUDA {torch.cuda} build, but there is no "
            f"nvcc in {place}: install the CUDA toolkit, or set ZSHARD_CUDA=0 to build zshard "
            "without CUDA kernels"
        )
    return None


def _inspect(nvcc: str) -> Cuda:
    release = re.search(r"release (\d+\.\d+)", run([nvcc, "--version"]))
    version = release[1] if release else "of unknown version"
    archs = os.environ.get("ZSHARD_CUDA_ARCHS", DEFAULT_CUDA_ARCHS).split(",")
    known = re.findall(r"compute_(\w+)", run([nvcc, "--list-gpu-arch"]))
    unknown = [arch for arch in archs if arch not in known]
    if unknown:
        raise BuildError(
            f"{nvcc} (CUDA {version}) cannot compile for {', '.join(unknown)}, only for "
            f"{', '.join(known)}: install CUDA 12.8 or newer, or set ZSHARD_CUDA_ARCHS"
        )
    return Cuda(nvcc, version, archs)


class Toolchain:
    """The command lines for one torch, and one CUDA compiler or none."""

    def __init__(self, torch: Torch, cuda: Cuda | None) -> None:
        """Take the C++ compiler from CXX."""
        self.torch, self.cuda = torch, cuda
        self.cxx = os.environ.get("CXX", "g++")
        includes = ["-isystem", str(torch.root / "include")]
        includes += ["-isystem", sysconfig.get_path("include")]
        self._common = ["-std=c++20", "-Icsrc", *includes]
        self._common += ["-DNDEBUG", f"-DZSHARD_WITH_CUDA={int(cuda is not None)}"]
        self._stable = [f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}"]
        # Torch's check macros hold __FILE__: keep the builder's folders out of the binary.
        self._host = [*CXX_FLAGS, *CXX_WARNINGS, f"-ffile-prefix-map={torch.root}=torch"]
        self._nvcc, self._ptxas = [*NVCC_FLAGS], [*PTXAS_FLAGS]
        if warnings_are_errors():
            self._host.append(CXX_WERROR)
            self._nvcc += NVCC_WERROR
            self._ptxas.append(PTXAS_WERROR)

    def compile(self, source: Path, output: Path) -> list[str]:
        """Return the command that compiles a source file, with a depfile beside its output."""
        files = ["-MD", "-MF", f"{output}.d", "-c", str(source), "-o", str(output)]
        # pybind11 as torch 2.11 ships it refuses stable files; module.cpp takes no tensor anyway.
        macros = self._build_info() if source.name == "module.cpp" else self._stable
        if source.suffix != ".cu":
            return [self.cxx, *self._common, *macros, *self._host, *files]
        assert self.cuda is not None
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.cuda.archs]
        last = max(self.cuda.archs, key=int)
        targets.append(f"-gencode=arch=compute_{last},code=compute_{last}")  # PTX, for newer GPUs
        flags = [*self._nvcc, *targets, *(f"-Xptxas={flag}" for flag in self._ptxas)]
        # nvcc splits what it hands on at spaces, as a shell does.
        flags += [f"-Xcompiler={shlex.quote(flag)}" for flag in self._host]
        return [self.cuda.nvcc, f"-ccbin={self.cxx}", *self._common, *macros, *flags, *files]

    def link(self, objects: list[Path], output: Path) -> list[str]:
        """Return the link command: torch by soname without a run path, cudart static."""
        files = [*map(str, objects), "-o", str(output), f"-L{self.torch.root / 'lib'}"]
        files += ["-ltorch_cpu", "-ltorch", "-ldl", "-lrt", "-lpthread"]
        if self.cuda is None:
            return [self.cxx, "-shared", "-Wl,--no-as-needed", *files]
        driver = [self.cuda.nvcc, f"-ccbin={self.cxx}", "-shared", "-cudart=static"]
        return [*driver, "-Xlinker=--no-as-needed,--exclude-libs=ALL", *files]

    def _build_info(self) -> list[str]:
        """Macros for module.cpp alone, so that a change of theirs recompiles nothing else."""
        archs = [f"sm_{arch}" for arch in self.cuda.archs] if self.cuda else []
        values = {
            "FLAGS": shlex.join(CXX_FLAGS),
            "CUDA_VERSION": self.cuda.version if self.cuda else "",
            "CUDA_ARCHS": " ".join(archs),
        }
        return [f'-DZSHARD_BUILD_{name}="{value}"' for name, value in values.items()]
