"""What changes parameters has to be alike on every rank; where it is not, all of them are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import models
import pytest
import torch
from models import Blocks
from ranks import RankFailure, run_ranks
from steps import batch, build, one_step
from torch import Tensor, nn

import zshard
from zshard.updates import Tally

kSplit = zshard.Precision(compute=torch.bfloat16, master="split")


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
    [{}, {"comm": "peer"}, {"strategy": "ddp"}, {"strategy": "zero1"}, {"precision": kSplit}],
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


def one_element(rank: int, world_size: int) -> str:
    model = build()
    one_step(model, rank, 0)
    new = values(0.0)
    new["blocks.1.up.bias"][3] += float(rank == 1)
    model.load_state_dict(new)
    with pytest.raises(zshard.MismatchError) as caught:
        one_step(model, rank, 1)
    return str(caught.value)


def test_the_parameter_that_differs_is_named() -> None:
    for message in run_ranks(one_element, 2):
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


def raises_in_context(rank: int, world_size: int, goes_on: bool) -> str:
    """Leave the context by an exception on rank 1, which ends or goes on; what a forward says."""
    model = build()
    with pytest.raises(ValueError, match="user code") if goes_on and rank == 1 else nullcontext():
        try:
            with zshard.full_params(model, write=True), torch.no_grad():
                model.inlet.bias.fill_(2.0)
                if rank == 1:
                    raise ValueError("user code")
        except zshard.MismatchError as error:
            assert not (zshard.local_shards(model)["inlet.bias"] == 2.0).any()
            return str(error)
    with pytest.raises(zshard.MismatchError) as caught:
        one_step(model, rank, 0)
    return str(caught.value)


def test_an_exception_in_one_ranks_context_is_no_write_of_the_others() -> None:
    for said in run_ranks(raises_in_context, 2, True):
        assert "rank 0: the end of full_params(write=True); rank 1: a forward" in said
    with pytest.raises(RankFailure, match=r"CommError: .*'the end of full_params\(write=True\)'"):
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


def own_gradients(rank: int, world_size: int) -> None:
    """Gradients are each rank's to set: noise, say, that is drawn anew on each."""
    model = build()
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        one_step(model, rank, step)
        for param in model.parameters():
            param.grad.copy_(torch.full(param.shape, float(rank)))
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_are_not_compared() -> None:
    run_ranks(own_gradients, 2)


@pytest.mark.parametrize("tally", [Tally(0, 0), Tally(5, 2**30 - 1), Tally(2**31 - 1, 1)])
def test_a_tally_fits_a_word(tally: Tally) -> None:
    assert 0 <= 2 * tally.as_word() + 1 < 2**63
    assert Tally.of_word(tally.as_word()) == tally
    assert Tally(7, 3).since(Tally(5, 2**30 - 1)) == Tally(2, 4)


# --- what else a step depends on -----------------------------------------------------------------

Part = Callable[[nn.Module, torch.optim.Optimizer], object]


def clip_to(max_norm: float, norm_type: float = 2.0) -> Part:
    return partial(clip, max_norm=max_norm, norm_type=norm_type)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, **options: float) -> object:
    return zshard.clip_grad_norm_(model, **options)


