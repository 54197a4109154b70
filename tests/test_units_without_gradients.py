"""Units of which no rank has gradients are not reduced; what is known of all gradients is right."""

from __future__ import annotations

from collections.abc import Sequence

import models
import pytest
import torch
from models import Block
from ranks import run_ranks
from steps import batch, mean_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard


class Experts(nn.Module):
    """Blocks of which those run that ``path`` says, where -1 detaches what came before.

    Args:
        reentrant: in one reentrant checkpoint, of which nobody can tell what it makes.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, models.WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.outlet = nn.Linear(models.WIDTH, 1)
        self.path: Sequence[int] = ()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        x = checkpoint(self.run, x, use_reentrant=True) if self.reentrant else self.run(x)
        return self.outlet(x)

    def run(self, x: Tensor) -> Tensor:
        for block in self.path:
            x = x.detach() if block < 0 else self.blocks[block](x)
        return x


# The blocks that each of two ranks runs, and whether an optimizer's step follows, or else the next
# backward adds its gradients to these, which were clipped.
BACKWARDS: list[tuple[list[int], list[int], bool]] = [
    ([0, 1], [0, 2], True),
    ([3], [3], True),
    ([3], [3], True),  # as the last one
    ([], [], True),
    ([1, 4], [1], False),
    ([0], [0], True),
    ([0], [0], False),  # as the one two before, but nothing is there of blocks 1 and 4
    ([0], [0], False),
    ([2], [3], True),
    ([0, 1], [0, 2], True),
    ([1, -1, 2], [1, -1, 2], True),
    ([1, -1, 2], [1, -1, 2], True),
    (
        [1, 2],
        [1, 2],
        True,
    ),  # in a reentrant checkpoint no different from the last one until it runs
]


def reductions(
    rank: int, world_size: int, options: dict[str, object], reentrant: bool
) -> list[int]:
    """How many units were reduced in each backward; their results are the plain model's."""
    torch.manual_seed(1)
    plain, model = Experts(reentrant), Experts(reentrant)
    model.load_state_dict(plain.state_dict())
    zshard.wrap(model, **options)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    sums: dict[str, Tensor] = {}
    counts = []
    for index, (*paths, steps) in enumerate(BACKWARDS):
        zshard.stats(model).reset()
        for side in (plain, model):
            side.path = paths[rank % 2]
            (side(batch(rank % 2, index)) - 1.0).square().mean().backward()
        counts.append(zshard.stats(model).calls["reduce_scatter"])
        for name, param in plain.named_parameters():
            if (mean := mean_gradient(param, world_size)) is not None:
                sums[name] = mean + sums.get(name, 0.0)
            param.grad = sums.get(name)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(zshard.clip_grad_norm_(model, 0.1).float(), expected)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(zshard.full_grad(model, name), param.grad)
            if steps and param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
            param.grad = None
        if steps:
            sums.clear()
            gathered = zshard.stats(model).calls["all_gather"]
            optimizer.step()
            optimizer.zero_grad()
            renewed = zshard.stats(model).calls["all_gather"] - gathered
            assert renewed == (counts[-1] if options["strategy"] == "zero2" else 0)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(zshard.full_param(model, name), param.detach())
    return counts


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize(
    ("strategy", "reentrant"),
    # Under zero3 gathers tell that a checkpoint takes another way, which drops the step.
    [("zero2", False), ("zero2", True), ("zero3", False)],
)
def test_only_units_are_reduced_of_which_a_rank_has_gradients(
    strategy: str, comm: str, reentrant: bool
) -> None:
    options = {"strategy": strategy, "comm": comm}
    for counts in run_ranks(reductions, 2, options, reentrant):
        assert counts == [4, 2, 2, 1, 3, 4, 2, 2, 4, 4, 2, 2, 3]
