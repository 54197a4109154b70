"""An error in wrap, on any rank and at any unit, is one on all; the model is as it was before."""

from __future__ import annotations

import math
import weakref
from unittest.mock import Mock, patch

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard.wrapping import sharding

WIDTH = 9


class Odd(nn.Module):
    """Three units, and a root with a tied weight, a buffer, an LSTM and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks[1].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.blocks[0].weight
        self.recurrent = nn.LSTM(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.coarse = nn.Parameter(torch.ones(WIDTH, dtype=torch.float16))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        x, _ = self.recurrent(x + self.coarse.to(x.dtype))
        return self.head(x) * self.scale.to(x.dtype) * self.frozen


def built() -> Odd:
    torch.manual_seed(0)
    model = Odd()
    model.blocks[2].weight.note = "of the user"
    model.blocks[2].register_forward_hook(lambda module, args, output: output * 2)
    model.head.bias.register_hook(lambda grad: grad * 3)
    return model


def facts(model: nn.Module) -> list[object]:
    """What there is to be the same; values as bytes."""
    found: list[object] = []
    for name, param in model.named_parameters(remove_duplicate=False):
        values = param.detach().contiguous().view(-1).view(torch.uint8).tolist()
        about = param.requires_grad, param.dtype, param.shape, param.stride()
        alone = param.untyped_storage().nbytes() == param.nbytes
        note = getattr(param, "note", "")
        found.append((name, id(param), type(param), about, alone, note, values))
    for name, module in model.named_modules():
        hooks = list(module._forward_pre_hooks), list(module._forward_hooks)
        recurrent = len(getattr(module, "_flat_weight_refs", ()))
        found.append((name, hooks, sorted(vars(module)), recurrent))
    return found


def stepped(model: nn.Module) -> list[torch.Tensor]:
    """Whole gradients of one backward, of the same data on all ranks."""
    model(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)).square().mean().backward()
    if not hasattr(model, "_zshard_schedule"):
        return [p.grad.float() for p in model.parameters() if p.grad is not None]
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    return [zshard.full_grad(model, name).float() for name in names]


class Fault:
    """What goes wrong on this rank as the unit of the third block is sharded."""

    def __init__(self, kind: str, model: Odd) -> None:
        self.kind, self.held, self.flat = kind, [], sharding.Flat
        if kind == "a weak reference":
            self.held.append(weakref.ref(model.blocks[2].bias))
        elif kind == "one to a recurrent weight":
            self.held.append(weakref.ref(model.recurrent.weight_ih_l0))
        elif kind == "a graph":
            self.held.append(model.blocks[2].bias.square())
        elif kind == "an allocation":
            sharding.Flat = self.made

    def made(self, names: list[tuple[str, ...]], *args: object) -> object:
        if "blocks.2" in names[0][0]:
            raise RuntimeError("can't allocate memory")
        return self.flat(names, *args)

    def end(self) -> None:
        sharding.Flat = self.flat
        self.held.clear()


def undone(
    rank: int, world_size: int, comm: str, kind: str, shape: tuple[int, ...], options: dict
) -> str:
    mesh = init_device_mesh("cpu", shape)
    wanted = stepped(zshard.wrap(built(), mesh=mesh, comm=comm, **options))
    plain = stepped(built())
    model = built()
    before = facts(model)
    fault = Fault(kind if rank == world_size - 1 else "", model)
    with pytest.raises((zshard.Error, RuntimeError)) as raised:
        zshard.wrap(model, mesh=mesh, comm=comm, **options)
    said = f"{type(raised.value).__name__}: {raised.value}"
    fault.end()
    assert facts(model) == before
    assert all(map(torch.equal, stepped(model), plain)), "hooks, too"
    model.zero_grad()
    again = stepped(zshard.wrap(model, mesh=mesh, comm=comm, **options))
    assert all(map(torch.equal, again, wanted))
    return said


OPTIONS = {
    "zero3": {},
    "zero2": {"strategy": "zero2"},
    "ddp": {"strategy": "ddp"},
    "bf16": {"precision": zshard.Precision.bf16()},
    "split": {"precision": zshard.Precision.bf16(master="split")},
}


@pytest.mark.parametrize(
    ("comm", "kind", "shape", "options"),
    [
        *((comm, "a weak reference", (2,), "zero3") for comm in ("group", "peer")),
        *(("peer", "an allocation", (2,), options) for options in OPTIONS),
        *((comm, "an allocation", (2, 2), "zero3") for comm in ("group", "peer")),
        ("group", "a graph", (3,), "split"),
        ("peer", "one to a recurrent weight", (2,), "zero3"),
        ("group", "an allocation", (1,), "bf16"),
    ],
)
def test_an_error_at_a_later_unit_on_one_rank_leaves_all_models_as_they_were(
    comm: str, kind: str, shape: tuple[int, ...], options: str
) -> None:
    world_size = math.prod(shape)
    *others, own = run_ranks(undone, world_size, comm, kind, shape, OPTIONS[options], timeout=40)
    expected = {
        "an allocation": "can't allocate memory",
        "one to a recurrent weight": "recurrent.weight_ih_l0 cannot be",
    }.get(kind, "blocks.2.bias cannot be")
    assert expected in own
    for said in others:
        assert said.startswith(f"WrapError: rank {len(others)}: ")
        assert expected in said


def lost_meta(rank: int, world_size: int, init: bool) -> list[str]:
    """A model without values fails at its third block, and is wrapped again."""

    def fill(module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.copy_(torch.randn(tensor.shape))

    options = {"init_fn": fill} if init else {}
    with torch.device("meta"):
        model, other = built(), built()
    before = [(name, id(p), p.device, p.stride()) for name, p in model.named_parameters()]
    fault = Fault("an allocation" if rank == 1 else "", model)
    with pytest.raises((zshard.Error, RuntimeError)) as raised:
        zshard.wrap(model, **options)
    fault.end()
    assert [(name, id(p), p.device, p.stride()) for name, p in model.named_parameters()] == before
    assert all(buffer.is_meta for buffer in model.buffers())
    torch.manual_seed(1)
    zshard.wrap(model, **options)
    if init:
        torch.manual_seed(1)
        zshard.wrap(other, **options)
        assert all(map(torch.equal, stepped(model), stepped(other)))
    return [str(raised.value)]


@pytest.mark.parametrize("init", [False, True])
def test_a_model_without_values_has_none_after_an_error(init: bool) -> None:
    (other,), (own,) = run_ranks(lost_meta, 2, init, timeout=40)
    assert own == "can't allocate memory"
    assert other == "rank 1: RuntimeError: can't allocate memory"


def refused_buffer(rank: int, world_size: int, kind: str) -> list[bool]:
    model, mask = nn.Linear(2, 2), torch.eye(2)
    buffer = (
        mask.to_sparse()
        if kind == "sparse"
        else torch.quantize_per_tensor(mask, 1.0, 0, torch.qint8)
    )
    for persistent in (True, False):
        model.register_buffer("mask", buffer, persistent=persistent)
        if persistent:
            with pytest.raises(
                zshard.WrapError, match=rf"mask is a {kind} buffer.*persistent=False"
            ):
                zshard.wrap(model)
    values = model.mask.to_dense() if kind == "sparse" else model.mask.dequantize()
    return [zshard.wrap(model)(values).isfinite().all().item()]


@pytest.mark.parametrize("kind", ["sparse", "quantised"])
def test_a_buffer_without_plain_values_that_would_be_broadcast_is_refused_at_wrap(
    kind: str,
) -> None:
    assert run_ranks(refused_buffer, 2, kind) == [[True]] * 2


def lazy_buffer(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(zshard.WrapError, match=r"1\.running_mean is a lazy buffer.* forward"):
        zshard.wrap(model)
    with torch.no_grad():
        model(torch.eye(2))
    assert zshard.wrap(model)(torch.eye(2)).isfinite().all()


def test_a_buffer_without_a_shape_that_would_be_broadcast_is_refused_at_wrap() -> None:
    run_ranks(lazy_buffer, 2)


def sparse_on_one(rank: int, world_size: int) -> str:
    model = nn.Linear(2, 2)
    mask = torch.eye(2)
    model.register_buffer("mask", mask.to_sparse() if rank else mask)
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(model)
    return str(caught.value)


def test_a_buffer_that_is_sparse_on_some_ranks_alone_is_refused_on_all() -> None:
    for message in run_ranks(sparse_on_one, 2):
        assert "sparse buffers" in message and "mask" in message


def test_nothing_is_undone_together_with_ranks_that_cannot_be_reached() -> None:
    sharder = sharding.Sharder(built(), zshard.Precision(), Mock(), torch.device("cpu"), {})
    with patch.object(sharder, "_undo") as undo:
        for gone in (zshard.CommError("rank 1 has ended"), KeyboardInterrupt()):
            with pytest.raises(type(gone)), sharder:
                raise gone
        undo.assert_not_called()
        with pytest.raises(zshard.WrapError), sharder:
            raise zshard.WrapError("no memory")
        undo.assert_called_once_with()
