"""Properties of the split: every row once, never over the budget, never slower than the plain split; and the plugin."""

from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from plugin_cases import Cases, Mutation, Part

import hwopt_plugins.length_batching
from hwopt.data.batches.collate import Collate, cut_in_order
from hwopt.data.batches.step_batch import Widths
from hwopt.plugin import verify
from hwopt_plugins.length_batching import LengthBatching, cut_by_length, padded_tokens

LENGTHS = st.lists(st.integers(1, 512), min_size=1, max_size=60)


def cost(lengths, groups, overhead):
    return padded_tokens(lengths, groups) + overhead * len(groups)


def consecutive(count, rows):
    return [list(range(at, min(at + rows, count))) for at in range(0, count, rows)]


@given(lengths=LENGTHS, tokens=st.one_of(st.none(), st.integers(1, 4096)), rows=st.integers(1, 32), overhead=st.integers(0, 1024))
def test_cut_holds_every_row_once_within_the_budget(lengths, tokens, rows, overhead):
    groups = cut_by_length(lengths, rows, tokens=tokens, overhead_tokens=overhead)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths))), "every row exactly once"
    assert all(groups), "no group is empty"
    budget = tokens if tokens is not None else rows * max(lengths)
    assert all(len(group) == 1 or padded_tokens(lengths, [group]) <= budget for group in groups)
    widths = [max(lengths[row] for row in group) for group in groups]
    assert all(wider >= narrower for wider, narrower in pairwise(widths)), "longest first"
    assert groups == cut_by_length(tuple(lengths), rows, tokens=tokens, overhead_tokens=overhead)


def step_time(lengths, groups, overhead, host):
    """The tokens that the slower side of a step computes, or could compute."""
    return max(cost(lengths, groups, overhead), host * len(groups))


PRICES = st.tuples(st.integers(0, 1024), st.integers(0, 20_000))


@given(lengths=LENGTHS, rows=st.integers(1, 32), prices=PRICES, faster_host=st.floats(0, 1), slower_device=st.floats(1, 8))
def test_split_is_never_slower_than_no_split(lengths, rows, prices, faster_host, slower_device):
    """Under the price, on a faster host and on a slower device."""
    overhead, host = prices
    groups = cut_by_length(lengths, rows, tokens=None, overhead_tokens=overhead, host_tokens=host)
    unsplit = consecutive(len(lengths), rows)
    assert step_time(lengths, groups, overhead, host) <= step_time(lengths, unsplit, overhead, host)
    here = [max(slower_device * cost(lengths, each, overhead), faster_host * host * len(each)) for each in (groups, unsplit)]
    assert here[0] <= here[1] * (1 + 1e-9)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths))), "every row exactly once"
    assert all(len(group) == 1 or padded_tokens(lengths, [group]) <= rows * max(lengths) for group in groups)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    rows=st.integers(1, 9),
    overhead=st.integers(0, 40),
    host=st.integers(0, 300),
)
def test_split_is_the_fastest_that_a_faster_host_allows(lengths, rows, overhead, host):
    ordered, count = sorted(lengths), len(lengths)
    budget = rows * ordered[-1]
    plain = [ordered[max(0, end - rows) : end] for end in range(count, 0, -rows)]
    allowed = sum(len(group) * group[-1] + overhead for group in plain)
    best = float("inf")
    for choice in range(2 ** (count - 1)):
        ends = [0, *(at for at in range(1, count) if choice >> (at - 1) & 1), count]
        groups = [range(a, b) for a, b in pairwise(ends)]
        within = all(len(g) == 1 or padded_tokens(ordered, [g]) <= budget for g in groups)
        if within and cost(ordered, groups, overhead) <= allowed:
            best = min(best, step_time(ordered, groups, overhead, host))
    found = cut_by_length(lengths, rows, tokens=None, overhead_tokens=overhead, host_tokens=host)
    assert step_time(lengths, found, overhead, host) == best


