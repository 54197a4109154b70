"""Models built on the meta device: init_fn gives them the plain model's values, unit by unit."""

from __future__ import annotations

import weakref

import models
import pytest
import torch
from meta import SEED, Logged, assert_same_values, draw, on_meta, plain, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import Record, Wrapped, adamw, assert_same_bits, train

import zshard

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]


def materialised(
    rank: int, world_size: int, strategy: str, names: list[str]
) -> dict[str, tuple[list[str], dict[str, Tensor]]]:
    out = {}
    for name in names:
        model = on_meta(name)
        init_fn = Logged(model)
        torch.manual_seed(SEED + rank)  # rank 0's numbers are everybody's
        zshard.wrap(model, strategy=strategy, init_fn=init_fn)
        out[name] = (init_fn.calls, whole(model))
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_are_the_plain_models_bit_by_bit(strategy: str, world_size: int) -> None:
    run = (strategy, models.PLAIN_CASES)
    results = (
        [materialised(0, 1, *run)] if world_size == 1 else run_ranks(materialised, world_size, *run)
    )
    for name in models.PLAIN_CASES:
        expected = plain(name, results[0][name][0])
        for calls, values in (result[name] for result in results):
            assert calls == results[0][name][0]
            assert_same_values(values, expected, name)


def test_each_owner_is_called_once_unit_by_unit_and_children_first() -> None:
    model = on_meta("odd_parameters")
    init_fn = Logged(model)
    zshard.wrap(model, init_fn=init_fn)
    block = ["norm", "up", "down", ""]
    blocks = [f"blocks.{i}.{name}".rstrip(".") for i in range(3) for name in block]
    assert init_fn.calls == ["inlet", "outlet", "", *blocks]


def test_a_module_with_a_weight_tied_across_units_comes_with_the_root() -> None:
    model = on_meta("tied_across_units")
    init_fn = Logged(model)
    zshard.wrap(model, init_fn=init_fn)
    own = [f"blocks.{i}.{name}" for i in range(3) for name in ("norm", "up", "down")]
    tied = ["blocks.0.up", "blocks.2.up"]
    rest = [name for name in own if name not in tied]
    assert init_fn.calls == ["inlet", *tied, "outlet", *rest]


def test_with_one_unit_the_order_is_that_of_apply() -> None:
    model = on_meta("gpt")
    init_fn = Logged(model)
    torch.manual_seed(SEED)
    zshard.wrap(model, units="model", init_fn=init_fn)
    expected = models.build("gpt")
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected.apply(draw)
    assert_same_values(whole(model), expected)


OPTIONS = {
    "bf16": {"precision": zshard.Precision.bf16()},
    "split": {"precision": zshard.Precision.bf16(master="split")},
    "layers": {"units": "layer"},
    "trust": {"init": "trust"},
    "broadcast": {"init": "broadcast"},
}


def with_options(rank: int, world_size: int, option: str) -> tuple[list[str], dict[str, Tensor]]:
    options = dict(OPTIONS.get(option, {}))
    if option == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = on_meta("odd_parameters")
    init_fn = Logged(model)
    torch.manual_seed(SEED + rank)
    zshard.wrap(model, init_fn=init_fn, **options)
    return init_fn.calls, whole(model)


@pytest.mark.parametrize("option", [*OPTIONS, "hsdp"])
def test_values_do_not_depend_on_the_other_options(option: str) -> None:
    for calls, values in run_ranks(with_options, 4 if option == "hsdp" else 2, option):
        assert_same_values(values, plain("odd_parameters", calls), option)


def half_precision(module: nn.Module) -> None:
    module.weight.normal_()


def test_parameters_of_several_dtypes_keep_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 3, bias=False).bfloat16(), nn.Linear(3, 5, bias=False))
    torch.manual_seed(SEED)
    zshard.wrap(model, units="model", init_fn=half_precision)
    torch.manual_seed(SEED)
    first, second = torch.empty(3, 7).bfloat16().normal_(), torch.empty(5, 3).normal_()
    assert torch.equal(zshard.full_param(model, "0.weight"), first)
    assert torch.equal(zshard.full_param(model, "1.weight"), second)


def trained(rank: int, world_size: int, how: str) -> Record:
    """Training with an optimizer built before or after wrap on meta, or from a plain model."""
    model = on_meta("odd_parameters")
    optimizer = adamw(model) if how == "before" else None
    torch.manual_seed(SEED)
    if how == "plain":
        calls = Logged(model)
        zshard.wrap(model, init_fn=calls)
        model = zshard.wrap(plain("odd_parameters", calls.calls))
    else:
        zshard.wrap(model, init_fn=draw)
    optimizer = optimizer or adamw(model)
    return train(Wrapped(model), optimizer, models.batches("odd_parameters", 3, rank))


