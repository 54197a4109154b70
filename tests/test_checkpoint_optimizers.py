"""What of an optimizer a checkpoint gives back, and to which other optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import build, plain, train
from ranks import run_ranks
from torch import nn

import zshard


def test_optimizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, optimizer = plain()
    train(model, optimizer, 0, range(1))
    zshard.save(tmp_path / "bare", model)
    zshard.save(tmp_path / "a", model, optimizer)
    with pytest.raises(zshard.CheckpointError, match="the optimizer's states: missing"):
        zshard.load(tmp_path / "bare", model, optimizer)
    with pytest.raises(
        zshard.CheckpointError, match=r"loaded:\n.*AdamW was saved, and it is SGD now"
    ):
        zshard.load(tmp_path / "a", model, zshard.SGD(model.parameters()))
    params = list(model.parameters())
    halves = zshard.AdamW([{"params": params[:5]}, {"params": params[5:]}])
    assert zshard.load(tmp_path / "a", model, halves) == zshard.Loaded()
    zshard.save(tmp_path / "b", model, halves)
    with pytest.raises(zshard.CheckpointError, match=r"its parameters were in groups \[0, 1\]"):
        zshard.load(tmp_path / "b", model, optimizer)


def test_an_optimizer_that_a_failed_load_has_torn_is_loaded_too_or_deleted(tmp_path: Path) -> None:
    model, optimizer = plain()
    train(model, optimizer, 0, range(1))
    zshard.save(tmp_path / "a", model, optimizer)
    zshard.save(tmp_path / "b", model, optimizer)
    file = tmp_path / "b/optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for attempt in range(2):
        with pytest.raises(zshard.CheckpointError, match="are damaged"):
            zshard.load(tmp_path / "b", model, optimizer)
        for alone in (zshard.load, lambda path, model: zshard.load_weights(model, path)):
            with pytest.raises(zshard.StateError, match="states of the AdamW"):
                alone(tmp_path / "a", model)
            with pytest.raises(zshard.StateError, match="failed halfway"):
                model(torch.randn(4, 3))
        if attempt == 0:
            zshard.load(tmp_path / "a", model, optimizer)
            zshard.load(tmp_path / "a", model)  # as ever
    optimizer.itself = optimizer  # as in the cycles that schedulers and tracebacks make
    del optimizer
    zshard.load(tmp_path / "a", model)
    train(model, zshard.AdamW(model.parameters()), 0, range(1))


@pytest.mark.parametrize("kernels", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_torchs_adamw_goes_on_from_zshards(kernels: dict[str, bool], tmp_path: Path) -> None:
    model, optimizer = plain()
    train(model, optimizer, 0, range(2))
    zshard.save(tmp_path / "a", model, optimizer)
    other, _ = plain(1)
    theirs = torch.optim.AdamW(other.parameters(), lr=1.0, **kernels)
    zshard.load(tmp_path / "a", other, theirs)
    assert theirs.param_groups[0]["lr"] == 1e-3 and not theirs.param_groups[0]["amsgrad"]
    for mine, own in zip(model.parameters(), other.parameters(), strict=True):
        state = theirs.state[own]
        assert state["step"].dtype == torch.float32 and int(state["step"]) == 2
        assert torch.equal(state["exp_avg"].local, optimizer.state[mine]["exp_avg"])
    losses = train(other, theirs, 0, range(2, 4))
    wanted = train(model, optimizer, 0, range(2, 4))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted))


SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}


def sgd_moves(
    rank: int, world_size: int, folder: Path, before: int, by_file: bool, used: bool
) -> None:
    """SGD between torch.optim and zshard, both ways, after ``before`` steps; into one ``used``."""
    for there, here in ((torch.optim.SGD, zshard.SGD), (zshard.SGD, torch.optim.SGD)):
        model, _ = plain()
        optimizer = there(model.parameters(), **SGD)
        train(model, optimizer, rank, range(before))
        other, _ = plain(1)
        moved = here(other.parameters(), **SGD)
        train(other, moved, rank, range(7, 7 + used))  # a state of its own, which goes
        path = folder / there.__module__
        zshard.save(path, model, optimizer)
        if by_file:
            zshard.load(path, other, moved)
        else:
            zshard.load(path, other)
            if here is torch.optim.SGD:
                continue  # whose load_state_dict is its own
            moved.load_state_dict(optimizer.state_dict())
        steps = range(before, before + 2)
        losses = train(other, moved, rank, steps)
        torch.testing.assert_close(losses, train(model, optimizer, rank, steps))
        for name, _ in model.named_parameters():
            mine, own = (zshard.full_param(each, name) for each in (model, other))
            torch.testing.assert_close(own, mine)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(("before", "by_file"), [(0, True), (2, True), (2, False)])
def test_sgd_goes_on_from_torchs_and_torchs_from_zshards(
    tmp_path: Path, world_size: int, before: int, by_file: bool, used: bool
) -> None:
    run_ranks(sgd_moves, world_size, tmp_path, before, by_file, used)


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.temperature


@pytest.mark.parametrize("there", [torch.optim.AdamW, zshard.AdamW])
@pytest.mark.parametrize("here", [torch.optim.AdamW, zshard.AdamW])
def test_states_of_an_ignored_scalar_move(
    tmp_path: Path, there: Callable[..., torch.optim.Optimizer], here: type[torch.optim.Optimizer]
) -> None:
    sides = []
    for make in (there, here):
        model = Tempered()
        zshard.wrap(model, ignored=[model.temperature])
        sides.append((model, make(model.parameters(), lr=0.1)))
    for step in range(4):
        if step == 2:
            zshard.save(tmp_path / "a", *sides[0])
            zshard.load(tmp_path / "a", *sides[1])
        for model, optimizer in sides:
            optimizer.zero_grad()
            (model(torch.ones(2, 8)) * (step + 1)).square().mean().backward()
            optimizer.step()
    for name, value in zshard.state_dict(sides[0][0]).items():
        torch.testing.assert_close(zshard.state_dict(sides[1][0])[name], value)


@pytest.mark.parametrize("make", [zshard.AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_a_load_in_inference_mode_makes_states_that_train(
    tmp_path: Path, make: Callable[..., torch.optim.Optimizer]
) -> None:
    sides = []
    for seed in range(2):
        model, _ = plain(seed)
        more = {"momentum": 0.9} if make is torch.optim.SGD else {}
        sides.append((model, make(model.parameters(), lr=0.01, **more)))
    train(*sides[0], 0, range(2))
    zshard.save(tmp_path / "a", *sides[0])
    with torch.inference_mode():
        zshard.load(tmp_path / "a", *sides[1])
    losses = [train(*side, 0, range(2, 4)) for side in sides]
    assert losses[0] == losses[1]


def test_adams_states_without_their_step_are_refused() -> None:
    model, optimizer = plain()
    train(model, optimizer, 0, range(1))
    state = optimizer.state_dict()
    del state["state"][0]["step"]
    with pytest.raises(zshard.OptimizerError, match=r"state 'step' of .*got nothing"):
        optimizer.load_state_dict(state)


def test_what_a_scheduler_keeps_in_the_groups_comes_back(tmp_path: Path) -> None:
    model, optimizer = plain()
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert optimizer.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] /= 4
    zshard.save(tmp_path / "a", model, optimizer)
    other, again = plain()
    zshard.load(tmp_path / "a", other, again)
    assert again.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]
    torch.optim.lr_scheduler.StepLR(again, 2, last_epoch=4)


def test_a_rule_that_zshards_optimizer_does_not_have_is_refused(tmp_path: Path) -> None:
    model, _ = plain()
    theirs = torch.optim.AdamW(model.parameters(), maximize=True)
    train(model, theirs, 0, range(1))
    zshard.save(tmp_path / "a", model, theirs)
    with pytest.raises(zshard.CheckpointError, match="maximize=True"):
        zshard.load(tmp_path / "a", model, zshard.AdamW(model.parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: zshard.SGD(p, lr=0.1, momentum=0.9),
        lambda p: zshard.SGD(p, lr=0.1),
        lambda p: zshard.Adam(p),
    ],
)
def test_every_elementwise_optimizer_goes_on_bitwise(
    tmp_path: Path, make: Callable[[object], torch.optim.Optimizer]
) -> None:
    model = build(1)
    optimizer = make(model.parameters())
    train(model, optimizer, 0, range(2))
    zshard.save(tmp_path / "a", model, optimizer)
    wanted = train(model, optimizer, 0, range(2, 4))
    other = build(2)
    again = make(other.parameters())
    zshard.load(tmp_path / "a", other, again)
    assert train(other, again, 0, range(2, 4)) == wanted


class Averaging(torch.optim.Optimizer):
    """Divides its rate by a count that it keeps for all parameters, as MADGRAD does."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        count = self.state.setdefault("count", torch.zeros((), dtype=torch.int64))
        self.state.setdefault("name", "averaging")
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / float(count + 1))
        count += 1


