"""The user's hooks on parameters and modules, set before and after wrap: as in plain torch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import models
import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

import zshard

NAMES = ("inlet.weight", "blocks.1.up.bias", "outlet.weight")
Log = list[tuple[str, Tensor]]


def set_hooks(model: nn.Module, log: Log, which: str) -> list[torch.utils.hooks.RemovableHandle]:
    """Set hooks of one kind; they log what they see, and change a gradient where they may."""
    handles = []

    def note(what: str, *tensors: Tensor) -> None:
        log.extend((what, tensor.detach().clone()) for tensor in tensors)

    if which == "gradient":
        for name in NAMES:
            parameter = model.get_parameter(name)
            handles.append(parameter.register_hook(lambda g, n=name: note(n, g)))
            handles.append(parameter.register_hook(lambda g: g * 2))
            handles.append(parameter.register_hook(lambda g, n=name: note(n, g)))
        return handles
    for name in ("", "inlet", "blocks.1", "blocks.1.up"):
        module = model.get_submodule(name)
        if which == "forward":
            handles += [
                module.register_forward_pre_hook(lambda m, a, n=name: note(f"pre {n}", *a)),
                module.register_forward_hook(lambda m, a, o, n=name: note(f"post {n}", *a, o)),
                module.register_forward_hook(lambda m, a, o: o * 0.5),
            ]
        else:
            handles += [
                module.register_full_backward_pre_hook(lambda m, g, n=name: note(f"pre {n}", *g)),
                module.register_full_backward_hook(
                    lambda m, i, o, n=name: note(f"post {n}", *(g for g in i if g is not None), *o)
                ),
            ]
    return handles


def hooked(
    rank: int, world_size: int, which: str, when: str
) -> tuple[tuple[Log, Log], tuple[Log, Log]]:
    """What hooks saw, and the gradients after three steps, the last without hooks; both sides."""
    sides = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model, log = Blocks(), []
        handles = set_hooks(model, log, which) if when == "before" else []
        run = model
        if is_wrapped:
            zshard.wrap(model)
        elif world_size > 1:
            run = DistributedDataParallel(model)
        grads: Log = []
        for step in range(3):
            if step == 1 and when == "after":
                handles = set_hooks(model, log, which)
            if step == 2:
                for handle in handles:
                    handle.remove()
            models.loss_of(run, batch(rank, step)).backward()
            for name, parameter in model.named_parameters():
                grad = zshard.full_grad(model, name) if is_wrapped else parameter.grad
                grads.append((f"{step} {name}", grad.clone()))
            model.zero_grad()
        sides.append((log, grads))
    return sides[0], sides[1]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", ["gradient", "forward", "backward"])
def test_hooks_see_and_change_what_they_do_in_plain_torch(
    which: str, when: str, world_size: int
) -> None:
    on_one_rank = world_size == 1
    results = [hooked(0, 1, which, when)] if on_one_rank else run_ranks(hooked, 2, which, when)
    for actual, expected in results:
        for ours, theirs in zip(actual, expected, strict=True):
            assert [what for what, _ in ours] == [what for what, _ in theirs]
            assert len(ours) > 0
            for (what, one), (_, other) in zip(ours, theirs, strict=True):
                assert torch.equal(one, other), what


@pytest.mark.parametrize("set_another", [False, True])
def test_a_unit_without_zshards_hooks_is_refused_by_name(set_another: bool) -> None:
    model = zshard.wrap(Blocks())
    before = model.blocks[1]._forward_hooks
    model.blocks[1]._forward_hooks = OrderedDict()  # how scripts remove all hooks
    if set_another:
        model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(zshard.StateError, match=r"unit 'blocks\.1', a Block, were removed"):
        model(batch(0, 0))
    model.blocks[1]._forward_hooks = before
    models.loss_of(model, batch(0, 0)).backward()


def test_a_forward_hook_set_after_wrap_finds_whole_parameters() -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())
    seen: list[Tensor] = []
    for module in (model, model.blocks[1]):
        module.register_forward_pre_hook(
            lambda m, a: seen.append(model.inlet.weight @ torch.ones(3))
        )
        module.register_forward_hook(lambda m, a, o: seen.append(o))
    model.blocks[1].register_forward_hook(lambda m, a, o: seen.append(m.up.weight.sum()))
    model(batch(0, 0)).sum().backward()
    assert len(seen) == 5


def after_reduction(rank: int, world_size: int, when: str) -> list[tuple[str, Tensor]]:
    """An optimizer in backward: each parameter is updated in its hook."""
    torch.manual_seed(0)
    model = Blocks(order=(0, 2))  # block 1 gets no gradient: its hooks do not run
    log: list[tuple[str, Tensor]] = []
    names = {}

    def update(parameter: Tensor) -> None:
        log.append((names[id(parameter)], zshard.full_grad(model, names[id(parameter)]).clone()))
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    if when == "after":
        zshard.wrap(model)
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        parameter.register_post_accumulate_grad_hook(update)
    if when == "before":
        zshard.wrap(model)
    for step in range(3):
        models.loss_of(model, batch(rank, step)).backward()
    log += [(name, zshard.full_param(model, name)) for name, _ in model.named_parameters()]
    return log


def updated_after(rank: int, world_size: int) -> list[tuple[str, Tensor]]:
    """The same updates after backward."""
    torch.manual_seed(0)
    model = zshard.wrap(Blocks(order=(0, 2)))
    for step in range(3):
        models.loss_of(model, batch(rank, step)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return [(name, zshard.full_param(model, name)) for name, _ in model.named_parameters()]


@pytest.mark.parametrize("when", ["before", "after"])
def test_post_accumulate_hooks_find_the_reduced_gradient(when: str) -> None:
    for log, expected in zip(
        run_ranks(after_reduction, 2, when), run_ranks(updated_after, 2), strict=True
    ):
        called = [name for name, _ in log[: -len(expected)]]
        assert len(called) == 3 * 14 and not any("blocks.1" in name for name in called)
        for (name, ours), (_, theirs) in zip(log[-len(expected) :], expected, strict=True):
            assert torch.equal(ours, theirs), name


def called_while_accumulating(rank: int, world_size: int) -> list[set[str]]:
    model = zshard.wrap(Blocks())
    called: list[set[str]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: called[-1].add(n))
    for model.order in ((0, 1, 2), (0, 2)):
        called.append(set())
        models.loss_of(model, batch(rank, 0)).backward()
    return called


@pytest.mark.parametrize("world_size", [1, 2])
def test_they_are_called_for_what_the_backward_has_added_to_alone(world_size: int) -> None:
    for first, second in run_ranks(called_while_accumulating, world_size):
        assert len(first) == 19 and first - second == {n for n in first if "blocks.1" in n}


def steps_in_backward(param: nn.Parameter) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward  # it warns, and takes seconds

    _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.1})


@pytest.mark.parametrize(
    "call",
    [lambda param: register_multi_grad_hook([param], print), get_gradient_edge, steps_in_backward],
    ids=["register_multi_grad_hook", "get_gradient_edge", "_apply_optimizer_in_backward"],
)
def test_what_needs_a_node_at_the_parameter_is_told_of_its_hooks(
    call: Callable[[nn.Parameter], object], request: pytest.FixtureRequest
) -> None:
    param = zshard.wrap(nn.Linear(3, 2)).weight
    name = request.node.callspec.id
    with pytest.raises(zshard.ShardedAccessError, match=rf"{name} .*'weight'.*register_post_accum"):
        call(param)


def test_a_hook_on_a_frozen_parameter_is_refused_as_in_plain_torch() -> None:
    model = zshard.wrap(Blocks().requires_grad_(False))
    with pytest.raises(zshard.StateError, match=r"inlet\.weight: a hook"):
        model.inlet.weight.register_hook(lambda g: g)
    with pytest.raises(zshard.StateError, match=r"inlet\.weight: a hook"):
        model.inlet.weight.register_post_accumulate_grad_hook(lambda p: None)


def raises_after_reduction(rank: int, world_size: int) -> list[str]:
    model = zshard.wrap(Blocks())
    optimizer = zshard.AdamW(model.parameters())

    def hook(parameter: Tensor) -> None:
        if rank == 0:
            raise ValueError("user code")

    model.inlet.weight.register_post_accumulate_grad_hook(hook)
    ends = []
    for _ in range(2):
        try:
            models.loss_of(model, batch(rank, 0)).backward()
            optimizer.step()
            ends.append("made")
        except (ValueError, zshard.Error) as error:
            ends.append(type(error).__name__)
    return ends


def test_a_post_accumulate_hook_that_raises_on_one_rank_is_told_at_the_next_forward() -> None:
    own, other = run_ranks(raises_after_reduction, 2)
    assert (own, other) == (["ValueError", "MismatchError"], ["made", "MismatchError"])


class Left(Exception):
    """Leaves a module, whose output a hook has kept."""


class Leaving(Blocks):
    """Goes on from what a hook has kept, to the other blocks or past them."""

    past = False

    def forward(self, x: Tensor) -> Tensor:
        x, self.kept = self.inlet(x), []
        for block in self.blocks:
            try:
                x = block(x)
            except Left:
                x = self.kept.pop()
                if self.past:
                    break
        return self.outlet(x)


def backward_through_what_hooks_kept(rank: int, world_size: int, where: str, past: bool) -> None:
    torch.manual_seed(0)
    plain = Leaving()
    model = zshard.wrap(copy.deepcopy(plain))
    for each in (plain, model):

        def leave(*args: object, each: Leaving = each) -> None:
            each.kept.append(args[-1])
            raise Left

        each.past = past
        each.get_submodule(where).register_forward_hook(leave)
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            models.loss_of(each, batch(0, step)).backward()
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            assert (grad is None) == (param.grad is None)
            assert grad is None or torch.equal(grad, param.grad), name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("where", "past"), [("blocks.0", False), ("blocks.1.down", True)])
def test_what_a_hook_has_kept_of_a_unit_that_an_exception_left_has_its_backward(
    world_size: int, where: str, past: bool
) -> None:
    run_ranks(backward_through_what_hooks_kept, world_size, where, past)


class GivesALeaf(nn.Linear):
    """Returns, beside what it computes, a parameter that zshard leaves whole."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.temperature = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.temperature


def test_forwards_leave_no_hook_on_a_leaf_that_they_return() -> None:
    model = zshard.wrap(GivesALeaf(), ignored=["temperature"])
    for _ in range(3):
        output, temperature = model(batch(0, 0))
        (output * temperature).sum().backward()
    assert not model.temperature._backward_hooks
