"""Which of torch's operators work on slices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import zshard
from zshard.sharded.operators import operator
from zshard.units import full_buffer, leaf


def _operators(prefix: str) -> dict[str, bool]:
    """Every ATen operator that starts so -> whether all its overloads work on slices."""
    found: dict[str, bool] = {}
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.removeprefix("aten::").partition(".")
        if full_name.startswith("aten::") and name.startswith(prefix):
            func = getattr(getattr(torch.ops.aten, name), overload or "default")
            found[name] = found.get(name, True) and operator(func).elementwise
    return found


def test_lists_are_computed_on_slices_but_by_reductions_and_matrix_products() -> None:
    found = _operators("_foreach_")
    not_elementwise = {name for name, elementwise in found.items() if not elementwise}
    possible = ("norm", "max", "powsum", "mm")  # of which older versions of torch have fewer
    assert not_elementwise == {f"_foreach_{name}" for name in possible} & found.keys()
    assert {"_foreach_norm", "_foreach_max"} <= not_elementwise
    assert {
        "_foreach_abs_",
        "_foreach_clamp_max",
        "_foreach_copy_",
        "_foreach_zero_",
    } <= found.keys()


@pytest.mark.parametrize("name", ["equal", "rrelu", "mm", "sum", "cumsum", "sort", "softmax"])
def test_what_needs_other_elements_or_their_random_numbers_is_not_elementwise(name: str) -> None:
    assert not _operators(name)[name]


# Of which older versions of torch have the last alone.
@pytest.mark.parametrize("name", [n for n in ("_foreach_mm", "mm") if hasattr(torch, n)])
def test_matrix_products_of_shards_are_refused(name: str) -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    weights = [param.detach() for param in model.parameters() if param.ndim == 2]
    left, right = (weights, weights) if name.startswith("_foreach") else weights
    with pytest.raises(zshard.ShardedAccessError, match=f"{name} needs the whole"):
        getattr(torch, name)(left, right)


@pytest.mark.parametrize("change", ["abs_", "sign_", "gt_", "copysign_", "heaviside_", "clamp_"])
def test_elementwise_operations_in_place_change_the_slices(change: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 5)
    model = zshard.wrap(copy.deepcopy(plain))
    with torch.no_grad():
        for weight in (plain.weight, model.weight):
            others = {"abs_": (), "sign_": (), "clamp_": (-0.1, 0.1)}.get(change, (-weight / 2,))
            getattr(weight, change)(*others)
    assert torch.equal(zshard.full_param(model, "weight"), plain.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tensors_like_a_sharded_one_are_plain(dtype: torch.dtype) -> None:
    """As hidden states are made outside of forward: weight.new_zeros(layers, batch, width)."""
    weight = zshard.wrap(nn.Linear(3, 5, dtype=dtype)).weight
    made = [
        *(weight.new_zeros(2, 3), weight.data.new_ones(2, 3), weight.new_full((2, 3), 0.5)),
        *(weight.new_empty(2, 3), weight.new_empty_strided((2, 3), (3, 1))),
    ]
    assert all(type(each) is torch.Tensor and each.dtype == dtype for each in made)
    assert [each.tolist() for each in made[:3]] == [[[x] * 3] * 2 for x in (0.0, 1.0, 0.5)]
    assert weight.new_zeros(2, dtype=torch.int64).dtype == torch.int64


@pytest.mark.parametrize("name", ["untyped_storage", "data_ptr", "const_data_ptr", "numpy"])
def test_the_memory_of_a_sharded_tensor_is_refused_by_name(name: str) -> None:
    model = zshard.wrap(nn.Linear(3, 5))
    with pytest.raises(zshard.ShardedAccessError, match=rf"weight: {name} needs.*full_param"):
        getattr(model.weight, name)()
    assert not model.weight.is_shared()  # which torch answers by the storage
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(zshard.ShardedAccessError, match=rf"weight: {name} needs.*full_grad"):
        getattr(model.weight.grad, name)()


def test_files_of_shards_are_refused(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(3, 5))
    with pytest.raises(zshard.ShardedAccessError, match="needs the whole of it"):
        save_file(model.state_dict(), tmp_path / "x.safetensors")
    save_file(zshard.state_dict(model), tmp_path / "x.safetensors")
    whole = load_file(tmp_path / "x.safetensors")["weight"]
    assert torch.equal(whole, zshard.full_param(model, "weight"))
    with pytest.raises(zshard.ShardedAccessError, match=r"to load a file, zshard\.load_weights"):
        load_model(model, tmp_path / "x.safetensors")
    zshard.load_weights(model, tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_has_the_dtype_that_was_asked_for_be_it_the_gradients(dtype: torch.dtype) -> None:
    precision = zshard.Precision.bf16(reduce=torch.bfloat16)
    weight = zshard.wrap(nn.Linear(3, 5), precision=precision).weight.detach()
    for cast in (weight.to(dtype), torch.zeros_like(weight, dtype=dtype)):
        assert cast.dtype == cast.local.dtype == dtype


def test_a_list_may_hold_buffers_beside_sharded_parameters() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5)) for _ in range(2)]
    wrapped = [zshard.wrap(copy.deepcopy(model)) for model in models]
    for average, model in (models, wrapped):
        model(torch.arange(6.0).view(2, 3))  # which changes the buffers
        ours, theirs = (
            [each for each in (*m.buffers(), *m.parameters()) if each.is_floating_point()]
            for m in (average, model)
        )
        with torch.no_grad():
            torch._foreach_lerp_(ours, theirs, 0.3)
            torch._foreach_mul_(ours, [1.5] * len(ours))
            doubled = torch._foreach_add(ours, ours)
            torch._foreach_copy_(ours, doubled)
        assert [each.shape for each in doubled] == [each.shape for each in ours]
    torch.testing.assert_close(
        zshard.state_dict(wrapped[0]), models[0].state_dict(), rtol=0, atol=0
    )


def test_a_plain_tensor_in_the_row_of_a_sharded_one_is_refused_before_anything_has_changed() -> (
    None
):
    model = zshard.wrap(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5)))
    buffer, weight = model[0].running_var, model[1].weight.detach()
    with pytest.raises(zshard.ShardedAccessError, match=r"mixes the sharded '1\.weight'"):
        torch._foreach_mul_([buffer, weight], [torch.ones(3) * 2, torch.ones(5, 3)])
    assert torch.equal(buffer, torch.ones(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda plain, scale: plain.add_(scale),
        lambda plain, scale: plain.lerp_(scale, 0.5),
        lambda plain, scale: torch.add(scale, 1.0, out=plain),
        lambda plain, scale: torch._foreach_add_([plain], [scale]),
    ],
)
def test_a_plain_number_is_not_written_from_a_slice(write: Callable[[Tensor, Tensor], Any]) -> None:
    """A rank may have no element of a parameter without dimensions."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    zshard.wrap(model)
    plain = torch.tensor(1.0)
    with pytest.raises(zshard.ShardedAccessError, match="mixes the sharded 'scale' with a plain"):
        write(plain, model.scale.detach())
    assert plain.shape == () and plain == 1.0


