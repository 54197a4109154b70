"""Optimizers of whole matrices beside a wrapped model: what works, what would change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from models import Blocks, loss_of
from ranks import run_ranks
from torch import Tensor, nn

import zshard
from zshard.optimizers import stand_ins


def _batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(3)]


def _muon(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.1)


def muon_of_whole_tensors_takes_the_plain_models_steps(rank: int, world: int) -> None:
    """Follow the README: whole tensors of one's own, their gradients, and back into the shards."""
    torch.manual_seed(0)
    plain = Blocks()
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())
    names = [name for name, _ in model.named_parameters()]
    whole = {name: zshard.full_param(model, name) for name in names}
    optimizer, reference = _muon(list(whole.values())), _muon(list(plain.parameters()))
    for batches in zip(*map(_batches, range(world)), strict=True):
        loss_of(model, batches[rank]).backward()
        for name, value in whole.items():
            value.grad = zshard.full_grad(model, name)
        optimizer.step()
        with zshard.full_params(model, write=True) as inside, torch.no_grad():
            for name, param in inside.named_parameters():
                param.copy_(whole[name])
        model.zero_grad()
        losses = [loss_of(plain, batch) / world for batch in batches]
        torch.autograd.backward(losses)
        reference.step()
        reference.zero_grad()
    for name, param in plain.named_parameters():
        found = zshard.full_param(model, name)
        torch.testing.assert_close(found, param, rtol=1e-6 if world == 1 else 1e-4, atol=1e-6)
        assert world > 1 or torch.equal(found, param)


def test_muon_of_whole_tensors_takes_the_plain_models_steps() -> None:
    muon_of_whole_tensors_takes_the_plain_models_steps(0, 1)
    run_ranks(muon_of_whole_tensors_takes_the_plain_models_steps, 2)


def _with_gradients() -> nn.Module:
    model = zshard.wrap(Blocks())
    loss_of(model, torch.randn(4, 3)).backward()
    return model


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, zshard.AdamW, zshard.SGD])
def test_a_step_on_lent_parameters_without_gradients_is_refused(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    model = _with_gradients()
    with zshard.full_params(model, write=True) as inside:
        optimizer = kind(inside.parameters(), lr=0.1)
        with pytest.raises(zshard.OptimizerError, match=r"lends has no gradient.*full_grad"):
            optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, zshard.AdamW, zshard.SGD])
def test_a_step_on_parameters_that_were_lent_before_is_refused(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    model = _with_gradients()
    grads = {name: zshard.full_grad(model, name) for name, _ in model.named_parameters()}
    with zshard.full_params(model, write=True) as inside:
        for name, param in inside.named_parameters():
            param.grad = grads[name]
        before = next(inside.parameters()).clone()
        optimizer = kind(inside.parameters(), lr=0.1)
        optimizer.step()  # which the context takes
        assert not torch.equal(next(inside.parameters()), before)
    with pytest.raises(zshard.OptimizerError, match="lent while it lasted"):
        optimizer.step()
    with (
        zshard.full_params(model, write=True),
        pytest.raises(zshard.OptimizerError, match="lent while it lasted"),
    ):
        optimizer.step()


def test_a_closure_may_make_the_gradients_of_lent_parameters() -> None:
    model = _with_gradients()
    with zshard.full_params(model, write=True) as inside:
        optimizer = torch.optim.SGD(inside.parameters(), lr=0.1)

        def closure() -> Tensor:
            with torch.enable_grad():
                loss = sum(param.square().sum() for param in inside.parameters())
                loss.backward()
            return loss

        before = next(inside.parameters()).detach().clone()
        optimizer.step(closure)
        torch.testing.assert_close(next(inside.parameters()).detach(), 0.8 * before)


def test_a_step_on_lent_parameters_excuses_no_gradient_of_those_lent_later() -> None:
    model = _with_gradients()
    grads = {name: zshard.full_grad(model, name) for name, _ in model.named_parameters()}
    with zshard.full_params(model, write=True) as inside:
        for name, param in inside.named_parameters():
            param.grad = grads[name]
        torch.optim.SGD(inside.parameters()).step()
    assert not stand_ins._STEPPED  # by their ids, which later ones may be given


def test_lent_parameters_may_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = zshard.wrap(Blocks())
    values = {name: torch.ones_like(value) for name, value in zshard.state_dict(model).items()}
    with zshard.full_params(model, write=True):
        model.load_state_dict(values)
    assert all(torch.equal(zshard.state_dict(model)[name], values[name]) for name in values)


def test_lent_parameters_that_nobody_trains_may_be_in_an_optimizer() -> None:
    model = zshard.wrap(Blocks())
    with zshard.full_params(model, write=True) as inside:
        torch.optim.SGD(inside.parameters()).step()  # no gradients anywhere: nothing is lost


class OfWholeStates(torch.optim.Optimizer):
    """Makes its states by itself, and of whole tensors, as SM3 does."""

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        closure()
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(torch.ones(param.shape))


def of_whole_states(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return OfWholeStates(params, {})


@pytest.mark.parametrize(
    "make", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, of_whole_states]
)
def test_an_optimizer_that_needs_whole_matrices_is_refused_with_the_way_out(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 5, bias=False)))
    optimizer = make(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        with pytest.raises(zshard.ShardedAccessError, match=r"forward, that was called past"):
            model[0].weight.sum()  # the closure is the script's
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(zshard.ShardedAccessError, match=r"takes ones of your own.*full_params"):
        optimizer.step(closure)


def steps_of_some(rank: int, world_size: int, overlaps: bool) -> tuple[str, bool]:
    """What one of torch's ZeroRedundancyOptimizer meets, and whether the step changed nothing."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    class Derived(ZeroRedundancyOptimizer):
        pass

    model = zshard.wrap(Blocks())
    # Where it overlaps with DDP, it has no optimizer of its own yet.
    optimizer = Derived(model.parameters(), torch.optim.SGD, overlap_with_ddp=overlaps, lr=0.1)
    before = zshard.state_dict(model, all_ranks=True)
    loss_of(model, torch.ones(2, 3)).backward()
    with pytest.raises(zshard.OptimizerError) as error:
        optimizer.step()
    after = zshard.state_dict(model, all_ranks=True)
    return str(error.value), all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_optimizer_that_steps_each_parameter_on_one_rank_is_refused_before_its_step(
    overlaps: bool,
) -> None:
    for message, unchanged in run_ranks(steps_of_some, 2, overlaps):
        assert "give its optimizer_class the parameters" in message and unchanged


class _WithGradients(torch.optim.Optimizer):
    """Writes to .data with gradients on, as Prodigy and torch_optimizer's do."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.data.flatten()[::2].sum())


def test_an_optimizer_that_steps_with_gradients_on_is_told_what_it_takes() -> None:
    model = _with_gradients()
    optimizer = _WithGradients(model.parameters(), {})
    with pytest.raises(zshard.ShardedAccessError, match=r"takes ones of your own"):
        optimizer.step()
    with pytest.raises(zshard.ShardedAccessError, match=r"A penalty on weights"):
        optimizer.step(lambda: sum(param.flatten().sum() for param in model.parameters()))
