"""Scripts that go on after an exception, with several models; one is in test_lost_gradients.py."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from models import Blocks
from ranks import RankFailure, run_ranks
from steps import batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard


def in_turn(rank: int, world_size: int, comms: tuple[str, str]) -> list[str]:
    """Two models, each with a backward of its own, one of which raises once on one rank."""
    first, second = (zshard.wrap(Blocks(), comm=comm) for comm in comms)
    optimizers = [zshard.AdamW(model.parameters()) for model in (first, second)]

    def fail(*_: object) -> None:
        raise ValueError("user code")

    ends = []
    for step in range(4):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            output = model(batch(rank, step))
            if step == 1 and model is first and rank == 0:
                output.grad_fn.register_prehook(fail)  # when backward has come into it
            try:
                output.sum().backward()
                optimizer.step()
                ends.append("made")
            except (ValueError, zshard.Error) as error:
                ends.append(type(error).__name__)
            optimizer.zero_grad()
    return ends


@pytest.mark.parametrize("comms", [("group", "group"), ("peer", "peer"), ("group", "peer")])
def test_an_exception_in_one_models_backward_leaves_the_other_in_step(
    comms: tuple[str, str],
) -> None:
    """What is left of the first model's backward comes before anything of the second's."""
    own, other = run_ranks(in_turn, 2, comms, timeout=20)
    assert own == ["made"] * 2 + ["ValueError"] + ["made"] * 5
    assert other == ["made"] * 2 + ["StateError"] + ["made"] * 5


def reads_after(rank: int, world_size: int, where: str, comm: str) -> list[str]:
    """A loop that reads after each step, whatever came of it; once, rank 0's step raises."""
    torch.manual_seed(0)
    model = zshard.wrap(Blocks(), comm=comm)
    optimizer = zshard.AdamW(model.parameters())
    ends = []
    for step in range(5):
        raises = step == 2 and rank == 0
        try:
            x = batch(rank, step)
            loss = model(x[:, :2] if raises and where == "forward" else x).square().mean()
            if raises:
                raise ValueError("user code")
            loss.backward()
            optimizer.step()
            ends.append("made")
        except Exception as error:
            ends.append(type(error).__name__)
            zshard.reset(model)
        optimizer.zero_grad()
        zshard.full_param(model, "inlet.bias")
    return ends


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("where", ["forward", "loss"])
def test_a_read_after_an_exception_on_one_rank_finds_the_others(where: str, comm: str) -> None:
    own, other = run_ranks(reads_after, 2, where, comm, timeout=20)
    raised = "RuntimeError" if where == "forward" else "ValueError"
    assert own == ["made", "made", raised, "made", "made"]
    assert other == ["made", "made", "MismatchError", "made", "made"]


def loop_over_two(
    rank: int, world_size: int, where: str, at: int, comm: str
) -> tuple[list[str], list[Tensor]]:
    """A loop that goes on after any exception; once, rank 1's raises, or all leave it out."""
    torch.manual_seed(0)
    first, second = Blocks(), nn.Sequential(nn.Linear(1, 3), Blocks())
    zshard.wrap(first, comm=comm)
    zshard.wrap(second, comm=comm, strategy="zero1")
    optimizers = [zshard.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]

    def fail(*_: object) -> None:
        raise ValueError("user code")

    seen = []
    for step in range(7) if where else [each for each in range(7) if each != at]:
        bad = rank == 1 and step == at
        module = second[1].blocks[1] if where == "second" else first.blocks[1]
        hook = module.register_forward_pre_hook(fail) if bad and where != "loss" else None
        try:
            output = second(first(batch(rank, step)))
            if bad:
                fail()
            output.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            seen.append("")
        except (ValueError, zshard.Error) as error:
            seen.append(type(error).__name__)
            if where == "loss":
                zshard.reset(first)
                zshard.reset(second)
        finally:
            if hook is not None:
                hook.remove()
        for optimizer in optimizers:
            optimizer.zero_grad()
    named = [(model, name) for model in (first, second) for name, _ in model.named_parameters()]
    return seen, [zshard.full_param(model, name) for model, name in named]


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize(("where", "at"), [("first", 3), ("second", 3), ("loss", 3), ("first", 0)])
def test_an_exception_before_a_backward_through_two_costs_every_rank_one_step(
    where: str, at: int, comm: str
) -> None:
    (told, ours), (own, _) = run_ranks(loop_over_two, 2, where, at, comm, timeout=20)
    (_, without), _ = run_ranks(loop_over_two, 2, "", at, comm, timeout=20)
    assert own == ["ValueError" if step == at else "" for step in range(7)]
    assert told == ["MismatchError" if step == at else "" for step in range(7)]
    assert all(map(torch.equal, ours, without))


