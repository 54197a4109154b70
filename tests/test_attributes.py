"""What a script sets on a parameter, it finds there: on the model, and inside of a forward."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard
from zshard.param import Sharded

SEEN = ("before", "gone", "after", "count")


class Counting(nn.Module):
    """A layer that counts on its weight how often it was called, and notes what it sees there."""

    def __init__(self, seen: list[dict[str, object]]) -> None:
        super().__init__()
        self.layer = nn.Linear(models.WIDTH, models.WIDTH)
        self.layer.register_forward_hook(self._look)
        self._seen = seen

    def _look(self, layer: nn.Module, *_: object) -> None:
        weight = layer.weight
        weight.count = getattr(weight, "count", 0) + 1
        self._seen.append({name: getattr(weight, name, None) for name in SEEN})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def play(rank: int, world_size: int, strategy: str | None) -> list[dict[str, object]]:
    """What two forwards and backwards saw, and what is there at the end; None: a plain model."""
    seen: list[dict[str, object]] = []
    model = nn.ModuleDict({"blocks": nn.ModuleList(Counting(seen) for _ in range(2))})
    weight = model["blocks"][0].layer.weight
    weight.before, weight.gone = "set", "soon"
    if strategy is not None:
        model = zshard.wrap(model, strategy=strategy, units=[f"blocks.{i}" for i in range(2)])
    weight.after = 1
    for _ in range(2):
        x = torch.ones(2, models.WIDTH)
        for block in model["blocks"]:
            x = block(x)
        x.sum().backward()
        weight.after, weight.before = 2, "changed"
        if hasattr(weight, "gone"):
            del weight.gone
    return [*seen, {name: getattr(weight, name, None) for name in SEEN}]


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_attributes_are_those_of_the_plain_model_in_forwards_too(
    strategy: str, world_size: int
) -> None:
    expected = play(0, 1, None)
    assert expected[-1] == {"before": "changed", "gone": None, "after": 2, "count": 2}
    for seen in run_ranks(play, world_size, strategy):
        assert seen == expected


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu", 0)])
@pytest.mark.parametrize("precision", [None, zshard.Precision.bf16(master="split")])
def test_a_model_may_be_moved_to_where_it_is(
    device: str | torch.device, precision: zshard.Precision | None
) -> None:
    """accelerate does it."""
    model = zshard.wrap(models.Blocks(), precision=precision)
    before = dict(model.named_parameters())
    values = zshard.state_dict(model)
    model.to(device).to(device, torch.float32).to(device, non_blocking=True)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert all(param.device == torch.device("cpu") for param in model.parameters())
    models.loss_of(model, models.batches("blocks", 1, 0)[0]).backward()
    assert all(torch.equal(value, values[n]) for n, value in zshard.state_dict(model).items())


def test_a_parameter_by_itself_is_not_moved_into_a_graph() -> None:
    weight = zshard.wrap(nn.Linear(3, 2)).weight
    with pytest.raises(zshard.StateError, match="weight: dtype and device cannot change"):
        weight.to("cpu:0")
    assert weight.is_leaf and weight.grad_fn is None


def test_a_change_of_the_memory_format_is_refused_by_name_but_not_one_that_is_there() -> None:
    before = zshard.wrap(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    behind = zshard.wrap(nn.Conv2d(3, 4, 3))
    before.to(memory_format=torch.channels_last)
    assert before.weight.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(zshard.StateError, match="nor can the memory format"):
        behind.to(memory_format=torch.channels_last)


OWN = ["flat", "fqn", "local", "local_numel", "segment"]


def test_sharded_parameters_have_the_attributes_that_the_readme_names() -> None:
    """Each of them a property: a method would be hidden by what a script sets after wrap."""
    torchs = {*dir(nn.Parameter), "const_data_ptr"}  # which torch 2.11 lacks
    own = {n: each for n, each in vars(Sharded).items() if n[0] != "_" and n not in torchs}
    assert sorted(own) == OWN
    assert {type(each) for each in own.values()} == {property}
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert f"that sharded ones have ({', '.join(f'`{name}`' for name in OWN)})" in readme


@pytest.mark.parametrize("name", OWN)
def test_an_attribute_that_a_sharded_parameter_has_itself_is_refused_by_name(name: str) -> None:
    layer = nn.Linear(4, 2)
    setattr(layer.bias, name, "mine")
    with pytest.raises(zshard.WrapError, match=f"bias has an attribute '{name}'"):
        zshard.wrap(layer)
    assert getattr(layer.bias, name) == "mine"
    delattr(layer.bias, name)
    zshard.wrap(layer)
    with pytest.raises(AttributeError):
        setattr(layer.bias, name, "mine")
    layer(torch.ones(3, 4)).sum().backward()
    assert layer.bias.grad is not None


def test_a_parameter_whose_contents_were_swapped_is_refused_until_they_are_swapped_back() -> None:
    """The object stays in its module, but what it holds is not what the unit computes with."""
    model = zshard.wrap(models.Blocks())
    x = models.batches("blocks", 1, 0)[0]
    up = model.blocks[0].up.weight
    others = [nn.Parameter(torch.zeros(up.shape)), model.blocks[1].up.weight]
    others.append(zshard.wrap(models.Blocks()).blocks[0].up.weight)
    for other in others:
        torch.utils.swap_tensors(up, other)
        for use in (lambda: model(x), lambda: zshard.full_params(model).__enter__()):
            with pytest.raises(zshard.StateError, match=r"up\.weight \(.* replaced .*swap_tensors"):
                use()
        torch.utils.swap_tensors(up, other)
        models.loss_of(model, x).backward()
