"""Caching allocator: which memory torch's CUDA allocator reserves from the device for a sequence of allocations and releases.

torch rounds sizes up to 512 bytes and keeps two pools. Requests of up to 1 MiB share segments of 2 MiB. Larger ones share
segments of 20 MiB, and from 10 MiB on have a segment of their own, rounded up to 2 MiB. The smallest free block that is large
enough is taken, and split if enough remains. Released blocks merge with free neighbours and stay reserved. If the device has no
memory for a segment, torch releases all segments without an allocation and tries again.
With expandable segments each pool is one segment, which grows by pages of 2 or 20 MiB.
Source: torch's c10/cuda/CUDACachingAllocator.cpp. One stream, default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

MIN_BLOCK = 512
SMALL = 1 << 20
"""Largest request of the small pool."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
"""Smallest request with a segment of its own."""
ROUND_SEGMENT = 2 << 20
ADDRESS_SPACE = LARGE_SEGMENT << 20
"""Size of an expandable segment before memory is mapped into it."""


class OutOfDeviceMemory(Exception):
    """The device has no memory for an allocation, even after all free segments were released."""


class Block:
    """A part of a segment, a neighbour of `previous` and `next` in it."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: Pool, previous: Block | None = None, next: Block | None = None) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.previous, self.next = previous, next
        self.free = self.mapped = True

    @property
    def whole(self) -> bool:
        """Whether the block is a whole segment."""
        return self.previous is None and self.next is None


Entry = tuple[int, int, Block]
"""(size, address, block): the order in which free blocks are searched."""


class Pool:
    """The free blocks of one pool."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[Entry] = []
        self.unmapped: list[Entry] = []
        """Parts of expandable segments without memory."""

    def add(self, block: Block) -> None:
        insort(self.free if block.mapped else self.unmapped, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self.free if block.mapped else self.unmapped
        del blocks[bisect_left(blocks, (block.size, block.address))]


class CachingAllocator:
    """One device's allocator. Sizes are bytes."""

    def __init__(self, expandable: bool = False, limit: float = inf) -> None:
        """`limit`: the most that the allocator can reserve."""
        self.expandable, self.limit = expandable, limit
        self.pools = {small: Pool(small) for small in (True, False)}
        self.allocated = self.reserved = self.most_reserved = 0
        self.retries = 0
        """How often segments had to be released before an allocation."""
        self._next_address = 0
        if expandable:
            for pool in self.pools.values():
                segment = Block(self._next_address, ADDRESS_SPACE, pool)
                segment.mapped = False
                self._next_address += ADDRESS_SPACE
                pool.add(segment)

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes. Raises OutOfDeviceMemory."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        pool = self.pools[size <= SMALL]
        block = self._cached(pool, size) or self._reserve(pool, size)
        if block is None:
            self.retries += 1
            self.release_segments()
            block = self._reserve(pool, size)
            if block is None:
                raise OutOfDeviceMemory
        block.free = False
        remaining = block.size - size
        if remaining > SMALL or (remaining >= MIN_BLOCK and (pool.small or self.expandable)):
            rest = Block(block.address + size, remaining, pool, block, block.next)
            if block.next is not None:
                block.next.previous = rest
            block.next, block.size = rest, size
            pool.add(rest)
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Make `block` free, and merge it with free neighbours."""
        self.allocated -= block.size
        block.free = True
        self._merge_neighbours(block)
        block.pool.add(block)

    def release_segments(self) -> None:
        """Return the segments without an allocation to the device; of expandable segments, the free pages."""
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.whole:
                    pool.remove(block)
                    self.reserved -= block.size

    def _merge_neighbours(self, block: Block) -> None:
        """Extend `block` over its free neighbours, which leave the pool."""
        pool = block.pool
        if (before := block.previous) is not None and before.free and before.mapped == block.mapped:
            pool.remove(before)
            block.address, block.size, block.previous = before.address, block.size + before.size, before.previous
            if block.previous is not None:
                block.previous.next = block
        if (after := block.next) is not None and after.free and after.mapped == block.mapped:
            pool.remove(after)
            block.size, block.next = block.size + after.size, after.next
            if block.next is not None:
                block.next.previous = block

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block of at least `size` bytes, which leaves the pool; None if there is none."""
        blocks = pool.free
        at = bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        if self.expandable:  # a block that can still grow is taken last
            while not blocks[at][2].whole and at + 1 < len(blocks) and grown(blocks[at + 1][2]) < grown(blocks[at][2]):
                at += 1
        return blocks.pop(at)[2]

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        """Return a block of new memory of the device, outside the pool; None if the device has too little."""
        if self.expandable:
            return self._grow(pool, size)
        if pool.small:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        if not self._take(segment):
            return None
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _take(self, size: int) -> bool:
        """Count `size` bytes as reserved, if the device has them."""
        if self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return True

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Map memory into an expandable segment, next to its free end, and return the block, outside the pool."""
        for _, _, block in list(pool.unmapped):
            before = block.previous if block.previous is not None and block.previous.free else None
            missing = size - (before.size if before else 0)
            if block.size < missing:
                continue
            mapped = -(-missing // pool.page) * pool.page
            if not self._take(mapped):
                return None
            pool.remove(block)
            if mapped < block.size:
                rest = Block(block.address + mapped, block.size - mapped, pool, block, block.next)
                rest.mapped = False
                if block.next is not None:
                    block.next.previous = rest
                block.size, block.next = mapped, rest
                pool.add(rest)
            block.mapped = True
            self._merge_neighbours(block)
            return block
        return None

    def _unmap(self, block: Block) -> None:
        """Return the whole pages in the free `block` of an expandable segment to the device."""
        page = block.pool.page
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool = block.pool
        pool.remove(block)
        self.reserved -= end - begin
        if before := begin - block.address:
            rest = Block(block.address, before, pool, block.previous, block)
            if block.previous is not None:
                block.previous.next = rest
            block.previous = rest
            pool.add(rest)
        if after := block.address + block.size - end:
            rest = Block(end, after, pool, block, block.next)
            if block.next is not None:
                block.next.previous = rest
            block.next = rest
            pool.add(rest)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._merge_neighbours(block)
        pool.add(block)


def grown(block: Block) -> int:
    """Return the size of a free block of an expandable segment with the unmapped part behind it."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