def test_what_an_optimizer_keeps_for_all_parameters_comes_back(tmp_path: Path) -> None:
    def begun() -> tuple[nn.Module, Averaging]:
        model, _ = plain()
        return model, Averaging(model.parameters())

    model, optimizer = begun()
    zshard.save(tmp_path / "new", model, optimizer)
    train(model, optimizer, 0, range(3))
    zshard.save(tmp_path / "a", model, optimizer)
    again, other = begun()
    zshard.load(tmp_path / "a", again, other)
    assert other.state["count"].dtype == torch.int64 and other.state["name"] == "averaging"
    assert train(again, other, 0, range(3, 5)) == train(model, optimizer, 0, range(3, 5))
    assert other.state["count"] == 5
    zshard.save(tmp_path / "bare", model)
    found = zshard.load(tmp_path / "bare", again, other, strict=False)
    assert found.missing == ["the optimizer's states"] and other.state["count"] == 5
    zshard.load(tmp_path / "new", again, other)
    assert not other.state.keys() - set(again.parameters())  # as it was before the first step


def test_what_a_checkpoint_cannot_hold_of_an_optimizers_state_is_refused(tmp_path: Path) -> None:
    model, optimizer = plain()
    optimizer.state["buffer"] = torch.zeros(3)  # type: ignore[index]
    with pytest.raises(zshard.OptimizerError, match=r"'buffer', which belongs to no.*\(3,\)"):
        zshard.save(tmp_path / "a", model, optimizer)
    optimizer.state["buffer"] = torch.zeros((), dtype=torch.complex128)  # type: ignore[index]
    with pytest.raises(zshard.InputError, match=r"'buffer' is of torch\.complex128"):
        zshard.save(tmp_path / "a", model, optimizer)
    del optimizer.state["buffer"]  # type: ignore[arg-type]
    train(model, optimizer, 0, range(1))
    for place, words in (
        (optimizer.state, "the optimizer's state has the key 3"),
        (
            optimizer.state[model.inlet.weight],
            "the optimizer's state of inlet.weight has the key 3",
        ),
        (optimizer.param_groups[0], r"param_groups\[0\] has the key 3"),
    ):
        place[3] = 1
        with pytest.raises(zshard.InputError, match=words):
            zshard.save(tmp_path / "a", model, optimizer)
        del place[3]


