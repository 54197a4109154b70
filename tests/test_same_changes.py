"""What changes parameters has to be alike on every rank; where it is not, all of them are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from models import Blocks
from ranks import RankFailure, run_ranks
from steps import build, one_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard.step.updates import Tally

SPLIT = zshard.Precision(compute=torch.bfloat16, master="split")


def values(shift: float) -> dict[str, Tensor]:
    """Return values for all of the model, whole."""
    torch.manual_seed(1)
    return {name: p.detach() + shift for name, p in Blocks().named_parameters()}


def load(model: nn.Module, new: dict[str, Tensor]) -> None:
    model.load_state_dict(new)


def copy(model: nn.Module, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(new[name])


def assign_data(model: nn.Module, new: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data = new[name]


def copy_data(model: nn.Module, new: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(new[name])


Write = Callable[[nn.Module, dict[str, Tensor]], None]


def written(
    rank: int, world_size: int, write: Write, shift: float, options: dict[str, object]
) -> list[str]:
    """Give rank 1 values that are ``shift`` away from the others', and train before and after."""
    model = build(**options)
    optimizer = zshard.AdamW(model.parameters())
    said = []
    for step in range(4):
        try:
            one_step(model, rank, step)
            optimizer.step()
        except zshard.MismatchError as error:
            said.append(str(error))
            write(model, values(0.0))  # which mends it
        optimizer.zero_grad()
        if step == 1:
            write(model, values(shift if rank == 1 else 0.0))
    return said


@pytest.mark.parametrize("write", [load, copy, assign_data, copy_data])
@pytest.mark.parametrize(
    "options",
    [{}, {"comm": "peer"}, {"strategy": "ddp"}, {"strategy": "zero1"}, {"precision": SPLIT}],
    ids=["zero3", "peer", "ddp", "zero1", "split"],
)
def test_other_values_on_one_rank_are_an_error_on_all(
    write: Write, options: dict[str, object]
) -> None:
    said = run_ranks(written, 3, write, 0.25, options)
    assert said[0] == said[1] == said[2]
    (message,) = said[0]
    assert "changed the parameters differently: the values of inlet.weight" in message
    assert run_ranks(written, 2, write, 0.0, options) == [[], []]


def averaged(rank: int, world_size: int, options: dict[str, object]) -> str:
    """Average three loads, of which rank 1 has another second one; what the next forward says."""
    model, average = build(**options), build(**options)
    for index in range(3):
        load(model, values(index + 0.5 * (rank == index == 1)))
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 1 / (index + 1))
    with pytest.raises(zshard.MismatchError) as caught:
        one_step(model, rank, 0)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_load_hides_no_other_one_before_it(strategy: str) -> None:
    for message in run_ranks(averaged, 2, {"strategy": strategy}):
        assert "by a value that has been replaced since" in message


def one_element(rank: int, world_size: int, reads: bool) -> str:
    model = build()
    one_step(model, rank, 0)
    new = values(0.0)
    new["blocks.1.up.bias"][3] += float(rank == 1)
    model.load_state_dict(new)
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.state_dict(model) if reads else one_step(model, rank, 1)
    return str(caught.value)


@pytest.mark.parametrize("reads", [False, True])
def test_the_parameter_that_differs_is_named_by_the_next_step_or_read(reads: bool) -> None:
    for message in run_ranks(one_element, 2, reads):
        assert "the values of blocks.1.up.bias" in message


def in_context(rank: int, world_size: int, comm: str, at_rank: int) -> list[Tensor]:
    model = build(comm=comm)
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, rank, 0)
    before = zshard.state_dict(model)
    with (
        pytest.raises(zshard.MismatchError, match=r"blocks\.1\.up\.bias.*nothing.*is taken"),
        zshard.full_params(model, write=True),
        torch.no_grad(),
    ):
        model.blocks[0].up.bias.fill_(2.0)
        if rank == at_rank:
            model.blocks[1].up.bias.fill_(3.0)
    after = zshard.state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimizer.step()
    with zshard.full_params(model, write=True), torch.no_grad():
        model.blocks[1].up.bias.fill_(3.0)
    one_step(model, rank, 1)
    return [zshard.full_param(model, "blocks.1.up.bias")]


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("at_rank", [0, 2])
def test_other_values_in_a_context_are_not_taken(comm: str, at_rank: int) -> None:
    for (value,) in run_ranks(in_context, 3, comm, at_rank):
        assert (value == 3.0).all()


def enters_unlike_others(rank: int, world_size: int) -> str:
    model = build()
    with (
        pytest.raises(zshard.MismatchError) as caught,
        zshard.full_params(model, write=rank == 0),
    ):
        raise AssertionError("inside")
    one_step(model, rank, 0)
    return str(caught.value)


def test_a_context_in_which_only_some_ranks_write_is_refused_as_they_enter() -> None:
    for said in run_ranks(enters_unlike_others, 2):
        assert "0: full_params(write=True); rank 1: full_params(write=False)" in said


def raises_in_context(rank: int, world_size: int, goes_on: bool) -> str:
    """Leave the context by an exception on rank 1, which ends or goes on; what others hear."""
    model, said = build(), ""
    with pytest.raises(ValueError, match="user code") if goes_on and rank == 1 else nullcontext():
        try:
            with zshard.full_params(model, write=True), torch.no_grad():
                model.inlet.bias.fill_(2.0)
                if rank == 1:
                    raise ValueError("user code")
        except zshard.MismatchError as error:
            said = str(error)
    assert not (zshard.local_shards(model)["inlet.bias"] == 2.0).any()
    one_step(model, rank, 0)
    return said


