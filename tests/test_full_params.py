"""zshard.full_params(write=True): what was written is taken, and nothing else changes."""

from __future__ import annotations

import os
from collections.abc import Callable

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard.step import debts
from zshard.wrap import schedule_of

PRECISIONS = {
    "own": None,
    "bf16": zshard.Precision.bf16(),
    "split": zshard.Precision(compute=torch.bfloat16, master="split"),
}


class Scaled(nn.Linear):
    """A layer that reads an attribute of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.factor


def trained(
    dtype: torch.dtype, strategy: str = "zero3", precision: str = "own", comm: str = "auto"
) -> nn.Module:
    """A model whose fp32 masters have more bits than its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), Scaled(7, 5)).to(dtype)
    model[1].weight.factor = 2.0
    zshard.wrap(model, strategy=strategy, precision=PRECISIONS[precision], comm=comm)
    opt = zshard.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        model(torch.ones(2, 5, dtype=dtype)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model


def masters(model: nn.Module) -> dict[str, Tensor]:
    """This rank's slices of the masters, in fp32."""
    found = {}
    for param in model.parameters():
        found[param.fqn] = param.flat.master.read(*param.flat.local(param.segment).at).clone()
    return found


def write_some(
    rank: int, world_size: int, dtype: torch.dtype, strategy: str, precision: str
) -> None:
    model = trained(dtype, strategy, precision)
    before = masters(model)
    if dtype != torch.float32:
        assert any((each != each.to(dtype)).any() for each in before.values())
    with zshard.full_params(model, write=True):
        pass
    after = masters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with zshard.full_params(model, write=True), torch.no_grad():
        model[0].bias.fill_(0.5)
        model[1].weight[2, 3] = float("nan")
        model[1].bias = nn.Parameter(torch.full((5,), 0.25, dtype=dtype))
    after = masters(model)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert (after["0.bias"] == 0.5).all() and (after["1.bias"] == 0.25).all()
    differs = after["1.weight"] != before["1.weight"]
    whole = zshard.full_param(model, "1.weight")
    assert whole.isnan().nonzero().tolist() == [[2, 3]]
    assert torch.equal(differs, after["1.weight"].isnan())
    for name in ("0.bias", "1.bias"):
        assert zshard.full_param(model, name).unique().numel() == 1
    with zshard.full_params(model, write=True):
        pass
    again = masters(model)
    assert all(
        torch.equal(a.view(torch.int32), again[n].view(torch.int32)) for n, a in after.items()
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "strategy", "precision"),
    [
        (torch.bfloat16, "zero3", "own"),
        (torch.float16, "zero3", "own"),
        (torch.bfloat16, "zero3", "split"),
        (torch.bfloat16, "ddp", "own"),
        (torch.float32, "zero3", "own"),
        (torch.float32, "zero2", "bf16"),
        (torch.float32, "zero3", "split"),
    ],
)
def test_what_is_not_written_keeps_every_bit_of_its_master(
    world_size: int, dtype: torch.dtype, strategy: str, precision: str
) -> None:
    run_ranks(write_some, world_size, dtype, strategy, precision)


def by_optimizer(model: nn.Module) -> None:
    model(torch.ones(2, 5)).square().mean().backward()
    opt = zshard.AdamW(model.parameters(), lr=0.1)
    with zshard.full_params(model, write=True):
        opt.step()


def by_shards(model: nn.Module) -> None:
    with zshard.full_params(model, write=True):
        for shard in zshard.local_shards(model).values():
            shard.add_(1.0)
        zshard.mark_updated(model)


@pytest.mark.parametrize("change", [by_optimizer, by_shards])
def test_a_change_of_shards_inside_is_refused_and_kept(change: Callable[[nn.Module], None]) -> None:
    model = trained(torch.float32)
    before = zshard.full_param(model, "0.weight")
    with pytest.raises(zshard.StateError, match="one after the other"):
        change(model)
    assert (zshard.full_param(model, "0.weight") - before).abs().min() > 0.01
    model(torch.ones(2, 5))


