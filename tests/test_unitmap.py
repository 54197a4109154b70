"""The automatic unit map: what counts as a repeated block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from models import Block
from odd import Holder
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

import zshard
from zshard.unitmap import unit_map, unit_names


def layers(*, norm: bool = False, made: Callable = lambda layer: layer) -> nn.Sequential:
    front = [nn.LayerNorm(4)] if norm else []
    return nn.Sequential(*front, made(nn.Linear(4, 4)), nn.GELU(), made(nn.Linear(4, 4)))


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())


class Layers(nn.Sequential):
    """A Sequential by another name."""


class Pair(nn.Module):
    """Two layers: a block of a stage, or an expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Expert(nn.Module):
    """Two layers, wider inside than what goes in and out."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)


class Experts(nn.Module):
    """Experts of which every row goes to one; their weights are read at once."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(Expert(width, inside) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(1)
        up = torch.stack([expert.up.weight for expert in self.experts])[chosen]
        down = torch.stack([expert.down.weight for expert in self.experts])[chosen]
        return x + (down @ (up @ x[..., None]).relu())[..., 0]


class Listing(Pair):
    """Lists its parameters, where torch's own method generates them."""

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        return list(super().parameters(recurse))


def listing(modules: Iterable[nn.Module]) -> nn.Sequential:
    """A model of a list."""
    return nn.Sequential(nn.ModuleList(modules))


def pairs(width: int) -> nn.Sequential:
    return nn.Sequential(Pair(width), Pair(width))


class Normed(nn.Module):
    """A layer and its normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)


class Convolutions(nn.Module):
    """Two convolutions, whose window is the same in every stage, as is the size of a table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(width, width, 3), nn.Conv2d(width, width, 3)
        self.table = nn.Parameter(torch.zeros(25, 2))


