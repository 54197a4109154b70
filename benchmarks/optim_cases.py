"""The optimizer's kernels beside what torch does: the update alone, and the whole phase.

[Note: what the optimizer phase is]
From the reduced gradient to the parameters that the next step gathers: unscale, global norm, clip,
AdamW, bf16 copy out. torch needs a pass for each. zshard needs one: the pass after each
reduction has left the sum of squares and the non-finite flag, and adamw_ applies the factor and
writes the send buffer. "phase" charges zshard that one pass; "phase+norm" also a pass over the
gradients that does nothing but measure them, as a step never needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from op_cases import Case, adder, same
from protocol import Side
from torch import Tensor
from workloads import WORKLOADS, random_tensors

import zshard.reference as reference
from zshard import ops

_LR, _BETA1, _BETA2, _EPS, _DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_

Stream = Callable[..., None]  # see stream.py


# The reads and writes of an update alone, without and with a copy; by operands of ``Stream``.
PATTERNS = {4: "4 reads, 3 writes", 5: "4 reads, 4 writes"}


class _State:
    """The operands of one optimizer step: a shard in flat buffers, and torch's views of the same.

    Args:
        grad: dtype of the reduced gradient.
        send: whether a bf16 copy of the parameters is written.
        each: make every tensor a shard of its own, as 1,000 plain parameters would be.
    """

    def __init__(
        self, workload: str, grad: torch.dtype, device: torch.device, *, send: bool, each: bool
    ) -> None:
        shapes = WORKLOADS[workload]
        skew = int(workload == "odd")
        numels = [torch.Size(shape).numel() for shape in shapes]
        flats = numels if each else [sum(numels)]

        def make(dtype: torch.dtype) -> list[Tensor]:
            return random_tensors(tuple((n,) for n in flats), dtype, device, skew=skew)

        self.masters, self.exp_avgs = make(torch.float32), make(torch.float32)
        # Away from 0, where the update is ill-conditioned and torch's rounding would show.
        self.exp_avg_sqs = [x.square_().add_(0.1) for x in make(torch.float32)]
        self.grads = make(grad)
        self.sends = make(torch.bfloat16) if send else []
        ends = [sum(numels[: i + 1]) for i in range(len(numels))]
        rows = (
            [[i, 0, n] for i, n in enumerate(numels)]
            if each
            else [[0, end - n, end] for n, end in zip(numels, ends, strict=True)]
        )
        self.segments = torch.tensor(rows, dtype=torch.int64, device=device)
        hyper = [_LR, _BETA1, _BETA2, _EPS, _DECAY, 1.0]
        self.hypers = torch.tensor([hyper] * len(rows), dtype=torch.float64, device=device)
        self.steps = torch.full((len(rows),), 10, dtype=torch.int64, device=device)
        self.inverse_scale = torch.ones(1, device=device)  # of the loss scale
        self.found = torch.zeros(1, device=device)  # nonzero: a gradient is not finite
        self.max_norm = math.sqrt(sum(numels)) / 4  # a quarter of the norm that randn has
        # Of reduce_, a row a shard: the sum of squares, and the non-finite flag.
        self.stats = torch.zeros(len(flats), 2, dtype=torch.float64, device=device)
        self.views = _Views(*(self._split(x, rows) for x in self._lists()))
        self.wide = self.views.grads
        if grad != torch.float32:  # torch's AdamW takes fp32 gradients only
            self.wide = [torch.empty_like(g, dtype=torch.float32) for g in self.views.grads]
        # torch keeps the count of steps in a tensor a parameter, on CPU on the host.
        self.torch_steps = [torch.tensor(10.0, device=device) for _ in rows]

    def _lists(self) -> list[list[Tensor]]:
        return [self.masters, self.exp_avgs, self.exp_avg_sqs, self.grads, self.sends]

    @staticmethod
    def _split(flats: list[Tensor], rows: list[list[int]]) -> list[Tensor]:
        return [flats[u][begin:end] for u, begin, end in rows] if flats else []

    def measure_norm(self) -> None:
        """Fill ``stats`` in a pass of its own."""
        for grad, stats in zip(self.grads, self.stats, strict=True):
            ops.reduce_(grad, grad[None], stats=stats)

    def zshard_step(self, grad_scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        ops.adamw_(
            self.masters,
            [],
            self.exp_avgs,
            self.exp_avg_sqs,
            self.grads,
            self.sends,
            self.segments,
            self.hypers,
            self.steps,
            grad_scale=grad_scale,
            skip=skip,
        )

    def fused_step(self, peers: list[Tensor], scale: float) -> None:
        shard = (self.masters[0], None, self.exp_avgs[0], self.exp_avg_sqs[0])
        tables = (self.segments, self.hypers, self.steps)
        ops.reduce_adamw_(*shard, peers, self.sends[0], *tables, scale, self.stats[0])

    def factor(self) -> tuple[Tensor, Tensor]:
        """What multiplies the gradients (unscale and clip), and the non-finite flag, (1,) fp32."""
        stats = self.stats.sum(0)
        norm, clip = (torch.empty_like(self.inverse_scale) for _ in range(2))
        ops.clip_factor_(clip, norm, stats[:1], self.max_norm, self.inverse_scale)
        return clip * self.inverse_scale, stats[1:].float()

    def zshard_phase(self) -> None:
        self.zshard_step(*self.factor())

    def torch_step(self) -> None:
        torch._foreach_add_(self.torch_steps, 1)
        torch._fused_adamw_(
            self.views.masters,
            self.wide,
            self.views.exp_avgs,
            self.views.exp_avg_sqs,
            [],
            self.torch_steps,
            amsgrad=False,
            lr=_LR,
            beta1=_BETA1,
            beta2=_BETA2,
            weight_decay=_DECAY,
            eps=_EPS,
            maximize=False,
            grad_scale=None,
            found_inf=self.found,
        )

    def torch_passes(self) -> None:
        """The update, with what torch needs around it where gradients and a copy are bf16."""
        if self.wide is not self.views.grads:
            torch._foreach_copy_(self.wide, self.views.grads)
        self.torch_step()
        if self.sends:
            torch._foreach_copy_(self.views.sends, self.views.masters)

    def torch_phase(self) -> None:
        if self.wide is not self.views.grads:
            torch._foreach_copy_(self.wide, self.views.grads)
        self.found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(self.wide, self.found, self.inverse_scale)
        norm = torch.nn.utils.get_total_norm(self.wide, foreach=True)
        torch._foreach_mul_(self.wide, (self.max_norm / (norm + _TINY)).clamp_(max=1.0))
        self.torch_step()
        if self.sends:
            torch._foreach_copy_(self.views.sends, self.views.masters)

    def snapshot(self) -> list[Tensor]:
        return [x.clone() for part in self._lists() for x in part]

    def restore(self, saved: list[Tensor]) -> None:
        live = [x for part in self._lists() for x in part]
        for x, value in zip(live, saved, strict=True):
            x.copy_(value)
        self.steps.fill_(10)
        for step in self.torch_steps:
            step.fill_(10)

    def poison(self) -> None:
        for send in self.sends:
            send.fill_(float("nan"))


class _Views(NamedTuple):
    """One tensor a parameter, of the memory that zshard's shards are in."""

    masters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    grads: list[Tensor]
    sends: list[Tensor]