def test_an_exception_in_one_ranks_context_is_no_write_of_the_others() -> None:
    said, own = run_ranks(raises_in_context, 2, True)
    assert "rank 0: the end of full_params(write=True); rank 1: the end of full_params(" in said
    assert own == ""
    with pytest.raises(RankFailure, match=r"CommError: .*for the end of full_params\(write=True\)"):
        run_ranks(raises_in_context, 2, False, grace=20)


def other_rates(rank: int, world_size: int, kind: str, rate: object, same: bool) -> list[str]:
    """Halve the learning rate on rank 0, or on all, as schedulers do that look at a loss."""
    model = build()
    optimizers = {"torch": torch.optim.AdamW, "AdamW": zshard.AdamW, "Adam": zshard.Adam}
    made = optimizers.get(kind, zshard.SGD)(model.parameters(), lr=rate)
    said = []
    for step in range(4):
        try:
            one_step(model, rank, step)
        except zshard.MismatchError as error:
            said.append(str(error))
            break
        if step == 1 and (same or rank == 0):
            made.param_groups[0]["lr"] = made.param_groups[0]["lr"] * 0.5
        made.step()
        made.zero_grad()
    return said


@pytest.mark.parametrize(
    ("kind", "rate", "what"),
    [
        *((kind, 0.25, f"the settings of {kind}'s groups") for kind in ("AdamW", "Adam", "SGD")),
        ("torch", 0.25, "the settings of AdamW's groups"),
        ("torch", torch.tensor(0.25), "the settings of AdamW's groups"),
    ],
)
def test_other_learning_rates_are_an_error_on_all(kind: str, rate: object, what: str) -> None:
    own, other = run_ranks(other_rates, 2, kind, rate, False)
    assert own == other and len(own) == 1
    first, second = own[0].split(" on rank 0; ")
    assert f"{what}: [" in first and "0.125" in first and "0.25" in second
    assert run_ranks(other_rates, 2, kind, rate, True) == [[], []]


def other_states(rank: int, world_size: int, state: str, shift: float) -> list[str]:
    """Go on from a plain optimizer's state_dict, of which rank 1 has another; a loss is kept."""
    plain = Blocks()
    theirs = torch.optim.AdamW(plain.parameters())
    one_step(plain, 0, 0)
    theirs.step()
    found = theirs.state_dict()
    found["state"][0]["loss"] = torch.tensor(float(rank))  # the script's, of no update
    if rank == 1:
        found["state"][0][state] += shift
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    optimizer.load_state_dict(found)
    said = []
    for step in range(2):
        try:
            one_step(model, rank, step)
            optimizer.step()
        except zshard.MismatchError as error:
            said.append(str(error))
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize("state", ["exp_avg", "step"])
def test_other_states_for_an_optimizer_are_an_error_on_all(state: str) -> None:
    own, other = run_ranks(other_states, 2, state, 1.0)
    assert own == other and len(own) == 1
    assert f"{state} of inlet.weight, loaded into AdamW, (by checksum)" in own[0]
    assert run_ranks(other_states, 2, state, 0.0) == [[], []]


def clips_parts(rank: int, world_size: int, names: list[str], norm_type: float) -> list[str]:
    """Each rank clips the parameter that it is given, which is one on every rank."""
    model = build()
    said = []
    for step in range(2):
        try:
            one_step(model, rank, step)
            if step == 0:
                params = [model.get_parameter(names[rank])]
                zshard.clip_grad_norm_(params, 0.001, norm_type)
        except zshard.MismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_other_parameters_is_an_error_on_all(norm_type: float) -> None:
    names = ["inlet.weight", "outlet.weight"]
    own, other = run_ranks(clips_parts, 2, names, norm_type)
    assert own == other and len(own) == 1
    assert "the parameters clipped" in own[0]
    assert all(f"1 from {name} on" in own[0] for name in names)
    assert run_ranks(clips_parts, 2, names[:1] * 2, norm_type) == [[], []]


def own_gradients(rank: int, world_size: int, strategy: str) -> None:
    """Slices of gradients are each rank's to set: noise, say, that is drawn anew on each."""
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names) if strategy == "hsdp" else None
    model = build(strategy="zero3" if mesh else strategy, mesh=mesh)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        one_step(model, rank, step)
        for param in model.parameters():
            param.grad.copy_(torch.full(param.shape, float(rank)))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1"])
def test_gradients_of_which_each_rank_keeps_a_slice_are_not_compared(strategy: str) -> None:
    run_ranks(own_gradients, 2, strategy)


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_gradients_that_several_ranks_keep_are_compared(strategy: str) -> None:
    with pytest.raises(RankFailure, match=r"the gradient of inlet\.weight \(by checksum\)"):
        run_ranks(own_gradients, 2, strategy)


def test_a_tally_counts_from_an_earlier_one() -> None:
    assert Tally(7, 3).since(Tally(5, 2**30 - 1)) == Tally(2, 4)


def read_a_gradient(rank: int, world_size: int, held: bool) -> list[str]:
    """What two reads say, of which rank 0 has dropped the gradient, or never had one to hold."""
    model = build()
    with zshard.no_sync(model) if held else nullcontext():
        one_step(model, rank, 0)
    if rank == 0:
        model.zero_grad()
    said = []
    for _ in range(2):
        try:
            said.append(str(zshard.full_grad(model, "outlet.weight")))
        except zshard.Error as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(
    ("held", "refusal"),
    [
        (False, "MismatchError: .*ranks \\[0\\] have dropped"),
        (True, "StateError: .* on ranks \\[1\\]"),
    ],
)
def test_a_gradient_that_some_ranks_have_dropped_is_refused_on_all(
    held: bool, refusal: str
) -> None:
    for said in run_ranks(read_a_gradient, 2, held):
        assert all(re.match(refusal, each) for each in said)
