"""`zshard ckpt info` and `verify`: what they tell of whole and of damaged checkpoints."""

import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import build, train
from ranks import run_ranks
from safetensors import safe_open

import zshard
from zshard.checkpoint import catalogue, command, writer
from zshard.checkpoint.inspect import list_folder, summarize
from zshard.cli import main


def save_three(rank: int, size: int, folder: str) -> None:
    """With bf16 parameters over fp32 masters, tensors of several chunks, and random states."""
    writer.CHUNK_BYTES = 64
    model = build(1, precision=zshard.Precision.bf16())
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        train(model, optimizer, rank, range(step, step + 1))
        extra = {"step": step + 1, "text": "x" * 1000}
        zshard.save(f"{folder}/step-{step + 1}", model, optimizer, extra=extra, rng=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_three, 2, str(folder))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def place_of(file: Path, tensor: str) -> int:
    """Where a tensor begins, by the file's own header."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["ckpt", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_info_tells_what_a_checkpoint_holds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "step-2"
    status, text, _ = ckpt(capsys, "info", path, "--json")
    assert status == 0
    told = json.loads(text)
    kinds = {}
    for kind in ("model", "master", "optimizer", "rng"):
        with safe_open(path / f"{kind}.safetensors", framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        kinds[kind] = tensors
        assert told["kinds"][kind]["tensors"] == len(tensors)
        assert told["kinds"][kind]["nbytes"] == sum(t.nbytes for t in tensors.values())
        assert told["kinds"][kind]["elements"] == sum(t.numel() for t in tensors.values())
        assert told["files"][f"{kind}.safetensors"] == (path / f"{kind}.safetensors").stat().st_size
    whole = build(0)
    own = {name for name, _ in whole.named_parameters()}
    parameters = sum(t.numel() for name, t in kinds["model"].items() if name in own)
    assert told["parameters"] == parameters > 100
    assert told["kinds"]["model"]["dtypes"]["BOOL"] == 1
    assert (told["ranks"], told["optimizer"], told["step"]) == (2, "AdamW", 2)
    assert told["extra"] == {"step": 2, "text": "x" * 1000}
    assert told["problems"] == []
    assert told["bytes"] == sum(told["files"].values())
    status, text, _ = ckpt(capsys, "info", path)
    assert status == 0
    for line in (
        rf"^saved +{re.escape(told['saved'])} by 2 ranks, id {told['id']}$",
        rf"^parameters +{parameters:,}$",
        r"^updated by +AdamW, after 2 steps$",
        r'^extra +\{"step": 2, "text": "x+\.\.\.$',
        r"^health +whole",
        *(
            rf"^{kind} +{sum(t.nbytes for t in tensors.values()) / 1e6:.2f} MB in {len(tensors)} "
            for kind, tensors in kinds.items()
        ),
        *(rf"^file +{name}, {nbytes / 1e6:.2f} MB$" for name, nbytes in told["files"].items()),
    ):
        assert re.search(line, text, re.M), (line, text)
    assert max(map(len, text.splitlines())) < 400


def test_info_names_every_file_that_is_missing_or_cut(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "step-3"
    (path / "rng.safetensors").unlink()
    (path / "optimizer.safetensors").write_bytes(b"x" * 10)
    flip(path / "model.safetensors", 20)
    status, text, _ = ckpt(capsys, "info", path)
    health = re.findall(r"^health +(.*)$", text, re.M)
    assert (status, len(health)) == (0, 3)
    assert any(re.search(r"rng\.safetensors: No such file", line) for line in health)
    assert any(re.search(r"optimizer\.safetensors: has 10 bytes, and", line) for line in health)
    assert any(re.search(r"model\.safetensors: its header is not", line) for line in health)


def test_info_of_a_folder_is_a_line_for_each_checkpoint_and_marks_the_newest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / "step-1" / "checkpoint.json", 200)
    (folder / "step-3" / "model.safetensors").unlink()
    (folder / "other").mkdir()
    (folder / ".step-4.replaced").mkdir()
    (folder / "step-2").rename(folder / ".step-2.replaced")  # a save was killed between renames
    status, text, _ = ckpt(capsys, "info", folder)
    second, third, first = text.splitlines()
    assert status == 0
    size = sum(file.stat().st_size for file in (folder / ".step-2.replaced").glob("*.safetensors"))
    assert re.search(rf"^step-2 .* 2 ranks +{size / 1e6:.2f} MB +whole, newest$", second)
    assert re.search(r"^step-3 .* 2 ranks .*not whole: .*model\.safetensors: No such file", third)
    assert re.search(r"^step-1 .*checkpoint\.json: damaged", first)
    told = json.loads(ckpt(capsys, "info", folder, "--json")[1])
    assert told["newest"] == zshard.latest(folder) == str(folder / "step-2")
    assert set(list_folder(str(folder)).broken) == {str(folder / f"step-{n}") for n in (1, 3)}


def test_of_two_jobs_that_save_at_once_info_and_latest_take_the_same_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "next_sequence", lambda folder: 7)
    for day, name in enumerate(("b-first", "a-second"), start=1):
        clock = SimpleNamespace(now=lambda zone, day=day: datetime(2026, 11, day, tzinfo=zone))
        monkeypatch.setattr(writer, "datetime", clock)
        zshard.save(tmp_path / name, zshard.wrap(torch.nn.Linear(2, 2)))
    assert list_folder(str(tmp_path)).newest == zshard.latest(tmp_path) == str(tmp_path / "b-first")


def test_verify_reads_every_byte_of_a_whole_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    bar = command.tqdm

    def counted(**options: object) -> object:
        made = bar(**options)
        update = made.update
        made.update = lambda n: (read.append(n), update(n))
        return made

    monkeypatch.setattr(command, "tqdm", counted)
    status, text, errors = ckpt(capsys, "verify", folder / "step-1")
    total = sum(
        opened.get_tensor(name).nbytes
        for file in (folder / "step-1").glob("*.safetensors")
        for opened in [safe_open(file, framework="pt")]
        for name in opened.keys()  # noqa: SIM118
    )
    assert (status, errors) == (0, "")
    assert sum(read) == total
    assert re.fullmatch(rf".*step-1: ok, {total:,} bytes of tensors in \d+\.\d s\n", text)


def test_verify_names_every_damaged_file_and_tensor(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "step-1"
    model = path / "model.safetensors"
    begins = [place_of(model, name) for name in ("turned", "blocks.1.down.weight")]
    for begin in begins:  # one bit each
        flip(model, begin + 40)
    flip(path / "optimizer.safetensors", 20)  # the header
    (path / "rng.safetensors").unlink()
    status, text, errors = ckpt(capsys, "verify", path)
    assert (status, text) == (1, "")
    tensors = set(re.findall(r"^  tensor (\S+):", errors, re.M))
    assert tensors == {"turned", "blocks.1.down.weight", "rank-00000", "rank-00001"}
    assert errors.count(": damaged\n") == 3
    for file in ("model", "optimizer", "rng"):
        assert f"{path / file}.safetensors: damaged\n" in errors
    assert "optimizer.safetensors: its header is not the one" in errors


def test_verify_finds_a_bit_flipped_anywhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    files = sorted((folder / "step-1").iterdir())
    for _ in range(150):
        file = files[int(torch.randint(len(files), (), generator=generator))]
        before = file.read_bytes()
        flip(file, int(torch.randint(len(before), (), generator=generator)))
        status, _, errors = ckpt(capsys, "verify", folder / "step-1")
        assert status == 1 and file.name in errors, (file, errors)
        file.write_bytes(before)
    assert ckpt(capsys, "verify", folder / "step-1")[0] == 0


def test_what_was_exported_can_be_looked_at_verified_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = build(1), build(2)
    zshard.export(tmp_path / "a", model)
    status, out, _ = ckpt(capsys, "info", tmp_path / "a")
    assert status == 0 and "weights only, by zshard.export" in out
    assert ckpt(capsys, "verify", tmp_path / "a")[0] == 0
    zshard.load(tmp_path / "a", other)
    for name, value in zshard.state_dict(model).items():
        assert torch.equal(zshard.state_dict(other)[name], value), name
    with pytest.raises(zshard.CheckpointError, match="the optimizer's states: missing there"):
        zshard.load(tmp_path / "a", other, zshard.AdamW(other.parameters()))


@pytest.mark.parametrize("inside", ["", "checkpoints"])  # as of a run of zshard train
def test_verify_of_a_folder_reads_each_of_its_checkpoints(
    folder: Path, tmp_path: Path, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run" / inside
    shutil.copytree(folder, place)
    status, text, errors = ckpt(capsys, "verify", tmp_path / "run")
    assert (status, len(text.splitlines()), errors) == (0, 3, "")
    assert ckpt(capsys, "info", tmp_path / "run")[1] == ckpt(capsys, "info", place)[1]
    flip(place / "step-2" / "model.safetensors", -1)
    status, text, errors = ckpt(capsys, "verify", tmp_path / "run")
    assert (status, len(text.splitlines())) == (1, 2)
    assert "step-2" in errors and "step-1" not in errors
    flip(place / "step-2" / "model.safetensors", -1)  # whole again
    flip(place / "step-1" / "checkpoint.json", 200)
    status, text, errors = ckpt(capsys, "verify", tmp_path / "run")
    assert (status, len(text.splitlines())) == (1, 2)
    assert f"{place / 'step-1'}: damaged" in errors


def test_verify_of_a_folder_goes_on_where_a_job_removes_one_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1", "2"):
        zshard.save(tmp_path / name, zshard.wrap(torch.nn.Linear(2, 2)))
    verify = command.inspect.verify

    def after_another_job(path: str, progress: object) -> object:
        shutil.rmtree(tmp_path / "1", ignore_errors=True)
        return verify(path, progress)

    monkeypatch.setattr(command.inspect, "verify", after_another_job)
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / '1'}: another job has removed it meanwhile"
    assert second.startswith(f"{tmp_path / '2'}: ok")


def test_verify_of_a_folder_ends_where_one_that_is_there_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zshard.save(tmp_path / "1", zshard.wrap(torch.nn.Linear(2, 2)))

    def fails(path: str, progress: object) -> object:
        raise zshard.CheckpointError(f"{path}: was replaced too often")

    monkeypatch.setattr(command.inspect, "verify", fails)
    status, out, errors = ckpt(capsys, "verify", tmp_path)
    assert (status, out) == (1, "") and "was replaced too often" in errors


def test_a_folder_of_which_no_checkpoint_can_be_read_is_told_of_as_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zshard.save(tmp_path / "a", build(0))
    flip(tmp_path / "a" / "checkpoint.json", 200)
    status, text, _ = ckpt(capsys, "info", tmp_path)
    assert status == 0 and re.match(r"a  .*checkpoint\.json: damaged", text)
    status, text, errors = ckpt(capsys, "verify", tmp_path)
    assert (status, text) == (1, "") and f"{tmp_path / 'a'}: damaged" in errors


def test_one_checkpoint_may_have_the_name_of_a_runs_folder_of_them(tmp_path: Path) -> None:
    zshard.save(tmp_path / "checkpoints", build(0))
    assert command.run_ckpt("verify", str(tmp_path)) == 0


@pytest.mark.parametrize("action", ["info", "verify"])
def test_where_there_is_no_checkpoint_the_path_is_named(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    for name in ("empty", "file", "absent"):
        status, text, errors = ckpt(capsys, action, tmp_path / name)
        assert (status, text) == (1, "")
        assert re.fullmatch(rf"zshard: error: {tmp_path / name}: .*checkpoint.*\n", errors)


def test_an_export_is_told_apart_verified_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build(1)
    zshard.export(tmp_path / "a", model)
    status, text, _ = ckpt(capsys, "info", tmp_path / "a")
    assert status == 0 and re.search(r"kind +weights only, by zshard\.export", text)
    assert not re.search(r"^(master|optimizer|rng) ", text, re.M)  # of which it has none
    assert ckpt(capsys, "verify", tmp_path / "a")[0] == 0
    assert zshard.latest(tmp_path) is None
    other = build(2)
    zshard.load(tmp_path / "a", other)
    wanted = zshard.state_dict(model)
    for name, value in zshard.state_dict(other).items():
        assert torch.equal(value, wanted[name]), name


def test_an_export_is_never_the_newest_and_comes_before_checkpoints(tmp_path: Path) -> None:
    model = zshard.wrap(torch.nn.Linear(2, 2))
    zshard.export(tmp_path / "c", model)
    zshard.export(tmp_path / "a", model)
    assert list_folder(str(tmp_path)).newest is None
    zshard.save(tmp_path / "b", model)
    listing = list_folder(str(tmp_path))
    assert [Path(each.path).name for each in listing.checkpoints][2:] == ["b"]
    assert listing.newest == str(tmp_path / "b")


def test_info_tells_the_most_steps_that_a_parameter_has_taken(tmp_path: Path) -> None:
    model = zshard.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    for frozen in (False, False, True):
        model[1].requires_grad_(not frozen)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zshard.save(tmp_path / "a", model, optimizer)
    states = summarize(str(tmp_path / "a"))
    assert (states.optimizer, states.step) == ("AdamW", 3)  # torch's counts are floats
