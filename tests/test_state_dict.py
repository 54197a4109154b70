"""zshard.state_dict is the plain model's; load_state_dict takes whole tensors on every layout."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import adamw

import zshard
from zshard.calls import whole
from zshard.units.param_site import ParamSite

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]
PRECISIONS = [None, zshard.Precision.bf16(), zshard.Precision.bf16(master="split")]
CASES = ["odd_parameters", "channels_last", "tied_in_one_unit", "tied_across_units", "frozen"]


class Rich(models.Blocks):
    """All that a state_dict may hold: parameters of two dtypes, buffers, extra state, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.low = nn.Parameter(torch.rand(5, 3).bfloat16())
        self.apart = nn.Parameter(torch.rand(4))  # ignored by wrap
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.register_buffer("twin", torch.rand(2, 2))
        self.blocks[0].register_buffer("twin", self.twin)
        self.register_state_dict_post_hook(doubled)

    def get_extra_state(self) -> dict[str, object]:
        return {"seen": 3, "words": ["a"]}

    def set_extra_state(self, state: object) -> None:
        assert state == self.get_extra_state()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)) + self.low.float().sum()


def doubled(module: nn.Module, state: dict[str, Any], prefix: str, local: object) -> None:
    """A hook that looks inside, and adds what it finds."""
    state["doubled"] = 2 * state["inlet.weight"]


def rich() -> nn.Module:
    torch.manual_seed(7)
    return Rich()


def differences(found: dict[str, Any], model: nn.Module) -> list[str]:
    """How ``found`` is not what the plain ``model`` gives."""
    expected = model.state_dict()
    if list(found) != list(expected):
        return [f"keys {list(found)}, not {list(expected)}"]
    wrong = ["versions"] if found._metadata != expected._metadata else []
    for name, value in expected.items():
        ours = found[name]
        if not isinstance(value, Tensor):
            wrong += [] if ours == value else [name]
        elif type(ours) is not Tensor or ours.requires_grad or ours.device.type != "cpu":
            wrong.append(f"{name} is no plain tensor")
        elif (ours.dtype, ours.shape, ours.stride()) != (value.dtype, value.shape, value.stride()):
            wrong.append(f"{name} is {ours.dtype} {ours.shape} {ours.stride()}")
        elif not torch.equal(ours, value):
            wrong.append(name)
    tied = {(a, b) for a in expected for b in expected if is_tied(expected, a, b)}
    return wrong + [f"{a} and {b} are two" for a, b in tied if found[a] is not found[b]]


def is_tied(state: dict[str, Any], a: str, b: str) -> bool:
    both = state[a], state[b]
    if a >= b or not all(isinstance(x, Tensor) and x.numel() for x in both):
        return False
    return both[0].data_ptr() == both[1].data_ptr()


def read(rank: int, world_size: int, hsdp: bool) -> list[str]:
    wrong = []
    for strategy in STRATEGIES:
        for precision in PRECISIONS:
            options: dict[str, Any] = {"strategy": strategy, "precision": precision}
            if hsdp:
                names = ("replicate", "shard")
                options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            for case in ["odd_parameters", "rich", CASES[1 + STRATEGIES.index(strategy)]]:
                plain, model = (rich() if case == "rich" else models.build(case) for _ in range(2))
                ignored = [model.apart] if case == "rich" else None
                zshard.wrap(model, ignored=ignored, **options)
                for all_ranks in (True, False):
                    found = zshard.state_dict(model, all_ranks=all_ranks)
                    label = f"{case} {strategy} {precision} {all_ranks}: "
                    if all_ranks or rank == 0:
                        wrong += [label + each for each in differences(found, plain)]
                    elif found != {}:
                        wrong.append(label + "not empty")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_is_the_plain_models_state_dict(world_size: int) -> None:
    for wrong in run_ranks(read, world_size, world_size == 4):
        assert wrong == []