def crossed_after_exceptions(rank: int, world_size: int) -> str:
    pair = [zshard.wrap(Blocks()) for _ in range(2)]
    with pytest.raises(RuntimeError, match="shapes"):
        pair[0](torch.ones(4, 99))
    with pytest.raises(zshard.MismatchError) as caught:
        pair[rank](batch(rank, 0))
    for model in pair:
        model(batch(rank, 1)).sum().backward()
    return str(caught.value)


def test_ranks_that_all_left_a_forward_and_call_different_models_are_all_told() -> None:
    for message in run_ranks(crossed_after_exceptions, 2, timeout=20):
        assert "of wrapped model 0; rank 1: a forward, of wrapped model 1" in message


class Failing(nn.Module):
    """A unit that raises what it is told to, once it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return y


def interrupted(strategy: str, error: BaseException, *, alone: bool) -> nn.Module:
    """Two units; the second was left by ``error``, called ``alone`` or by the root."""
    torch.manual_seed(0)
    model = zshard.wrap(nn.Sequential(Failing(), Failing()), strategy=strategy)
    model[1].error = error
    with pytest.raises(type(error)):
        (model[1] if alone else model)(torch.ones(2, 4))
    return model


def trained_after(rank: int, world_size: int, strategy: str, freeze: bool) -> list[Tensor]:
    """Steps after a unit called alone has raised, with an optimizer made since."""
    model = interrupted(strategy, ValueError("user code"), alone=True)
    if freeze:
        model[1].requires_grad_(False)
        model.requires_grad_(True)
    before = zshard.state_dict(model)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [after - before[name] for name, after in zshard.state_dict(model).items()]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_an_exception_in_a_unit_called_alone_leaves_the_sharded_parameters(
    strategy: str, freeze: bool
) -> None:
    for changes in run_ranks(trained_after, 2, strategy, freeze):
        assert all(change.abs().max() > 0.1 for change in changes)


def test_a_unit_called_while_an_exception_is_handled_is_no_exception_itself() -> None:
    torch.manual_seed(0)
    model = zshard.wrap(nn.Sequential(Failing(), Failing()))
    plain = nn.Sequential(Failing(), Failing())
    plain.load_state_dict(zshard.state_dict(model))

    def loss(model: nn.Module) -> Tensor:
        try:
            raise ValueError("user code")
        except ValueError:
            return model[1](model[0](torch.ones(2, 4))).sum()

    loss(model).backward()
    loss(plain).backward()
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_after_ctrl_c_in_a_forward_errors_say_what_to_do(strategy: str) -> None:
    model = interrupted(strategy, KeyboardInterrupt(), alone=False)  # torch runs no hooks then
    with pytest.raises(zshard.OptimizerError, match=r"call zshard\.reset\(model\) first"):
        zshard.AdamW(model.parameters())
    other, first = zshard.AdamW([nn.Parameter(torch.ones(2))]), r"call zshard\.reset\(model\) first"
    with pytest.raises(zshard.OptimizerError, match=first):
        other.add_param_group({"params": list(model.parameters())})
    assert len(other.param_groups) == 1
    with pytest.raises(zshard.StateError, match=r"call zshard\.reset\(model\) first"):
        zshard.state_dict(model)
    with pytest.raises(zshard.StateError, match=r"call zshard\.reset\(model\) first"):
        model[1].requires_grad_(False)  # of the whole parameters that it holds
    zshard.reset(model)
    model.requires_grad_(True)
    zshard.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    assert zshard.full_grad(model, "1.inner.weight").abs().max() > 0


def leaves_a_meeting(rank: int, world_size: int) -> None:
    """Rank 0's script goes on after an exception out of the meeting before its second forward."""
    model = zshard.wrap(Blocks(), comm="group")
    model(batch(rank, 0)).sum().backward()

    def ring(*_: object) -> None:
        raise TimeoutError("user code")

    if rank == 0:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(TimeoutError):
            model(batch(rank, 1))
        zshard.reset(model)
    else:
        time.sleep(2)
    model(batch(rank, 1))


