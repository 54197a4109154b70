"""One unit of a model on the meta device is whole at a time, and alike on every rank."""

from __future__ import annotations

from collections.abc import Callable

import models
import numpy as np
import pytest
import torch
from meta import (
    LARGEST,
    SEED,
    Counted,
    Large,
    Logged,
    assert_same_values,
    draw,
    on_meta,
    plain,
    whole,
)
from ops_check import devices
from ranks import run_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zshard

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]


# --- memory --------------------------------------------------------------------------------------


def peak_of_wrap(
    rank: int, world_size: int, strategy: str, precision: zshard.Precision | None
) -> tuple[int, int, int]:
    """The most bytes at a time during wrap, and those that stay, of the ones above a kilobyte."""
    with torch.device("meta"):
        model = Large()
    with Counted(least=1000) as counted:
        zshard.wrap(
            model,
            init_fn=lambda m: m.reset_parameters(),
            strategy=strategy,
            precision=precision,
            init="trust",
            comm="group",  # shared memory comes in extents of a MiB, of all ranks: test_arena.py
        )
    stays = sum(nbytes for _, nbytes in counted.live.values())
    return counted.peak, stays, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_at_most_the_largest_unit_is_whole_beside_the_shards(strategy: str) -> None:
    for precision in (None, zshard.Precision.bf16(), zshard.Precision.bf16(master="split")):
        for peak, stays, count in run_ranks(peak_of_wrap, 3, strategy, precision):
            # A split master is written as fp32 first, its owned range only.
            planes = LARGEST if precision is not None and precision.master == "split" else 0
            planes = planes // 3 if strategy != "ddp" else planes
            assert stays < peak <= stays + LARGEST + 1.02 * planes, precision
            if strategy == "zero3" and precision is None:
                assert stays == pytest.approx(4 * count / 3, rel=0.05)


def units_whole_at_each_call(rank: int, world_size: int) -> tuple[list[list[str]], bool]:
    with torch.device("meta"):
        model = models.build("blocks")
    seen: list[list[str]] = []
    storages: list[StorageWeakRef] = []

    def init_fn(module: nn.Module) -> None:
        whole = [
            n for n, p in model.named_parameters() if type(p) is nn.Parameter and not p.is_meta
        ]
        seen.append(sorted({n.rpartition(".")[0].rpartition(".")[0] for n in whole}))
        draw(module)
        storages.extend(StorageWeakRef(p.untyped_storage()) for p in module.parameters())

    zshard.wrap(model, init_fn=init_fn)
    return seen, all(storage.expired() for storage in storages)


def test_during_each_call_exactly_one_unit_is_whole_and_none_afterwards() -> None:
    expected = [[""]] * 2 + [[f"blocks.{i}"] for i in range(3) for _ in range(3)]
    assert run_ranks(units_whole_at_each_call, 2) == [(expected, True)] * 2


# --- random numbers ------------------------------------------------------------------------------


def states_around_wrap(rank: int, world_size: int, meta: bool) -> tuple[bool, Tensor]:
    """Whether wrap left the generator alone, and a forward with dropout after it."""
    model = on_meta("gpt_dropout") if meta else models.build("gpt_dropout")
    batch = models.batches("gpt_dropout", 1)[0]
    torch.manual_seed(1000 + rank)
    torch.rand(3)
    before = torch.get_rng_state()
    zshard.wrap(model, init_fn=draw if meta else None)
    untouched = torch.equal(torch.get_rng_state(), before)
    with zshard.full_params(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return untouched, models.loss_of(model, batch).detach()


def test_wrap_leaves_every_ranks_random_numbers_alone() -> None:
    plainly = run_ranks(states_around_wrap, 2, False)
    assert plainly == run_ranks(states_around_wrap, 2, True)
    assert all(untouched for untouched, _ in plainly)
    assert plainly[0][1] != plainly[1][1], "the ranks' dropout is each rank's own"


@devices
def test_a_devices_random_numbers_are_the_plain_models_and_left_alone(device: str) -> None:
    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]

    model = on_meta("blocks")
    init_fn = Logged(model)
    torch.manual_seed(SEED)
    before = states()
    zshard.wrap(model, device=device, init_fn=init_fn)
    assert all(torch.equal(a, b) for a, b in zip(states(), before, strict=True))
    assert_same_values(whole(model), plain("blocks", init_fn.calls, device))