def test_the_state_of_a_parameter_that_left_the_optimizer_stays_where_it_is(tmp_path: Path) -> None:
    model, _ = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0, range(1))
    left = optimizer.param_groups[0]["params"].pop()
    zshard.save(tmp_path / "a", model, optimizer)
    zshard.load(tmp_path / "a", model, optimizer)
    assert optimizer.state[left]["step"] == 1


def test_what_a_user_keeps_in_zshards_optimizers_state_comes_back(tmp_path: Path) -> None:
    model, optimizer = plain()
    optimizer.state["note"] = 7  # type: ignore[index]
    train(model, optimizer, 0, range(1))
    zshard.save(tmp_path / "a", model, optimizer)
    again, other = plain()
    zshard.load(tmp_path / "a", again, other)
    assert other.state["note"] == optimizer.state_dict()["state"]["note"] == 7


class Around(torch.optim.Optimizer):
    """An optimizer that holds another one, whose states its state_dict gives, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: None = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, object]:
        return self.inner.state_dict()


def test_an_optimizer_around_another_is_refused_and_the_inner_one_saved(tmp_path: Path) -> None:
    model, _ = plain()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = Around(inner)
    train(model, optimizer, 0, range(1))
    with pytest.raises(zshard.OptimizerError, match=r"Around keeps states.*AdamW.*that one"):
        zshard.save(tmp_path / "a", model, optimizer)
    zshard.save(tmp_path / "a", model, inner)
    again, _ = plain()
    other = torch.optim.AdamW(again.parameters())
    zshard.load(tmp_path / "a", again, other)
    steps = range(1, 3)
    assert train(again, Around(other), 0, steps) == train(model, optimizer, 0, steps)


@pytest.mark.parametrize("kind", [zshard.AdamW, zshard.Adam, zshard.SGD])
def test_a_checkpoint_loads_into_an_optimizer_that_has_loaded_a_state_dict(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    zshard.save(tmp_path / "saved", model, optimizer)
    before = [zshard.full_param(model, name) for name in ("0.weight", "1.bias")]
    optimizer.step()
    zshard.load(tmp_path / "saved", model, optimizer)
    after = [zshard.full_param(model, name) for name in ("0.weight", "1.bias")]
    assert all(map(torch.equal, before, after))