def clip_some(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return zshard.clip_grad_norm_([*model.parameters()][2:], 0.5)


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def drop_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def drop_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.inlet.bias.grad = None


def other_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for group in optimizer.param_groups:
        group["params"] = [p for p in params if (p.ndim == 1) == (group["weight_decay"] > 0)]


def leave_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def setting(name: str, value: object) -> Part:
    return partial(set_one, name=name, value=value)


def set_one(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, value: object) -> None:
    optimizer.param_groups[0][name] = value


kMakers = {
    "AdamW": zshard.AdamW,
    "torch SGD": partial(torch.optim.SGD, momentum=0.5),
    "torch AdamW": torch.optim.AdamW,
}

# What rank 1 does, what the others do -> the optimizer, what the error names.
kParts: dict[str, tuple[Part, Part, str, str]] = {
    "clips to another norm": (clip_to(0.25), clip_to(0.5), "AdamW", "max_norm, norm_type"),
    "clips alone": (clip_to(0.5), nothing, "AdamW", "max_norm, norm_type"),
    "clips by another p": (clip_to(0.5, 1.0), clip_to(0.25, 1.0), "torch SGD", "max_norm, norm"),
    "clips fewer": (clip_some, clip_some, "AdamW", ""),
    "drops all gradients": (drop_all, nothing, "AdamW", "have changed"),
    "drops one gradient": (drop_one, nothing, "AdamW", "which parameters have gradients in AdamW"),
    "drops one of torch's": (drop_one, nothing, "torch SGD", "which parameters have gradients"),
    "has other groups": (other_groups, nothing, "AdamW", "which parameters are in AdamW's groups"),
    "has torch's other groups": (other_groups, nothing, "torch AdamW", "are in AdamW's groups"),
    "leaves a parameter out": (leave_out, nothing, "AdamW", "which parameters are in AdamW's"),
    "maximizes": (setting("maximize", True), nothing, "torch AdamW", "the settings of AdamW's"),
    "is Nesterov's": (setting("nesterov", True), nothing, "torch SGD", "the settings of SGD's"),
}


def parts(rank: int, world_size: int, case: str, strategy: str) -> str:
    own, others, kind, _ = kParts[case]
    model = build(strategy=strategy)
    params = [*model.named_parameters()]
    optimizer = kMakers[kind](
        [
            {"params": [p for _, p in params if p.ndim == 1], "weight_decay": 0.0},
            {"params": [p for _, p in params if p.ndim != 1], "weight_decay": 0.1},
        ],
        lr=0.1,
    )
    said = ""
    try:
        for step in range(3):
            one_step(model, rank, step)
            (own if rank == 1 else others)(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    except zshard.MismatchError as error:
        said = str(error)
    return said


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("case", kParts)
def test_other_parts_of_a_step_are_an_error_on_all(case: str, strategy: str) -> None:
    own, other = run_ranks(parts, 2, case, strategy)
    if kParts[case][3]:
        assert own == other and kParts[case][3] in own
    else:
        assert own == other == "", "all ranks do the same"


def leaves_gradients(rank: int, world_size: int) -> str:
    """Drop gradients between steps on rank 0 alone; rank 1 adds to them."""
    model = build()
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(3):
            one_step(model, rank, step)
            optimizer.step()
            if rank == 0:
                optimizer.zero_grad()
    except zshard.MismatchError as error:
        return str(error)
    return ""


def test_gradients_that_some_ranks_add_to_are_an_error_on_all() -> None:
    own, other = run_ranks(leaves_gradients, 2)
    assert own == other and "which gradients a backward adds to" in own


def scaled(rank: int, world_size: int) -> str:
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    scaler = zshard.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
    try:
        for step in range(2):
            scaler.scale(models.loss_of(model, batch(rank, step))).backward()
            scaler.step(optimizer)
            scaler.update()
    except zshard.MismatchError as error:
        return str(error)
    return ""


def test_other_loss_scales_are_an_error_on_all() -> None:
    own, other = run_ranks(scaled, 2)
    assert own == other and "the scale and the settings of GradScaler" in own


# --- a torn model --------------------------------------------------------------------------------

kReads: dict[str, Callable[[nn.Module, str], object]] = {
    "state_dict": lambda model, folder: zshard.state_dict(model),
    "full_param": lambda model, folder: zshard.full_param(model, "inlet.bias"),
    "full_params": lambda model, folder: zshard.full_params(model).__enter__(),
    "save": lambda model, folder: zshard.save(f"{folder}/torn", model),
    "export": lambda model, folder: zshard.export(f"{folder}/torn", model),
}


def reads_torn(rank: int, world_size: int, read: str, strategy: str, folder: str) -> str:
    model = build(strategy=strategy)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    one_step(model, rank, 0)
    if rank == 0:
        optimizer.step()
    with pytest.raises(zshard.MismatchError) as caught:
        kReads[read](model, folder)
    assert not os.path.exists(f"{folder}/torn")
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("read", kReads)
def test_a_torn_model_is_not_read_or_saved(read: str, strategy: str, tmp_path: Path) -> None:
    for said in run_ranks(reads_torn, 2, read, strategy, str(tmp_path)):
        assert "the ranks have changed" in said and "The model is torn" in said


def mended(rank: int, world_size: int, load: str, folder: str) -> list[str]:
    """Tear the model, load, and train on; what was said."""
    model = build()
    path = f"{folder}/whole"
    (zshard.save if load == "load" else zshard.export)(path, model)
    one_step(model, rank, 0)
    if rank == 0:
        zshard.SGD(model.parameters(), lr=0.1).step()
    said = []
    for act in (
        lambda: (
            zshard.load_weights(model, path, strict=False, rename=lambda name: None)
            if load == "part"
            else zshard.load(path, model)
            if load == "load"
            else zshard.load_weights(model, path)
        ),
        lambda: one_step(model, rank, 1),
        lambda: one_step(model, rank, 2),
    ):
        try:
            act()
        except zshard.MismatchError:
            said.append("torn")
        else:
            said.append("ok")
    return said


@pytest.mark.parametrize("load", ["load", "load_weights", "part"])
def test_a_load_of_everything_mends_a_torn_model(load: str, tmp_path: Path) -> None:
    after = "torn" if load == "part" else "ok"
    assert run_ranks(mended, 2, load, str(tmp_path)) == [["ok", after, "ok"]] * 2


def renames(rank: int, world_size: int, folder: str) -> str:
    model = build()
    zshard.export(f"{folder}/whole", model)
    before = zshard.full_param(model, "inlet.bias")

    def rename(name: str) -> str | None:
        return None if (rank == 1 and name == "inlet.bias") else name

    with pytest.raises(zshard.MismatchError) as caught:
        zshard.load_weights(model, f"{folder}/whole", strict=False, rename=rename)
    assert torch.equal(before, zshard.full_param(model, "inlet.bias"))
    return str(caught.value)


def test_weights_that_ranks_name_differently_are_not_loaded(tmp_path: Path) -> None:
    for said in run_ranks(renames, 2, str(tmp_path)):
        assert "load_weights" in said and "Nothing has changed" in said
