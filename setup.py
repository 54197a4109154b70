"""Build zshard._C: csrc/**/*.cpp always, csrc/cuda/*.cu wherever nvcc is found.

The compilers are called directly rather than through torch.utils.cpp_extension, which refuses to
compile .cu files beside a CPU-only torch and ties the binary to one torch release. What is built
here uses LibTorch's stable ABI alone: one binary serves every torch from 2.11 on, CPU or CUDA.
cmake/toolchain.py holds the command lines and lists the switches, cmake/build_backend.py finds
torch. A compiled file is kept in build/ and made again when its command line, its source or a
header it includes has changed.
"""

import hashlib
import os
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "cmake"))
from build_backend import TORCH_REQUIREMENT, find_torch
from toolchain import BuildError, Toolchain, find_cuda, max_jobs, run


class BuildExtension(build_ext):
    """Compile what changed, in parallel, and link."""

    def build_extension(self, ext: Extension) -> None:
        """Build the extension at the place setuptools asks for."""
        torch = find_torch()
        if torch is None or not torch.supported:
            found = f"torch {torch.version} in {torch.root.parent}" if torch else "no torch"
            raise BuildError(
                f"zshard builds against {TORCH_REQUIREMENT}, but found {found}: "
                f"pip install '{TORCH_REQUIREMENT}' first"
            )
        cuda = find_cuda(torch)
        tools = Toolchain(torch, cuda)
        # Not build_temp, which is a new temporary folder in every editable build.
        target = f"torch{torch.version}-{'cuda' if cuda else 'cpu'}"
        folder = Path("build", f"{sys.implementation.cache_tag}-{target}")
        # CUDA first: those files take longest.
        sources = sorted(map(Path, ext.sources), key=lambda path: (path.suffix != ".cu", path))
        sources = [source for source in sources if cuda or source.suffix != ".cu"]
        objects = [folder / f"{source}.o" for source in sources]
        with ThreadPoolExecutor(max_jobs()) as pool:
            pairs = zip(sources, objects, strict=True)
            list(pool.map(lambda pair: _compile(tools, *pair), pairs))
        library = folder / "_C.so"
        _link(tools, objects, library)
        destination = Path(self.get_ext_fullpath(ext.name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, never overwritten: a running process may have the old file mapped.
        temporary = destination.with_suffix(".tmp")
        shutil.copyfile(library, temporary)
        temporary.replace(destination)


def _compile(tools: Toolchain, source: Path, output: Path) -> None:
    command = tools.compile(source, output)
    if not _is_stale(output, command, _dependencies(output)):
        return
    print(f"compiling {source}", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    report = _make(output, command)
    if source.suffix == ".cu":
        Path(f"{output}.ptxas.txt").write_text(report)


def _link(tools: Toolchain, objects: list[Path], output: Path) -> None:
    command = tools.link(objects, output)
    if not _is_stale(output, command, objects):
        return
    print(f"linking {output}", flush=True)
    _make(output, command)


def _make(output: Path, command: list[str]) -> str:
    """Run the command, and record it once its output is whole."""
    record = Path(f"{output}.sha256")
    record.unlink(missing_ok=True)
    started = time.time()
    report = run(command)
    # Dated back, so that an input edited while the compiler ran counts as newer.
    os.utime(output, (started, started))
    record.write_text(_digest(command))
    return report


def _digest(command: list[str]) -> str:
    return hashlib.sha256(shlex.join(command).encode()).hexdigest()


def _dependencies(output: Path) -> list[Path] | None:
    """Read the depfile that the compiler wrote beside its output; None = never compiled."""
    depfile = Path(f"{output}.d")
    if not depfile.is_file():
        return None
    names = depfile.read_text().partition(":")[2].replace("\\\n", " ")
    return [Path(name) for name in shlex.split(names)]


def _is_stale(output: Path, command: list[str], inputs: list[Path] | None) -> bool:
    """Whether an output is missing, older than an input, or made by another command line."""
    record = Path(f"{output}.sha256")
    if inputs is None or not output.is_file() or not record.is_file():
        return True
    if record.read_text() != _digest(command):
        return True
    made = output.stat().st_mtime
    return any(not path.is_file() or path.stat().st_mtime > made for path in inputs)


def _find(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


setup(
    ext_modules=[
        Extension(
            "zshard._C",
            sources=_find("csrc/**/*.cpp", "csrc/cuda/*.cu"),
            depends=_find("csrc/**/*.h", "csrc/**/*.cuh", "cmake/*.py"),
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
