"""float64 parameters under zshard's own optimizers, beside others in the same units."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ops_check import devices
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zshard
from zshard.optimizers.wide import wide_adamw, wide_sgd

Make = Callable[[nn.Module, bool], torch.optim.Optimizer]  # of a model, of torch's or zshard's kind


def _make(name: str, **options: object) -> Make:
    def make(model: nn.Module, ours: bool) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer
        made = getattr(zshard if ours else torch.optim, name)(model.parameters(), **options)
        return made

    return make


def _in_groups(model: nn.Module, ours: bool) -> torch.optim.Optimizer:
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-2, "betas": (0.8, 0.9)},
    ]
    return (zshard if ours else torch.optim).AdamW(groups, lr=1e-2, eps=1e-6)


OPTIMIZERS = {
    "AdamW": _make("AdamW", lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1),
    "Adam": _make("Adam", lr=1e-2, eps=1e-6, weight_decay=0.1),
    "Adam without decay": _make("Adam", lr=1e-2, eps=1e-6),
    "AdamW, in groups": _in_groups,
    "SGD": _make("SGD", lr=5e-2),
    "SGD, all of it": _make(
        "SGD", lr=5e-2, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True
    ),
    "SGD, dampened": _make("SGD", lr=5e-2, momentum=0.8, dampening=0.1),
}


class Mixed(nn.Module):
    """fp32 with float64: odd sizes, 0-d, empty, frozen, smaller than N, unused, used at times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Linear(5, 7)
        self.wide = nn.Linear(7, 11).double()
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.rand(3, dtype=torch.float64), requires_grad=False)
        self.single = nn.Parameter(torch.rand(1, dtype=torch.float64))
        self.unused = nn.Parameter(torch.rand(2, dtype=torch.float64))
        self.at_times = nn.Parameter(torch.rand(5, dtype=torch.float64))

    def forward(self, x: Tensor, step: int) -> Tensor:
        out = self.wide(self.narrow(x).double()) * self.gain + self.single + self.frozen.sum()
        return out + self.at_times.sum() if step % 2 else out


def play(
    rank: int, world_size: int, optimizer: str, options: dict[str, object] | None
) -> tuple[list[Tensor], list[tuple[dict[str, Tensor], int]]]:
    """Norms and, after every step, all parameters; options None: of the plain model, or DDP's."""
    model = Mixed()
    ours = options is not None
    if options is not None:
        trained: nn.Module = zshard.wrap(model, **options)  # type: ignore[arg-type]
    else:
        several = world_size > 1
        trained = DistributedDataParallel(model, find_unused_parameters=True) if several else model
    made = OPTIMIZERS[optimizer](model, ours)
    norms, found = [], []
    for step in range(5):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        trained(x, step).square().mean().backward()
        clip = zshard.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
        norms.append(clip(model.parameters() if not ours else model, 0.5))
        made.step()
        made.zero_grad()
        read = zshard.full_param if ours else lambda m, name: m.get_parameter(name)
        found.append({n: read(model, n).detach().clone() for n, _ in model.named_parameters()})
    return norms, found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_float64_is_updated_as_torch_does_beside_fp32(optimizer: str, world_size: int) -> None:
    expected = run_ranks(play, world_size, optimizer, None)
    same: list[object] = []
    for strategy, comm in (("zero3", "peer"), ("zero2", "group"), ("ddp", "group")):
        if world_size == 1:
            comm = "group"
        options = {"strategy": strategy, "comm": comm, "units": "layer"}
        actual = run_ranks(play, world_size, optimizer, options)
        for (norms, steps), (norms_, steps_) in zip(actual, expected, strict=True):
            torch.testing.assert_close(norms, [n.double() for n in norms_], rtol=1e-5, atol=0)
            for ours, theirs in zip(steps, steps_, strict=True):
                assert ours["wide.weight"].dtype == torch.float64
                torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-6)
        same.append([{n: p.tolist() for n, p in step.items()} for step in actual[0][1]])
    assert same[0] == same[1] == same[2]