@pytest.mark.parametrize("how", ["before", "after"])
def test_training_is_that_of_a_plain_model_with_an_optimizer_built_before_or_after(
    how: str,
) -> None:
    for actual, expected in zip(
        run_ranks(trained, 2, how), run_ranks(trained, 2, "plain"), strict=True
    ):
        assert_same_bits(actual, expected)


def test_parameters_keep_identity_attributes_and_hooks() -> None:
    model = on_meta("tied_across_units")
    before = dict(model.named_parameters(remove_duplicate=False))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.label = name
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.label))
    labels: list[object] = []
    zshard.wrap(
        model,
        init_fn=lambda m: (labels.extend(p.label for p in m.parameters(recurse=False)), draw(m)),
    )
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert all(p.label == name for name, p in model.named_parameters())
    assert set(labels) == {name for name, _ in model.named_parameters()}
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    assert set(seen) == set(labels)


# --- buffers -------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Owns a cache that is no part of the state, and another name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(3), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.original = self.angles


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.rotary.angles


def fill_buffers(module: nn.Module) -> None:
    if isinstance(module, Rotary):
        module.angles.copy_(torch.arange(3))
        module.count = torch.tensor(4)  # may be replaced, also by one of another shape
    else:
        module.reset_parameters()


def buffers(rank: int, world_size: int, device: str | None) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = WithBuffers()
    init_fn = Logged(model, fill_buffers)
    zshard.wrap(model, init_fn=init_fn, device=device)
    assert init_fn.calls == ["rotary", "norm", "layers.0", "layers.1"]
    assert model.rotary.original is model.rotary.angles
    found = {name: b.clone() for name, b in model.named_buffers()}
    model(torch.randn(5, 3)).sum().backward()
    assert int(model.norm.num_batches_tracked) == 1
    return found


@pytest.mark.parametrize("device", [None, "cpu"])
def test_buffers_come_with_their_module_and_are_what_init_fn_wrote(device: str | None) -> None:
    expected = {
        "rotary.angles": torch.arange(3.0),
        "rotary.count": torch.tensor(4),
        "norm.running_mean": torch.zeros(3),
        "norm.running_var": torch.ones(3),
        "norm.num_batches_tracked": torch.tensor(0),
    }
    for found in run_ranks(buffers, 2, device):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def held_buffer(rank: int, world_size: int) -> tuple[str, bool]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    holder = weakref.ref(model[1].running_var) if rank == 1 else None
    with pytest.raises(zshard.WrapError) as caught:
        zshard.wrap(model)
    as_before = all(tensor.is_meta for tensor in model.state_dict().values())
    del holder
    zshard.wrap(model)
    return str(caught.value), as_before


def test_a_buffer_that_one_rank_cannot_give_memory_is_refused_on_every_rank() -> None:
    for message, as_before in run_ranks(held_buffer, 2):
        assert "1.running_var cannot be replaced" in message and as_before


# --- mixed models --------------------------------------------------------------------------------


def mixed(rank: int, world_size: int) -> tuple[list[str], dict[str, Tensor], list[str]]:
    model = models.build("blocks")
    with torch.device("meta"):
        model.blocks[1], model.outlet.bias = models.Block(), nn.Parameter(torch.empty(1))
        model.lora = nn.Linear(3, 3)
    init_fn = Logged(model)
    torch.manual_seed(SEED + rank)
    zshard.wrap(model, init_fn=init_fn, device="cpu", ignored=[model.lora])
    kinds = [type(p).__name__ for p in model.lora.parameters()]
    return init_fn.calls, whole_but(model, "lora"), kinds


def whole_but(model: nn.Module, skip: str) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters() if not name.startswith(skip)]
    return {name: zshard.full_param(model, name) for name in names}


def test_of_a_mixed_model_only_what_is_on_meta_is_initialised() -> None:
    expected = models.build("blocks")
    order = ["outlet", "lora", "blocks.1.norm", "blocks.1.up", "blocks.1.down"]
    expected.lora = nn.Linear(3, 3)
    torch.manual_seed(SEED)
    for name in order:
        draw(expected.get_submodule(name))
    del expected.lora
    for calls, values, ignored in run_ranks(mixed, 2):
        assert calls == order
        assert ignored == ["Parameter", "Parameter"]
        assert_same_values(values, expected)
