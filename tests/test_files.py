"""Files are there as a whole or not at all; what is no regular file stays what it is."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path

import pytest

import zshard
from zshard.checkpoint.files import File
from zshard.whole_files import write_whole

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, lambda path: path.write_text("whole"))
    reader.join(timeout=30)
    assert read == ["whole"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_pipe_by_number_is_written_to() -> None:
    receiving, sending = os.pipe()
    write_whole(f"/dev/fd/{sending}", lambda path: path.write_text("whole"))
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        assert pipe.read() == "whole"


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    (path := tmp_path / "secret").touch(mode=0o600)
    write_whole(path, lambda part: part.write_text("whole"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("new", "newer"):
        write_whole(link, lambda path, text=text: path.write_text(text))
        assert link.is_symlink() and target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("path", ["", "/", "a\0b", "none/file"])
def test_what_is_no_files_name_is_refused(path: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(zshard.InputError):
        write_whole(path, lambda part: part.write_text("whole"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_short_is_said_to_end_where_it_does(tmp_path: Path) -> None:
    (path := tmp_path / "cut").write_bytes(b"x" * 1000)
    said = "ends at byte 1000; it was cut short"
    with File.to_read(str(path)) as file, pytest.raises(zshard.CheckpointError, match=said):
        file.read(bytearray(64), 1792)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_benchmarks_figures_stay_where_the_next_find_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from environment import write_json

    figures = tmp_path / "new" / "figures.json"
    write_json(str(figures), {"figure": 1})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(zshard.InputError, match="No space left"):
        write_json(str(figures), {"figure": 2})
    assert json.loads(figures.read_text())["figure"] == 1
    assert [path.name for path in figures.parent.iterdir()] == ["figures.json"]
