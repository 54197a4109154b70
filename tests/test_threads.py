"""Models on one rank, each trained by a thread of its own."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import Blocks
from steps import batch
from torch import Tensor, nn

import zshard
from zshard.step.agreement import Agreement
from zshard.units.flat import Flat

_SECONDS = 60.0  # of a thread's wait for its turn, at most


class Turns:
    """Lets one thread run at a time, from one place where it passes the turn on to the next."""

    def __init__(self, count: int) -> None:
        self._waiting, self._at = list(range(count)), 0
        self._changed = threading.Condition()

    def pass_on(self, thread: int, *, ends: bool = False) -> None:
        """Let the others run up to where they pass the turn on."""
        with self._changed:
            place = self._waiting.index(thread)
            if ends:
                self._waiting.remove(thread)
            self._at = (place + (not ends)) % max(len(self._waiting), 1)
            self._changed.notify_all()
            if not ends:
                self._await(thread)

    def begin(self, thread: int) -> None:
        """Wait for the first turn."""
        with self._changed:
            self._await(thread)

    def _await(self, thread: int) -> None:
        mine = self._changed.wait_for(lambda: self._waiting[self._at] == thread, _SECONDS)
        assert mine, "another thread has not passed the turn on"


def trained(model: nn.Module, thread: int, turns: Turns) -> list[Tensor]:
    """Losses of three steps, in which the turn is passed on around every block, both ways."""
    turns.begin(thread)
    try:
        optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            loss = model(batch(thread, step)).square().mean()
            loss.backward()
            zshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses
    finally:
        turns.pass_on(thread, ends=True)


def trained_by_threads(strategy: str, threads: int) -> list[list[Tensor]]:
    turns, made = Turns(threads), []
    for thread in range(threads):
        torch.manual_seed(thread)
        model = zshard.wrap(Blocks(), strategy=strategy)

        def around(_: nn.Module, args: object, out: Tensor, thread: int = thread) -> None:
            turns.pass_on(thread)
            out.register_hook(lambda _: turns.pass_on(thread))

        for block in model.blocks:
            block.register_forward_hook(around)
        made.append(model)
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(trained, made, range(threads), [turns] * threads)]


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_models_of_several_threads_on_one_rank_have_the_bits_of_one_thread(strategy: str) -> None:
    together = trained_by_threads(strategy, 3)
    for count in (1, 2):
        assert together[:count] == trained_by_threads(strategy, count)


def test_a_thread_ends_no_part_of_a_pass_of_another_threads_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would, were the models to meet: what runs freely then changes a pass under way."""
    finish_part, threads = Agreement._finish_part, defaultdict(set)

    def noted(agreement: Agreement) -> None:
        threads[agreement].add(threading.get_ident())
        finish_part(agreement)

    monkeypatch.setattr(Agreement, "_finish_part", noted)
    trained_by_threads("zero3", 3)
    assert [len(idents) for idents in threads.values()] == [1, 1, 1]


def test_a_model_that_another_thread_wraps_while_an_optimizer_lays_out_its_states_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state_bytes, meanwhile = zshard.AdamW.state_bytes, []

    def wraps_meanwhile(*args: Any) -> dict[Flat, int]:
        with ThreadPoolExecutor(1) as pool:
            meanwhile.append(pool.submit(zshard.wrap, nn.Linear(2, 2)).result())
        return state_bytes(*args)

    monkeypatch.setattr(zshard.AdamW, "state_bytes", wraps_meanwhile)
    model = zshard.wrap(Blocks())
    optimizer = zshard.AdamW(model.parameters())
    model(batch(0, 0)).square().mean().backward()
    optimizer.step()
    assert meanwhile
