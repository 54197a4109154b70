"""Bad input: a typed error that names what and where, on every rank, and a model that goes on.

One test for each row of the README's tables of what is refused that no other file has.
tests/test_agreement.py has ranks that do different things, tests/test_guards.py and test_habits.py
graphs and exceptions, tests/test_freezing.py requires_grad, tests/test_params.py sharded access.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from models import Block, Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn

import zshard

Act = Callable[[nn.Module], object]


def goes_on(model: nn.Module) -> None:
    model.zero_grad()
    models.loss_of(model, batch(0, 1)).backward()


def append_block(model: nn.Module) -> object:
    model.blocks.append(Block())
    return lambda: model.blocks.__delitem__(3)


def replace_block(model: nn.Module) -> object:
    before = model.blocks[1]
    model.blocks[1] = Block()
    return lambda: model.blocks.__setitem__(1, before)


def add_parameter(model: nn.Module) -> object:
    model.blocks[0].scale = nn.Parameter(torch.ones(1))
    return lambda: model.blocks[0].__delattr__("scale")


def give_bias(model: nn.Module) -> object:
    model.blocks[0].down.bias = nn.Parameter(torch.ones(7))  # None until then
    return lambda: setattr(model.blocks[0].down, "bias", None)


def replace_parameter(model: nn.Module) -> object:
    before = model.inlet.weight
    model.inlet.weight = nn.Parameter(torch.zeros(7, 3))
    return lambda: model.inlet.__setattr__("weight", before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (append_block, r"ModuleList 'blocks' has other modules or parameters.*\(3\)"),
        (replace_block, r"ModuleList 'blocks' has other modules or parameters.*\(1\)"),
        (add_parameter, r"Block 'blocks\.0' has other modules or parameters.*\(scale\)"),
        (give_bias, r"Linear 'blocks\.0\.down' has other modules or parameters.*\(bias\)"),
        (replace_parameter, r"weight \(weight of a Linear\) was replaced after zshard\.wrap"),
    ],
)
def test_what_is_added_or_replaced_after_wrap_is_refused_and_can_be_undone(
    change: Callable[[nn.Module], Callable[[], object]], message: str
) -> None:
    model = zshard.wrap(Blocks())
    undo = change(model)
    with pytest.raises(zshard.Error, match=message):
        model(batch(0, 0))
    undo()
    goes_on(model)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda m: m.half(), r"inlet\.weight: dtype and device cannot change"),
        (lambda m: m.to(torch.float64), r"inlet\.weight: dtype and device cannot change"),
        (lambda m: m.to("meta"), r"inlet\.weight: dtype and device cannot change"),
        (lambda m: m.to_empty(device="meta"), r"inlet\.weight: .* on meta would change"),
        (lambda m: m.to("cpu:0", torch.float64), r"inlet\.weight: dtype and device cannot change"),
        (lambda m: setattr(m.inlet.weight, "data", torch.ones(7, 3).half()), r"convert the model"),
        (lambda m: setattr(m.inlet.weight, "data", torch.ones(7, 3, device="meta")), r"on meta"),
        (lambda m: setattr(m.inlet.weight, "data", torch.ones(3, 7)), r"\(3, 7\).*\(7, 3\)"),
        (lambda m: zshard.wrap(m), r"wrapped already"),
        (lambda m: zshard.wrap(nn.Sequential(m)), r"0\.inlet\.weight is a Sharded"),
        (lambda m: zshard.wrap(nn.Sequential(m, Block()), ignored=[m]), r"0\.inlet.* wrapped"),
        (lambda m: m.inlet.weight @ torch.ones(3), r"inlet\.weight"),
        (lambda m: m.inlet.weight.tolist(), r"inlet\.weight"),
        (lambda m: m.inlet.weight.numpy(), r"inlet\.weight.*zshard\.full_param"),
        (lambda m: m.inlet.weight.data_ptr(), r"inlet\.weight.*zshard\.full_param"),
        (lambda m: m.share_memory(), r"inlet\.weight.*zshard\.full_param"),
        (lambda m: torch.save(m, io.BytesIO()), r"zshard\.full_params"),
        (
            lambda m: torch.save(m.state_dict(), io.BytesIO()),
            r"zshard\.state_dict\(model\).*zshard\.save",
        ),
        (lambda m: m.inlet.weight[0], r"inlet\.weight"),
        (lambda m: m.inlet.weight.norm(), r"inlet\.weight"),
        (
            lambda m: torch.func.functional_call(m, dict(Blocks().named_parameters()), batch(0, 0)),
            r"was replaced after zshard\.wrap",
        ),
    ],
)
def test_what_would_break_a_wrapped_model_is_refused_and_it_goes_on(act: Act, message: str) -> None:
    model = zshard.wrap(Blocks())
    with pytest.raises(zshard.Error, match=message):
        act(model)
    goes_on(model)


class Keeper(Block):
    """Keeps a reference to its weight from inside forward, as a careless logger does."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["kept"] = self.up.weight
        return super().forward(x)


