"""A unit that is called by itself, as of several models in a ModuleDict: looked at as the model.

So is a model that one of its methods calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard


class Part(nn.Module):
    """A model of its own, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.outlet = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.norm(self.inlet(x)))


def pair(strategy: str = "zero3") -> nn.ModuleDict:
    torch.manual_seed(0)
    return zshard.wrap(nn.ModuleDict({"g": Part(), "d": Part()}), strategy=strategy)


def train(models: nn.ModuleDict, seed: int, *, steps: bool = True) -> None:
    """Two steps; without ``steps`` only their backwards."""
    optimizer = zshard.AdamW(models.parameters())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        fake = models["g"](torch.randn(5, 4, generator=generator))
        models["d"](fake).square().mean().backward()
        if steps:
            optimizer.step()
        optimizer.zero_grad()


def statistics(rank: int, world_size: int) -> list[list[float]]:
    """Of both, as each rank has trained them; then of "g" and "d" behind a forward of "g"."""
    models = pair()
    train(models, rank)
    trained = [models[name].norm.running_mean.tolist() for name in "gd"]
    models.eval()
    with torch.no_grad():
        models["g"](torch.ones(5, 4))
    return [*trained, *(models[name].norm.running_mean.tolist() for name in "gd")]


def test_its_buffers_and_no_others_are_the_first_ranks() -> None:
    (g, d, *first), (other_g, other_d, *second) = run_ranks(statistics, 2)
    assert g != other_g and d != other_d  # behind a forward each has its own batch's
    assert first == [g, d] and second == [g, other_d]


def written(rank: int, world_size: int) -> list[list[float]]:
    """What both have, as each rank has written it, behind a forward of "g" and then one of "d"."""
    models = pair().eval()
    found = []
    with torch.no_grad():
        for part in models.values():
            part.norm.running_mean.fill_(rank)
        for part in models.values():
            part(torch.ones(5, 4))
            found.append([float(each.norm.running_mean[0]) for each in models.values()])
    return found


def test_what_was_written_to_its_buffers_before_another_was_called_is_not_forgotten() -> None:
    assert run_ranks(written, 2) == [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]]


def left_out(rank: int, world_size: int, strategy: str) -> str:
    models = pair(strategy)
    with pytest.raises(zshard.MismatchError) as caught:  # at the second step's first forward
        train(models, 0, steps=rank == 0)
    with zshard.full_params(models, write=True):
        for param in models.parameters():
            nn.init.ones_(param)
    train(models, 0)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_step_that_some_ranks_have_left_out_is_told_at_its_forward(strategy: str) -> None:
    for message in run_ranks(left_out, 2, strategy):
        assert "an optimizer's step" in message and "was left out on some ranks" in message


def test_what_is_added_to_it_is_refused_and_the_others_go_on() -> None:
    models = pair()
    models["g"].extra = nn.Linear(4, 4)
    with pytest.raises(zshard.WrapError, match=r"Part 'g' has other modules.*\(extra\)"):
        models["g"](torch.ones(5, 4))
    models["d"](torch.ones(5, 4)).sum().backward()
    del models["g"].extra
    train(models, 0)


def in_one_autocast(rank: int, world_size: int, strategy: str, cached: bool) -> list[Tensor]:
    """Gradients of a loss of "d", and then of one of "g" through another forward of "d"."""
    models = pair(strategy)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        fake = models["g"](torch.ones(5, 4) + rank)
        of_d = models["d"](fake.detach()).float().square().mean()
        of_g = models["d"](models["g"](torch.ones(5, 4) - rank)).float().mean()
    grads = []
    for loss in (of_d, of_g):
        loss.backward()
        grads += [zshard.full_grad(models, name) for name, _ in models["d"].named_parameters("d")]
        models.zero_grad()
    return grads


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_forwards_inside_one_autocast_context_are_as_without_its_cache(strategy: str) -> None:
    cached, without = (run_ranks(in_one_autocast, 2, strategy, each) for each in (True, False))
    assert all(map(torch.equal, cached[0] + cached[1], without[0] + without[1]))


class Scored(nn.Module):
    """A linear layer behind statistics that it may share with others."""

    def __init__(self, statistics: nn.Module) -> None:
        super().__init__()
        self.statistics, self.score = statistics, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.statistics(x))


def shared_statistics(rank: int, world_size: int) -> list[list[float]]:
    """As each rank has trained them; then behind a forward of the second that has them."""
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(4, affine=False)
    models = zshard.wrap(nn.ModuleDict({"actor": Scored(shared), "critic": Scored(shared)}))
    models["critic"](torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)))
    trained = shared.running_mean.tolist()
    models.eval()
    with torch.no_grad():
        models["critic"](torch.ones(5, 4))
    return [trained, shared.running_mean.tolist()]


def test_buffers_of_a_module_that_several_have_are_the_first_ranks() -> None:
    first, second = run_ranks(shared_statistics, 2)
    assert first[0] != second[0]
    assert first[1] == second[1] == first[0]


class Refiner(nn.Sequential):
    """Makes something of what it has made."""

    def refine(self, x: Tensor) -> Tensor:
        return self(x + self(x).detach())


