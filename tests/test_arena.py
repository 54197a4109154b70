"""Where windows lie in memory that ranks allocate together."""

from __future__ import annotations

import random

import pytest
import torch

from zshard.transports.arena import COPIED, Arena, Extent, Window

SMALL, RANK, RANKS = 1024, 1, 3


class Plain(Arena[Window]):
    """Of ranks that are all here."""

    def __init__(self, overhead: int) -> None:
        super().__init__(SMALL, overhead)
        self.gap, self.made = overhead, list[int]()

    def allocate(self, part: int) -> Extent[Window]:
        self.made.append(part)
        parts = torch.zeros(RANKS, part, dtype=torch.uint8)

        def cut(begin: int, nbytes: int) -> Window:
            return Window(parts[:, begin + self.gap : begin + self.gap + nbytes], RANK)

        return Extent(parts[RANK], cut)


@pytest.mark.parametrize("overhead", [0, 64])
def test_windows_of_any_size_have_their_bytes_for_themselves(overhead: int) -> None:
    chance, arena = random.Random(overhead), Plain(overhead)
    sizes = [chance.choice((0, 1, 63, 64, 65, 200, 896, 960, 1024, 1025, 5000)) for _ in range(200)]
    windows = [arena.window(nbytes) for nbytes in sizes]
    for number, (window, nbytes) in enumerate(zip(windows, sizes, strict=True)):
        assert window.rows.shape == (RANKS, nbytes)
        assert window.own.data_ptr() % 64 == 0 or nbytes == 0
        window.rows.fill_(number)
    for number, window in enumerate(windows):
        assert (window.rows == number).all(), sizes[number]


def test_a_tensor_is_found_in_its_window_at_its_byte() -> None:
    chance, arena = random.Random(3), Plain(64)
    windows = [arena.window(chance.choice((64, 100, 500, 3000))) for _ in range(50)]
    for window in windows:
        begin = chance.randrange(window.own.numel())
        found = arena.find(window.own[begin:])
        assert found is not None
        assert found[0] is window
        assert found[1] == begin
    assert arena.find(torch.zeros(4)) is None
    assert arena.find(windows[0].own[:0]) is None


def test_small_windows_share_extents_and_a_large_one_is_given_back() -> None:
    arena = Plain(0)
    small, large = arena.window(64), arena.window(2 * SMALL)
    rest = [arena.window(320) for _ in range(4)]
    assert arena.made == [SMALL, 2 * SMALL, SMALL]
    for window in (small, large, *rest):
        arena.give_back(window.own)
    assert arena.find(large.own) is None
    assert all(arena.find(window.own) is not None for window in (small, *rest))
    arena.give_back(torch.zeros(4))  # not of the arena
    arena.close()
    assert arena.find(small.own) is None


@pytest.mark.parametrize("before", [0, 64, 2 * SMALL])
def test_what_was_made_since_it_was_settled_is_forgotten(before: int) -> None:
    """Ranks that have made more than others have the same windows afterwards, of zeros."""
    arena, later = Plain(64), (64, 320, 3 * SMALL, 320, 320)
    kept = arena.window(before) if before else None
    arena.settle()
    for made in range(len(later) + 1):
        windows = [arena.window(nbytes) for nbytes in later[:made]]
        for window in windows:
            window.rows.fill_(1)
        arena.go_back()
        assert all(arena.find(window.own) is None or window.own.sum() == 0 for window in windows)
        assert kept is None or arena.find(kept.own) == (kept, 0)
        assert len(arena._extents) == (kept is not None)
        assert arena.has_room(64) == (before == 64)
    arena.close()
    arena.go_back()
    assert not arena._extents and not arena.has_room(64)


@pytest.mark.parametrize("overhead", [0, 64])
def test_there_is_room_exactly_where_nothing_is_allocated(overhead: int) -> None:
    arena = Plain(overhead)
    assert not arena.has_room(64)
    for _ in range(60):
        room, before = arena.has_room(64), len(arena.made)
        arena.window(64)
        assert room == (len(arena.made) == before)


@pytest.mark.parametrize("whole", [False, True])
def test_a_gather_reads_every_ranks_shard(whole: bool) -> None:
    """A full buffer holds this rank's shard at its place; other buffers are shards."""
    window = Plain(64).window(RANKS * 128)
    window.whole = whole
    window.rows.copy_(torch.arange(RANKS).view(-1, 1) * 100 + torch.arange(RANKS * 128) // 128)
    shards = window.shards(RANK * 128, 128)
    expected = [100 * rank + (rank if whole else RANK) for rank in range(RANKS)]
    assert [shard.dtype for shard in shards] == [COPIED] * RANKS
    assert [shard.view(torch.uint8).tolist() for shard in shards] == [
        [value % 256] * 128 for value in expected
    ]