def kept_weight(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks(block=Keeper), strategy=strategy)
    optimizer = zshard.AdamW(model.parameters())
    models.loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    kept = model.blocks[0].kept
    for use in (torch.sum, Tensor.tolist, lambda t: t.numpy(), lambda t: t + 1, lambda t: t.data):
        with pytest.raises(zshard.ShardedAccessError, match=r"zshard\.full_param"):
            use(kept)
    assert kept.shape == model.blocks[0].up.weight.shape  # what does not change may be asked
    assert "not gathered" in repr(kept)
    goes_on(model)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_kept_reference_to_a_gathered_weight_is_an_error_not_another_units_numbers(
    strategy: str,
) -> None:
    run_ranks(kept_weight, 2, strategy)


def test_a_kept_reference_is_an_error_on_one_rank_too() -> None:
    kept_weight(0, 1, "zero3")


@pytest.mark.parametrize("kind", [zshard.AdamW, torch.optim.AdamW])
def test_an_optimizer_over_a_copys_parameters_is_refused_at_its_step(
    kind: type[torch.optim.Optimizer],
) -> None:
    optimizer = kind(Blocks().parameters())
    models.loss_of(zshard.wrap(Blocks()), batch(0, 0)).backward()  # of a model that is dropped
    model = zshard.wrap(Blocks())
    optimizer.step()  # no model that is used has gradients: nothing to do, as in torch
    models.loss_of(model, batch(0, 0)).backward()
    with pytest.raises(zshard.OptimizerError, match=r"was given a copy's"):
        optimizer.step()
    goes_on(model)


def test_clipping_another_models_parameters_is_refused() -> None:
    zshard.wrap(Blocks())
    with pytest.raises(zshard.InputError, match="not of a wrapped model"):
        zshard.clip_grad_norm_(list(Blocks().parameters()), 1.0)


def test_clipping_several_models_at_once_is_refused() -> None:
    both = [zshard.wrap(Blocks()) for _ in range(2)]
    for model in both:
        goes_on(model)
    with pytest.raises(zshard.InputError, match="several wrapped models"):
        zshard.clip_grad_norm_([param for model in both for param in model.parameters()], 1.0)


def test_double_backward_is_refused_and_the_model_goes_on() -> None:
    model = zshard.wrap(Blocks())
    loss = models.loss_of(model, batch(0, 0))
    with pytest.raises(zshard.StateError, match="create_graph=True"):
        loss.backward(create_graph=True)
    goes_on(model)


def unlike_models(rank: int, world_size: int, difference: str, comm: str, init: str) -> str:
    torch.manual_seed(0)
    model, options = Blocks(), {"comm": comm, "init": init}
    if rank == 1 and difference == "name":
        model.entry = model.inlet
        del model.inlet
    elif rank == 1 and difference == "shape":
        model.outlet = nn.Linear(7, 2)
    elif rank == 1 and difference == "dtype":
        model.outlet.double()
    elif rank == 1 and difference == "unit":
        options["units"] = "model"
    elif rank == 1 and difference == "init":
        options["init"] = "broadcast"
    elif rank == 1 and difference == "prefetch":
        options["prefetch"] = 2
    elif rank == 1 and difference == "values":
        model.blocks[2].up.bias.data[3] += 1e-6
    elif rank == 1 and difference == "requires_grad":
        model.outlet.bias.requires_grad_(False)
    elif rank == 1 and difference == "order":
        model.inlet = model._modules.pop("inlet")
    elif rank == 1 and difference == "missing":
        model.blocks = nn.ModuleList([*model.blocks, Block()])
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(model, **options)
    assert type(model.outlet.weight) is nn.Parameter
    return str(caught.value)


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ("init", "with different options: init: {init} on ranks [0]; broadcast on ranks [1]"),
        ("prefetch", "with different options: prefetch: 1 on ranks [0]; 2 on ranks [1]"),
        ("name", "only some ranks have the parameter 'inlet.weight': ranks [0] do"),
        ("shape", "outlet.weight: rank 0 and rank 1 differ in shape: (1, 7) on rank 0, (2, 7)"),
        ("dtype", "outlet.weight: rank 0 and rank 1 differ in dtype: 'torch.float32'"),
        ("unit", "blocks.0.norm.weight: rank 0 and rank 1 differ in unit: 'blocks.0' on rank 0"),
        ("requires_grad", "outlet.bias: rank 0 and rank 1 differ in requires_grad"),
        ("missing", "blocks.3"),
        ("order", "parameters are registered in another order on rank 1: outlet.weight"),
    ],
)
@pytest.mark.parametrize("init", ["check", "trust"])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_whose_models_differ_are_told_where_on_every_rank(
    difference: str, said: str, comm: str, init: str
) -> None:
    for message in run_ranks(unlike_models, 2, difference, comm, init):
        assert said.format(init=init) in message, message


