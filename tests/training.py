"""Trains a model and records it; compares two records bit by bit or within a tolerance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import models
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zshard
from zshard.calls import whole
from zshard.tag import Tag
from zshard.units.flat import Flat
from zshard.wrap import schedule_of

STEPS = 10
# Where two ways of zshard are to have the same bits: steps repeat themselves from the third on.
FEW_STEPS = 4
Batch = TypeVar("Batch")


@dataclass
class Record:
    """What one rank saw of a run: whole tensors, in the order of named_parameters."""

    losses: list[Tensor] = field(default_factory=list)  # fp32, one a step (or micro-batch)
    norms: list[Tensor] = field(default_factory=list)  # what clipping returned, one a step
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # before clipping
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step

    def cpu(self) -> Record:
        """The same, in the host's memory."""
        return Record(
            [loss.cpu() for loss in self.losses],
            [norm.cpu() for norm in self.norms],
            [
                {name: None if grad is None else grad.cpu() for name, grad in each.items()}
                for each in self.gradients
            ],
            {name: param.cpu() for name, param in self.parameters.items()},
        )

    def before_any_step(self) -> Record:
        """What the first step has not changed."""
        return Record(self.losses[:1], self.norms[:1], self.gradients[:1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """zshard's AdamW with hyper-parameters that move every parameter visibly in ten steps."""
    return zshard.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's AdamW with the same hyper-parameters."""
    return torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1
    )


class Plain:
    """Trains a model without zshard, under DDP where there is more than one rank."""

    def __init__(self, model: nn.Module, world_size: int = 1, unused: bool = False) -> None:
        self.module = model
        self.model = model
        if world_size > 1:
            self.model = DistributedDataParallel(model, find_unused_parameters=unused)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync() if self.model is not self.module else nullcontext()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def gradient(self, name: str) -> Tensor | None:
        grad = self.module.get_parameter(name).grad
        return None if grad is None else grad.clone()

    def parameter(self, name: str) -> Tensor:
        return self.module.get_parameter(name).detach().clone()


class Wrapped:
    """Trains a model that zshard.wrap has taken."""

    def __init__(self, model: nn.Module) -> None:
        self.module = self.model = model

    def no_sync(self) -> AbstractContextManager[None]:
        return zshard.no_sync(self.model)

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return zshard.clip_grad_norm_(self.model, max_norm, norm_type)

    def gradient(self, name: str) -> Tensor | None:
        grad = zshard.full_grad(self.model, name)
        return None if grad is None else grad.detach().clone()

    def parameter(self, name: str) -> Tensor:
        return zshard.full_param(self.model, name).detach().clone()


@contextmanager
def together(side: Plain | Wrapped) -> Iterator[None]:
    """Have the calls of full_grad, or of full_param, in here gather a flat once, agreed on once.

    Each on its own would gather all of its flat again: most of what a record costs. What the ranks
    tell each other first, whether they have a gradient at all, they compare at the end, at once.
    """
    if isinstance(side, Plain):
        yield
        return
    schedule = schedule_of(side.model)
    comm, all_gather, begin_call = schedule.comm, whole.all_gather, schedule.begin_call
    all_gather_words = comm.all_gather_words
    found: dict[int, Tensor] = {}
    told: list[int] = []
    tag = Tag(schedule.executor.step, "full_grad", "root")

    def once(flat: Flat, owned: Tensor) -> Tensor:
        if id(flat) not in found:
            begin_call("a record")
            found[id(flat)] = all_gather(flat, owned)
        return found[id(flat)]

    def tell_later(words: Sequence[int], about: Tag) -> list[list[int]]:
        if about != tag:
            return all_gather_words(words, about)
        told.extend(words)
        return [list(words)] * comm.world_size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "all_gather", once)
        patch.setattr(schedule, "begin_call", lambda what: None)
        patch.setattr(comm, "all_gather_words", tell_later)
        yield
    if told:
        assert all_gather_words(told, tag) == [told] * comm.world_size


