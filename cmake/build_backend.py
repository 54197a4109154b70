"""PEP 517 build backend: setuptools, plus the torch of the environment that is installed into.

The extension needs torch's headers, and pip's isolated builds hide the installed torch: they put an
empty overlay in the place of the site directories. The interpreter is still the target
environment's own, so sysconfig keeps naming those directories; torch's files are read there,
without importing torch. Only where there is none does the build ask pip for one, by the same
requirement as the package itself, so that both are one download.
"""

import importlib.util
import re
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

MIN_TORCH = (2, 11)  # the oldest torch whose stable ABI has everything csrc/ calls
TORCH_REQUIREMENT = f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"

Settings = dict[str, str | list[str] | None]


@dataclass(frozen=True)
class Torch:
    """An installed torch, read from its files."""

    root: Path  # .../site-packages/torch
    version: str  # "2.13.0+cpu"
    cuda: str | None  # "13.0"; None in a CPU build

    @property
    def supported(self) -> bool:
        """Whether this torch is new enough to build against."""
        return tuple(int(part) for part in self.version.split(".")[:2]) >= MIN_TORCH


def _site_directories() -> list[Path]:
    """Where the target environment keeps its packages, also when pip hides them from sys.path."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    config = Path(sys.prefix, "pyvenv.cfg")
    is_venv = config.is_file()
    if not is_venv or re.search(
        r"^include-system-site-packages\s*=\s*true", config.read_text(), re.MULTILINE | re.I
    ):
        paths.append(site.getusersitepackages())
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        paths += [sysconfig.get_path(name, vars=base) for name in ("purelib", "platlib")]
        paths += site.getsitepackages([sys.base_prefix])
    return [Path(path) for path in dict.fromkeys(paths)]


def find_torch() -> Torch | None:
    """Return the importable torch, else the target environment's, else None."""
    spec = importlib.util.find_spec("torch")
    roots = [Path(path) for path in (spec.submodule_search_locations or [])] if spec else []
    roots += [path / "torch" for path in _site_directories()]
    for root in roots:
        version_file = root / "version.py"
        if version_file.is_file() and (root / "include").is_dir():
            text = version_file.read_text()
            version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
            cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
            if version:
                return Torch(root, version[1], cuda[1] if cuda else None)
    return None


def _torch_requirement() -> list[str]:
    torch = find_torch()
    return [] if torch and torch.supported else [TORCH_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Setuptools' own requirements, and torch where the target environment has none."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """Setuptools' own requirements, and torch where the target environment has none."""
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
