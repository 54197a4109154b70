"""zshard.describe: a line for each flat buffer, with what it consists of."""

from __future__ import annotations

import models
import pytest
import torch
from ranks import run_ranks, simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zshard


def described(rank: int, size: int) -> str:
    torch.manual_seed(0)
    precision = zshard.Precision.bf16(master="split")
    return zshard.describe(
        zshard.wrap(models.build("frozen"), precision=precision, strategy="zero2")
    )


def test_every_flat_buffer_of_every_unit_has_a_line() -> None:
    model = models.build("frozen")
    numel = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for rank, text in enumerate(run_ranks(described, 2)):
        head, columns, *lines = text.splitlines()
        assert head.startswith(f"{type(model).__name__}: {numel:,} parameters in 4 units, sharded")
        assert head.endswith(f"over 2 ranks on cpu; this is rank {rank} of 2")
        assert columns.split()[:4] == ["unit", "module", "strategy", "parameters"]
        rows = [line.split() for line in lines]
        assert {row[0] for row in rows} == {"root", "blocks.0", "blocks.1", "blocks.2"}
        assert sum(int(row[3]) for row in rows) == numel
        assert sum(int(row[4]) for row in rows) == trained < numel
        for row in rows:
            assert 2 * int(row[5]) == int(row[3]) + int(row[6])
            assert row[7:10] == ["bfloat16", "float32", "split"] and row[2] == "zero2"


def test_replicas_are_told_of() -> None:
    with simulated(5, 8):
        mesh = init_device_mesh("cpu", (2, 4))
        head, *_ = zshard.describe(zshard.wrap(nn.Linear(3, 3), mesh=mesh)).splitlines()
    assert head.endswith(" over 4 ranks, 2 times on cpu; this is rank 5 of 8")


def test_one_unit_is_no_units() -> None:
    assert " 12 parameters in 1 unit, sharded over one rank " in zshard.describe(
        zshard.wrap(nn.Linear(3, 3), units="model")
    )


def test_a_root_without_parameters_is_not_counted() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(4)))
    head, _, *lines = zshard.describe(zshard.wrap(blocks)).splitlines()
    assert " 48 parameters in 4 units, " in head and len(lines) == 4


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(zshard.WrapError):
        zshard.describe(nn.Linear(3, 3))
