"""Run a compiler only when something its output depends on has changed."""

import hashlib
import os
import re
import shlex
import time
from pathlib import Path

from toolchain import run


def update(output: Path, command: list[str], inputs: list[Path] | None = None) -> str | None:
    """Run the command that makes an output, unless the output is up to date.

    inputs = None reads them from the depfile that the command writes beside its output. Returns
    what the command printed, None where it did not have to run. The command line is an input too.
    """
    if not _is_stale(output, command, _read_depfile(output) if inputs is None else inputs):
        return None
    print(f"making {output}\n", end="", flush=True)  # one write: threads share the terminal
    output.parent.mkdir(parents=True, exist_ok=True)
    record = _record(output)
    # No record until the output is whole, so that an interrupted build leaves nothing to trust.
    record.unlink(missing_ok=True)
    started = time.time()
    printed = run(command)
    # Dated back, so that an input edited while the compiler ran counts as newer.
    os.utime(output, (started, started))
    record.write_text(_digest(command))
    return printed


def _is_stale(output: Path, command: list[str], inputs: list[Path] | None) -> bool:
    record = _record(output)
    if inputs is None or not output.is_file() or not record.is_file():
        return True
    if record.read_text() != _digest(command):
        return True
    made = output.stat().st_mtime
    return any(not path.is_file() or path.stat().st_mtime > made for path in inputs)


def _read_depfile(output: Path) -> list[Path] | None:
    """Return the files the output was compiled from; None where it never was."""
    depfile = Path(f"{output}.d")
    if not depfile.is_file():
        return None
    # As g++ and nvcc write them for make, which is not as a shell reads them: ' is a letter.
    names = re.findall(r"(?:\\.|\S)+", depfile.read_text().partition(":")[2].replace("\\\n", " "))
    return [Path(re.sub(r"\\([ #])|\$(\$)", r"\1\2", name)) for name in names]


def _record(output: Path) -> Path:
    return Path(f"{output}.sha256")


def _digest(command: list[str]) -> str:
    return hashlib.sha256(shlex.join(command).encode()).hexdigest()
