"""The build: which torch and which compilers it takes, what it refuses, and what it produces."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_backend
import pytest
import torch
from build_backend import Torch, find_torch
from incremental import update
from toolchain import BuildError, Cuda, Toolchain, find_cuda, max_jobs, run

from zshard import _C
from zshard.errors import InputError

CPU_TORCH = Torch(Path("site/torch"), "2.13.0+cpu", None)
CUDA_TORCH = Torch(Path("site/torch"), "2.14.1+cu130", "13.0")


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    switches = ("ZSHARD_CUDA", "ZSHARD_CUDA_ARCHS", "ZSHARD_MAX_JOBS", "ZSHARD_WERROR")
    for name in (*switches, "CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def isolated(monkeypatch):
    """An isolated build: torch cannot be imported, and setuptools asks for nothing itself."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for hook in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        monkeypatch.setattr(build_backend.build_meta, hook, lambda config_settings: [])


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def old_nvcc(monkeypatch, tmp_path):
    """An nvcc of CUDA 12.4, which knows no Blackwell."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo "Cuda compilation tools, release 12.4, V12.4.99";;\n'
        '*) echo "compute_80"; echo "compute_90";; esac\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return str(nvcc)


def write_torch(folder: Path, version: str, cuda: str | None) -> Path:
    root = folder / "torch"
    (root / "include").mkdir(parents=True)
    text = f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
    (root / "version.py").write_text(text)
    return root


# --- which torch ---


def test_the_torch_of_the_environment_is_found_where_it_cannot_be_imported(isolated):
    found = find_torch()
    assert found == Torch(Path(torch.__file__).parent, torch.__version__, torch.version.cuda)
    assert build_backend.get_requires_for_build_wheel() == []
    assert build_backend.get_requires_for_build_editable() == []


@pytest.mark.parametrize(
    ("version", "cuda", "asked"),
    [("2.11.0", None, []), ("2.14.1+cu130", "13.0", []), ("2.9.1", None, ["torch>=2.11"])],
)
def test_the_build_asks_for_a_torch_only_where_none_can_be_used(
    isolated, monkeypatch, tmp_path, version, cuda, asked
):
    root = write_torch(tmp_path, version, cuda)
    monkeypatch.setattr(build_backend, "_site_directories", lambda: [tmp_path])
    assert find_torch() == Torch(root, version, cuda)
    assert build_backend.get_requires_for_build_wheel() == asked
    assert build_backend.get_requires_for_build_editable() == asked


def test_the_build_asks_for_a_torch_where_there_is_none(isolated, monkeypatch, tmp_path):
    monkeypatch.setattr(build_backend, "_site_directories", lambda: [tmp_path])
    assert find_torch() is None
    assert build_backend.get_requires_for_build_wheel() == ["torch>=2.11"]


# --- which compilers ---


def test_a_cuda_torch_without_nvcc_is_refused_with_the_switch_named(no_nvcc):
    with pytest.raises(BuildError, match=r"torch 2\.14\.1\+cu130 .*ZSHARD_CUDA=0"):
        find_cuda(CUDA_TORCH)


def test_a_cpu_torch_without_nvcc_builds_for_cpu(no_nvcc):
    assert find_cuda(CPU_TORCH) is None


def test_cuda_can_be_left_out_and_insisted_on(monkeypatch, no_nvcc):
    monkeypatch.setenv("ZSHARD_CUDA", "0")
    assert find_cuda(CUDA_TORCH) is None
    monkeypatch.setenv("ZSHARD_CUDA", "1")
    with pytest.raises(BuildError, match=r"ZSHARD_CUDA=1, but there is no nvcc in PATH"):
        find_cuda(CPU_TORCH)


def test_cuda_home_goes_before_path(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("ZSHARD_CUDA", "1")
    with pytest.raises(BuildError, match=rf"no nvcc in CUDA_HOME={re.escape(str(tmp_path))}"):
        find_cuda(CPU_TORCH)


@pytest.mark.parametrize("value", ["yes", "", "2"])
def test_an_unknown_value_of_a_switch_is_refused(monkeypatch, value):
    monkeypatch.setenv("ZSHARD_CUDA", value)
    with pytest.raises(BuildError, match="is not one of auto, 0, 1"):
        find_cuda(CPU_TORCH)


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_an_impossible_number_of_jobs_is_refused(monkeypatch, value):
    monkeypatch.setenv("ZSHARD_MAX_JOBS", value)
    with pytest.raises(BuildError, match="is not a positive number"):
        max_jobs()


def test_an_nvcc_that_misses_a_target_is_refused_with_what_it_knows(monkeypatch, old_nvcc):
    with pytest.raises(BuildError, match=r"CUDA 12\.4.*for 100, 120, only for 80, 90"):
        find_cuda(CPU_TORCH)
    monkeypatch.setenv("ZSHARD_CUDA_ARCHS", "80,90")
    assert find_cuda(CPU_TORCH) == Cuda(old_nvcc, "12.4", ["80", "90"])


def test_a_compiler_that_is_not_there_is_named_with_the_switch(monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    command = Toolchain(CPU_TORCH, None).compile(Path("csrc/cpu/pack.cpp"), Path("pack.o"))
    with pytest.raises(BuildError, match=r"cannot run 'ccache g\+\+' \(No such file.*set CXX"):
        run(command)


@pytest.mark.parametrize("archs", [["80", "90", "100"], ["100", "80", "90"]])
def test_every_target_gets_machine_code_and_the_newest_one_ptx(archs):
    tools = Toolchain(CPU_TORCH, Cuda("nvcc", "13.0", archs))
    command = tools.compile(Path("csrc/cuda/pack.cu"), Path("pack.o"))
    assert [word for word in command if word.startswith("-gencode")] == [
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
        "-gencode=arch=compute_100,code=compute_100",
    ]


def test_a_warning_ends_the_build_where_that_is_asked_for(monkeypatch):
    commands = []
    for value in ("0", "1"):
        monkeypatch.setenv("ZSHARD_WERROR", value)
        tools = Toolchain(CPU_TORCH, Cuda("nvcc", "13.0", ["90"]))
        for source in ("csrc/cpu/pack.cpp", "csrc/cuda/pack.cu"):
            commands.append(tools.compile(Path(source), Path("pack.o")))
    for lenient, strict in zip(commands[:2], commands[2:], strict=True):
        assert not [word for word in lenient if "error" in word]
        assert "-Wall" in lenient or "-Xcompiler=-Wall" in lenient
        assert [word for word in strict if word not in lenient] in (
            ["-Werror"],
            ["-Werror", "all-warnings", "-Xptxas=--warning-as-error", "-Xcompiler=-Werror"],
        )
    monkeypatch.setenv("ZSHARD_WERROR", "yes")
    with pytest.raises(BuildError, match=r"ZSHARD_WERROR='yes' is not one of 0, 1"):
        Toolchain(CPU_TORCH, None)


# --- what is compiled again ---


def test_an_output_is_made_again_when_an_input_or_the_command_changes(tmp_path):
    header, output = tmp_path / "a.h", tmp_path / "a.o"
    header.write_text("1")
    script = f"cp '{header}' '{output}'; echo 'a.o: {header}' > '{output}.d'"
    command = ["sh", "-c", script]
    assert update(output, command) is not None
    assert update(output, command) is None

    header.write_text("2")
    os.utime(header, (output.stat().st_mtime + 5,) * 2)
    assert update(output, command) is not None
    assert output.read_text() == "2"

    assert update(output, [*command, "other"]) is not None
    output.unlink()
    assert update(output, [*command, "other"]) is not None


def test_an_input_of_any_name_is_found_again(tmp_path):
    folder = tmp_path / "Zoë's #1 for $5"
    folder.mkdir()
    (folder / "a.h").write_text("int a;\n")
    source, output = folder / "a.cpp", tmp_path / "a.o"
    source.write_text('#include "a.h"\n')
    command = ["g++", "-MD", "-MF", f"{output}.d", "-c", str(source), "-o", str(output)]
    assert update(output, command) is not None
    assert update(output, command) is None


def test_a_failed_command_leaves_nothing_to_trust(tmp_path):
    source, output = tmp_path / "a.cpp", tmp_path / "a.o"
    source.write_text("1")
    works = ["sh", "-c", f"echo good > '{output}'"]
    fails = ["sh", "-c", f"echo broken > '{output}'; echo the reason; exit 3"]
    update(output, works, [source])
    with pytest.raises(BuildError, match=r"(?s)the reason.*exit status 3"):
        update(output, fails, [source])
    assert update(output, works, [source]) is not None


def test_an_input_edited_while_the_command_runs_counts_as_newer(tmp_path):
    source, output = tmp_path / "a.cpp", tmp_path / "a.o"
    source.write_text("1")
    edits = ["sh", "-c", f"sleep 0.05; echo 2 > '{source}'; sleep 0.05; echo > '{output}'"]
    assert update(output, edits, [source]) is not None
    assert update(output, edits, [source]) is not None


# --- what comes out ---


def test_the_binary_uses_the_stable_abi_alone():
    symbols = subprocess.check_output(["nm", "-D", "--undefined-only", _C.__file__], text=True)
    names = [line.split()[-1].partition("@")[0] for line in symbols.splitlines()]
    assert any(name.startswith("aoti_torch_") for name in names)
    unstable = [name for name in names if re.match(r"_ZNK?(2at|3c10|5torch)", name)]
    assert unstable == []
    cuda = [name for name in names if re.match(r"(cuda|__cuda)[A-Z]|cu[A-Z]|.*cuda_stream", name)]
    assert cuda == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's vector levels")
def test_lines_are_streamed_by_the_widest_stores_of_each_level():
    """[Note: streamed lines] in csrc/cpu/memory.h: narrower ones hold up loads, as calls do."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", _C.__file__]
    stores: dict[str, set[str]] = {"run_v3": set(), "run_v4": set(), "run_baseline": set()}
    level = ""
    for line in subprocess.check_output(command, text=True).splitlines():
        if line.endswith(">:"):
            level = next((name for name in stores if name in line), "")
        elif level and (store := re.search(r"movnt\w+\s+%(\w)mm", line)):
            stores[level].add(store[1])
        assert not (level and "call" in line and "stream_line" in line), line
    assert stores == {"run_v3": {"y"}, "run_v4": {"z"}, "run_baseline": {"x"}}


