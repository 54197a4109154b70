"""Build zshard._C: csrc/**/*.cpp always, csrc/cuda/*.cu wherever nvcc is found.

The compilers are called directly rather than through torch.utils.cpp_extension, which refuses to
compile .cu files beside a CPU-only torch and ties the binary to one torch release. What is built
here uses LibTorch's stable ABI alone: one binary serves every torch from 2.11 on, CPU or CUDA.

In cmake/: build_backend.py finds torch, toolchain.py holds the command lines and lists the
switches, incremental.py decides what has to be compiled again.
"""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "cmake"))
from build_backend import TORCH_REQUIREMENT, find_torch
from incremental import update
from toolchain import BuildError, Toolchain, find_cuda, max_jobs


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

        def compile_one(source: Path) -> Path:
            output = folder / f"{source}.o"
            report = update(output, tools.compile(source, output))
            if report and source.suffix == ".cu":
                Path(f"{output}.ptxas.txt").write_text(report)
            return output

        # CUDA first: those files take longest.
        sources = sorted(map(Path, ext.sources), key=lambda path: (path.suffix != ".cu", path))
        sources = [source for source in sources if cuda or source.suffix != ".cu"]
        with ThreadPoolExecutor(max_jobs()) as pool:
            objects = list(pool.map(compile_one, sources))
        library = folder / "_C.so"
        update(library, tools.link(objects, library), objects)

        destination = Path(self.get_ext_fullpath(ext.name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, never overwritten: a running process may have the old file mapped.
        temporary = destination.with_suffix(".tmp")
        shutil.copyfile(library, temporary)
        temporary.replace(destination)


def find(*patterns: str) -> list[str]:
    """Return the files that match any of the patterns, sorted."""
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


setup(
    ext_modules=[
        Extension(
            "zshard._C",
            sources=find("csrc/**/*.cpp", "csrc/cuda/*.cu"),
            depends=find("csrc/**/*.h", "csrc/**/*.cuh", "cmake/*.py"),
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
