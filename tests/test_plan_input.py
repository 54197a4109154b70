"""What plans take by other names, and what they refuse."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard.planning.machine import MACHINES


def test_a_plan_and_its_units_have_the_same_kinds() -> None:
    planned = zshard.plan(models.build("blocks"), 2).to_dict()
    for unit in planned["units"]:
        assert set(unit) - {"name", "model_parameters"} == set(planned["per_rank"])
    root = planned["units"][0]
    assert root["peak"] == root["states"] + root["full_buffers"] + root["reduce_buffers"]


@pytest.mark.parametrize(
    ("alias", "name"), [("full_shard", "zero3"), ("shard_grad_op", "zero2"), ("no_shard", "ddp")]
)
def test_a_strategy_by_fsdps_name_is_no_alternative_to_itself(alias: str, name: str) -> None:
    planned = zshard.plan(models.build("blocks"), 2, strategy=alias)
    assert planned.strategy == name
    assert f"strategy {name}" not in [each.change for each in planned.alternatives()]


@pytest.mark.parametrize("given", [{"hbm": "80GB"}, {"network": "50GB"}])
def test_sizes_as_text_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(zshard.InputError, match="GB"):
        zshard.plan(models.build("blocks"), 2, **given)
    with pytest.raises(zshard.InputError, match="GB"):
        zshard.plan(models.build("blocks"), 2).fit("80GB")


@pytest.mark.parametrize("batch", [(1, 0), (1, 2**62), (2**21, 2**21), (1, 10**30)])
def test_sizes_that_no_batch_has_are_refused(batch: tuple[int, int]) -> None:
    with pytest.raises(zshard.InputError, match=r"each 1 or more, and up to 1,099,511,627,776 in"):
        zshard.plan("gpt:tiny", 2, batch=batch)


class WithTable(nn.Module):
    """A linear layer, and a parameter of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
        self.linear = nn.Linear(2, 2)


def of_one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (of_one_memory, r"1\.weight shares memory with 0\.weight"),
        (lambda: WithTable(torch.int64), r"table has dtype torch\.int64"),
        (lambda: WithTable(torch.complex64), r"table has dtype torch\.complex64"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), r"0\.weight has no shape yet"),
    ],
)
def test_a_model_that_wrap_refuses_cannot_be_planned(
    model: Callable[[], nn.Module], why: str
) -> None:
    with pytest.raises(zshard.WrapError, match=why):
        zshard.plan(model(), 2)
    with pytest.raises(zshard.WrapError, match=why):
        zshard.wrap(model())


@pytest.mark.parametrize(
    ("dtype", "precision", "why"),
    [
        (torch.float32, zshard.Precision(master="split"), "parameters are torch.float32: pass"),
        (
            torch.float64,
            zshard.Precision.bf16(master="split", cast_inputs=False),
            "which stay float64. Convert the model first",
        ),
        (torch.float64, zshard.Precision.bf16(), "stay float64"),
    ],
)
def test_a_precision_that_wrap_refuses_for_a_model_cannot_be_planned(
    dtype: torch.dtype, precision: zshard.Precision, why: str
) -> None:
    model = nn.Linear(2, 2).to(dtype)
    planned = zshard.plan(model, 2)
    for act in (
        lambda: planned.changed(precision=precision),
        lambda: zshard.plan(model, 2, precision=precision),
        lambda: zshard.wrap(model, precision=precision),
    ):
        with pytest.raises(zshard.InputError, match=why):
            act()


def test_a_machine_measured_with_one_rank_does_for_counting_devices() -> None:
    alone = replace(MACHINES["h100"], gather=None, reduce=None, network=None)
    planned = zshard.plan(models.build("blocks"), 1, batch=torch.ones(2, 3), machine=alone)
    least = planned.peak_over(4)
    assert planned.fit(least).devices["zero3"] is not None
    with pytest.raises(zshard.InputError, match="measured with one rank"):
        planned.with_world_size(2)


def test_a_configuration_of_no_language_model_is_refused_with_the_remedy() -> None:
    import transformers

    with pytest.raises(zshard.InputError, match=r"config\.architectures"):
        zshard.plan(transformers.T5Config(num_layers=1), 2)


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("LlamaForCausalLM", {"hidden_act": "abacus"}, "abacus"),
        ("LlamaForCausalLM", {"vocab_size": -1}, "RuntimeError"),
        ("LlamaConfig", {}, "positional"),
        ([5], {"hidden_act": "abacus"}, "abacus"),
    ],
)
def test_a_configuration_that_no_model_can_be_built_of_is_refused(
    architecture: object, fields: dict[str, object], reason: str
) -> None:
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=1, **fields)
    config.architectures = [architecture]
    with pytest.raises(zshard.InputError, match=reason):
        zshard.plan(config, 2)


def test_a_file_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(zshard.InputError, match=r"^confg\.json: no such file; expected gpt:7b"):
        zshard.plan("confg.json", 2)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": "many", "hidden_size": []}')
    with pytest.raises(zshard.InputError, match=r"config\.json"):
        zshard.plan(path, 2)


def test_a_profile_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zshard.InputError, match="cannot be written"):
        MACHINES["h100"].save(tmp_path / "missing" / "machine.json")


def test_a_configuration_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(zshard.MissingPackage, match="pip install transformers"):
        zshard.plan(str(tmp_path), 2)


@pytest.mark.parametrize(
    "precision",
    [zshard.Precision(), zshard.Precision(compute=torch.bfloat16, cast_inputs=False)],
)
def test_a_plan_offers_no_precision_that_its_parameters_cannot_have(
    precision: zshard.Precision,
) -> None:
    planned = zshard.plan(nn.Linear(2, 2).double(), 2, precision=precision)
    offered = {each.change for each in planned.alternatives()}
    assert "strategy ddp" in offered and not offered & {"bf16 compute", "split master"}
    assert "strategy ddp" in str(planned)


class Checkpointed(nn.Module):
    """All of it in a reentrant checkpoint, which has a backward only for an input with gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_batch_that_takes_gradients_does_so_in_a_plan() -> None:
    with pytest.raises(zshard.InputError, match="there is no backward"):
        zshard.plan(Checkpointed(), 2, batch=torch.ones(4, 3))
    planned = zshard.plan(Checkpointed(), 2, batch=torch.ones(4, 3, requires_grad=True))
    assert [each.op for each in planned.collectives] == ["all_gather", "reduce_scatter"]


@pytest.mark.filterwarnings("ignore:.*jit.script.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("units", [None, ["1"]])
def test_modules_of_torchscript_have_their_tensors_again_after_a_plan(
    units: list[str] | None,
) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model = nn.Sequential(nn.Linear(3, 3), scripted)
    before = [*model.parameters(), *model.buffers()]
    refused = pytest.raises(zshard.InputError, match="ScriptModules")  # hooks, which units take
    with contextlib.nullcontext() if units is None else refused:
        zshard.plan(model, 2, batch=torch.ones(4, 3), units=units)
    assert all(map(operator.is_, [*model.parameters(), *model.buffers()], before))
    assert model(torch.ones(4, 3)).isfinite().all()
