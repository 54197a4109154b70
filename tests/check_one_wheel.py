"""Build one wheel and run the op tests on it under several releases of torch.

    make check-wheel        (or: python tests/check_one_wheel.py [REQUIREMENT ...])

The wheel is built once, against the first torch, and installed unchanged beside each of them. On
demand rather than in CI: the later defaults are CUDA builds, several gigabytes to download.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFAULT_TORCHES = ["torch==2.13.0", "torch==2.11.0", "torch==2.14.1"]  # 2.11: the oldest
PROBE = """
import torch, zshard
from zshard import _C
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; zshard from {zshard.__file__}")
print(f"built with {_C.build_info()}")
assert zshard.__file__.startswith(__import__("sys").prefix), "not the installed wheel"
"""


def run(command: list[str | Path], cwd: Path) -> None:
    """Run a command, shown first; its failure ends the check."""
    print("+", " ".join(map(str, command)), flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def make_environment(folder: Path, *requirements: str) -> Path:
    """Create a virtual environment and return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", *requirements], ROOT)
    return python


def check(torches: list[str], folder: Path) -> None:
    """Build the wheel in folder and test it under each torch."""
    # Away from the source tree, whose zshard/ would be imported in the wheel's place.
    tests = folder / "tests"
    shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    digest = ""
    for index, torch in enumerate(torches):
        environment = folder / f"environment{index}"
        python = make_environment(environment, torch, "setuptools>=77", "pytest", "pytest-timeout")
        if not digest:
            options = ["--no-build-isolation", "--no-deps", "-w", folder]
            run([python, "-m", "pip", "wheel", *options, ROOT], ROOT)
            (wheel,) = folder.glob("zshard-*.whl")
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        run([python, "-m", "pip", "install", "-q", wheel], ROOT)
        print(f"{wheel.name} sha256 {digest}", flush=True)
        run([python, "-c", PROBE], folder)
        run([python, "-m", "pytest", "-q", *sorted(tests.glob("test_ops*.py"))], folder)
        shutil.rmtree(environment)
    print(f"one wheel, sha256 {digest}, passed under {', '.join(torches)}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("torches", nargs="*", default=DEFAULT_TORCHES, metavar="REQUIREMENT")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zshard-one-wheel-") as folder:
        try:
            check(arguments.torches, Path(folder))
        except subprocess.CalledProcessError as error:
            sys.exit(f"failed with exit status {error.returncode}")


if __name__ == "__main__":
    main()
