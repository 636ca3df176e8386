"""CUDA's caching allocator, replayed: the bytes it would reserve for a sequence of allocations and frees.

Living tensors are not what a GPU runs out of. Its allocator rounds sizes, keeps freed blocks for later, and cannot always
use what it keeps. Its rules are public (c10/cuda/CUDACachingAllocator.cpp of PyTorch); this applies them to sizes alone, for
one stream and without garbage collection.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

# Every request is rounded up to a multiple of this.
BLOCK = 512
# Requests up to this size come from the pool of small blocks.
_SMALL = MIB
# Segments that are requested from the device: for small blocks, for blocks below 10 MiB, and the rounding of larger ones.
_SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE_REQUEST, _ROUND_LARGE = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB

# An allocation under a key and its bytes, or the free of what a key holds, without bytes.
Event = tuple[Hashable, int | None]


class AllocatorFullError(Exception):
    """An allocation does not fit under the cap, even after all cached memory was released."""


@dataclass(slots=True, eq=False)
class _Block:
    """A range of addresses; neighbours in a segment are linked, so that free ones merge.

    Args:
        state: `unmapped` is address space of an expandable segment without memory behind it.
    """

    address: int
    size: int
    pool: _Pool
    state: Literal["free", "used", "unmapped"] = "free"
    before: _Block | None = None
    after: _Block | None = None

    @property
    def is_segment(self) -> bool:
        """Whether it is a whole segment, which can be given back to the device."""
        return self.before is None and self.after is None


class _Pool:
    """Blocks of one size class: the free ones by (size, address), and an expandable segment's blocks by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, int], _Block] = {}

    def add(self, block: _Block) -> None:
        key = block.size, block.address
        insort(self._order, key)
        self._blocks[key] = block

    def remove(self, block: _Block) -> None:
        key = block.size, block.address
        del self._order[bisect_left(self._order, key)]
        del self._blocks[key]

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block that holds `size`, the lowest address among equals."""
        place = bisect_left(self._order, (size, 0))
        return self._blocks[self._order[place]] if place < len(self._order) else None

    def free_blocks(self) -> list[_Block]:
        return [self._blocks[key] for key in self._order]


class CachingAllocator:
    """The state of the allocator after some allocations and frees.

    Args:
        cap_bytes: what it may reserve; `set_per_process_memory_fraction` sets the same limit.
        expandable: `expandable_segments:True`: pools grow page by page instead of segment by segment.

    Attributes:
        live_bytes: rounded sizes of what is allocated now.
        reserved_bytes, peak_reserved_bytes: what is held from the device, now and at most.
        retries: how often cached memory had to be released before a request fitted.

    >>> allocator = CachingAllocator(expandable=False)
    >>> allocator.allocate("a", 3 * MIB)
    >>> allocator.live_bytes // MIB, allocator.reserved_bytes // MIB
    (3, 20)
    """

    def __init__(self, cap_bytes: float = math.inf, *, expandable: bool = True) -> None:
        self.cap_bytes, self.expandable = cap_bytes, expandable
        self.live_bytes = self.reserved_bytes = self.peak_reserved_bytes = self.retries = 0
        self._pools = {True: _Pool(small=True), False: _Pool(small=False)}
        self._used: dict[Hashable, _Block] = {}
        self._next_address = 0
        self._first: dict[bool, _Block] = {}  # the first block of each pool's expandable segment

    def allocate(self, key: Hashable, size: int) -> None:
        """Allocate bytes under a key.

        Raises:
            AllocatorFullError: they do not fit under the cap.
        """
        if size == 0:
            return
        size = -(-size // BLOCK) * BLOCK
        pool = self._pools[size <= _SMALL]
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._new_block(pool, size)
            if block is None:
                self.retries += 1
                self.release_cached()
                block = self._new_block(pool, size)
            if block is None:
                raise AllocatorFullError(
                    f"{size} bytes do not fit: {self.live_bytes} live, {self.reserved_bytes} reserved, cap {self.cap_bytes}"
                )
        rest = block.size - size
        if rest >= BLOCK if pool.small or self.expandable else rest > _SMALL:
            pool.add(self._split(block, size))
        block.state = "used"
        self._used[key] = block
        self.live_bytes += block.size

    def free(self, key: Hashable) -> None:
        """Free what a key holds; its block merges with free neighbours."""
        block = self._used.pop(key, None)
        if block is None:  # zero bytes
            return
        self.live_bytes -= block.size
        block.state = "free"
        block.pool.add(self._merged(block))

    def reset_peak(self) -> None:
        """Forget the peak: it starts from what is reserved now."""
        self.peak_reserved_bytes = self.reserved_bytes

    def replay(self, events: Iterable[Event]) -> None:
        """Apply allocations and frees in order.

        Raises:
            AllocatorFullError: an allocation does not fit under the cap.
        """
        for key, size in events:
            if size is None:
                self.free(key)
            else:
                self.allocate(key, size)

    def _all_free(self) -> list[_Block]:
        return [block for pool in self._pools.values() for block in pool.free_blocks()]

    def _new_block(self, pool: _Pool, size: int) -> _Block | None:
        """A block that is in no free list, from memory of the device; None where the cap does not allow it."""
        if self.expandable:
            return self._expanded(pool, size)
        if pool.small:
            segment = _SMALL_SEGMENT
        elif size < _LARGE_REQUEST:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if not self._reserve(segment):
            return None
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > self.cap_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _split(self, block: _Block, size: int) -> _Block:
        """Cut a block to `size`; the rest, with its state, in no free list."""
        rest = _Block(block.address + size, block.size - size, block.pool, block.state, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        return rest

    def _merged(self, block: _Block) -> _Block:
        """A block together with its neighbours in the same state, free or unmapped; free ones leave the free list."""
        for other in (block.before, block.after):
            if other is None or other.state != block.state:
                continue
            if other.state == "free":
                block.pool.remove(other)
            first, second = sorted((block, other), key=lambda neighbour: neighbour.address)
            first.size, first.after = first.size + second.size, second.after
            if first.after is not None:
                first.after.before = first
            block = first
        return block

    def release_cached(self) -> None:
        """Give back to the device what is wholly free: segments, or pages of an expandable one."""
        for block in self._all_free():
            page = _SMALL_SEGMENT if block.pool.small else _LARGE_SEGMENT
            if not self.expandable:
                if block.is_segment:
                    block.pool.remove(block)
                    self.reserved_bytes -= block.size
                continue
            start, end = -(-block.address // page) * page, (block.address + block.size) // page * page
            if start >= end:
                continue
            block.pool.remove(block)
            self.reserved_bytes -= end - start
            if start > block.address:
                rest = self._split(block, start - block.address)
                block.pool.add(block)
                block = rest
            if end < block.address + block.size:
                block.pool.add(self._split(block, end - block.address))
            block.state = "unmapped"
            self._merged(block)

    # Expandable segments: each pool is one range of addresses without end, mapped page by page.

    def _expanded(self, pool: _Pool, size: int) -> _Block | None:
        """A free block of at least `size` at the lowest address where mapping pages makes one."""
        block = self._expandable(pool, size)
        if block.state == "unmapped":
            mapped = self._mapped(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.after is not None
            mapped = self._mapped(block.after, min(block.after.size, size - block.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _expandable(self, pool: _Pool, size: int) -> _Block:
        """The first run of free and unmapped blocks with room for `size`, one of which is unmapped."""
        if pool.small not in self._first:
            # At the start of a page, as the driver's are: else a page's memory would never be wholly free.
            address = 0 if pool.small else (1 << 60) // _LARGE_SEGMENT * _LARGE_SEGMENT
            self._first[pool.small] = _Block(address, 1 << 59, pool, "unmapped")
        block: _Block | None = _first_of(self._first[pool.small])
        while block is not None:
            if block.state == "unmapped":
                start = block.before if block.before is not None and block.before.state == "free" else block
                room = 0
                following: _Block | None = start
                while following is not None and following.state != "used" and room < size:
                    room, following = room + following.size, following.after
                if room >= size:
                    return start
            block = block.after
        raise AssertionError("address space is endless")

    def _mapped(self, block: _Block, size: int) -> _Block | None:
        """Map whole pages at the start of an unmapped block; the free block that results, in the free list."""
        page = _SMALL_SEGMENT if block.pool.small else _LARGE_SEGMENT
        size = min(-(-size // page) * page, block.size)
        if not self._reserve(size):
            return None
        if size < block.size:
            self._split(block, size)
        block.state = "free"
        merged = self._merged(block)
        block.pool.add(merged)
        return merged


def _first_of(block: _Block) -> _Block:
    while block.before is not None:
        block = block.before
    return block