def masters(rank: int, world_size: int) -> list[bool]:
    """After a step with bf16 compute: fp32 masters, and a copy of them."""
    result = []
    for precision in PRECISIONS[1:]:
        model = zshard.wrap(models.build("odd_parameters"), precision=precision)
        optimizer = adamw(model)
        data = models.batches("odd_parameters", 2, rank)
        models.loss_of(model, data[0]).backward()
        optimizer.step()
        found = zshard.state_dict(model, all_ranks=True)
        read = {name: zshard.full_param(model, name) for name in found}
        models.loss_of(model, data[1]).backward()
        optimizer.step()
        result += [torch.equal(found[name], read[name]) for name in found]
        result.append(not torch.equal(found["mix"], found["mix"].bfloat16().float()))
    return result


def test_it_copies_the_masters_not_what_is_computed_with() -> None:
    for result in run_ranks(masters, 2):
        assert all(result)


def buffers_of_the_first(rank: int, world_size: int) -> list[float]:
    model = rich()
    zshard.wrap(model, ignored=[model.apart])
    model.twin.fill_(rank)
    ours = zshard.state_dict(model)
    all_of_them = zshard.state_dict(model, all_ranks=True)
    saved = all_of_them["twin"].clone()
    model.twin.fill_(9)
    kept = bool((all_of_them["twin"] == saved).all())
    return [float(ours["twin"].max()) if ours else 0.0, float(saved.max()), float(not kept)]


def test_buffers_are_copies_of_rank_0s_on_every_rank() -> None:
    assert run_ranks(buffers_of_the_first, 3) == [[0.0, 0.0, 0.0]] * 3


def test_a_buffer_and_its_lazy_conjugate_keep_their_own_values() -> None:
    module, v = nn.Linear(2, 2), torch.tensor([1 + 2j, 3 - 4j])
    made = {"v": v, "conjugate": v.conj(), "imaginary": v.imag, "negative": v.conj().imag}
    for name, buffer in made.items():
        module.register_buffer(name, buffer)
    whole = zshard.state_dict(zshard.wrap(module))
    assert all(torch.equal(whole[name], buffer) for name, buffer in made.items())


def test_a_sparse_buffer_is_copied() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    found = zshard.state_dict(zshard.wrap(model))["mask"]
    assert torch.equal(found.to_dense(), torch.eye(2))
    assert found.values().data_ptr() != model.mask.values().data_ptr()


def whole_at_once(rank: int, world_size: int) -> tuple[int, int, int]:
    """The most flat buffers that were whole at a time, how many there were, and what is left."""
    model = zshard.wrap(models.build("odd_parameters"))
    import weakref

    from zshard.calls import whole_state as state

    alive: list[weakref.ref[Tensor]] = []
    most = 0
    all_gather = whole.all_gather

    def counted(*args: Any) -> Tensor:
        nonlocal most
        full = all_gather(*args)
        alive.append(weakref.ref(full))
        most = max(most, sum(each() is not None for each in alive))
        return full

    made: list[int] = []
    on_the_host = state._on_the_host

    def noted(*args: Any) -> list[nn.Parameter]:
        params = on_the_host(*args)
        made.extend(param.data_ptr() for param in params)
        return params

    state.all_gather, state._on_the_host = counted, noted
    found = zshard.state_dict(model)
    assert all(value.data_ptr() in made for value in found.values())  # no second copy
    left = sum(each() is not None for each in alive)
    assert (len(found) > 0) == (rank == 0)
    return most, len(alive), left


def test_one_flat_buffer_is_whole_at_a_time() -> None:
    for most, count, left in run_ranks(whole_at_once, 2):
        assert (most, left) == (1, 0) and count > 3


