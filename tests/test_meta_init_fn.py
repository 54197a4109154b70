"""What an init_fn may do, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from meta import SEED, assert_same_values, draw, on_meta, whole
from ranks import run_ranks
from torch import Tensor, nn

import zshard

# --- the ways to write values --------------------------------------------------------------------


def in_place(module: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    module.weight.copy_(weight)
    module.bias.copy_(bias)


def through_data(module: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    module.weight.data.copy_(weight)
    module.bias.data[:] = bias


def assigned_data(module: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    module.weight.data = weight.t().contiguous().t()  # dense, but in another order
    module.bias.data = torch.zeros(5)
    module.bias.data = torch.zeros(1).expand(5)
    module.bias.data = bias


def replaced(module: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    module.weight = nn.Parameter(weight)
    module.bias = nn.Parameter(bias)
    module.bias.label = "new"


def emptied_again(module: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    module.to_empty(device="cpu", recurse=False)
    nn.init.zeros_(module.weight).add_(weight)
    torch._foreach_copy_([module.bias], [bias])


def out_variant(module: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    torch.add(weight, 0, out=module.weight)
    module.bias.set_(bias.clone())


WAYS = [in_place, through_data, assigned_data, replaced, emptied_again, out_variant]


@pytest.mark.parametrize("way", WAYS)
def test_init_fn_may_write_values_in_any_way(way: Callable[..., None]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5))
    held = list(model.parameters())
    held[1].label = "old"
    weight, bias = torch.randn(5, 3), torch.randn(5)
    zshard.wrap(model, init_fn=lambda module: way(module, weight, bias))
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    assert torch.equal(zshard.full_param(model, "0.weight"), weight)
    assert torch.equal(zshard.full_param(model, "0.bias"), bias)
    assert zshard.full_param(model, "0.weight").stride() == (3, 1)
    assert held[1].label == ("new" if way is replaced else "old")
    model(torch.ones(2, 3)).sum().backward()
    assert zshard.full_grad(model, "0.bias").tolist() == [2.0] * 5


def test_a_tied_parameter_may_be_replaced_in_all_its_places_at_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        model.gain = nn.Parameter(torch.ones(()))

    def init_fn(module: nn.Module) -> None:
        if module is model:
            model[0].weight = model[1].weight = nn.Parameter(torch.eye(3))
            model.gain.fill_(2.0)

    held = model[0].weight
    zshard.wrap(model, units="model", init_fn=init_fn)
    assert model[0].weight is model[1].weight is held
    assert torch.equal(zshard.full_param(model, "1.weight"), torch.eye(3))


class Huggingface(models.GPT):
    """Initialises as Hugging Face's models do: by kind of module, each one once, through data."""

    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "_is_initialized", False):
            raise AssertionError("initialised twice")
        module._is_initialized = True
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        else:
            self.positions.data.normal_(std=0.02)


def huggingface(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = Huggingface()
    zshard.wrap(model, init_fn=model._init_weights)
    assert model.head.weight is model.tokens.weight
    return whole(model)


def test_tied_weights_stay_tied_and_hold_what_was_written_last() -> None:
    expected = Huggingface()
    blocks = [
        f"blocks.{i}.{name}"
        for i in range(3)
        for name in ("norm1", "norm2", "attention.qkv", "attention.out", "mlp.0", "mlp.2")
    ]
    torch.manual_seed(SEED)
    for name in ["tokens", "norm", "head", "", *blocks]:
        expected._init_weights(expected.get_submodule(name))
    for values in run_ranks(huggingface, 2):
        assert_same_values(values, expected)


def test_recurrent_layers_train_from_the_meta_device() -> None:
    def build() -> nn.Module:
        return nn.ModuleList([nn.LSTM(3, 5, num_layers=2), nn.GRU(5, 2)])

    with torch.device("meta"):
        model = build()
    torch.manual_seed(SEED)
    zshard.wrap(model, units=(nn.RNNBase,), init_fn=lambda module: module.reset_parameters())
    expected = build()
    torch.manual_seed(SEED)
    for layer in expected:
        layer.reset_parameters()
    x = torch.randn(4, 3)
    for layer in range(2):
        ours, theirs = (
            m[layer](x if layer == 0 else torch.ones(4, 5))[0] for m in (model, expected)
        )
        assert torch.equal(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
    for name, parameter in expected.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), parameter.grad), name


# --- what is refused -----------------------------------------------------------------------------


def other_shape(model: nn.Module, module: nn.Module) -> None:
    model.inlet.weight.data = torch.zeros(2, 3)


def other_dtype(model: nn.Module, module: nn.Module) -> None:
    model.inlet.weight = nn.Parameter(torch.zeros(7, 3, dtype=torch.float64))


def other_requires_grad(model: nn.Module, module: nn.Module) -> None:
    model.inlet.weight.requires_grad_(False)


def back_on_meta(model: nn.Module, module: nn.Module) -> None:
    model.inlet.weight = nn.Parameter(torch.empty(7, 3, device="meta"))


def removed(model: nn.Module, module: nn.Module) -> None:
    model.inlet.weight = None


def tied(model: nn.Module, module: nn.Module) -> None:
    model.inlet.weight = model.like.weight


def untied(model: nn.Module, module: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.zeros(7, 3))


def added(model: nn.Module, module: nn.Module) -> None:
    module.extra = nn.Parameter(torch.zeros(2))


def buffer_on_meta(model: nn.Module, module: nn.Module) -> None:
    model.cache = torch.empty(2, device="meta")


def later_unit(model: nn.Module, module: nn.Module) -> None:
    model.blocks[0].weight.zero_()


def later_unit_through_data(model: nn.Module, module: nn.Module) -> None:
    model.blocks[0].weight.data.normal_()