@given(lengths=LENGTHS, rows=st.integers(1, 32), overhead=st.integers(0, 1024), multiple=st.sampled_from([1, 2, 4, 8]))
def test_few_row_counts_cost_no_more_than_a_split_into_fixed_groups(lengths, rows, overhead, multiple):
    """Multiples of some rows, except in the group of the shortest; `multiple` rows each is one of the splits."""
    rows = max(rows, multiple)
    groups = cut_by_length(lengths, rows, tokens=None, overhead_tokens=overhead, multiple=multiple)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(len(group) % multiple == 0 for group in groups[:-1])
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    fixed = [longest_first[at : at + multiple] for at in range(0, len(lengths), multiple)]
    assert cost(lengths, groups, overhead) <= cost(lengths, fixed, overhead)


def test_step_that_the_host_bounds_is_not_split():
    lengths = [200, *[20] * 15]
    assert len(cut_by_length(lengths, 16, tokens=None, overhead_tokens=256)) == 2
    assert len(cut_by_length(lengths, 16, tokens=None, overhead_tokens=256, host_tokens=2000)) == 1
    assert len(cut_by_length(lengths, 16, tokens=None, overhead_tokens=256, host_tokens=1000)) == 2


AS_THEY_ARE = Widths()


def evidence_of(lengths, sizes, widths=AS_THEY_ARE, cuts=1):
    step = SimpleNamespace(lengths=lengths, sizes=sizes, widths=widths, cuts=cuts)
    return verify(LengthBatching(LengthBatching.Options()), SimpleNamespace(last_step_batch=step))


def test_evidence_compares_computed_tokens_with_rows_at_random():
    evidence = evidence_of([100, 100, 5, 5], [(2, 100), (2, 5)])
    assert evidence.status == "active"
    assert "210 tokens" in evidence.seen
    assert "with rows at random about 317 (1.51x)" in evidence.seen
    assert evidence_of([100, 5, 100, 5], [(2, 100), (2, 100)]).status == "inactive"
    assert evidence_of([9] * 4, [(2, 9), (2, 9)]).status == "unknown"


def test_rows_that_are_sorted_by_their_fixed_widths_are_active():
    lengths, sizes = [20, 21, 31, 30, 3, 4, 9, 5], [(2, 32), (2, 32), (4, 16)]
    assert evidence_of(lengths, sizes).status == "inactive"
    assert evidence_of(lengths, sizes, Widths(fixed=(16, 32))).status == "active"


def test_batches_of_a_step_that_a_script_cuts_one_by_one_are_active():
    lengths, sizes = [100, 90, 5, 4, 80, 70, 6, 3], [(2, 100), (2, 5), (2, 80), (2, 6)]
    assert evidence_of(lengths, sizes).status == "inactive"
    assert evidence_of(lengths, sizes, cuts=2).status == "active"


def cut_by_position(lengths, rows, **_):
    return cut_in_order(lengths, rows)


def swap_two_rows(patch):
    """The longest and the shortest row of a step change places."""

    def swapped(lengths, rows, **options):
        groups = cut_by_length(lengths, rows, **options)
        groups[0][-1], groups[-1][0] = groups[-1][0], groups[0][-1]
        return groups

    patch.setattr(hwopt_plugins.length_batching, "cut_by_length", swapped)


def no_cut(patch):
    patch.setattr(hwopt_plugins.length_batching, "cut_by_length", cut_by_position)


def rows_exchanged(patch, chosen):
    """The shortest row of a chosen micro-batch and the longest one of the next change places."""
    real = Collate.groups

    def groups(self, widths):
        found = [list(group) for group in real(self, widths)]
        for number, (group, following) in enumerate(pairwise(found)):
            if chosen(number):
                group[-1], following[0] = following[0], group[-1]
        return found

    patch.setattr(Collate, "groups", groups)


NO_OVERHEAD = {"overhead_tokens": 0}
CASES = Cases(
    mutations=(
        Mutation("rows are cut in order", no_cut, "with rows at random", NO_OVERHEAD),
        Mutation("two rows are in other groups", swap_two_rows, "have longer rows", NO_OVERHEAD),
    ),
    parts=(Part("rows exchanged", rows_exchanged, {"overhead_tokens": 8}),),
)
