"""A model wrapped on the meta device without init_fn: its shards' memory, refused until loaded."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
import torch.distributed as dist
from meta import LARGEST, Counted, Large, on_meta
from ops_check import devices
from ranks import run_ranks
from torch import Tensor, nn
from training import Record, Wrapped, adamw, assert_same_bits, train

import zshard
from zshard.wrap import schedule_of

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]
PRECISIONS = {
    "fp32": None,
    "bf16": zshard.Precision.bf16(),
    "split": zshard.Precision.bf16(master="split"),
}


def load(model: nn.Module, source: nn.Module) -> None:
    """What a load does: takes the ranks in, writes every value, and lets the model run."""
    schedule = schedule_of(model)
    schedule.begin_call("load", unusable_ok=True)
    values = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(values[name])  # a whole value gives a sharded parameter its slice
    schedule.unusable = ""


# --- values --------------------------------------------------------------------------------------


def loaded(
    rank: int, world_size: int, strategy: str, precision: str, names: list[str]
) -> list[tuple[Tensor, Record, Record]]:
    """The first loss, and a few steps, of models that were loaded and of their plain twins."""
    out = []
    for name in names:
        model = on_meta(name)
        optimizer = adamw(model)
        options = {"strategy": strategy, "precision": PRECISIONS[precision]}
        zshard.wrap(model, **options)
        load(model, models.build(name))
        first = models.loss_of(model, models.batches(name, 1, rank)[0]).detach()
        expected = zshard.wrap(models.build(name), **options)
        records = (
            train(Wrapped(each), opt, models.batches(name, 3, rank))
            for each, opt in ((model, optimizer), (expected, adamw(expected)))
        )
        out.append((first, *records))
    return out


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "split"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_once_loaded_it_is_the_plain_model_bit_by_bit(
    strategy: str, precision: str, world_size: int
) -> None:
    names = models.PLAIN_CASES
    for rank, results in enumerate(run_ranks(loaded, world_size, strategy, precision, names)):
        for name, (first, actual, expected) in zip(names, results, strict=True):
            assert_same_bits(actual, expected)
            if precision == "fp32":
                batch = models.batches(name, 1, rank)[0]
                assert torch.equal(first, models.loss_of(models.build(name), batch)), name


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LSTM(3, 5, 2), nn.GRU(5, 5), nn.GRU(5, 5)
        self.third.weight_ih_l0 = self.second.weight_ih_l0

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)[0])[0])[0]


def test_recurrent_modules_and_tied_parameters_keep_their_objects_and_attributes() -> None:
    with torch.device("meta"):
        model = Recurrent()
    before = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        parameter.label = name
    zshard.wrap(model, units=(nn.RNNBase,))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert all(p.label == name for name, p in model.named_parameters())
    expected = Recurrent()
    load(model, expected)
    x = torch.randn(4, 3)
    assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_masters_begin_as_zeros_and_so_does_their_padding(strategy: str, precision: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        model = on_meta("odd_parameters")
        zshard.wrap(model, strategy=strategy, precision=PRECISIONS[precision])
    finally:
        torch.use_deterministic_algorithms(False)
    flats = [flat for unit in schedule_of(model).units for flat in unit.flats]
    assert sum(flat.padding for flat in flats) > 0
    assert all(bool((flat.master.read() == 0).all()) for flat in flats)


# --- refusals ------------------------------------------------------------------------------------


class Encoder(models.Blocks):
    def encode(self, x: Tensor) -> Tensor:
        return self.inlet(x)


def enter_full_params(model: nn.Module) -> None:
    with zshard.full_params(model, write=True):
        pass


def step_with_scaler(model: nn.Module, x: Tensor) -> None:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), zshard.GradScaler("cpu")
    scaler.scale(x.sum())
    scaler.step(optimizer)


USES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "a forward": lambda model, x: model(x),
    "a forward of blocks.1": lambda model, x: model.blocks[1](torch.ones(2, models.WIDTH)),
    "the method 'encode'": lambda model, x: model.encode(x),
    "full_param('outlet.bias')": lambda model, x: zshard.full_param(model, "outlet.bias"),
    "full_params": lambda model, x: enter_full_params(model),
    "zshard.local_shards": lambda model, x: zshard.local_shards(model),
    "clipping": lambda model, x: zshard.clip_grad_norm_(model, 1.0),
    "an optimizer's step": lambda model, x: zshard.AdamW(model.parameters()).step(),
    "unscaling or an optimizer": lambda model, x: torch.optim.AdamW(model.parameters()).step(),
    "unscaling": step_with_scaler,
    "load_state_dict": lambda model, x: model.load_state_dict({}, strict=False),
}


def uses(rank: int, world_size: int, strategy: str) -> tuple[dict[str, str], Record, Record]:
    """What every use is told, and then, by the same ranks, training once it is loaded."""
    with torch.device("meta"):
        model = Encoder()
    zshard.wrap(model, strategy=strategy)
    zshard.method(model, "encode")
    told = {}
    before = repr(zshard.stats(model))
    zshard.reset(model)  # brings no values
    for what, use in USES.items():
        with pytest.raises(zshard.StateError) as caught:
            use(model, torch.ones(2, 3))
        told[what] = str(caught.value)
    assert repr(zshard.stats(model)) == before, "no collective on the way"
    dist.all_reduce(torch.ones(1))
    torch.manual_seed(9)
    expected = Encoder()
    load(model, expected)
    x = torch.ones(2, 3)
    assert torch.equal(model.encode(x), expected.inlet(x))
    assert zshard.local_shards(model).keys() == dict(model.named_parameters()).keys()
    zshard.wrap(expected, strategy=strategy)
    batches = models.batches("blocks", 2, rank)
    actual = train(Wrapped(model), adamw(model), batches)
    return told, actual, train(Wrapped(expected), adamw(expected), batches)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_every_use_before_a_load_is_refused_on_every_rank_and_hurts_nothing(strategy: str) -> None:
    for told, actual, expected in run_ranks(uses, 2, strategy):
        for what, message in told.items():
            assert what in message and "is refused: " in message
            assert "inlet.weight and 18 more tensors have no values" in message
            assert "zshard.load or zshard.load_weights" in message
        assert_same_bits(actual, expected)


def broken_in_training(rank: int, world_size: int) -> list[bool]:
    """A load that fails while gradients are there, and a graph."""
    model = zshard.wrap(models.build("blocks"))
    optimizer = adamw(model)
    x, y = models.batches("blocks", 2, rank)
    models.loss_of(model, x).backward()
    values = {name: local.clone() for name, local in zshard.local_shards(model).items()}
    graph = models.loss_of(model, y)
    schedule_of(model).unusable = "loading ckpt failed; call zshard.load again"
    for use in (optimizer.step, lambda: zshard.clip_grad_norm_(model, 1.0), graph.backward):
        with pytest.raises(zshard.StateError, match=r"refused: loading ckpt failed; call"):
            use()
    with pytest.raises(zshard.StateError, match=r"full_grad.* is refused"):
        zshard.full_grad(model, "inlet.weight")
    schedule_of(model).unusable = ""
    now = zshard.local_shards(model)
    same = [torch.equal(now[name], value) for name, value in values.items()]
    optimizer.step()
    assert not all(torch.equal(now[name], value) for name, value in values.items())
    models.loss_of(model, y).backward()
    return same


def test_what_a_failed_load_has_left_is_neither_stepped_nor_differentiated() -> None:
    for same in run_ranks(broken_in_training, 2):
        assert len(same) > 0 and all(same)


# --- memory --------------------------------------------------------------------------------------


def peak_of_wrap(
    rank: int, world_size: int, strategy: str, precision: str, init: str
) -> tuple[int, int, int]:
    """The most bytes at a time during wrap, and those that stay, of the ones above a kilobyte."""
    with torch.device("meta"):
        model = Large()
    with Counted(least=1000) as counted:
        # Shared memory comes in extents of a MiB, of all ranks: test_arena.py.
        policy = PRECISIONS[precision]
        zshard.wrap(model, strategy=strategy, precision=policy, init=init, comm="group")
    stays = sum(nbytes for _, nbytes in counted.live.values())
    return counted.peak, stays, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wrap_holds_nothing_beside_the_shards(strategy: str, precision: str) -> None:
    init = {"zero1": "broadcast", "zero2": "trust"}.get(strategy, "check")
    for peak, stays, count in run_ranks(peak_of_wrap, 3, strategy, precision, init):
        # A split master is written as fp32 first, its owned range only, one unit at a time.
        planes = LARGEST / (1 if strategy == "ddp" else 3) if precision == "split" else 0
        assert stays <= peak <= stays + 1.02 * planes
        if strategy == "zero3" and precision == "fp32":
            assert peak == pytest.approx(4 * count / 3, rel=0.05)


# --- models of which only a part is on meta ------------------------------------------------------


def partly(rank: int, world_size: int, init: str) -> tuple[str, dict[str, Tensor]]:
    model = models.build("blocks")
    with torch.device("meta"):
        model.blocks[1], model.outlet.bias = models.Block(), nn.Parameter(torch.empty(1))
    if rank == 1:
        with torch.no_grad():
            model.inlet.bias += 1
    try:
        zshard.wrap(model, init=init)
    except zshard.MismatchError as error:
        return str(error), {}
    assert init != "broadcast" or zshard.stats(model).calls["broadcast"] == 13, "those with values"
    with pytest.raises(zshard.StateError) as caught:
        model(torch.ones(1, 3))
    schedule_of(model).unusable = ""
    return str(caught.value), {n: zshard.full_param(model, n) for n, _ in model.named_parameters()}


def test_what_has_values_keeps_them_by_inits_rule_and_the_rest_waits_for_a_load() -> None:
    plain = dict(models.build("blocks").named_parameters())
    for message, values in run_ranks(partly, 2, "broadcast"):
        assert "blocks.1.norm.weight and 5 more tensors have no values" in message
        assert values.keys() == plain.keys()
        for name, value in values.items():
            on_meta = name == "outlet.bias" or name.startswith("blocks.1.")
            assert torch.equal(value, torch.zeros_like(value) if on_meta else plain[name]), name
    for message, values in run_ranks(partly, 2, "check"):
        assert "inlet.bias" in message and "different values" in message and not values


class WithBuffers(models.Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.adapter = nn.Linear(3, 3)
        self.adapter.bias.requires_grad_(False)
        self.also = self.norm.running_mean  # another name for it

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.adapter(self.norm(x)))


@devices
def test_ignored_parameters_and_persistent_buffers_get_memory_on_the_device(device: str) -> None:
    with torch.device("meta"):
        model = WithBuffers()
    model.norm.running_var = torch.ones(3)  # a real one goes along
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    model.adapter.weight.label = "kept"
    zshard.wrap(model, device=device, ignored=[model.adapter])
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before if "running_var" not in name)
    assert {tensor.device.type for tensor in after.values()} == {device}
    assert model.also is model.norm.running_mean
    assert type(model.adapter.weight) is nn.Parameter and model.adapter.weight.label == "kept"
    assert model.adapter.weight.requires_grad and not model.adapter.bias.requires_grad
    expected = WithBuffers().to(device)
    load(model, expected)
    x = torch.ones(4, 3, device=device)
    bits = {"rtol": 0, "atol": 0} if device == "cpu" else {}  # as in test_steps_n1.py
    torch.testing.assert_close(model(x), expected(x), **bits)
    torch.testing.assert_close(model.norm.running_mean, expected.norm.running_mean, **bits)


def test_a_buffer_alone_on_meta_makes_the_model_wait_for_a_load() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean = model[1].running_mean.to("meta")
    zshard.wrap(model)
    with pytest.raises(zshard.StateError, match=r"1\.running_mean has no values"):
        model(torch.ones(2, 3))


def test_buffers_of_which_no_checkpoint_has_values_are_refused_and_nothing_is_changed() -> None:
    with torch.device("meta"):
        model = models.build("blocks")
        model.inlet.register_buffer("angles", torch.ones(3), persistent=False)
        model.register_buffer("mask", torch.ones(3), persistent=False)
        model.register_buffer("count", torch.ones(3))
    with pytest.raises(zshard.WrapError, match=r"mask, inlet\.angles\. .*init_fn"):
        zshard.wrap(model)
    assert all(type(p) is nn.Parameter and p.is_meta for p in model.parameters())
    assert model.count.is_meta
    model.mask = model.inlet.angles = torch.ones(3)
    model.outlet.register_buffer("again", model.count, persistent=False)  # loaded as `count`
    zshard.wrap(model)
    assert model.outlet.again is model.count and not model.count.is_meta


def unlike_buffers(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    if rank == 1:
        model[1].running_mean = model[1].running_mean.to("meta")
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(model, init="broadcast")
    return str(caught.value)


def test_a_buffer_on_meta_on_one_rank_only_is_refused_on_every_rank() -> None:
    for message in run_ranks(unlike_buffers, 2):
        assert "ranks [1]" in message and "1.running_mean" in message