class Depthwise(nn.Module):
    """Little else than a convolution of each channel alone, with a wide window."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, groups=width)
        self.mix = nn.Linear(width, width)


class Stage(nn.Module):
    """Blocks of one width, and a layer to that of the next stage."""

    def __init__(
        self, width: int, depth: int, out: int, block: Callable[[int], nn.Module] = Pair
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.reduction = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.reduction(x)


def net() -> nn.Sequential:
    return nn.Sequential(Stage(3, 1, 6), Stage(6, 2, 12), Stage(12, 8, 1))


STAGES = ["0.blocks.0", "1.blocks.0", "1.blocks.1", *(f"2.blocks.{i}" for i in range(8))]

MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "layers": (lambda: layers(norm=True), ["1", "3"]),
    "blocks": (lambda: nn.Sequential(Block(), Block(), nn.Linear(7, 7)), ["0", "1"]),
    "one block": (lambda: nn.Sequential(Block(), nn.Linear(7, 7)), []),
    "Sequentials": (lambda: nn.Sequential(*(layers(norm=True) for _ in range(3))), ["0", "1", "2"]),
    "normed": (lambda: nn.Sequential(*(layers(made=weight_norm) for _ in "ab")), ["0", "1"]),
    "of one layer": (lambda: nn.ModuleList(convolution() for _ in range(2)), ["0", "1"]),
    "a subclass": (lambda: nn.Sequential(Layers(nn.Linear(4, 4)), Layers(nn.Tanh())), []),
    "subclasses": (lambda: nn.Sequential(*(Layers(nn.Linear(4, 4)) for _ in "ab")), ["0", "1"]),
    "parametrized": (lambda: layers(made=weight_norm), ["0", "2"]),
    "one Sequential": (lambda: nn.Sequential(layers(), nn.Linear(4, 4)), ["0.0", "0.2"]),
    "stages of blocks": (
        lambda: nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2))),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "stages of Sequentials": (
        lambda: nn.ModuleDict(
            {name: nn.Sequential(layers(norm=True), layers(norm=True)) for name in "ab"}
        ),
        ["a.0", "a.1", "b.0", "b.1"],
    ),
    "stages and what is between": (
        lambda: nn.Sequential(
            nn.Sequential(Block(), Block()), layers(), nn.Sequential(Block(), Block())
        ),
        ["0.0", "0.1", "1", "2.0", "2.1"],
    ),
    "models as one": (
        lambda: nn.ModuleDict(
            {"a": layers(norm=True), "b": Block(), "c": nn.ModuleDict({"d": Block()})}
        ),
        ["a", "a.1", "a.3", "b", "c.d"],  # which the script calls, as there is no forward around
    ),
    "models of one class": (
        lambda: nn.ModuleDict(
            {
                "policy": Stage(3, 2, 6),
                "critics": nn.ModuleDict({name: Stage(3, 2, 6) for name in "ab"}),
                "heads": nn.ModuleList([Block(), Block()]),
            }
        ),
        [
            *("policy", "policy.blocks.0", "policy.blocks.1"),
            *("critics.a", "critics.a.blocks.0", "critics.a.blocks.1"),
            *("critics.b", "critics.b.blocks.0", "critics.b.blocks.1"),
            *("heads.0", "heads.1"),
        ],
    ),
    "lists": (
        lambda: nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2)),
        ["0.0", "0.1", "1.0", "1.1"],  # a list itself is never called
    ),
    "a list for each layer": (  # of two blocks, as in x-transformers and vit-pytorch
        lambda: listing(nn.ModuleList([Block(), Pair(7), nn.Linear(7, 7)]) for _ in range(2)),
        ["0.0.0", "0.0.1", "0.1.0", "0.1.1"],
    ),
    "one block in every list": (lambda: listing(nn.ModuleList([b]) for b in [Block()] * 2), []),
    "holders in lists": (lambda: listing(nn.ModuleList([Holder()]) for _ in range(2)), []),
    "blocks that list parameters": (lambda: nn.Sequential(Listing(3), Listing(3)), ["0", "1"]),
    "stages of a net": (net, STAGES),
    "stages of lists": (
        lambda: nn.Sequential(*(Stage(w, 1, w, pairs) for w in (3, 6))),
        ["0.blocks.0.0", "0.blocks.0.1", "1.blocks.0.0", "1.blocks.0.1"],
    ),
    "stages of convolutions": (
        lambda: nn.Sequential(Stage(4, 2, 8, Convolutions), Stage(8, 2, 1, Convolutions)),
        ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"],
    ),
    "stages of depthwise convolutions": (
        lambda: nn.Sequential(Stage(4, 2, 8, Depthwise), Stage(8, 2, 1, Depthwise)),
        ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"],
    ),
    "no block repeated": (lambda: nn.Sequential(Stage(3, 1, 6), Stage(6, 1, 1)), ["0", "1"]),
    "experts": (lambda: nn.Sequential(Stage(3, 4, 3), Stage(3, 4, 3)), ["0", "1"]),
    "experts in one": (lambda: nn.Sequential(Stage(3, 4, 3), Stage(3, 0, 3)), ["0", "1"]),
    "experts of other widths": (lambda: nn.Sequential(Experts(4, 9), Experts(4, 16)), ["0", "1"]),
    "layers and norms": (
        lambda: nn.Sequential(Stage(3, 2, 6, Normed), Stage(6, 2, 1, Normed)),
        ["0", "1"],
    ),
    "without a shape yet": (
        lambda: nn.Sequential(Stage(3, 2, 6, nn.LazyLinear), Stage(6, 2, 1, nn.LazyLinear)),
        ["0", "1"],
    ),
    "little in lists": (lambda: nn.Sequential(Stage(3, 2, 36), Stage(36, 2, 900)), ["0", "1"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_units(name: str) -> None:
    make, expected = MODELS[name]
    assert unit_names(make(), None) == expected


def test_models_wrapped_as_one_train_as_plain_ones_do() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"G": layers(norm=True), "D": Block()})
    model = zshard.wrap(copy.deepcopy(plain))
    for each in (plain, model):
        for step in range(2):
            each["D"](
                each["G"](torch.full((2, 4), step + 1.0))[:, :1].expand(2, 7)
            ).sum().backward()
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad), name


def test_layers_of_experts_train_however_wide_these_are() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Experts(4, 9), Experts(4, 16))
    model = zshard.wrap(copy.deepcopy(plain))
    for each in (plain, model):
        each(torch.ones(3, 4)).sum().backward()
    for name, param in plain.named_parameters():
        grad = zshard.full_grad(model, name)
        assert (grad is None) == (param.grad is None), name
        assert grad is None or torch.equal(grad, param.grad), name


def stages(rank: int, world_size: int) -> tuple[float, bool]:
    """How much of a net is whole at once, and whether its gradients are DDP's."""
    torch.manual_seed(0)
    plain = DistributedDataParallel(net())
    model = zshard.wrap(copy.deepcopy(plain.module))
    x = torch.randn(4, 3)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x * (rank + 1)).square().mean().backward()
    same = all(
        torch.equal(zshard.full_grad(model, name), param.grad)
        for name, param in plain.module.named_parameters()
    )
    whole = 4 * sum(param.numel() for param in model.parameters())
    return zshard.memory(model)["peak"]["full_buffers"] / whole, same


