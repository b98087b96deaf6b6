"""Caching allocator: which memory torch's CUDA allocator reserves from the device for a sequence of allocations and releases.

torch rounds sizes up to 512 bytes and keeps two pools. Requests of up to 1 MiB share segments of 2 MiB. Larger ones share
segments of 20 MiB, and from 10 MiB on have a segment of their own, rounded up to 2 MiB. The smallest free block that is large
enough is taken, and split if enough remains. Released blocks merge with free neighbours and stay reserved.
With expandable segments each pool is one segment, which grows by pages of 2 or 20 MiB.
Not played: when the device is full, torch releases its free segments and tries again. A step that depends on that is too large.
Source: torch's c10/cuda/CUDACachingAllocator.cpp. One stream, default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIN_BLOCK = 512
SMALL = 1 << 20
"""Largest request of the small pool."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
"""Smallest request with a segment of its own."""
ROUND_SEGMENT = 2 << 20
ADDRESS_SPACE = LARGE_SEGMENT << 20
"""Largest size of an expandable segment."""


class Block:
    """A part of a segment, a neighbour of `previous` and `next` in it."""

    __slots__ = ("address", "free", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: Pool, previous: Block | None = None, next: Block | None = None) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.previous, self.next = previous, next
        self.free = True


class Pool:
    """The free blocks of one pool, by size and address."""

    def __init__(self, small: bool, address: int) -> None:
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.end = address
        """End of the memory in the pool's expandable segment."""
        self.last: Block | None = None
        """The block at that end."""

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """One device's allocator, without a limit. Sizes are bytes."""

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.pools = {True: Pool(True, 0), False: Pool(False, ADDRESS_SPACE)}
        self.allocated = self.reserved = 0
        self._next_address = 2 * ADDRESS_SPACE

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        pool = self.pools[size <= SMALL]
        block = self._cached(pool, size) or (self._grow(pool, size) if self.expandable else self._segment(pool, size))
        block.free = False
        remaining = block.size - size
        if remaining > SMALL or (remaining >= MIN_BLOCK and (pool.small or self.expandable)):
            rest = Block(block.address + size, remaining, pool, block, block.next)
            self._link(rest)
            block.size = size
            pool.add(rest)
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Make `block` free, and merge it with free neighbours."""
        self.allocated -= block.size
        block.free = True
        self._merge(block)
        block.pool.add(block)

    def _link(self, block: Block) -> None:
        """Make `block` the neighbour of its neighbours, and the last block of its segment if it has no next one."""
        if block.previous is not None:
            block.previous.next = block
        if block.next is not None:
            block.next.previous = block
        elif self.expandable:
            block.pool.last = block

    def _merge(self, block: Block) -> None:
        """Extend `block` over its free neighbours, which leave the pool."""
        if (before := block.previous) is not None and before.free:
            block.pool.remove(before)
            block.address, block.size, block.previous = before.address, block.size + before.size, before.previous
        if (after := block.next) is not None and after.free:
            block.pool.remove(after)
            block.size, block.next = block.size + after.size, after.next
        self._link(block)

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block of at least `size` bytes, which leaves the pool; None if there is none.

        The last block of an expandable segment can grow, so torch takes it only if it is the only one.
        """
        at = bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        if self.expandable and pool.free[at][2] is pool.last and at + 1 < len(pool.free):
            at += 1
        return pool.free.pop(at)[2]

    def _segment(self, pool: Pool, size: int) -> Block:
        """Return a new segment, outside the pool."""
        if pool.small:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        self.reserved += segment
        return block

    def _grow(self, pool: Pool, size: int) -> Block:
        """Add pages to the expandable segment, next to its last block if that is free, and return the block, outside the pool."""
        last = pool.last
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        added = -(-(size - (last.size if last is not None and last.free else 0)) // page) * page
        block = Block(pool.end, added, pool, last)
        pool.end += added
        self.reserved += added
        self._merge(block)
        return block