def test_one_inside_another_is_refused_and_the_outer_one_goes_on() -> None:
    model = trained(torch.float32)
    with zshard.full_params(model, write=True):
        with (
            pytest.raises(zshard.StateError, match="inside another full_params"),
            zshard.full_params(model),
        ):
            pass
        with pytest.raises(zshard.StateError, match="is whole as it is"):
            zshard.state_dict(model)
        nn.init.ones_(model[0].weight)
    assert zshard.full_param(model, "0.weight").eq(1).all()


def test_where_one_parameter_has_another_shape_none_is_taken() -> None:
    model = trained(torch.float32)
    before = zshard.state_dict(model)
    with (
        pytest.raises(zshard.InputError, match="bias: cannot copy a tensor of shape"),
        zshard.full_params(model, write=True),
    ):
        nn.init.ones_(model[0].weight).requires_grad_(False)
        model[-1].bias = nn.Parameter(torch.ones(99))
    assert model[0].weight.requires_grad
    assert all(map(torch.equal, zshard.state_dict(model).values(), before.values()))
    model(torch.ones(2, 5))


def left_without_values(rank: int, world_size: int) -> bool:
    """Whether nothing is taken, and training goes on."""
    model = trained(torch.float32)
    before = zshard.state_dict(model, all_ranks=True)
    for value in (torch.ones(99, device="meta"), torch.ones(99).to_sparse()):
        with (
            pytest.raises(zshard.InputError, match=r"bias: .* left with a tensor o"),
            zshard.full_params(model, write=True),
        ):
            nn.init.ones_(model[0].weight).requires_grad_(False)
            model[-1].bias = nn.Parameter(value)
    model(torch.ones(2, 5)).sum().backward()
    after = zshard.state_dict(model, all_ranks=True)
    return model[0].weight.requires_grad and all(map(torch.equal, after.values(), before.values()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_where_one_parameter_is_left_without_values_none_is_taken(world_size: int) -> None:
    assert run_ranks(left_without_values, world_size) == [True] * world_size


def test_without_writing_a_step_inside_counts() -> None:
    model = trained(torch.float32)
    model(torch.ones(2, 5)).square().mean().backward()
    before = zshard.full_param(model, "0.weight")
    opt = zshard.AdamW(model.parameters(), lr=0.1)
    with zshard.full_params(model):
        opt.step()
    assert not torch.equal(zshard.full_param(model, "0.weight"), before)


def test_attributes_of_parameters_are_there_inside() -> None:
    model = trained(torch.float32)
    x = torch.ones(2, 5)
    expected = model(x)
    with zshard.full_params(model), torch.no_grad():
        assert torch.equal(model(x), expected)
        assert model[1].weight.factor == 2.0


def goes_on(
    rank: int, world_size: int, comm: str, raising: tuple[int, ...], then: str
) -> tuple[str, list[Tensor]]:
    """What an exception inside has ended in on this rank, and the parameters a step later."""
    model = trained(torch.float32, comm=comm)
    mesh = init_device_mesh("cpu", (world_size, 1)) if then == "another mesh" else None
    other = zshard.wrap(nn.Linear(5, 2), init="broadcast", comm=comm, mesh=mesh)
    opt = zshard.SGD(model.parameters(), lr=0.1)
    try:
        with zshard.full_params(model, write=True), torch.no_grad():
            model[0].bias.fill_(0.5)
            if rank in raising:
                raise KeyError("user code")
        said = ""
    except (KeyError, zshard.MismatchError) as error:
        said = str(error)
    if then == "reset":
        zshard.reset(model)
    elif then == "read":
        zshard.full_param(model, "0.bias")
    elif then.startswith("another"):
        other(torch.ones(2, 5)).sum().backward()
    elif then == "wrap":
        zshard.wrap(nn.Linear(5, 2), init="broadcast", comm=comm)
    model(torch.full((2, 5), 1.0 + rank)).square().mean().backward()
    opt.step()
    return said, [zshard.full_param(model, name) for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("comm", "then"),
    [
        ("group", "step"),
        ("group", "another model"),
        ("group", "wrap"),
        ("peer", "step"),
        ("peer", "another mesh"),
        ("peer", "reset"),
        ("peer", "read"),
    ],
)
@pytest.mark.parametrize("raising", [(1,), (0, 2), (0, 1, 2)])
def test_after_an_exception_inside_on_some_ranks_all_go_on_together(
    raising: tuple[int, ...], comm: str, then: str
) -> None:
    found = run_ranks(goes_on, 3, comm, raising, then, timeout=30)
    for rank, (said, _) in enumerate(found):
        if rank in raising:
            assert said == "'user code'"
        else:
            assert f"rank {raising[0]}: the end of full_params(write=True), after an exc" in said
    for params in zip(*(params for _, params in found), strict=True):
        assert all(torch.equal(param, params[0]) for param in params)
    assert (found[0][1][1] < 0.4).any(), "nothing of what was written is taken"


def gives_up_with_a_debt(rank: int, world_size: int) -> tuple[str, list[Tensor]]:
    """Rank 1 leaves the context by an exception, and all collectives before its next call."""
    model = trained(torch.float32, comm="peer")
    said = ""
    try:
        with zshard.full_params(model, write=True):
            if rank == 1:
                raise KeyError("user code")
    except KeyError:
        schedule_of(model).comm.give_up(KeyError, "the test")
    except zshard.CommError as error:
        said = str(error)
    zshard.reset(model)
    model(torch.ones(2, 5)).square().mean().backward()
    return said, [zshard.full_grad(model, name) for name, _ in model.named_parameters()]


def test_after_all_ranks_began_anew_no_meeting_is_owed() -> None:
    (said, grads), (own, others) = run_ranks(gives_up_with_a_debt, 2, timeout=30)
    assert "KeyError was raised in it during the test" in said and own == ""
    assert all(torch.equal(*pair) for pair in zip(grads, others, strict=True))


def owing(rank: int, world_size: int) -> list[int]:
    """How many meetings a forked child owes, and its parent."""
    model = trained(torch.float32)
    debts.owe(schedule_of(model).agreement, schedule_of(model).comm, "the end of something")
    if (child := os.fork()) == 0:
        os._exit(len(debts._OWED))
    _, status = os.waitpid(child, 0)
    return [os.waitstatus_to_exitcode(status), len(debts._OWED)]


def test_a_forked_child_owes_nothing() -> None:
    assert run_ranks(owing, 1, group=False) == [[0, 1]]


def traced(rank: int, world_size: int, comm: str) -> None:
    model = zshard.wrap(models.Blocks(), comm=comm)
    x = models.batches("blocks", 1, 0)[0]
    expected = model(x).detach()
    with pytest.raises(zshard.StateError, match=r"inside zshard\.full_params"):
        torch.jit.trace(model, (x,))
    with zshard.full_params(model), torch.no_grad():
        whole = torch.jit.trace(model, (x,))
        exported = torch.export.export(model, (x,), strict=False).module()
        assert torch.equal(whole(x), expected)
        assert torch.equal(exported(x), expected)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_model_is_traced_and_exported_with_whole_parameters_alone(comm: str) -> None:
    run_ranks(traced, 2, comm)


def replaced(rank: int, world_size: int, call: str) -> None:
    """What rank 1 has put in a parameter's place is not thrown out of it."""
    model = trained(torch.float32)
    begin = {
        "full_params": lambda: zshard.full_params(model, write=True).__enter__(),
        "state_dict": lambda: zshard.state_dict(model),
    }
    if rank == 0:
        with pytest.raises(zshard.MismatchError, match="full_param"):
            begin[call]()
    else:
        kept, new = model[0].bias, nn.Parameter(torch.zeros(model[0].bias.shape))
        model[0].bias = new
        with pytest.raises(zshard.StateError, match=r"0\.bias .* was replaced after"):
            begin[call]()
        assert model[0].bias is new
        model[0].bias = kept
        with pytest.raises(zshard.MismatchError, match=call):
            zshard.full_param(model, "0.bias")
    with zshard.full_params(model):
        assert len(model[0].bias) > 0


@pytest.mark.parametrize("call", ["full_params", "state_dict"])
def test_a_parameter_that_a_rank_has_replaced_is_refused_before_the_ranks_meet(call: str) -> None:
    run_ranks(replaced, 2, call, timeout=30)


def test_a_whole_tensor_is_no_view_of_another() -> None:
    model = trained(torch.float32)
    with torch.no_grad():
        whole = zshard.full_param(model, "0.weight")
    whole.detach_().mul_(torch.ones((), requires_grad=True)).sum().backward()