def test_a_result_of_lists_is_like_the_sharded_tensor_of_its_row() -> None:
    a, b, c = (p.detach() for p in zshard.wrap(nn.ParameterList(map(torch.ones, (2, 3, 4)))))
    found = torch._foreach_mul([torch.tensor(2.0), c, b], [a, c, torch.tensor(3.0)])
    assert [each.fqn for each in found] == [a.fqn, c.fqn, b.fqn]


def test_what_lies_beside_the_lists_is_not_taken_apart() -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    buffer, weight = model[1].running_var, model[0].weight.detach()
    lists = [[buffer, weight] for _ in range(3)]
    with pytest.raises(zshard.ShardedAccessError, match="_foreach_addcmul_ mixes"):
        torch._foreach_addcmul_(*lists, torch.tensor([1.0, 2.0]))
    with pytest.raises(zshard.ShardedAccessError, match="_foreach_copy_ mixes"):
        torch._foreach_copy_([weight, buffer], [weight])
    layer = nn.Linear(3, 5)
    layer.scale = nn.Parameter(torch.tensor(2.0))
    zshard.wrap(layer)
    for plain in ([buffer], [buffer, layer.weight.detach()]):
        with pytest.raises(zshard.ShardedAccessError, match="_foreach_mul mixes"):
            torch._foreach_mul(plain, layer.scale.detach())
    assert torch.equal(buffer, torch.ones(5))