def test_a_rank_that_has_left_a_meeting_over_the_group_takes_part_in_nothing_more() -> None:
    """Else its next meeting would be another rank's gather: gloo ends the process, or garbage."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(leaves_a_meeting, 2, timeout=20, grace=10)
    assert "rank 0 of 2" in str(caught.value)
    meeting = "agree of unit 'root' (the meeting for a forward) in step 1"
    assert f"TimeoutError was raised in it during {meeting}" in str(caught.value)
    assert "start the processes anew" in str(caught.value)
    assert "SIGABRT" not in str(caught.value)


def test_what_was_replaced_may_be_put_back() -> None:
    """The first place was as it should be, and stays so where a later one is refused."""
    model = zshard.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units="model")
    kept, model[1].weight = model[1].weight, nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(zshard.StateError, match="replaced after"):
        model(torch.ones(2, 4))
    model[1].weight = kept
    model(torch.ones(2, 4)).sum().backward()
    zshard.state_dict(model)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_steps_inside_one_autocast_context_are_as_without_its_cache(strategy: str) -> None:
    sums = []
    for cached in (False, True):
        torch.manual_seed(0)
        model = zshard.wrap(Blocks(), strategy=strategy)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            for step in range(3):
                model(batch(0, step)).float().sum().backward()
        sums.append([zshard.full_grad(model, name) for name, _ in model.named_parameters()])
    assert all(map(torch.equal, *sums))


def test_aliases_may_be_taken_in_inference_mode() -> None:
    model = zshard.wrap(nn.Linear(4, 4))
    with torch.inference_mode():
        kept = [param.detach().clone() for param in model.parameters()]
        assert model.weight.data.shape == (4, 4)
        assert set(model.state_dict()) == {"weight", "bias"}
    for now, then in zip(model.parameters(), kept, strict=True):
        assert torch.equal(now.local, then.local)
    model(torch.ones(2, 4)).sum().backward()


class Recomputed(nn.Module):
    """Three blocks, of which two are recomputed as one, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.split = 0  # where what is recomputed as one ends

    def forward(self, x: Tensor) -> Tensor:
        for begin, end in ((0, self.split), (self.split, 3)):
            if begin < end:
                part = nn.Sequential(*self.blocks[begin:end])
                x = checkpoint(part, x, use_reentrant=False) if self.split else part(x)
        return x


def two_backwards(rank: int, world_size: int, comm: str) -> tuple[list[str], Tensor]:
    """Two backwards of one forward, whose first takes another way than before on rank 1 alone."""
    torch.manual_seed(0)
    model = zshard.wrap(Recomputed(), comm=comm, units="layer", prefetch=0)
    optimizer = zshard.SGD(model.parameters(), 0.1)
    ends = []
    for step in range(4):
        model.split = 2 if step < 2 else (0, 1)[rank]
        for _ in range(3):
            try:
                y = model(torch.ones(2, 6))
                y[:, :3].sum().backward(retain_graph=True)
                y[:, 3:].square().sum().backward()
                optimizer.step()
                ends.append("made")
            except zshard.Error as error:
                ends.append(type(error).__name__)
            optimizer.zero_grad()
            if ends[-1] == "made":
                break
    return ends, zshard.full_param(model, "blocks.0.weight")


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_stay_in_step_where_the_first_of_two_backwards_is_refused(comm: str) -> None:
    (own, found), (other, _) = run_ranks(two_backwards, 2, comm, timeout=20)
    assert own == other and own.count("made") == 4 and "StateError" in own
    assert torch.equal(found, two_backwards(0, 1, comm)[1])