def later_unit_read(model: nn.Module, module: nn.Module) -> None:
    model.inlet.weight.copy_(model.blocks[0].weight)


def later_unit_replaced(model: nn.Module, module: nn.Module) -> None:
    model.blocks[0].weight = nn.Parameter(torch.zeros(7, 3))


def earlier_unit(model: nn.Module, module: nn.Module) -> None:
    if module is model.blocks[1]:
        model.blocks[0].weight.fill_(1.0)


def earlier_unit_whole(model: nn.Module, module: nn.Module) -> None:
    if module is model.blocks[1]:
        model.blocks[0].weight.data.normal_()


def earlier_unit_replaced(model: nn.Module, module: nn.Module) -> None:
    if module is model.blocks[1]:
        model.blocks[0].weight = nn.Parameter(torch.zeros(7, 3))


class Strict(nn.Module):
    """Something of everything that an init_fn can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.like = nn.Linear(3, 7, bias=False), nn.Linear(3, 7, bias=False)
        self.first, self.second = nn.Linear(3, 7, bias=False), nn.Linear(3, 7, bias=False)
        self.second.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Linear(3, 7, bias=False) for _ in range(2))
        self.register_buffer("cache", torch.zeros(2))


REFUSED = {
    other_shape: r"inlet\.weight \(2, 3\).*was \(7, 3\)",
    other_dtype: r"inlet\.weight .*float64.*was .*float32",
    other_requires_grad: r"inlet\.weight .*requires_grad=False.*requires_grad=True",
    back_on_meta: r"inlet\.weight without values",
    removed: r"inlet\.weight without values",
    tied: r"tied or untied inlet\.weight",
    untied: r"tied or untied first\.weight and second\.weight",
    added: r"added.* extra",
    buffer_on_meta: r"buffer cache on the meta device",
    later_unit: r"zero_ .*blocks\.0\.weight.*another unit",
    later_unit_through_data: r"normal_ .*blocks\.0\.weight.*another unit",
    later_unit_read: r"copy_ .*blocks\.0\.weight.*another unit",
    later_unit_replaced: r"blocks\.0\.weight without values",
    earlier_unit: r"fill_ .*blocks\.0\.weight.*another unit",
    earlier_unit_whole: r"normal_ .*blocks\.0\.weight.*another unit",
    earlier_unit_replaced: r"replaced.* blocks\.0\.weight",
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_work_in_init_fn_is_refused_by_name(wrong: Callable[..., None]) -> None:
    with torch.device("meta"):
        model = Strict()

    def init_fn(module: nn.Module) -> None:
        if module is model:
            model.cache.zero_()
        else:
            module.reset_parameters()
        if module is model or module is model.blocks[1]:
            wrong(model, module)

    with pytest.raises(zshard.InputError, match=REFUSED[wrong]):
        zshard.wrap(model, init_fn=init_fn)


@pytest.mark.parametrize("name", ["1.weight", "1.bias", "1.running_var", "1.num_batches_tracked"])
@pytest.mark.parametrize("ignored", [[], ["1.weight", "1.bias"]])
def test_memory_that_init_fn_leaves_uninitialised_is_refused_by_name(
    name: str, ignored: list[str]
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def init_fn(module: nn.Module) -> None:
        if module is model[0]:
            return module.reset_parameters()
        for kind in (module.named_parameters(), module.named_buffers()):
            for own, tensor in kind:
                if own != name[2:]:
                    tensor.zero_()

    with pytest.raises(zshard.InputError, match=rf"wrote nothing to {name}"):
        zshard.wrap(model, init_fn=init_fn, ignored=ignored)


def test_temporaries_of_init_fn_may_be_on_meta_and_written_memory_may_be_used_again() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3, 4) for _ in range(5)))

    def init_fn(module: nn.Module) -> None:
        torch.empty(4, 3, device="meta").zero_()
        for _ in range(3):
            module.weight.data = torch.full((4, 3), 2.0)
            module.bias.data = torch.full((4,), 3.0)

    zshard.wrap(model, init_fn=init_fn)
    assert float(zshard.full_param(model, "4.bias").sum()) == 12


def test_a_weight_without_elements_may_be_left_as_it_is() -> None:
    with torch.device("meta"), pytest.warns(UserWarning, match="zero-element"):
        model = nn.Linear(0, 3)
    with pytest.warns(UserWarning, match="zero-element"):  # what torch's initialisation says then
        zshard.wrap(model, init_fn=nn.Linear.reset_parameters)
    assert model(torch.ones(2, 0)).tolist() == [[0.0] * 3] * 2


def test_an_init_fn_that_would_never_be_called_is_refused() -> None:
    with pytest.raises(zshard.InputError, match="no parameter or buffer is on the meta device"):
        zshard.wrap(models.build("blocks"), init_fn=draw)
    with pytest.raises(zshard.InputError, match=r"init_fn=3: expected a function"):
        zshard.wrap(on_meta("blocks"), init_fn=3)


def test_the_meta_device_is_no_place_to_train_on() -> None:
    model = models.build("blocks")
    with pytest.raises(zshard.InputError, match="device='meta'"):
        zshard.wrap(model, device="meta")
    assert not any(p.is_meta for p in model.parameters())


def test_init_fn_may_freeze_what_is_sharded_already() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

    def init_fn(module: nn.Linear) -> None:
        module.reset_parameters()
        if module is model[1]:
            model[0].bias.requires_grad_(False)

    zshard.wrap(model, init_fn=init_fn, units="layer")
    model(torch.ones(4, 3)).sum().backward()
    assert not model[0].bias.requires_grad and model[0].bias.grad is None
    assert model[0].weight.grad is not None