def test_a_number_is_put_where_a_mask_is_true_and_a_mask_of_rows_is_refused() -> None:
    plain = nn.Linear(4, 4)
    model = zshard.wrap(copy.deepcopy(plain))
    for of in (plain, model):
        with torch.no_grad():
            of.weight[of.weight < 0] = 0.75
            of.weight.masked_fill_(of.weight > 0.5, torch.tensor(0.25))
    assert torch.equal(zshard.full_param(model, "weight"), plain.weight)
    for no_mask in (model.bias > -9.0, (model.weight > 0).to(torch.uint8)):
        with torch.no_grad(), pytest.raises(zshard.ShardedAccessError, match="weight"):
            model.weight[no_mask] = 0.0
    assert torch.equal(zshard.full_param(model, "weight"), plain.weight)


class Counted(Tensor):
    """A user's kind of tensor, which is asked before torch computes anything with it."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.asked += all(issubclass(cls, each) for each in types)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_another_kind_of_tensor_beside_a_sharded_one_is_asked_as_beside_a_plain_one() -> None:
    weight = zshard.wrap(nn.Linear(3, 2)).weight
    other = torch.ones(2, 3).as_subclass(Counted)
    Counted.asked = 0
    for use in (
        lambda: weight.detach().add_(other),
        lambda: other * weight,
        lambda: weight * other,
    ):
        with pytest.raises(zshard.ShardedAccessError, match="mixes the sharded 'weight' with"):
            use()
    assert Counted.asked >= 3


class _InFloat64(torch.optim.Optimizer):
    """Computes in another dtype than the parameters', as pytorch_optimizer's Rose."""

    def __init__(self, params: Any, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, {})
        self.convert = convert

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            value = self.convert(param)
            param.copy_(value.sub_(param.grad.to(torch.float64), alpha=0.1))


@pytest.mark.parametrize(
    "convert",
    [
        lambda param: param.to(torch.float64),
        lambda param: param.type_as(torch.ones(1, dtype=torch.float64)),
        lambda param: param.to(param.device, torch.float64, non_blocking=True),
    ],
)
def test_an_optimizer_may_compute_with_parameters_in_another_dtype(
    convert: Callable[[Tensor], Tensor],
) -> None:
    plain, wrapped = models.build("blocks"), zshard.wrap(models.build("blocks"))
    for model in (plain, wrapped):
        optimizer = _InFloat64(model.parameters(), convert)
        for batch in models.batches("blocks", 2):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_param(wrapped, name), param), name
    to_meta = _InFloat64(wrapped.parameters(), lambda param: param.to("meta", torch.float64))
    with pytest.raises(zshard.StateError, match="dtype and device cannot change"):
        to_meta.step()


def test_a_write_to_one_parameter_passes_over_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zshard.wrap(nn.Sequential(*(nn.Linear(3, 3) for _ in range(8))), units="model")
    model(torch.ones(2, 3)).sum().backward()
    told: list[int] = []

    def counted(leaves: Sequence[nn.Parameter], kind: type[nn.Parameter]) -> None:
        told.append(len(leaves))
        leaf.set_kind(leaves, kind)

    monkeypatch.setattr(full_buffer, "set_kind", counted)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
    assert sum(told) <= len(list(model.parameters()))


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        for index in used:
            x = self.layers[index](x)
        return x


def test_a_weight_kept_from_before_an_update_is_not_read_where_a_gather_was_in_vain() -> None:
    model = zshard.wrap(Skipping(), units="layer")
    kept: list[Tensor] = []
    model.layers[2].register_forward_hook(lambda layer, *_: kept.append(layer.weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 3), {0, 1, 2, 3}).sum().backward()
        optimizer.step()
    model(torch.ones(2, 3), {0, 1, 3}).sum().backward()  # which has gathered the third ahead
    graph = torch.ones((), requires_grad=True) * 1
    graph.register_hook(lambda _: kept[0].sum())
    with pytest.raises(zshard.ShardedAccessError, match="was kept from inside"):
        graph.backward()