def test_build_info_tells_how_the_binary_was_made():
    info = _C.build_info()
    assert "-ffp-contract=off" in info["flags"]
    assert info["compiler"].split()[0] in ("gcc", "clang")
    assert re.fullmatch(r"2\.\d+\.\d+", info["torch_headers"])
    assert (info["cuda"] is None) == (info["cuda_archs"] == [])


def test_bad_layouts_raise_the_packages_own_error():
    with pytest.raises(InputError, match=r"segment 1 has -2 elements at offset 32"):
        _C.flat_layout([1, -2], 1)
    with pytest.raises(InputError, match=r"world_size 0"):
        _C.flat_layout([1], 0)
    with pytest.raises(InputError, match=r"rank 2 is not in \[0, 2\)"):
        _C.flat_layout([1], 2).intersection(0, 2)


def test_every_folder_of_the_package_is_in_the_wheel():
    """An installation from the source tree, as the tests have, would not miss one."""
    root = Path(__file__).parent.parent
    folders = {path.parent.relative_to(root) for path in (root / "zshard").rglob("*.py")}
    named = (root / "pyproject.toml").read_text().partition("packages = [")[2].partition("]")[0]
    wanted = {"zshard.benchmarks", *(".".join(folder.parts) for folder in folders)}
    assert set(re.findall(r'"([\w.]+)"', named)) == wanted


def test_a_checkout_that_is_not_built_says_so(tmp_path: Path) -> None:
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(_C.__file__).parent, tmp_path / "zshard", ignore=unbuilt)
    # Not by the finder of an editable install, which knows where else the extension is.
    script = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
        "import zshard"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"ImportError: {tmp_path / 'zshard'} has not been built" in done.stderr
