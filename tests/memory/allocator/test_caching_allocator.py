"""The caching allocator follows torch's rules. tests/gpu/test_memory.py compares it with torch's own, on any CUDA device."""

from itertools import pairwise

import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hwopt.memory.allocator.caching_allocator import Block, CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB + 512 * KIB, 12 * MIB, 12 * MIB),  # less than 1 MiB remains: not split, and counted as a whole
    ],
)
def test_first_allocation_takes_a_segment_of_its_pool(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_expandable_segment_grows_where_fixed_segments_fragment() -> None:
    """Each block is 4 MiB larger than the one before and does not fit into its segment."""
    reserved = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        for size in range(20, 60, 4):
            allocator.release(allocator.allocate(size * MIB))
        reserved.append(allocator.reserved)
    assert reserved == [sum(range(20, 60, 4)) * MIB, 60 * MIB]


REQUESTS = st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 40)), max_size=60)


@given(REQUESTS, st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_live_blocks_never_overlap_and_the_counts_agree(requests: list[tuple[int, int]], expandable: bool) -> None:
    allocator = CachingAllocator(expandable)
    live: list[Block] = []
    for size, drop in requests:
        if drop < len(live):
            allocator.release(live.pop(drop))
        live.append(allocator.allocate(size))
        ends = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
        assert live[-1].size >= size
        assert sum(block.size for block in live) == allocator.allocated <= allocator.reserved
    for block in live:
        allocator.release(block)
    assert sum(block.size for pool in allocator.pools.values() for _, _, block in pool.free) == allocator.reserved