def in_one_method(rank: int, world_size: int, cached: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = zshard.wrap(Refiner(*(Part() for _ in range(4))))
    refine = zshard.method(model, "refine")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        refine(torch.ones(5, 4) + rank).float().square().mean().backward()
    return [zshard.full_grad(model, name) for name, _ in model.named_parameters()]


def test_forwards_inside_one_method_are_as_without_autocasts_cache() -> None:
    cached, without = (run_ranks(in_one_method, 2, each) for each in (True, False))
    assert all(map(torch.equal, cached[0] + cached[1], without[0] + without[1]))


def loop_on(rank: int, world_size: int, comm: str, where: str) -> list[str]:
    """A loop that goes on after any exception; once, rank 1's raises in ``where``."""
    torch.manual_seed(0)
    models = zshard.wrap(nn.ModuleDict({"g": Part(), "d": Part()}), comm=comm)
    optimizer = zshard.AdamW(models.parameters())

    def fail(*_: object) -> None:
        raise ValueError("user code")

    ends = []
    for step in range(6):
        bad = rank == 1 and step == 2
        hook = models.get_submodule(where).register_forward_pre_hook(fail) if bad else None
        try:
            models["d"](models["g"](torch.ones(5, 4))).square().mean().backward()
            optimizer.step()
            ends.append("made")
        except Exception as error:
            ends.append(type(error).__name__)
        optimizer.zero_grad()
        if hook:
            hook.remove()
    return ends


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("where", ["g", "g.norm", "d", "d.outlet"])
def test_after_an_exception_in_one_on_one_rank_all_ranks_go_on(where: str, comm: str) -> None:
    own, other = run_ranks(loop_on, 2, comm, where, timeout=20)
    assert own == ["made", "made", "MismatchError", *["made"] * 3]
    assert other == ["made", "made", "ValueError", *["made"] * 3]


class Either(nn.Module):
    """Models that are called in its forward."""

    def __init__(self, models: nn.ModuleDict) -> None:
        super().__init__()
        self.models = models

    def forward(self, name: str, x: Tensor) -> Tensor:
        return self.models[name](x)


def of_one_encoder() -> nn.ModuleDict:
    torch.manual_seed(0)
    encoder = nn.Linear(4, 4)
    return nn.ModuleDict({name: Scored(encoder) for name in ("actor", "critic")})


@pytest.mark.parametrize("units", [None, "layer", "model", ["actor", "critic"]])
def test_what_models_share_is_told_with_the_module_that_they_need_around_them(
    units: str | list[str] | None,
) -> None:
    alone = zshard.wrap(of_one_encoder(), units=units)
    with pytest.raises(
        zshard.ShardedAccessError,
        match=r"\(actor\.statistics\.weight, critic.*\): call 'actor' .* around the nn\.ModuleDict",
    ):
        alone["actor"](torch.ones(5, 4))
    x, plain, model = torch.randn(5, 4), of_one_encoder(), zshard.wrap(Either(of_one_encoder()))
    for name in ("actor", "critic", "critic"):
        plain[name](x).square().mean().backward()
        model(name, x).square().mean().backward()
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, f"models.{name}"), param.grad), name


class Encoding(nn.Module):
    """Has a unit that it may be asked for alone, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def test_a_unit_with_a_tied_weight_is_called_in_a_method() -> None:
    model = zshard.wrap(Encoding(), units="layer")
    match = r"call 'encoder' in a forward of 'root'.*method"
    with pytest.raises(zshard.ShardedAccessError, match=match):
        model.encoder(torch.ones(5, 4))
    zshard.method(model, "encode")
    model.encode(torch.ones(5, 4)).sum().backward()
    assert zshard.full_grad(model, "encoder.weight") is not None


class Streaming(Part):
    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self.inlet(x)

    def listed(self, x: Tensor) -> list[Tensor]:
        return list(self.stream(x))


def test_a_generator_is_told_to_run_inside_a_method_and_does_so_there() -> None:
    model = zshard.wrap(Streaming())
    zshard.method(model, "stream")
    match = r"stream\(\) is a generator.*Go through it in a method"
    with pytest.raises(zshard.ShardedAccessError, match=match):
        list(model.stream(torch.ones(5, 4)))
    zshard.method(model, "listed")
    model.listed(torch.ones(5, 4))[0].sum().backward()
    assert zshard.full_grad(model, "inlet.weight") is not None


class Reading(nn.Module):
    """Computes with the weight of another."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.others[0].weight + self.bias


def test_what_a_unit_reads_of_another_without_sharing_it_is_not_called_shared() -> None:
    layer = nn.Linear(4, 4)
    models = zshard.wrap(nn.ModuleDict({"a": layer, "b": Reading(layer)}))
    with pytest.raises(zshard.ShardedAccessError, match="outside the module of its unit 'a'"):
        models["b"](torch.ones(5, 4))


def gathers_of_members(rank: int, world_size: int, strategy: str) -> list[int]:
    """In each step of two models of blocks: the first goes from meeting to meeting."""
    torch.manual_seed(0)
    members = {name: nn.Sequential(nn.LayerNorm(4), Part(), Part()) for name in "ab"}
    model = zshard.wrap(nn.ModuleDict(members), strategy=strategy)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    gathers = [0]
    for _ in range(3):
        (model["a"](torch.ones(2, 4)) + model["b"](torch.ones(2, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gathers.append(zshard.stats(model).calls["all_gather"])
    return [after - before for before, after in pairwise(gathers)]


@pytest.mark.parametrize(
    ("strategy", "gathers"),
    [("zero3", [12, 12, 12]), ("zero2", [12, 6, 6])],  # with zero2 behind a step alone
)
def test_the_units_inside_it_are_gathered_once_a_forward_in_every_step(
    strategy: str, gathers: list[int]
) -> None:
    for steps in run_ranks(gathers_of_members, 2, strategy):
        assert steps == gathers
