"""The batch sizes that each combination of options writes, and the evidence from a step."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from documentation import ROOT
from plugin_cases import Cases, Mutation, Part
from trl.data_utils import pack_dataset

from hwopt.data.batches.collate import StepDataset
from hwopt.data.batches.samplers import StepSampler
from hwopt.errors import PluginError
from hwopt.hardware.device import described
from hwopt.plugin import BatchSizes, Context, Recipe, verify
from hwopt.plugin.batch_sizes import KEYS
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.batch import Batch


def context(world_size=1):
    return Context(described("RTX 3070", (8, 6), 8.0), {}, None, None, world_size)


def written(**options):
    recipe = Recipe()
    Batch(Batch.Options(**options)).apply(recipe, context())
    sizes = BatchSizes.of(recipe.batch)
    return sizes.train, sizes.eval_rows(), sizes.step


def test_batch_sizes_are_written_to_the_recipe():
    assert written(train=64, eval=100, gradient_accumulation_steps=2) == (64, 100, 128)
    assert written(train=12) == (12, 24, 12)
    assert written(train=12, effective=128) == (12, 24, 128)


@pytest.mark.parametrize(
    ("ranks", "options", "reason"),
    [
        (2, {"train": 64, "gradient_accumulation_steps": 2}, "128 rows per step over 2 ranks: 1 micro-batch of up to 64 on each"),
        (4, {"train": 64}, "64 rows per step over 4 ranks: 1 micro-batch of up to 16 on each; "),
        (1, {"train": 16, "effective": 100}, "7 micro-batches of up to 16"),
        (1, {"effective": 64, "gradient_accumulation_steps": 2}, "instead of gradient_accumulation_steps = 2"),
    ],
)
def test_reasons_hold_the_numbers(ranks, options, reason):
    assert reason in Batch(Batch.Options(**options)).probe(context(ranks)).reason


def test_step_in_tokens_becomes_rows_and_gives_way_to_another_step(tmp_path):
    job = tiny_job(tmp_path).job
    given = Batch.Options(train=4, effective_tokens=1000)
    for mean, rows in ((61.4, 16), (None, 31), (3000.0, 1)):  # at most 32 tokens in a tiny job
        decision = Batch(given).probe(replace(context(), job=job, tokens_per_sample=lambda mean=mean: mean))
        assert decision.options[0] == Batch.Options(train=4, effective=rows)
        assert f"{rows} rows per step" in decision.reason
    below = {"train": 4, "effective_tokens": 1000}
    assert Batch.Options.merged(below, {"train": 2}) == {"train": 2, "effective_tokens": 1000}
    assert Batch.Options.merged(below, {"effective": 8}) == {"train": 4, "effective": 8}
    assert Batch.Options.merged({"effective": 8}, {"effective_tokens": 9}) == {"effective_tokens": 9}


@pytest.mark.parametrize("longest", [40, 200])
@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_epoch_has_as_many_steps_as_with_packed_rows_of_trl(strategy, longest, tmp_path):
    """`hwopt import` gives tokens for `packing: true`, and for axolotl's `sample_packing: true`. TRL fills rows to 98 %."""
    drawn = np.random.default_rng(0).integers(10, longest, 4_000)
    data = Dataset.from_dict({"input_ids": [[0] * length for length in drawn]})
    packed_steps = len(pack_dataset(data, 512, strategy, {"load_from_cache_file": False})) / 16
    job = tiny_job(tmp_path, "causal-lm").job
    inputs = replace(context(), job=job, tokens_per_sample=lambda: float(drawn.mean() - 1))
    rows = Batch(Batch.Options(train=4, effective_tokens=16 * 512)).probe(inputs).options[0].effective
    assert len(drawn) / rows == pytest.approx(packed_steps, rel=0.03)


def test_tokens_limit_the_rows_of_an_evaluation_batch(tmp_path):
    whole, limited = (
        train_tiny(
            plan_for(tiny_profile(batch={"train": 4, "eval": 12} | limit), tiny_job(tmp_path, max_steps=1)),
            tmp_path / str(len(limit)),
        )
        for limit in ({}, {"eval_tokens": 64})
    )
    sampler = limited.run.eval_loader.sampler
    batches = [(len(step.samples), int(max(sampler.lengths[list(step.samples)]))) for step in sampler]
    assert len(batches) > len(list(whole.run.eval_loader.sampler))
    assert all(rows == 1 or rows * longest <= 64 for rows, longest in batches)
    assert limited.rows[-1]["eval_loss"] == pytest.approx(whole.rows[-1]["eval_loss"], abs=1e-5)
    smaller = BatchSizes.of({"eval": 12, "eval_tokens": 64}, memory=0.5)
    assert [smaller.eval_rows(width) for width in (1, 8, 50)] == [6, 4, 1]


def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(PluginError, match=r"effective = 3 .* 4 ranks .* at least 4"):
        Batch(Batch.Options(effective=3)).probe(context(4))


@pytest.mark.parametrize(
    ("options", "sizes", "ranks", "last_of_epoch", "status"),
    [
        ({"gradient_accumulation_steps": 2}, [(20, 8), (12, 30)], 1, False, "active"),
        ({"gradient_accumulation_steps": 2}, [(9, 8)], 1, True, "unknown"),
        ({"effective": 100}, [(16, 8), (16, 8), (2, 8)], 3, False, "active"),  # three ranks do not divide it
    ],
)
def test_evidence_compares_micro_batches_with_the_options(options, sizes, ranks, last_of_epoch, status):
    batch = SimpleNamespace(rows=sum(rows for rows, _ in sizes), sizes=sizes, step=SimpleNamespace(index=0))
    loader = SimpleNamespace(sampler=SimpleNamespace(steps_per_epoch=1 if last_of_epoch else 9))
    run = SimpleNamespace(last_step_batch=batch, world_size=ranks, train_loader=loader)
    assert verify(Batch(Batch.Options(train=16, **options)), run).status == status


def half_of_each_step(patch):
    """The sampler yields only the first half of the samples of a step."""
    real = StepSampler.__iter__

    def halved(self):
        for step in real(self):
            yield type(step)(step.index, step.epoch, step.samples[: len(step.samples) // 2], step.count)

    patch.setattr(StepSampler, "__iter__", halved)


def rows_left_out(patch, chosen):
    """The data set leaves out the chosen rows of each step."""
    real = StepDataset.__getitem__

    def item(self, step):
        kept = tuple(sample for number, sample in enumerate(step.samples) if not chosen(number))
        return real(self, replace(step, samples=kept))

    patch.setattr(StepDataset, "__getitem__", item)


CASES = Cases(
    invalid=(({"train": "auto"}, "needs effective = N"), ({"effective": 8, "effective_tokens": 900}, "remove one")),
    options={"train": 4, "gradient_accumulation_steps": 2},
    mutations=(
        Mutation("steps have half of their rows", half_of_each_step, "expected rows_per_step 8", {"train": 4, "effective": 8}),
    ),
    parts=(Part("rows left out", rows_left_out, {"train": 4, "effective": 8}),),
)


def test_every_option_is_a_key_of_the_recipe_and_documented_there():
    assert not Batch.Options.model_fields.keys() - {*KEYS, "effective_tokens"}  # which becomes `effective`
    row = re.search(r"^\| `batch` \| dict \| ([^|]*) \|", (ROOT / "docs" / "recipe.md").read_text("utf-8"), re.M)
    assert set(re.findall(r"\w+", row[1])) - {"or"} == {*KEYS}