def test_an_error_leaves_the_random_numbers_alone_too() -> None:
    model = on_meta("blocks")
    before = torch.get_rng_state()

    def init_fn(module: nn.Module) -> None:
        draw(module)
        raise ValueError("user code")

    with pytest.raises(ValueError, match="user code"):
        zshard.wrap(model, init_fn=init_fn)
    assert torch.equal(torch.get_rng_state(), before)


# --- ranks ---------------------------------------------------------------------------------------


def by_numpy(module: nn.Module) -> None:
    draw(module)
    if isinstance(module, nn.LayerNorm):
        module.weight.mul_(float(np.random.default_rng().random()))


def by_rank(module: nn.Module) -> None:
    draw(module)
    if module.weight.shape == (models.HIDDEN, models.WIDTH):
        module.weight += torch.distributed.get_rank()


def unlike_values(rank: int, world_size: int, init_fn: Callable[[nn.Module], None]) -> str:
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(on_meta("blocks"), init_fn=init_fn)
    return str(caught.value)


@pytest.mark.parametrize(
    ("init_fn", "name"), [(by_numpy, "blocks.0.norm.weight"), (by_rank, "blocks.0.up.weight")]
)
def test_different_values_are_refused_on_every_rank_by_name(
    init_fn: Callable[[nn.Module], None], name: str
) -> None:
    for message in run_ranks(unlike_values, 2, init_fn):
        assert name in message and "init_fn" in message and "broadcast" in message


def broadcast_values(rank: int, world_size: int) -> Tensor:
    model = zshard.wrap(on_meta("blocks"), init_fn=by_rank, init="broadcast")
    return zshard.full_param(model, "blocks.1.up.weight")


def test_init_broadcast_takes_rank_0s_values_unit_by_unit() -> None:
    first, *others = run_ranks(broadcast_values, 3)
    assert all(torch.equal(first, other) for other in others)
    assert float(first.abs().max()) < 1, "nothing of rank 2, which adds 2"


def unlike_models(rank: int, world_size: int, what: str) -> tuple[str, int]:
    model = on_meta("blocks")
    init_fn = Logged(model)
    options = {"init_fn": init_fn, "init": "broadcast"}
    if rank == 1 and what == "shape":
        model.outlet = nn.Linear(models.WIDTH, 2, device="meta")
    if rank == 1 and what == "on_meta":
        model.outlet = nn.Linear(models.WIDTH, 1)
    if rank == 1 and what == "init_fn":
        model, options = models.build("blocks"), {"init": "broadcast"}
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(model, **options)
    return str(caught.value), len(init_fn.calls)


@pytest.mark.parametrize("what", ["shape", "on_meta", "init_fn"])
def test_unlike_models_are_refused_on_every_rank_before_anything_is_made(what: str) -> None:
    for message, calls in run_ranks(unlike_models, 2, what):
        assert what in message and calls == 0
        assert what == "init_fn" or "outlet.weight" in message


def unlike_shapes(rank: int, world_size: int) -> str:
    model = nn.Linear(3, 5 + rank)
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(model, init="broadcast")
    return str(caught.value)


def test_init_broadcast_refuses_unlike_shapes_before_it_sends_any() -> None:
    for message in run_ranks(unlike_shapes, 2):
        assert "weight" in message and "(5, 3)" in message and "(6, 3)" in message


def failure_on_one_rank(rank: int, world_size: int, init: str) -> tuple[str, str]:
    def init_fn(module: nn.Module) -> None:
        if rank == 1 and isinstance(module, nn.LayerNorm):
            raise KeyError("a table that only rank 0 has")
        draw(module)

    with pytest.raises(Exception) as caught:  # which one, is the result
        zshard.wrap(on_meta("blocks"), init_fn=init_fn, init=init)
    return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize("init", ["check", "broadcast", "trust"])
def test_an_error_of_init_fn_on_one_rank_is_an_error_on_all(init: str) -> None:
    (kind, message), (own_kind, own) = run_ranks(failure_on_one_rank, 2, init)
    assert own_kind == "KeyError" and "a table" in own
    assert kind == "InputError"
    assert all(word in message for word in ("rank 1", "blocks.0", "KeyError", "a table"))