def _check(state: _State) -> None:
    """zshard's phase has the reference's bits; torch's agrees within fp32 rounding."""
    start = state.snapshot()
    state.inverse_scale.fill_(0.5)
    state.measure_norm()
    outcomes = []
    for step in (state.zshard_phase, state.torch_phase):
        state.restore(start)
        state.poison()
        step()
        outcomes.append([x.clone() for x in (*state.masters, *state.exp_avgs, *state.sends)])
    state.restore(start)
    reference.adamw_(
        state.masters,
        [],
        state.exp_avgs,
        state.exp_avg_sqs,
        state.grads,
        state.sends,
        state.segments,
        state.hypers,
        state.steps,
        grad_scale=state.factor()[0],
    )
    # torch sums the norm, and so the clip factor, in fp32: the averages take over its error, which
    # grows with what is summed.
    more = max(1.0, sum(master.numel() for master in state.masters) / 27e6)
    roundings = [
        *(1e-5 * more for _ in state.masters),
        *(1e-4 * more for _ in state.exp_avgs),
        *(1e-2 for _ in state.sends),
    ]
    expected = [*state.masters, *state.exp_avgs, *state.sends]
    for ours, theirs, wanted, rounding in zip(*outcomes, expected, roundings, strict=True):
        same(ours, wanted, "adamw_")
        same(theirs, wanted, "torch's sequence", rtol=rounding)
    state.restore(start)
    # torch unscales and clips in place: with a scale of 1, running it again changes little.
    state.inverse_scale.fill_(1.0)


