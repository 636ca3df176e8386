"""The replay of CUDA's caching allocator: blocks never overlap, the cap holds, and blocks split and merge by the rules."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from bsearch.objectives.profiling.memory.allocator import (
    BLOCK,
    MIB,
    AllocatorFullError,
    CachingAllocator,
    Event,
)
from fake_gpu.device import segments_of
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.sampled_from([MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB]),
    st.integers(1, 64 * MIB),
)


@st.composite
def sequences(draw: Any) -> list[Event]:
    """Allocations of any sizes, and frees of what lives then."""
    events: list[Event] = []
    live: list[int] = []
    for number in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            events.append((live.pop(draw(st.integers(0, len(live) - 1))), None))
        else:
            events.append((number, draw(SIZES)))
            live.append(number)
    return events


def check(allocator: CachingAllocator, live: dict[Any, int]) -> None:
    """What holds after every event."""
    segments = segments_of(allocator)
    used = free = 0
    end = -1
    for blocks in segments:
        for place, (address, size, state) in enumerate(blocks):
            assert size > 0
            assert size % BLOCK == 0
            assert address >= end, "blocks overlap"
            if place:
                assert address == end, "a gap inside a segment"
                assert {state, blocks[place - 1][2]} != {state} or state == "used", (
                    "neighbours that should be one block"
                )
            end = address + size
            used += size * (state == "used")
            free += size * (state == "free")
    rounded = sum(-(-size // BLOCK) * BLOCK for size in live.values())
    assert allocator.live_bytes == used
    # A block whose rest is too small to split off is handed out whole.
    assert rounded <= used
    assert allocator.reserved_bytes == used + free
    assert allocator.reserved_bytes <= min(allocator.peak_reserved_bytes, allocator.cap_bytes)


@given(sequences(), st.booleans(), st.sampled_from([math.inf, 24 * MIB, 60 * MIB, 130 * MIB]))
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_reserved_bytes_never_exceed_the_cap(
    events: list[Event], expandable: bool, cap: float
) -> None:
    allocator = CachingAllocator(cap, expandable=expandable)
    live: dict[Any, int] = {}
    for key, size in events:
        if size is None:
            allocator.free(key)
            live.pop(key, None)
        else:
            try:
                allocator.allocate(key, size)
            except AllocatorFullError:
                assert cap < math.inf
                check(allocator, live)
                continue
            live[key] = size
        check(allocator, live)
    for key in list(live):
        allocator.free(key)
        del live[key]
    check(allocator, live)
    assert allocator.live_bytes == 0
    for blocks in segments_of(allocator):  # pages that were given back may lie between free ones
        assert all(
            "free" not in (one, other) or one != other for (_, _, one), (_, _, other) in pairwise(blocks)
        )


class Twin:
    """The same rules, as slowly and plainly as they can be written: segments are lists of [size, key or None]."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[Any]]]] = []

    def allocate(self, key: Any, size: int) -> None:
        size = -(-size // 512) * 512
        small = size <= MIB
        fits = [
            (block[0], order, place)
            for order, (of_small, blocks) in enumerate(self.segments)
            for place, block in enumerate(blocks)
            if of_small == small and block[1] is None and block[0] >= size
        ]
        if fits:
            _, order, place = min(fits)
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[whole, None]]))
            order, place = len(self.segments) - 1, 0
        blocks = self.segments[order][1]
        rest = blocks[place][0] - size
        if rest >= 512 if small else rest > MIB:
            blocks[place : place + 1] = [[size, key], [rest, None]]
        else:
            blocks[place][1] = key

    def free(self, key: Any) -> None:
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == key:
                    block[1] = None
            merged: list[list[Any]] = []
            for size, owner in blocks:
                if merged and owner is None and merged[-1][1] is None:
                    merged[-1][0] += size
                else:
                    merged.append([size, owner])
            blocks[:] = merged

    @property
    def reserved_bytes(self) -> int:
        return sum(block[0] for _, blocks in self.segments for block in blocks)


@given(sequences())
@settings(max_examples=100, deadline=None)
def test_segments_are_those_of_a_plainer_twin(events: list[Event]) -> None:
    allocator, twin = CachingAllocator(expandable=False), Twin()
    for key, size in events:
        if size is None:
            allocator.free(key)
            twin.free(key)
        else:
            allocator.allocate(key, size)
            twin.allocate(key, size)
        assert allocator.reserved_bytes == twin.reserved_bytes
    assert [[size for _, size, _ in blocks] for blocks in segments_of(allocator)] == [
        [size for size, _ in blocks] for _, blocks in twin.segments
    ]


def test_requests_get_the_segments_that_the_rules_name() -> None:
    for size, segment in (
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (11 * MIB, 12),
    ):
        allocator = CachingAllocator(expandable=False)
        allocator.allocate("one", size)
        assert allocator.reserved_bytes == segment * MIB


def test_cached_memory_is_released_before_a_request_fails() -> None:
    allocator = CachingAllocator(64 * MIB, expandable=False)
    allocator.allocate("first", 30 * MIB)
    allocator.allocate("second", 20 * MIB)
    allocator.free("first")
    allocator.allocate("third", 40 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 60 * MIB)
    with pytest.raises(AllocatorFullError):
        allocator.allocate("fourth", 5 * MIB)


def test_an_expandable_segment_grows_by_what_is_missing() -> None:
    """Where the last block is free, only the difference is mapped; the default takes a new segment."""
    reserved = {}
    for expandable in (True, False):
        allocator = CachingAllocator(expandable=expandable)
        allocator.allocate("first", 40 * MIB)
        allocator.free("first")
        allocator.allocate("larger", 60 * MIB)
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {True: 60 * MIB, False: 100 * MIB}


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("size", [100, MIB, 3 * MIB, 20 * MIB, 33 * MIB])
def test_nothing_stays_reserved_once_all_is_free_and_released(size: int, expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for key in range(3):
        allocator.allocate(key, size)
    for key in range(3):
        allocator.free(key)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0
