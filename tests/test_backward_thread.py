"""A backward whose hooks run in a thread of autograd's own, as for a GPU; here on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from models import Blocks
from steps import batch, build, one_step
from test_double_backward import Recomputed, assert_same_bits_but_norms, trained

import zshard


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have autograd run in a thread for each backward; the threads that it has begun them in."""
    run, threads = torch.autograd._engine_run_backward, list[int]()

    def in_a_thread(*args: object, **kwargs: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            return run(*args, **kwargs)  # inside another one, of which the thread is
        found, raised, graph = [], [], torch.is_grad_enabled()

        def work() -> None:
            threads.append(threading.get_ident())
            torch.set_num_threads(1)  # of this thread, as conftest.py of the caller's
            try:
                with torch.set_grad_enabled(graph):
                    found.append(run(*args, **kwargs))
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if raised:
            raise raised.pop()
        return found.pop()

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", in_a_thread)
    return threads


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("case", ["penalty", "forces", "recomputed", "in Python", "tied"])
def test_its_bits_are_the_plain_models(elsewhere: list[int], case: str, strategy: str) -> None:
    """Both run there: nodes that a thread makes are numbered anew, which may order other sums."""
    ours, theirs = (trained(0, 1, case, side) for side in (strategy, None))
    assert_same_bits_but_norms(ours, theirs)
    assert elsewhere and threading.get_ident() not in elsewhere


class Slope(Recomputed):
    """Its forward makes forces alone, of blocks that the backward within runs again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x)[0]


def test_what_it_recomputes_inside_full_params_is_a_part_of_the_call(elsewhere: list[int]) -> None:
    torch.manual_seed(0)
    model = Slope()
    with torch.no_grad():
        expected = model(batch(0, 0))
        zshard.wrap(model)
        with zshard.full_params(model):
            assert torch.equal(model(batch(0, 0)), expected)
    assert len(elsewhere) == 2


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ValueError("user code")


class Breaking(Blocks):
    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        x = self.blocks[0](x)
        x = _Broken.apply(x) if self.broken else x
        return self.outlet(self.blocks[2](self.blocks[1](x)))


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_after_one_that_raised_the_model_goes_on(elsewhere: list[int], strategy: str) -> None:
    expected = one_step(build(), 0, 1)
    torch.manual_seed(0)
    model = zshard.wrap(Breaking(), strategy=strategy)
    model.broken = True
    with pytest.raises(ValueError, match="user code"):
        model(batch(0, 0)).sum().backward()
    model.broken = False
    with pytest.raises(zshard.StateError, match="the last backward raised an exception"):
        zshard.clip_grad_norm_(model, 1.0)
    assert torch.equal(one_step(model, 0, 1), expected)
    assert zshard.clip_grad_norm_(model, 1.0).isfinite()
    assert len(elsewhere) == 3
