"""Parameters that share memory with other tensors of the model: refused by name, unless apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zshard


class Two(nn.Module):
    """Two linear layers, of which ``alias`` makes something shared."""

    def __init__(self, alias: Callable[[Two], None]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        alias(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def tied_by_data(model: Two) -> None:
    model.last.weight.data = model.first.weight.data


def detached(model: Two) -> None:
    model.proto = model.first.weight.detach()


def buffer(model: Two) -> None:
    model.register_buffer("proto", model.first.weight.data)


def transposed(model: Two) -> None:
    model.last.weight = nn.Parameter(model.first.weight.data.t())


def overlapping(model: Two) -> None:
    flat = torch.randn(28)
    model.first.weight.data = flat[:16].view(4, 4)
    model.last.weight.data = flat[12:].view(4, 4)


def upper_half(model: Two) -> None:
    """Of one element: it begins where no element of the parameter does."""
    model.proto = model.first.weight.detach().view(torch.bfloat16)[0, 1:2]


@pytest.mark.parametrize(
    ("alias", "other"),
    [
        (tied_by_data, "last.weight"),
        (transposed, "last.weight"),
        (overlapping, "last.weight"),
        (detached, "proto"),
        (buffer, "proto"),
        (upper_half, "proto"),
    ],
)
def test_a_parameter_that_shares_memory_is_refused_with_the_other(
    alias: Callable[[Two], None], other: str
) -> None:
    model = Two(alias)
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(model)
    assert "first.weight" in str(raised.value)
    assert other in str(raised.value)
    assert type(model.first.weight) is nn.Parameter


def same_parameter(model: Two) -> None:
    model.last.weight = model.first.weight


def next_to_each_other(model: Two) -> None:
    flat = torch.randn(32)
    model.first.weight.data, model.last.weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)


def columns(model: Two) -> None:
    both = torch.randn(4, 8)
    model.first.weight.data, model.last.weight.data = both[:, :4], both[:, 4:]


def normalised(model: Two) -> None:
    """Which makes the attribute ``weight`` of ``weight_orig``'s memory, and anew in each call."""
    torch.nn.utils.spectral_norm(model.first)


@pytest.mark.parametrize("alias", [same_parameter, next_to_each_other, columns, normalised])
def test_what_is_the_same_parameter_or_lies_apart_is_wrapped(
    alias: Callable[[Two], None],
) -> None:
    plain = Two(alias)
    x = torch.randn(2, 4)
    with torch.no_grad():
        wanted = plain(x) if alias is not normalised else None
    wrapped = zshard.wrap(plain)(x)
    assert wanted is None or torch.equal(wrapped, wanted)
