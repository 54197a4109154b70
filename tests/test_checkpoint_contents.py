"""What of odd models a checkpoint holds: under which names, of which rank, with which values."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.two_tensor import TwoTensor

import zshard
from zshard.checkpoint import writer
from zshard.checkpoint.tensorfile import CODES


class Counter(nn.Module):
    """With a parameter, a buffer, an extra state, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(3, 5)
        self.b.weight = self.a.weight
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return self.a(x) + self.b(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def build(wrapped: bool) -> nn.Module:
    torch.manual_seed(0)
    inner = Counter()
    return nn.Sequential(checkpoint_wrapper(inner) if wrapped else inner, nn.Linear(5, 2))


def trained(wrapped: bool) -> tuple[nn.Module, zshard.AdamW]:
    model = zshard.wrap(build(wrapped))
    optimizer = zshard.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("wrapped", [True, False], ids=["into_plain", "into_wrapped"])
def test_torchs_checkpoint_wrapper_leaves_no_trace_in_names(tmp_path: Path, wrapped: bool) -> None:
    model, optimizer = trained(wrapped)
    zshard.save(tmp_path / "a", model, optimizer)
    zshard.export(tmp_path / "weights", model)
    stored = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    plain = {key for key in build(False).state_dict() if "extra_state" not in key}
    assert set(stored) == plain - {"0.b.weight"}

    other = zshard.wrap(build(not wrapped))
    optimizer_of_other = zshard.AdamW(other.parameters())
    zshard.load(tmp_path / "a", other, optimizer_of_other)
    weights = zshard.wrap(build(not wrapped))
    zshard.load_weights(weights, tmp_path / "weights")
    values = zshard.state_dict(model)
    for key, value in zshard.state_dict(other).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(values[key])), key
    for key, value in zshard.state_dict(weights).items():
        same = torch.equal(torch.as_tensor(value), torch.as_tensor(values[key]))
        assert same != ("extra_state" in key), key
    states = zip(optimizer.state.values(), optimizer_of_other.state.values(), strict=True)
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in states)


def test_a_checkpoint_under_registered_names_is_still_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(True)
    with monkeypatch.context() as as_before:
        as_before.setattr("zshard.unitmap._WRAPPED", "nothing of the kind")
        zshard.save(tmp_path / "a", model, optimizer)
    stored = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert "0._checkpoint_wrapped_module.a.weight" in stored
    fresh = zshard.wrap(build(True))
    loaded = zshard.load(tmp_path / "a", fresh, zshard.AdamW(fresh.parameters()), strict=False)
    assert loaded.missing == ["0._extra_state"]
    assert torch.equal(
        zshard.full_param(fresh, "0._checkpoint_wrapped_module.a.weight"),
        zshard.full_param(model, "0._checkpoint_wrapped_module.a.weight"),
    )


def ignored_differ(rank: int, world_size: int, folder: str) -> str:
    torch.manual_seed(0)
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ignored=["1.weight"])
    zshard.save(f"{folder}/alike", model)
    with torch.no_grad():
        model[1].weight += rank
    with pytest.raises(zshard.MismatchError) as of_export:
        zshard.export(f"{folder}/weights", model)
    with pytest.raises(zshard.MismatchError) as of_save:
        zshard.save(f"{folder}/a", model)
    assert "'1.weight' has other values on ranks [1] than on rank 0" in str(of_export.value)
    assert sorted(os.listdir(folder)) == ["alike"]
    return str(of_save.value)


def test_ignored_parameters_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(ignored_differ, 2, str(tmp_path)):
        assert "'1.weight' has other values on ranks [1] than on rank 0" in message


def keys_in_another_order(rank: int, world_size: int, folder: str) -> object:
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3)), init="broadcast")
    extra = {"a": 1, "b": 2} if rank == 0 else {"b": 2, "a": 1}
    zshard.save(f"{folder}/a", model, extra=extra)
    return zshard.load(f"{folder}/a", model).extra


def test_equal_extras_whose_keys_come_in_another_order_are_equal(tmp_path: Path) -> None:
    assert run_ranks(keys_in_another_order, 2, str(tmp_path)) == [{"a": 1, "b": 2}] * 2