def test_all_of_float64_is_torchs_within_its_rounding() -> None:
    """Without fp32 beside it, clipped in float64, too."""
    for make in OPTIMIZERS.values():
        runs = []
        for ours in (True, False):
            torch.manual_seed(0)
            model = nn.Linear(6, 5).double()
            optimizer = make(zshard.wrap(model) if ours else model, ours)
            for step in range(5):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
                model(x).square().sum().backward()
                clip = zshard.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
                clip(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            with zshard.full_params(model) if ours else torch.no_grad():
                runs.append([p.detach().clone() for p in model.parameters()])
        torch.testing.assert_close(*runs, rtol=1e-13, atol=1e-14)


RULES = (
    (wide_adamw, (1e-2, 0.9, 0.95, 1e-6, 0.1, 1.0)),
    (wide_adamw, (1e-2, 0.9, 0.95, 1e-6, 0.1, 0.0)),
    (wide_sgd, (1e-2, 0.0, 0.0, 0.1, 0.0, 0.0)),
    (wide_sgd, (1e-2, 0.9, 0.1, 0.1, 1.0, 1.0)),
)


@devices
def test_a_float64_elements_bits_do_not_depend_on_where_it_lies(device: str) -> None:
    torch.manual_seed(0)
    p, g, m, v = (torch.rand(1000, dtype=torch.float64, device=device) for _ in range(4))
    count = torch.tensor(3.0, dtype=torch.float64, device=device)
    for rule, hyper in RULES:
        states = [m, v] if rule is wide_adamw else [m]
        whole, pieces = ([t.clone() for t in (p, *states)] for _ in range(2))
        rule(whole[0], g, count, hyper, *whole[1:])
        cuts = [0, 1, 4, 11, 12, 500, 999, 1000]
        for begin, end in pairwise(cuts):
            part, *others = (t[begin:end] for t in pieces)
            rule(part, g[begin:end], count, hyper, *others)
        assert all(map(torch.equal, whole, pieces))
        assert not torch.equal(whole[0], p)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_reads_nothing_back_from_the_device(name: str) -> None:
    model = nn.Linear(3, 4, dtype=torch.float64, device="meta")  # of which nothing can be read
    optimizer = OPTIMIZERS[name](model, True)
    for first in (model.weight, model.bias):  # all of them, and one alone
        for param in model.parameters():
            param.grad = None if param is first and first is model.bias else param.detach().clone()
        optimizer.step()
    assert all(state["step"].device.type == "meta" for state in optimizer.state.values())


def test_a_plain_float64_parameter_is_updated_as_a_sharded_one_is() -> None:
    torch.manual_seed(0)
    plain = nn.Parameter(torch.rand(3, 4, dtype=torch.float64).t())
    model = nn.Module()
    model.weight = nn.Parameter(plain.detach().clone())
    model.forward = lambda: model.weight.square().sum()  # type: ignore[method-assign]
    zshard.wrap(model)
    optimizer = zshard.AdamW([plain, model.weight], lr=1e-2)
    for _ in range(3):
        plain.square().sum().backward()
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(plain, zshard.full_param(model, "weight"))
    assert optimizer.state[plain]["exp_avg"].dtype == torch.float64


def test_float64_gradients_of_an_fp32_master_are_refused_by_name() -> None:
    precision = zshard.Precision(compute=torch.float64, reduce=torch.float64)
    model = zshard.wrap(nn.Linear(3, 2), precision=precision)
    optimizer = zshard.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(zshard.OptimizerError, match=r"weight has float64 gradients of a .*float32"):
        optimizer.step()
    before = zshard.full_param(model, "weight").clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(zshard.full_param(model, "weight"), before)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(x, step).square().mean()
    return loss


def resume(rank: int, world_size: int, folder: Path, begin: int, end: int) -> dict[str, Tensor]:
    """Steps ``begin`` to ``end`` of a run with a loss scale, from and to checkpoints."""
    model = zshard.wrap(Mixed())
    optimizer = OPTIMIZERS["AdamW"](model, True)
    scaler = zshard.GradScaler("cpu", init_scale=8.0)
    if begin:
        zshard.load(folder / str(begin), model, optimizer)
    for step in range(begin, end):
        # The same on every rank, so that it does not matter how many there are.
        scaler.scale(_loss(model, 0, step)).backward()
        scaler.unscale_(optimizer)
        zshard.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    zshard.save(folder / str(end), model, optimizer)
    return zshard.state_dict(model, all_ranks=True)


def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, *_ = run_ranks(resume, 1, tmp_path / "whole", 0, 4)
    run_ranks(resume, 2, tmp_path / "parts", 0, 2)
    parts, *_ = run_ranks(resume, 1, tmp_path / "parts", 2, 4)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert whole["wide.weight"].dtype == torch.float64


def test_states_travel_to_torchs_optimizer_and_back() -> None:
    model = zshard.wrap(Mixed())
    ours = OPTIMIZERS["AdamW"](model, True)
    _loss(model, 0, 1).backward()
    ours.step()
    theirs = OPTIMIZERS["AdamW"](model, False)
    theirs.load_state_dict(ours.state_dict())
    again = OPTIMIZERS["AdamW"](model, True)
    again.load_state_dict(theirs.state_dict())
    for param, state in ours.state.items():
        assert again.state[param].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(again.state[param][name], value)
            wide = param.dtype == torch.float64
            assert name == "step" or value.dtype == (torch.float64 if wide else torch.float32)