def misuse(rank: int, world_size: int) -> list[str]:
    """What is said where it cannot work; the model goes on."""
    model = zshard.wrap(models.build("blocks"))
    said = []

    def refused(kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as caught:
            call(*args, **kwargs)
        said.append(str(caught.value))

    with zshard.full_params(model):
        refused(zshard.StateError, zshard.state_dict, model)
    model.inlet.register_forward_hook(lambda *_: refused(zshard.Error, zshard.state_dict, model))
    models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
    refused(zshard.MismatchError, zshard.state_dict, model, all_ranks=rank == 0)
    refused(zshard.ShardedAccessError, torch.save, model.state_dict(), io.BytesIO())
    plain = models.build("blocks").state_dict()
    plain["inlet.weight"] = torch.zeros(3, 7)
    refused(RuntimeError, model.load_state_dict, plain)
    assert not differences(zshard.state_dict(model, all_ranks=True), models.build("blocks"))
    model.inlet.weight = nn.Parameter(torch.zeros(7, 3))
    refused(zshard.StateError, zshard.state_dict, model)
    return said


def test_what_cannot_work_is_said_on_every_rank_and_the_model_goes_on() -> None:
    for inside, forward, mismatch, pickled, shape, replaced in run_ranks(misuse, 2):
        assert "inlet.weight (weight of a Linear) was replaced" in replaced
        assert "model.state_dict() is whole" in inside
        assert "between steps" in forward
        assert "state_dict(all_ranks=" in mismatch
        assert "zshard.state_dict(model)" in pickled and "zshard.save" in pickled
        assert "inlet.weight" in shape and "[3, 7]" in shape and "[7, 3]" in shape


def take(rank: int, world_size: int) -> list[str]:
    """load_state_dict of whole tensors, over values that have been gathered already."""
    wrong = []
    for number, strategy in enumerate(STRATEGIES):
        for precision in PRECISIONS:
            for case in (CASES[number], CASES[(number + 1) % len(CASES)]):
                label = f"{case} {strategy} {precision}: "
                torch.manual_seed(99)
                source = models.CASES[case].build()
                batch = models.batches(case, 1, rank)[0]
                model, fresh = (
                    zshard.wrap(m, strategy=strategy, precision=precision)
                    for m in (models.build(case), models.CASES[case].build())
                )
                fresh.load_state_dict(source.state_dict())
                with torch.no_grad():
                    old = models.loss_of(model, batch)
                    model.load_state_dict(source.state_dict())
                    new = models.loss_of(model, batch)
                    if torch.equal(old, new) or not torch.equal(new, models.loss_of(fresh, batch)):
                        wrong.append(label + "forward")
                found = zshard.state_dict(model, all_ranks=True)
                wrong += [label + each for each in differences(found, source)]
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_load_state_dict_takes_this_ranks_part_of_whole_tensors(world_size: int) -> None:
    for wrong in run_ranks(take, world_size):
        assert wrong == []


def enter_full_params(model: nn.Module) -> None:
    with zshard.full_params(model):
        pass


@pytest.mark.parametrize("call", [zshard.state_dict, enter_full_params])
def test_ctrl_c_leaves_no_module_with_what_was_lent(
    call: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes as parameters are put into the modules, and as they are put back."""
    model = zshard.wrap(models.build("blocks"))
    expected = zshard.state_dict(model)
    plain, calls = ParamSite.install, 0

    def interrupting(site: ParamSite, param: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        plain(site, param)

    monkeypatch.setattr(ParamSite, "install", interrupting)
    for at in range(1, 2 * len(expected) + 1):
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            call(model)
        zshard.reset(model)
        found = zshard.state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), at
        model(models.batches("blocks", 1)[0]).sum().backward()
    calls, at = 0, -1
    call(model)
    assert calls == 2 * len(expected), "every one was interrupted"


def text_for_flags(rank: int, world_size: int) -> list[str]:
    model = zshard.wrap(nn.Linear(3, 2), init="broadcast")
    said = []
    for given in ("no", torch.ones(2), "no" if rank == 0 else False):
        for call in (
            lambda given=given: zshard.full_params(model, write=given).__enter__(),
            lambda given=given: zshard.state_dict(model, all_ranks=given),
        ):
            with pytest.raises(zshard.Error) as caught:
                call()
            said.append(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises(zshard.InputError, match="reset_peak='no': expected True or False"):
        zshard.memory(model, reset_peak="no")
    with zshard.full_params(model, write=True):
        assert model.weight.shape == (2, 3) and not isinstance(model.weight, zshard.param.Sharded)
    return said


def test_what_is_neither_true_nor_false_is_refused_as_a_flag_on_every_rank() -> None:
    for said in run_ranks(text_for_flags, 2):
        assert said[:4] == [
            "InputError: write='no': expected True or False",
            "InputError: all_ranks='no': expected True or False",
            "InputError: write=tensor([1., 1.]): expected True or False",
            "InputError: all_ranks=tensor([1., 1.]): expected True or False",
        ]
        assert "MismatchError" in said[4] and "full_params(write='no')" in said[4]
        assert "MismatchError" in said[5] and "state_dict(all_ranks='no')" in said[5]