class Lazy(nn.Module):
    """With buffers that stand for other values than are in their memory."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        one = torch.tensor(9 + 10j).conj()
        lazily = {"conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(), "one": one}
        lazily |= {"negative": torch.tensor([5 + 6j, 7 - 8j]).conj().imag, "minus": one.imag}
        assert all(each.is_conj() or each.is_neg() for each in lazily.values())
        for name, each in lazily.items():
            self.register_buffer(name, each if lazy else each.resolve_conj().resolve_neg())


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_lazily_conjugated_and_negated_buffers_keep_their_values(
    tmp_path: Path, saved: bool, loaded: bool
) -> None:
    zshard.save(tmp_path / "a", zshard.wrap(Lazy(saved)))
    model = zshard.wrap(Lazy(loaded))
    for buffer in model.buffers():
        buffer.zero_()
    zshard.load(tmp_path / "a", model)
    assert (model.one, model.minus) == (9 - 10j, -10)
    assert torch.equal(model.conjugate, torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(model.negative, torch.tensor([-6.0, 8.0]))


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_a_buffer_of_any_dtype_whose_memory_is_in_another_order_comes_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    module = nn.Linear(3, 2)
    module.register_buffer("turned", torch.randint(2, (6, 4)).to(dtype).t())
    wanted = module.turned.clone()
    model = zshard.wrap(module)
    zshard.save(tmp_path / "a", model)
    module.turned.copy_(~wanted.bool())
    zshard.load(tmp_path / "a", model)
    assert torch.equal(module.turned.to(torch.complex64), wanted.to(torch.complex64))


def test_a_lazily_conjugated_ignored_parameter_comes_back(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    module.aside = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]).conj(), requires_grad=False)
    model = zshard.wrap(module, ignored=["aside"])
    zshard.save(tmp_path / "a", model)
    module.aside.zero_()
    zshard.load(tmp_path / "a", model)
    assert torch.equal(module.aside, torch.tensor([1 - 2j, 3 + 4j]))


def test_an_extra_too_large_to_be_read_again_is_refused_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zshard.wrap(nn.Linear(2, 2))
    zshard.save(tmp_path / "a", model, keep=1)
    monkeypatch.setattr(writer, "MAX_NBYTES", 3000)
    with pytest.raises(zshard.CheckpointError, match="more than the limit of 3000"):
        zshard.save(tmp_path / "b", model, extra="x" * 3000, keep=1)
    assert os.listdir(tmp_path) == ["a"]


def test_a_name_that_safetensors_files_keep_for_themselves_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("__metadata__", nn.Parameter(torch.zeros(2)))
    with pytest.raises(zshard.InputError, match="'__metadata__'"):
        zshard.save(tmp_path / "a", zshard.wrap(model))


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_torchs_optimizer_takes_over_the_rule_of_zshards(tmp_path: Path, kind: str) -> None:
    model = zshard.wrap(nn.Linear(2, 2))
    zshard.save(tmp_path / "a", model, getattr(zshard, kind)(model.parameters()))
    other = {"decoupled_weight_decay": True} if kind == "Adam" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), maximize=True, amsgrad=True, **other)
    zshard.load(tmp_path / "a", model, optimizer)
    group = optimizer.param_groups[0]
    assert not group["maximize"] and not group["amsgrad"]
    assert group["decoupled_weight_decay"] == (kind == "AdamW")


def test_a_group_without_parameters_gets_its_options_back(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(2, 2))
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 5.0}]
    optimizer = zshard.AdamW([dict(group) for group in groups])
    optimizer.param_groups[1]["lr"] = 7.0
    zshard.save(tmp_path / "a", model, optimizer)
    fresh = zshard.AdamW([dict(group) for group in groups])
    zshard.load(tmp_path / "a", model, fresh)
    assert fresh.param_groups[1]["lr"] == 7.0


def test_the_names_that_a_group_was_given_stay_its_own(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(2, 2))
    named = list(model.named_parameters())
    zshard.save(tmp_path / "a", model, torch.optim.SGD(named, lr=0.1))
    for given, names in ((named[::-1], ["bias", "weight"]), (model.parameters(), None)):
        optimizer = torch.optim.SGD(given, lr=0.5)
        zshard.load(tmp_path / "a", model, optimizer)
        (group,) = optimizer.param_groups
        assert (group["lr"], group.get("param_names")) == (0.1, names)


def test_a_shared_buffer_is_stored_once_and_a_load_into_it_is_seen_by_autograd(
    tmp_path: Path,
) -> None:
    def build(shared: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in model:
            layer.register_buffer("table", torch.zeros(2))
        if shared:
            model[1].table = model[0].table
        return zshard.wrap(model)

    model = build(shared=True)
    model[0].table += torch.arange(2)
    zshard.save(tmp_path / "a", model)
    stored = safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")
    assert [name for name in stored if "table" in name] == ["0.table"]
    other = build(shared=False)
    version = other[1].table._version
    assert zshard.load(tmp_path / "a", other) == zshard.Loaded()
    assert all(layer.table.tolist() == [0, 1] for layer in other)
    assert other[1].table._version > version


def saves_in_a_child(rank: int, world_size: int, folder: str) -> int:
    model = zshard.wrap(nn.Linear(3, 3))
    handle = zshard.save(f"{folder}/parent", model, asynchronous=True)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        zshard.save(f"{folder}/child", model, asynchronous=True).wait()
        os._exit(0)
    handle.wait()
    return os.waitpid(child, 0)[1]


def test_a_forked_process_saves_by_a_thread_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(saves_in_a_child, 1, str(tmp_path), group=False) == [0]
    assert zshard.latest(tmp_path) is not None
    assert sorted(os.listdir(tmp_path)) == ["child", "parent"]


def test_of_a_file_and_an_index_in_a_folder_the_file_is_taken_as_by_transformers(
    tmp_path: Path,
) -> None:
    safetensors.torch.save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    safetensors.torch.save_file({"weight": torch.zeros(2, 2)}, tmp_path / "part.safetensors")
    index = {"weight_map": {"weight": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = zshard.wrap(nn.Linear(2, 2, bias=False))
    zshard.load_weights(model, tmp_path)
    assert torch.equal(zshard.full_param(model, "weight"), torch.ones(2, 2))


def test_a_sparse_buffer_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(zshard.InputError, match=r"mask is a tensor of torch\.sparse_coo"):
        zshard.save(tmp_path / "a", zshard.wrap(model))


def test_a_weight_of_a_class_of_its_own_is_refused_by_name_and_goes_through_torch_save(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    two = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))  # as a quantised weight and its scales
    model[0].weight = nn.Parameter(two, requires_grad=False)
    with pytest.raises(zshard.WrapError, match=r"0\.weight is a .*TwoTensor.* ignored="):
        zshard.wrap(model)
    zshard.wrap(model, ignored=["0.weight"])
    with pytest.raises(zshard.InputError, match=r"0\.weight is a .*TwoTensor.*torch\.save"):
        zshard.save(tmp_path / "a", model)
    torch.save(zshard.state_dict(model), tmp_path / "b")
    saved = torch.load(tmp_path / "b", weights_only=False)
    assert torch.equal(saved["0.weight"].a, two.a)
    assert torch.equal(saved["1.weight"], zshard.full_param(model, "1.weight"))


def test_complex_numbers_of_an_optimizer_come_back_or_are_refused_by_name(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters())
    kept = torch.tensor(complex(0.5, float("-inf")), dtype=torch.complex64)
    optimizer.state[model.weight]["turned"] = kept
    zshard.save(tmp_path / "a", model, optimizer)
    optimizer.state.clear()
    zshard.load(tmp_path / "a", model, optimizer)
    assert torch.equal(optimizer.state[model.weight]["turned"], kept)
    optimizer.state[model.bias]["turned"] = kept.to(torch.complex128)
    with pytest.raises(zshard.InputError, match=r"'turned' of bias is of torch\.complex128"):
        zshard.save(tmp_path / "b", model, optimizer)


class PreTrainedModel(nn.Linear):
    """By its names one of transformers' own."""

    __module__ = "transformers.modeling_utils"

    def __init__(self, rank: int) -> None:
        super().__init__(3, 2)
        self.config = SimpleNamespace(to_json_string=lambda: json.dumps({"rank": rank}))


def configs_that_differ(rank: int, size: int, folder: str) -> None:
    model = zshard.wrap(PreTrainedModel(rank), init="broadcast")
    with pytest.raises(zshard.MismatchError, match=r"differs: config\.json\. Make"):
        zshard.export(f"{folder}/a", model)
    model.config = PreTrainedModel(0).config
    zshard.export(f"{folder}/a", model, dtype=torch.bfloat16)


def test_ranks_whose_configs_differ_export_none(tmp_path: Path) -> None:
    run_ranks(configs_that_differ, 2, str(tmp_path))
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert (config["rank"], config["dtype"]) == (0, "bfloat16")
