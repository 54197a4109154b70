"""Which blocks of a model are repeated: the units that wrap finds by itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import type_before_parametrizations

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
NEVER_CALLED = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Children with parameters of a ModuleList, Sequential or ModuleDict whose class is repeated.

    Containers inside containers are looked into, and a block is not; a repeated Sequential is a
    block itself where it holds layers alone, and none of its own. Where a list has a list for each
    layer, what has several layers of its own is repeated from one to the next (its attention, say).
    Of a stage of a net the blocks are what its lists hold. What an nn.ModuleDict around all has are
    models, of one class or not: each is looked into as if it were alone.
    """
    if type(model) is nn.ModuleDict:
        members = model.named_children()
        return [f"{name}.{path}" for name, member in members for path in repeated_blocks(member)]

    def within(
        name: str, module: nn.Module, beside: Sequence[nn.Module] = ()
    ) -> list[tuple[str, nn.Module]]:
        alike: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        lists: list[nn.Module] = []
        if isinstance(module, _CONTAINERS):
            lists = [child for child in module.children() if type(child) is nn.ModuleList]
            for child in module.children():
                if any(True for _ in child.parameters()):  # which a class may have return a list
                    alike[_class_of(child)].append(child)
            for child in (child for other in beside for child in other.children()):
                called = type(child).forward is not nn.Module.forward  # else its layers are
                if child not in alike[_class_of(child)] and called and _has_several_layers(child):
                    alike[_class_of(child)].append(child)
        stages = {kind for kind, siblings in alike.items() if _are_stages(siblings)}
        blocks: list[tuple[str, nn.Module]] = []
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            called = not isinstance(child, (*_CONTAINERS, *NEVER_CALLED))
            repeated = len(alike[_class_of(child)]) > 1
            if repeated and called:
                blocks += _blocks_of(path, child) if _class_of(child) in stages else [(path, child)]
                continue
            inner = within(path, child, lists if child in lists else ())
            layers_alone = all(_is_layer(block) for _, block in inner)
            if repeated and isinstance(child, nn.Sequential) and layers_alone:
                blocks.append((path, child))
            else:
                blocks += inner
        return blocks

    return [path for path, _ in within("", model)]


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Its class, or that which it had before torch gave it one of its own, to parametrize it."""
    # What wraps a module, as torch's checkpoint_wrapper does, may have its attributes as well.
    parametrized = "parametrizations" in module._modules
    return type_before_parametrizations(module) if parametrized else type(module)


def _is_layer(block: nn.Module) -> bool:
    """Whether it has no modules but those that its parameters are made by."""
    return all(name == "parametrizations" for name, _ in block.named_children())


def _are_stages(siblings: Sequence[nn.Module]) -> bool:
    """Whether blocks of one class are stages of a net, each of little else than blocks in lists.

    Such stages repeat blocks, and have no width in common. Layers of experts do have one, however
    wide the experts are; and experts, of which only some are called, make no units.
    """
    params = [param for sibling in siblings for param in sibling.parameters()]
    if any(is_lazy(param) for param in params):
        return False  # which ``check_kinds`` refuses
    widths: list[set[int]] = []
    held, repeat = 0, False
    for sibling in siblings:
        blocks = [block for _, block in _blocks_of("", sibling)]
        weights = [param for block in blocks for param in block.parameters()]
        widths.append(_widths(weights))
        held += sum(weight.numel() for weight in weights)
        repeat = repeat or len({_class_of(block) for block in blocks}) < len(blocks)
    little_else = 3 * held > 2 * sum(param.numel() for param in params)
    return repeat and all(widths) and not set.intersection(*widths) and little_else


def _widths(weights: Sequence[torch.Tensor]) -> set[int]:
    """Numbers of channels that at least half of the elements are of."""
    channels: Counter[int] = Counter()
    for weight in weights:
        # 1 is what every depthwise convolution has, of whatever width.
        numbers = (number for number in weight.shape[:2] if number > 1)
        channels.update(dict.fromkeys(numbers, weight.numel()))
    half = sum(weight.numel() for weight in weights) / 2
    return {number for number, elements in channels.items() if elements >= half}


def _blocks_of(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What has several layers of what is in containers in ``module``, which is called ``name``."""
    blocks: list[tuple[str, nn.Module]] = []
    for child_name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            path = f"{name}.{child_name}"
            for member_name, member in child.named_children():
                if not isinstance(member, _CONTAINERS) and _has_several_layers(member):
                    blocks.append((f"{path}.{member_name}", member))
            blocks += _blocks_of(path, child)
    return blocks


def _has_several_layers(module: nn.Module) -> bool:
    """Whether several modules in it have a matrix; of a convolution and its normalisation one."""
    own = (each._parameters.values() for each in module.modules())
    return sum(any(p is not None and p.dim() > 1 for p in params) for params in own) > 1