def test_a_net_of_stages_is_gathered_by_their_blocks() -> None:
    for held, same in run_ranks(stages, 2):
        assert same
        assert held < 0.4


def gathered_at_once(rank: int, world_size: int) -> float:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(8)))
    zshard.wrap(model)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    whole = 4 * sum(param.numel() for param in model.parameters())
    return zshard.memory(model)["peak"]["full_buffers"] / whole


def test_a_list_of_sequentials_is_not_gathered_as_a_whole() -> None:
    assert run_ranks(gathered_at_once, 2) == [pytest.approx(2 / 8, rel=0.02)] * 2


def policy_and_reference(rank: int, world_size: int) -> tuple[float, bool]:
    """How much of two models of one class is whole at once, and whether both train as alone."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({name: Stage(64, 6, 1) for name in ("policy", "reference")})
    model = zshard.wrap(copy.deepcopy(plain))
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            with torch.no_grad():
                expected = each["reference"](torch.ones(2, 64))
            (each["policy"](torch.ones(2, 64)) - expected).square().sum().backward()
    same = all(
        torch.equal(zshard.full_grad(model, f"policy.{name}"), param.grad)
        for name, param in plain["policy"].named_parameters()
    )
    whole = 4 * sum(param.numel() for param in model["policy"].parameters())
    return zshard.memory(model)["peak"]["full_buffers"] / whole, same


def test_of_two_models_of_one_class_no_more_blocks_are_whole_at_once_than_of_one() -> None:
    for held, same in run_ranks(policy_and_reference, 2):
        assert same
        assert held < 0.6


def normalised_at_a_member(rank: int, world_size: int) -> torch.Tensor:
    """What a member of a ModuleDict gives on every rank that has parameters in blocks alone."""
    members = {
        name: nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4), nn.Linear(4, 4))
        for name in "ab"
    }
    model = zshard.wrap(nn.ModuleDict(members), init="broadcast")
    model["a"](torch.full((2, 4), float(rank))).sum().backward()
    return model.eval()["a"](torch.ones(1, 4)).detach()


def test_buffers_of_a_member_that_has_no_parameters_beside_its_blocks_are_rank_0s() -> None:
    first, second = run_ranks(normalised_at_a_member, 2)
    assert torch.equal(first, second)


def test_a_module_of_buffers_alone_is_no_unit_where_the_root_is_called() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    for model, units in (
        (layers, ["", "0"]),
        (nn.ModuleDict({"a": layers}), ["", "a", "a.0"]),  # whose forward broadcasts them
    ):
        specs = unit_map(model, (nn.Linear, nn.BatchNorm1d, nn.Sequential), ())
        assert [spec.name for spec in specs] == units


def of_another_width(rank: int, world_size: int) -> str:
    """What is said of a second stage that on one rank is wider, so that the map is another."""
    width = 3 + 3 * rank
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(nn.Sequential(Stage(3, 2, width), Stage(width, 2, 1)))
    return str(caught.value)


def test_where_units_differ_because_shapes_do_a_shape_is_named() -> None:
    for said in run_ranks(of_another_width, 2):
        assert "parameter 0.reduction.weight: rank 0 and rank 1 differ in shape: (3, 3)" in said