def test_ranks_whose_values_differ_are_told_where_on_every_rank() -> None:
    for message in run_ranks(unlike_models, 2, "values", "auto", "check"):
        assert "blocks.2.up.bias: rank 0 and rank 1 have different values" in message, message


WRONG: list[dict[str, object]] = [
    {"precision": "bf16"},
    {"precision": torch.bfloat16},
    {"units": 5},
    {"units": [nn.Linear, 5]},
    {"units": [nn.LSTM]},
    {"init": "random"},
    {"ignored": 5},
    {"ignored": [5]},
    {"ignored": [nn.Parameter(torch.ones(1))]},
    {"ignored": nn.Parameter(torch.ones(2))},
    {"ignored": "outlet.bias"},
    {"ignored": nn.ModuleDict({"outlet": nn.ReLU()})},
    {"ignored": ["outlet.nothing"]},
    {"device": "nonsense"},
    {"mesh": dist.GroupMember.NON_GROUP_MEMBER},
    {"mesh": "cpu"},
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_arguments_that_cannot_be_used_are_refused_and_the_model_stays_plain(
    arguments: dict[str, object],
) -> None:
    model = Blocks()
    with pytest.raises(zshard.InputError, match=next(iter(arguments))):
        zshard.wrap(model, **arguments)
    goes_on(zshard.wrap(model))


def test_a_module_can_be_ignored_by_its_name() -> None:
    model = zshard.wrap(Blocks(), ignored=["outlet"])
    whole = [name for name, param in model.named_parameters() if type(param) is nn.Parameter]
    assert whole == ["outlet.weight", "outlet.bias"]


@pytest.mark.parametrize("precision", [zshard.Precision.bf16(), zshard.Precision(torch.float32)])
def test_inputs_are_not_cast_away_from_a_float64_model(precision: zshard.Precision) -> None:
    with pytest.raises(zshard.InputError, match="float64 parameters, which all of its are"):
        zshard.wrap(Blocks().double(), precision=precision)
    kept = dataclasses.replace(precision, cast_inputs=False)
    model = zshard.wrap(Blocks().double(), precision=kept)
    assert model(batch(0, 0).double()).dtype == torch.float64


def test_other_arguments_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    model = zshard.wrap(Blocks())
    zshard.export(tmp_path / "a", model)
    for name, use in {
        "cast_inputs": lambda: zshard.Precision(cast_inputs=5),
        "max_norm": lambda: zshard.clip_grad_norm_(model, "a"),
        "norm_type": lambda: zshard.clip_grad_norm_(model, 1.0, "p"),
        "method": lambda: zshard.method(model, 5),
        "forward gathers already": lambda: zshard.method(model, "forward"),
        "takes a torch.nn.Module, got a list": lambda: zshard.wrap([model]),
        "expected a wrapped model, got a list": lambda: zshard.state_dict([model]),
        "rename": lambda: zshard.load_weights(model, tmp_path, rename={"a": "b"}),
        "makes two": lambda: zshard.load_weights(model, tmp_path / "a", rename=lambda name: "one"),
    }.items():
        with pytest.raises(zshard.InputError, match=name):
            use()
    with pytest.raises(zshard.StateError, match="assign=True"):
        model.load_state_dict(Blocks().state_dict(), assign=True)
    goes_on(model)


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_clipping_is_refused_with_ours(foreach: bool) -> None:
    model = zshard.wrap(Blocks())
    goes_on(model)
    with pytest.raises(zshard.ShardedAccessError, match=r"norm of .*Clip with zshard\.clip_grad_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    goes_on(model)


class OddMemory(nn.Module):
    """Parameters of one value for all and of one in a column, and ones made for inference."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.same = nn.Parameter(torch.randn(1).expand(4))
        self.one = nn.Parameter(torch.randn(4, 4)[:1, 0])
        with torch.inference_mode():
            self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.same


def broadcast_into_odd_memory(rank: int, world_size: int) -> dict[str, Tensor]:
    state = zshard.state_dict(zshard.wrap(OddMemory(rank), init="broadcast"), all_ranks=True)
    return {name: value.clone() for name, value in state.items()}


def test_a_broadcast_takes_parameters_of_any_memory() -> None:
    expected = {name: value.clone() for name, value in OddMemory(0).state_dict().items()}
    for found in run_ranks(broadcast_into_odd_memory, 2):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
