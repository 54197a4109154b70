"""torch.compile of a wrapped model or its blocks: the same training, and nothing compiled anew."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial

import models
import pytest
import torch
from models import Block, Blocks
from ranks import run_ranks
from steps import batch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import hooks

STEPS = 4
# What inductor compiles, forward and backward apart, run as it is.
compiled = partial(torch.compile, backend="aot_eager")


class Checkpointed(Block):
    """Recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


# Each returns what is to be called.
Change = Callable[[Blocks], nn.Module]


def unchanged(model: Blocks) -> nn.Module:
    return model


def compile_blocks(model: Blocks) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def replace_blocks(model: Blocks) -> nn.Module:
    model.blocks = nn.ModuleList(map(compiled, model.blocks))
    return model


def compile_model(model: Blocks) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def losses(
    rank: int, before: Change, after: Change, block: type[Block], **options: object
) -> tuple[list[float], list[int]]:
    """Losses of training steps, and how many graphs there were after each."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Blocks(block=block)
    zshard.wrap(before(model), **options)
    run = after(model)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    found, graphs = [], []
    for step in range(STEPS):
        loss = models.loss_of(run, batch(rank, step))
        loss.backward()
        zshard.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return found, graphs


def call(function: Callable[[], None]) -> None:
    function()


def call_in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


WAYS = {
    "blocks before wrap": (compile_blocks, unchanged),
    "blocks after wrap": (unchanged, compile_blocks),
    "blocks replaced": (replace_blocks, unchanged),
    "model before wrap": (compile_model, unchanged),
    "model after wrap": (unchanged, compile_model),
    "torch.compile(model)": (unchanged, compiled),
}
OPTIONS: list[dict[str, object]] = [
    {"comm": "group", "strategy": "zero2", "units": "model"},
    {"precision": zshard.Precision.bf16()},
]
CASES = [
    *((way, Block, {}) for way in WAYS),
    *(("blocks before wrap", Block, options) for options in OPTIONS),
    *((way, Checkpointed, {}) for way in ("blocks before wrap", "torch.compile(model)")),
]


def on_both_sides(
    rank: int, world_size: int
) -> list[tuple[list[float], list[float], list[int], list[int]]]:
    """Every case, eager and compiled. In one go: what compiles takes seconds to import."""
    found = []
    for way, block, options in CASES:
        print("case:", way, block.__name__, options)  # shown where it fails
        eager, none = losses(rank, unchanged, unchanged, block, **options)
        found.append((eager, *losses(rank, *WAYS[way], block, **options), none))
    return found


def loss_with_a_hook(
    change: Change, is_wrapped: bool = True, run: Callable[[Callable[[], None]], None] = call
) -> float:
    """Of a model in whose last block, alone, a module inside has a hook."""
    torch._dynamo.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = True  # as torch has it
    vars(hooks._OF_THREAD).clear()
    torch.manual_seed(0)
    model = Blocks()
    model.blocks[2].up.register_forward_hook(lambda module, args, output: output * 3)
    if is_wrapped:
        zshard.wrap(model)
    losses: list[float] = []
    changed = change(model)
    run(lambda: losses.append(models.loss_of(changed, batch(0, 0)).item()))
    return losses[0]


@pytest.mark.parametrize("run", [call, call_in_thread])
@pytest.mark.parametrize("change", [compile_blocks, compile_model, compiled])
def test_a_hook_in_one_of_several_compiled_blocks_runs(
    change: Change, run: Callable[[Callable[[], None]], None]
) -> None:
    expected = loss_with_a_hook(unchanged, is_wrapped=False)
    assert loss_with_a_hook(change, run=run) == pytest.approx(expected, rel=1e-5)


def test_a_compiled_model_trains_alike_and_is_compiled_once() -> None:
    for rank in run_ranks(on_both_sides, 2, timeout=150):
        for (way, _, options), (eager, found, graphs, none) in zip(CASES, rank, strict=True):
            close = pytest.approx(eager, rel=2e-2 if "precision" in options else 1e-5)
            assert found == close, f"{way} {options}"
            assert set(none) == {0} and graphs[0] > 0, f"{way} {options}"
            again = f"{way} {options}: a step was compiled anew"
            assert graphs[1:] == [graphs[1]] * (STEPS - 1), again


def test_dynamo_compiles_nothing_for_the_hooks_of_units_of_many_kinds() -> None:
    torch._dynamo.reset()
    layers = (nn.Embedding(10, 8), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    model = zshard.wrap(nn.Sequential(*layers), units="layer")
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(torch.arange(6)).sum().backward()
    called = inspect.unwrap(hooks.ModuleHook.__call__).__code__
    assert called.co_filename == hooks.__file__
    assert torch._C._dynamo.eval_frame._debug_get_cache_entry_list(called) == []