def adamw_case(
    workload: str, *, stream: Stream | None, grad: torch.dtype = torch.float32, apart: bool = False
) -> Case:
    """The update alone: adamw_ against torch's fused AdamW and the bare pattern.

    Args:
        grad: of the gradients; if bf16, a bf16 copy is written too, which takes torch three passes.
        apart: every tensor is a shard of its own, instead of lying in one as zshard lays them.
    """
    numel = sum(torch.Size(shape).numel() for shape in WORKLOADS[workload])
    low = grad != torch.float32
    nbytes = numel * (26 + grad.itemsize) if low else 28 * numel

    def build(device: torch.device, sets: int) -> list[Side]:
        states = [_State(workload, grad, device, send=low, each=apart) for _ in range(sets)]
        _check(states[0])
        theirs = "cast, fused AdamW, cast" if low else "torch fused AdamW"
        sides = [
            Side("adamw_", lambda i: states[i].zshard_step(), nbytes=nbytes),
            Side(theirs, lambda i: states[i].torch_passes(), nbytes=nbytes),
        ]
        if stream is not None and device.type == "cpu" and not apart:
            operands = [torch.randn(numel) for _ in range(3)]
            operands += [torch.randn(numel).to(grad) for _ in range(2 if low else 1)]
            name = PATTERNS[len(operands)]
            sides.append(Side(name, lambda i: stream(*operands), nbytes=nbytes))
        return sides

    name = f"adamw {_NAMES[grad]} grads {workload}{' apart' if apart else ''}"
    return Case(name, nbytes, build)


def fused_case(workload: str, peer: torch.dtype, ranks: int) -> Case:
    """From the ranks' gradients to the parameters: reduce_adamw_ against the passes that it joins.

    No clipping; the norm is measured all the same. All memory is local here.
    """
    numel = sum(torch.Size(shape).numel() for shape in WORKLOADS[workload])
    scale, rest = 1.0 / ranks, 26  # p, m, v read and written, the bf16 copy
    nbytes = numel * (ranks * peer.itemsize + rest)

    def build(device: torch.device, sets: int) -> list[Side]:
        states = [
            _State(workload, torch.float32, device, send=True, each=False) for _ in range(sets)
        ]
        shapes = ((numel,),) * ranks
        peers = [random_tensors(shapes, peer, device) for _ in range(sets)]
        add = adder(numel, peer, device)

        def ours(i: int) -> None:
            states[i].fused_step(peers[i], scale)

        def apart(i: int) -> None:
            ops.reduce_peers_(states[i].grads[0], peers[i], scale, stats=states[i].stats[0])
            states[i].zshard_step()

        def torch_sequence(i: int) -> None:
            add(grad := states[i].grads[0], peers[i])
            torch.linalg.vector_norm(grad.mul_(scale)).isfinite()
            states[i].torch_passes()

        def stale() -> None:
            for state in states:
                state.poison()

        start, outcomes = states[0].snapshot(), []
        for run in (apart, ours, torch_sequence):
            states[0].restore(start)
            stale()
            run(0)
            outcomes.append([states[0].masters[0].clone(), states[0].sends[0].clone()])
        for wanted, fused, theirs, rounding in zip(*outcomes, (1e-5, 1e-2), strict=True):
            same(fused, wanted, "reduce_adamw_")
            same(theirs, wanted, "torch's sequence", rtol=rounding)
        states[0].restore(start)
        more = 8 * numel  # the gradient written and read
        return [
            Side("reduce_adamw_", ours, stale, nbytes),
            Side("reduce_peers_ and adamw_", apart, stale, nbytes + more),
            Side("torch sequence", torch_sequence, stale, nbytes + more),
        ]

    return Case(f"reduce+adamw {ranks} x {_NAMES[peer]} {workload}", nbytes, build)


def phase_case(workload: str, grad: torch.dtype, *, norm: bool) -> Case:
    """The optimizer phase; see [Note: what the optimizer phase is]."""
    numel = sum(torch.Size(shape).numel() for shape in WORKLOADS[workload])
    nbytes = numel * (26 + grad.itemsize)  # p, m, v read and written, the bf16 copy, the gradient
    if norm:
        nbytes += numel * grad.itemsize

    def build(device: torch.device, sets: int) -> list[Side]:
        states = [_State(workload, grad, device, send=True, each=False) for _ in range(sets)]
        _check(states[0])

        def ours(i: int) -> None:
            if norm:
                states[i].measure_norm()
            states[i].zshard_phase()

        def stale() -> None:
            for state in states:
                state.poison()

        for state in states:
            state.measure_norm()
        return [
            Side("reduce_ and adamw_" if norm else "adamw_", ours, stale, nbytes),
            Side("torch sequence", lambda i: states[i].torch_phase(), stale, nbytes),
        ]

    name = "phase+norm" if norm else "phase"
    return Case(f"{name} {_NAMES[grad]} grads {workload}", nbytes, build)