def train(
    side: Plain | Wrapped,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    loss_of: Callable[[nn.Module, Batch], Tensor] = models.loss_of,
    clip: tuple[float, float] | None = None,
    accumulate: int = 1,
    no_sync: bool = True,
    after_step: Callable[[], object] = lambda: None,
) -> Record:
    """Train on `batches`, recording every step.

    Args:
        side: the model, plain or wrapped.
        optimizer: over the parameters of `side.module`.
        batches: this rank's micro-batches, `accumulate` of them a step.
        loss_of: the scalar loss of the model on a micro-batch.
        clip: (max_norm, norm_type), or None.
        accumulate: micro-batches a step.
        no_sync: hold communication back until the last micro-batch of a step.
        after_step: called after each optimizer step; a scheduler's step, say.
    """
    record = Record()
    names = [name for name, _ in side.module.named_parameters()]
    for start in range(0, len(batches), accumulate):
        micro = batches[start : start + accumulate]
        for index, batch in enumerate(micro):
            hold = no_sync and index < len(micro) - 1
            with side.no_sync() if hold else nullcontext():
                loss = loss_of(side.model, batch) / accumulate
                loss.backward()
            record.losses.append(loss.detach().clone())
        last = start + accumulate >= len(batches)  # whose gradients are asked for one by one
        with nullcontext() if last else together(side):
            record.gradients.append({name: side.gradient(name) for name in names})
        if clip is not None:
            record.norms.append(side.clip(*clip).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    with together(side):
        record.parameters = {name: side.parameter(name) for name in names}
    return record


class _Pair(NamedTuple):
    """One tensor of two records."""

    what: str
    ours: Tensor | None
    theirs: Tensor | None


def _groups(actual: Record, expected: Record) -> Iterator[list[_Pair]]:
    """Two records side by side, in groups of tensors of one kind and one step."""
    for what in ("losses", "norms"):
        both = zip(getattr(actual, what), getattr(expected, what), strict=True)
        yield [_Pair(f"{what}[{step}]", *pair) for step, pair in enumerate(both)]
    named = [
        *zip(actual.gradients, expected.gradients, strict=True),
        (actual.parameters, expected.parameters),
    ]
    for step, (ours, theirs) in enumerate(named):
        assert list(ours) == list(theirs), f"names {list(ours)} against {list(theirs)}"
        what = f"step {step} gradient" if step < len(expected.gradients) else "final"
        yield [_Pair(f"{what} {name}", ours[name], theirs[name]) for name in theirs]


def assert_same_bits(actual: Record, expected: Record) -> None:
    """Assert that two records are equal bit by bit, naming the first element that is not."""
    for what, ours, theirs in itertools.chain.from_iterable(_groups(actual, expected)):
        if ours is None or theirs is None:
            assert ours is theirs, f"{what}: {ours} against {theirs}"
            continue
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float32, (
            f"{what}: {tuple(ours.shape)} {ours.dtype} against {tuple(theirs.shape)} {theirs.dtype}"
        )
        same = ours.view(torch.int32) == theirs.view(torch.int32)
        if not bool(same.all()):
            where = tuple(torch.nonzero(~same)[0].tolist())
            raise AssertionError(
                f"{what}: {int((~same).sum())} of {ours.numel()} elements differ, the first at "
                f"{where}: {ours[where].item()!r} against {theirs[where].item()!r}"
            )


def assert_close(actual: Record, expected: Record, tolerance: float) -> None:
    """Assert that two records agree within `tolerance`, relative to each tensor's magnitude.

    A tensor that is small beside the others of its step (a 0-d gradient whose terms cancel) is
    held to a tenth of the largest instead: its rounding error is that of its terms.
    """
    for group in _groups(actual, expected):
        largest = [float(t.abs().max()) for _, _, t in group if t is not None and t.numel()]
        for what, ours, theirs in group:
            if ours is None or theirs is None:
                assert ours is theirs, f"{what}: {ours} against {theirs}"
                continue
            assert ours.shape == theirs.shape, f"{what}: {ours.shape} against {theirs.shape}"
            if theirs.numel():
                limit = tolerance * max(float(theirs.abs().max()), 0.1 * max(largest))
                worst = float((ours - theirs).abs().max())
                assert worst <= limit, f"{what}: off by {worst:.3g}, allowed {limit:.3g}"
