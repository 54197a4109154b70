"""In which dtypes states of optimizers come back, where that of their parameter is another now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zshard


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
@pytest.mark.parametrize("ignored", [True, False], ids=["from_ignored", "into_ignored"])
def test_states_follow_the_dtype_of_a_parameter_that_is_ignored_or_no_longer(
    tmp_path: Path, ignored: bool, kind: str
) -> None:
    def trained(ignored: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = zshard.wrap(nn.Linear(4, 3).bfloat16(), ignored=["bias"] if ignored else None)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, foreach=False)
        step(model, optimizer)
        return model, optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(2, 4).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def sums(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Those of the bias, fp32 or (of an ignored one) bf16."""
        state = optimizer.state[model.bias]
        found = [value for key, value in sorted(state.items()) if key != "step"]
        return [getattr(value, "local", value) for value in found]

    model, optimizer = trained(ignored)
    step(model, optimizer)
    zshard.save(tmp_path / "a", model, optimizer)
    expected = sums(model, optimizer)
    model, optimizer = trained(not ignored)
    zshard.load(tmp_path / "a", model, optimizer)
    wanted = torch.float32 if ignored else torch.bfloat16
    for value, of_old in zip(sums(model, optimizer), expected, strict=True):
        assert value.dtype == wanted != of_old.dtype
        assert torch.equal(value, of_old.to(wanted))
    step(model, optimizer)


def test_masters_of_parameters_of_another_dtype_are_refused(tmp_path: Path) -> None:
    of_bf16, of_fp16 = (
        zshard.wrap(nn.Linear(4, 3).to(dtype), precision=zshard.Precision(reduce=torch.float32))
        for dtype in (torch.bfloat16, torch.float16)
    )
    zshard.save(tmp_path / "a", of_bf16)
    with pytest.raises(zshard.CheckpointError, match=r"bfloat16, and torch\.float16 in the model"):
        zshard.load(tmp_path / "a", of_fp16)


class Exact(torch.optim.Optimizer):
    """Sums gradients in fp32, whatever the parameter's dtype is."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["sum"] = torch.zeros_like(param, dtype=torch.float32)
            state["sum"].add_(param.grad.float())
            param.add_(state["sum"].to(param.dtype), alpha=-0.1)


def test_states_that_another_librarys_optimizer_keeps_in_fp32_are_not_rounded(
    tmp_path: Path,
) -> None:
    def trained(ignored: bool) -> tuple[nn.Module, Exact]:
        torch.manual_seed(0)
        precision = zshard.Precision(reduce=torch.float32)
        model = nn.Linear(4, 3).bfloat16()
        zshard.wrap(model, ignored=["bias"] if ignored else None, precision=precision)
        optimizer = Exact(model.parameters())
        for scale in (1.0, 1e-3):
            (model(torch.ones(1, 4).bfloat16()).sum() * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(ignored=False)
    expected = optimizer.state[model.bias]["sum"].local.clone()
    assert not torch.equal(expected, expected.bfloat16().float())
    zshard.save(tmp_path / "a", model, optimizer)
    model, optimizer = trained(ignored=True)
    zshard.load(tmp_path / "a", model, optimizer)
    assert torch.equal(optimizer.state[model.bias]["sum"], expected)


class Averages(torch.optim.Optimizer):
    """Keeps the mean of gradients in the parameter's dtype, as most libraries' optimizers do."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            mean.mul_(0.9).add_(param.grad, alpha=0.1)
            param.add_(mean, alpha=-0.1)


def test_states_of_another_librarys_optimizer_get_the_precision_of_a_master(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).bfloat16()
    precision = zshard.Precision(reduce=torch.float32)
    zshard.wrap(model, ignored=["bias"], precision=precision)
    optimizer = Averages(model.parameters())
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    expected = optimizer.state[model.bias]["mean"].float()
    zshard.save(tmp_path / "a", model, optimizer)
    model = zshard.wrap(nn.Linear(4, 3).bfloat16(), precision=precision)
    optimizer = Averages(model.parameters())
    zshard.load(tmp_path / "a", model, optimizer)
    mean = optimizer.state[model.bias]["mean"].local
    assert mean.dtype == torch.float32 and torch.equal(mean[:3], expected)


def test_so_they_do_where_memory_is_in_another_order(tmp_path: Path) -> None:
    plain, turned = (nn.Linear(4, 3).bfloat16() for _ in range(2))
    precision = zshard.Precision(reduce=torch.float32)
    model = zshard.wrap(plain, ignored=["weight"], precision=precision)
    optimizer = Averages(model.parameters())
    model(torch.randn(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    expected = optimizer.state[model.weight]["mean"].float()
    zshard.save(tmp_path / "a", model, optimizer)
    turned.weight = nn.Parameter(torch.zeros(4, 3).bfloat16().t())
    optimizer = Averages(zshard.wrap(turned, precision=precision).parameters())
    zshard.load(tmp_path / "a", turned, optimizer)
    assert torch.equal(optimizer.state[turned.weight]["mean"].local, expected.t().flatten())


class Short(torch.optim.Optimizer):
    """Keeps the sum of gradients in fewer bits than those of an fp32 parameter."""

    def __init__(self, params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            total = self.state[param].setdefault("sum", torch.zeros_like(param, dtype=self.dtype))
            total.copy_(total.float() + param.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_states_in_another_dtype_than_what_they_update_stay_in_that(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    optimizer = Short(model.parameters(), dtype)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    zshard.save(tmp_path / "a", model, optimizer)
    again = Short(model.parameters(), dtype)
    zshard.load(tmp_path / "a", model, again)
    there, wanted = (each.state[model.bias]["sum"].local for each in (again, optimizer))
    assert there.dtype == dtype and torch.equal(there.float(), wanted.float())


def test_a_users_own_state_is_not_rounded_to_the_dtype_that_it_has_now(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    optimizer = zshard.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    average = optimizer.state[model.bias]["exp_avg"].clone()
    optimizer.state[model.bias]["mine"] = average
    zshard.save(tmp_path / "a", model, optimizer)
    optimizer.state[model.bias]["mine"] = average.bfloat16()
    with pytest.raises(zshard.CheckpointError, match=r"'mine' of bias: of torch\.float32, and"):
        zshard.load(tmp_path / "a", model, optimizer)


def test_weights_are_rounded_to_the_parameters_dtype_in_its_master_too(tmp_path: Path) -> None:
    plain = nn.Linear(4, 3).bfloat16()
    plain.weight = nn.Parameter(torch.randn(4, 3).bfloat16().t())  # read by index
    model = zshard.wrap(plain, precision=zshard.Precision(reduce=torch.float32))
    weights = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    save_file(weights, tmp_path / "fp32.safetensors")
    zshard.load_weights(model, tmp_path / "fp32.safetensors")
    zshard.save(tmp_path / "a", model)
    for name, master in load_file(tmp_path / "a/master.safetensors").items():
        assert torch.equal(master, weights.pop(name).bfloat16().float()), name
    assert not weights
