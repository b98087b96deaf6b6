"""The planner predicts what torch's allocator holds, for third-party plugins too."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from applied import Applied
from cases import examples, named
from cli.test_cli import write_job
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hwopt import api
from hwopt.cli.plan import plan as plan_command
from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.errors import InputError
from hwopt.hardware.device import described
from hwopt.memory.forecast.lengths import EVALUATED, Lengths, lengths_of
from hwopt.memory.forecast.measured import measure
from hwopt.memory.forecast.planner import plan_memory, with_largest_sizes
from hwopt.memory.shapes import Head, Shape
from hwopt.memory.trace.cuda_emulation import kept_workspaces
from hwopt.memory.trace.traced_step import fake_step_functions
from hwopt.memory.trace.tracer import trace_key, trace_plan
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Events, MemorySpec, Recipe, RunView, Stage
from hwopt.plugin.registry import Registry
from hwopt.report.comparison import show_plans
from hwopt.report.memory import show_memory
from hwopt.system.cache import cache_folder
from hwopt.testing import TINY_BERT, TINY_LLAMA, plan_for, tiny_job, tiny_profile

pytestmark = pytest.mark.filterwarnings("ignore")

BERT = TINY_BERT | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "hidden_dropout_prob": 0.1}
GEMMA = TINY_LLAMA | {"model_type": "gemma3_text", "vocab_size": 32_768, "hidden_size": 16, "head_dim": 8}
GEMMA |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
LORA = {"kind": "lora", "always": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (BERT, {}),
    "bf16": (BERT, {"precision": {"dtype": "bf16"}, "sdpa": {}}),
    "O2, 8 bits": (BERT, {"precision": {"dtype": "bf16", "level": "O2"}, "optimizer": {"name": "adamw_bnb_8bit"}}),
    "checkpointing": (BERT, {"checkpointing": {}, "optimizer": {"name": "adamw_torch"}}),
    "selective checkpointing": (TINY_LLAMA, {"checkpointing": {"layers": "selective"}, "sdpa": {}}),
    "LoRA": (TINY_LLAMA, {"adapter": LORA, "precision": {"dtype": "bf16"}}),
    "DoRA": (TINY_LLAMA, {"adapter": LORA | {"kind": "dora"}, "checkpointing": {"layers": 2}}),
    "a large vocabulary": (GEMMA, {"precision": {"dtype": "bf16"}}),
}


def planned(folder: Path, config: dict[str, Any], plugins: dict[str, Any], registry: Registry | None = None, **more: Any) -> Plan:
    kind = "text-classification" if config["model_type"] == "bert" else "causal-lm"
    return plan_for(tiny_profile(**plugins), tiny_job(folder, kind, config=config), registry, **more)


@pytest.mark.parametrize("case", named(CASES, ("O2, 8 bits", "selective checkpointing", "LoRA")))
def test_prediction_matches_the_allocator(case: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    config, plugins = case
    plan = planned(tmp_path, config, plugins)
    trace, rows = trace_plan(plan, 64, Head(2)), 4 if config is GEMMA else 64  # its logits are large
    real = measure(plan, Shape(rows, 64), Head(2))
    assert trace.train.at(rows, 64).peak().bytes == pytest.approx(real.train, rel=0.03, abs=4096)
    assert trace.eval.at(rows, 64).peak().bytes == pytest.approx(real.eval, rel=0.03, abs=4096)


@pytest.mark.parametrize("weights", ["balanced", {"colour": 2.0}], ids=["balanced", "table"])
def test_step_with_class_weights_is_traced(weights: Any, tmp_path: Path) -> None:
    document = tiny_job(tmp_path, config=BERT).document
    job = make_job(Document(document.name, document.data | {"task": {"class_weights": weights}}))
    plan = plan_for(tiny_profile(), job)
    assert plan_memory(plan, tmp_path / "cache").tier == "traced"
    real = measure(plan, Shape(8, 32), Head(2)).train
    assert trace_plan(plan, 32, Head(2)).train.at(8, 32).peak().bytes == pytest.approx(real, rel=0.03)


def test_copies_of_weights_with_new_tokens_are_predicted(tmp_path: Path) -> None:
    """PEFT copies a whole embedding to train the rows of new tokens, and the gradient of the copy is as large."""
    plugins = {"adapter": LORA, "fused_loss": {"backend": "torch"}}
    plan = planned(tmp_path, TINY_LLAMA | {"vocab_size": 20_000}, plugins)
    plain, added = (trace_plan(plan, 16, head).train.at(2, 16).peak().bytes for head in (Head(2), Head(2, new_tokens=3)))
    assert added - plain > 20_000 * 32 * 2
    assert added == pytest.approx(measure(plan, Shape(2, 16), Head(2, new_tokens=3)).train, rel=0.03)


def test_peak_in_the_update_is_measured(tmp_path: Path) -> None:
    """The update is the peak here. The random weights must be finite, or the update would be skipped."""
    plan = planned(tmp_path, TINY_LLAMA | {"vocab_size": 20_000}, {"optimizer": {"name": "adamw_torch"}})
    trace = trace_plan(plan, 16, Head(2))
    predicted = trace.train.at(1, 16).peak()
    assert predicted.parts["temporary"] > 2 * 20_000 * 32 * 4
    assert predicted.bytes == pytest.approx(measure(plan, Shape(1, 16), Head(2)).train, rel=0.01)


def test_a_card_updates_all_weights_at_once(tmp_path: Path) -> None:
    """torch's AdamW then has the square roots of all states in memory."""
    card = described("a card", (8, 6), 8.0)
    plan = planned(tmp_path, TINY_LLAMA | {"vocab_size": 200_000}, {"optimizer": {"name": "adamw_torch"}}, hardware=card)
    parts = trace_plan(plan, 16, Head(2)).train.at(1, 16).peak().parts
    assert parts["temporary"] == pytest.approx(parts["weights"] + sum(kept_workspaces(card)), rel=0.01)


@contextmanager
def steps(plan: Plan) -> Iterator[Any]:
    with fake_step_functions(plan, Head(2), whole=True) as functions:
        functions.train(Shape(2, 16))  # creates what later steps reuse
        yield functions.train


def test_any_shape_follows_from_two_traces(tmp_path: Path) -> None:
    card = described("a card", (8, 6), 8.0)
    plan = planned(tmp_path, BERT, {"precision": {"dtype": "auto"}, "sdpa": {}}, hardware=card)
    trace = trace_plan(plan, 64, Head(2))
    with steps(plan) as train:

        @given(st.integers(1, 64), st.integers(1, 8))
        @settings(max_examples=examples(4))
        def check(rows: int, eighths: int) -> None:
            direct, scaled = train(Shape(rows, 8 * eighths)).peak(), trace.train.at(rows, 8 * eighths).peak()
            assert scaled.bytes == pytest.approx(direct.bytes, rel=0.01)
            assert sum(direct.parts.values()) == direct.bytes

        check()


class Hoard(Applied):
    """A third-party plugin that keeps a copy of the weights."""

    name = "hoard"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(self.hoard)

    def hoard(self, model: Any, run: Any) -> Any:
        model.hoarded = [p.detach().clone() for p in model.parameters()]
        return model


class Copies(Events):
    """Copies of the weights, made at the end of the first step."""

    def __init__(self) -> None:
        self.copies: dict[str, Any] = {}

    def on_step_end(self, run: RunView, applied: Any) -> None:
        for name, parameter in zip(run.engine.names, run.engine.parameters, strict=True):
            self.copies.setdefault(name, parameter.detach().clone()).mul_(applied)


class LateHoard(Hoard):
    """Keeps the copy from the end of the first step on."""

    name = "late_hoard"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.events.append(Copies())


class TwoWidths(Applied):
    """Pads micro-batches to 16 or 48 tokens."""

    name = "two_widths"
    stage = Stage.DATA

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.batch["widths"] = (16, 48)


def test_shape_between_two_fixed_widths_is_traced_as_it_is(tmp_path: Path) -> None:
    """It says how a step depends on its width: padded to 48, it would say that it does not."""
    registry = Registry()
    registry.add(TwoWidths)
    plan = planned(tmp_path, BERT, {"two_widths": {}}, registry)
    assert plan.batch.widths == (16, 48)
    peaks = [trace_plan(each, 48, Head(2)).train.at(8, 32).peak() for each in (plan, planned(tmp_path, BERT, {}))]
    assert peaks[0].bytes == pytest.approx(peaks[1].bytes, rel=0.01)


def test_plans_whose_steps_need_the_same_memory_share_a_trace(tmp_path: Path) -> None:
    """Options that a step does not see, and plugins that are left out, do not make the planner trace it again."""
    card = described("a card", (7, 5), 8.0)
    unseen = {"cuda_graphs": {"enabled": True}, "length_batching": {}, "group_lengths": {}, "schedule": {}, "dataloader": {}}
    plain, other = (
        planned(tmp_path, BERT, {"batch": {"train": rows}} | more, hardware=card)
        for rows, more in ((4, {}), (8, unseen | {"tf32": {}}))
    )
    assert {entry.decision for entry in other.entries} == {"apply", "skip"}
    assert other.batch.widths != plain.batch.widths
    assert trace_key(other, 48, Head(2)) == trace_key(plain, 48, Head(2))
    found, again = (trace_plan(plan, 48, Head(2)) for plan in (plain, other))
    assert np.array_equal(found.train.base.sizes, again.train.base.sizes)
    assert np.array_equal(found.train.base.events, again.train.base.events)
    several, graphs = (
        planned(tmp_path, BERT, {"batch": {"train": 4, "effective": 8}, "precision": {"level": "O1"}} | more, hardware=card)
        for more in ({}, {"cuda_graphs": {"enabled": True}})
    )
    keys = {trace_key(plan, 48, Head(2)) for plan in (plain, several, graphs)}
    assert len(keys) == 3, "graphs keep no copies of the weights from one micro-batch to the next"


def test_memory_of_a_third_party_plugin_is_counted(tmp_path: Path) -> None:
    registry = Registry()
    plain = trace_plan(planned(tmp_path, BERT, {}), 32, Head(2))
    weights = plain.train.base.peak().parts["weights"]
    for plugin in (Hoard, LateHoard):
        registry.add(plugin)
        more = trace_plan(planned(tmp_path, BERT, {plugin.name: {}}, registry), 32, Head(2))
        for step, hoarding in ((plain.train, more.train), (plain.eval, more.eval)):
            assert hoarding.base.peak().bytes - step.base.peak().bytes == pytest.approx(weights, rel=0.02), plugin


class Stubborn(Hoard):
    """Needs the values of a tensor, which fake tensors do not have."""

    name = "stubborn"

    def hoard(self, model: Any, run: Any) -> Any:
        torch.nonzero(next(model.parameters()))
        return model

    def memory(self, spec: MemorySpec, context: Context) -> None:
        spec.state_bytes += 4


def test_untraceable_recipe_has_a_lower_bound_that_never_says_fits(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(Stubborn)
    plan = planned(tmp_path / "data", BERT, {"stubborn": {}}, registry)
    shown: list[Plan] = []

    class Recorder(api.PlanListener):
        def on_memory(self, plan: Plan) -> None:
            shown.append(plan)

    plan = api.with_memory(plan, lambda changes: plan, registry=registry, cache=cache_folder(), listener=Recorder())
    memory = plan.memory
    assert memory.tier == "closed form"
    assert memory.peak_gib * 2**30 == pytest.approx(plan.model.parameters * (4 + 4 + 8 + 4))
    assert memory.margin_gib > 0
    assert memory.fits is None
    assert json.loads(json.dumps(plan.to_dict(), default=str))["memory"]["fits"] is None
    assert shown == [plan]
    assert memory.changes == ()
    output = io.StringIO()
    console = Console(file=output, width=400)
    show_memory(console, plan)
    assert "UNKNOWN: the recipe could not be traced: " in output.getvalue()
    assert "at least" in output.getvalue()
    show_plans(console, [plan.to_dict()])
    assert "unknown: the recipe" in output.getvalue()
    assert "fits:" not in output.getvalue()
    too_much = replace(memory, peak_gib=2 * memory.free_gib)
    assert too_much.fits is False  # not even the lower bound fits


def test_attention_kernels_are_those_of_the_card(tmp_path: Path) -> None:
    """Flash attention stores no score matrix; math does."""

    def held(prefer: list[str], capability: tuple[int, int]) -> float:
        card = described("a card", capability, 8.0)
        dtype = "bf16" if capability >= (8, 0) else "fp16"
        plugins = {"precision": {"dtype": dtype}, "sdpa": {"prefer": prefer}}
        return (
            trace_plan(planned(tmp_path, TINY_LLAMA, plugins, hardware=card), 64, Head(2))
            .train.at(8, 4096)
            .peak()
            .parts["activations"]
        )

    scores = 8 * 2 * 4096 * 4096 * 2 * 2  # rows x heads x length x length x layers, in half precision
    assert held(["flash", "math"], (8, 6)) < scores / 4
    assert held(["math", "efficient"], (7, 5)) > scores


@pytest.mark.integration
@pytest.mark.daily
def test_suggested_changes_make_the_plan_fit(tmp_path: Path) -> None:
    profile = tmp_path / "card.toml"
    profile.write_text(
        'name = "card"\n[card]\nmemory_gib = 0.5\ncompute_capability = "8.6"\nmatch = ["a card"]\n'
        '[plugins.batch]\ntrain = 512\neffective = 512\neval = 8\n[plugins.precision]\ndtype = "fp32"\n'
    )
    job = write_job(tmp_path)

    def resolved(changes: Any = ()) -> Plan:
        return api.resolve(str(profile), job, assignments=list(changes), hardware="profile")

    found: list[Any] = []

    class Recorder(api.PlanListener):
        def on_memory(self, plan: Plan) -> None:
            found.append(plan.memory)

        def on_largest_sizes(self, memory: Any) -> None:
            found.append(memory)

        def on_change(self, change: Any) -> None:
            found.append(change)

    memory = api.with_memory(resolved(), resolved, listener=Recorder()).memory
    assert memory.fits is False
    assert memory.changes
    first, second, *changes = found  # the verdict comes first, then the largest sizes, then the changes
    assert first.largest_train is None
    assert second == replace(memory, changes=())
    assert first == replace(second, largest_train=None, largest_eval=None, largest_max_length=None)
    assert sorted(map(str, changes)) == sorted(map(str, memory.changes))
    assert [change.alters for change in changes] == sorted(change.alters for change in changes)
    assert [change.alters for change in memory.changes] == sorted(change.alters for change in memory.changes)
    enough = [change for change in memory.changes if change.fits]
    assert any("plugins.batch.train" in line for change in enough for line in change.lines)
    for change in enough:
        then = api.with_memory(resolved(change.assignments), resolved).memory
        assert then.fits, change
        assert memory.highest_gib - then.highest_gib == pytest.approx(change.saves_gib, rel=0.05)


def test_auto_batch_is_the_largest_that_fits_and_keeps_the_rows_per_step(tmp_path: Path) -> None:
    profile = tmp_path / "card.toml"
    profile.write_text(
        'name = "card"\n[card]\nmemory_gib = 0.5\ncompute_capability = "8.6"\n[plugins.batch]\ntrain = "auto"\neffective = 512\n'
    )
    plan = api.resolve(str(profile), write_job(tmp_path), hardware="profile")
    memory = with_largest_sizes(plan, plan_memory(plan, cache_folder()), cache_folder())
    assert plan.batch.step == 512
    assert 1 < plan.batch.train < 512
    assert memory.fits
    assert plan.batch.train <= memory.largest_train < 2 * plan.batch.train
    assert "the option before needs" in next(entry.reason for entry in plan.entries if entry.name == "batch")


def test_plan_command_shows_whether_the_plan_fits(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    found = CliRunner().invoke(plan_command, [str(job), "--profile", "rtx3070_8gb", "--format", "json"], catch_exceptions=False)
    plan = json.loads(found.output)
    assert plan["hardware"]["compute_capability"] == [8, 6]
    assert {entry["name"]: entry["decision"] for entry in plan["plugins"]}["precision"] == "apply"
    memory = plan["memory"]
    assert {"tier", "peak_gib", "free_gib", "fits", "parts", "largest_train", "largest_eval", "largest_max_length"} <= set(memory)
    assert memory["tier"] == "traced"
    assert memory["fits"] is True
    parts = memory["parts"]
    assert sum(parts.values()) == pytest.approx(memory["peak_gib"] + memory["reserve_gib"])
    asked = [str(job), "--profile", "rtx3070_8gb", "--values"]
    shown = CliRunner().invoke(plan_command, asked, catch_exceptions=False).output
    assert "rtx3070_8gb.toml:" in shown, "every value with its place"
    assert "fits: 7.78 GiB free" in shown
    assert "estimated from the card's peak speeds" in shown


def test_measure_needs_the_device_in_this_machine(tmp_path: Path) -> None:
    asked = [str(write_job(tmp_path)), "--profile", "cpu", "--measure", "--format", "json"]
    found = CliRunner().invoke(plan_command, [*asked, "--hardware", "detected"], catch_exceptions=False)
    memory = json.loads(found.output)["memory"]
    assert memory["tier"] == "measured"
    assert sum(memory["parts"].values()) == pytest.approx(memory["peak_gib"] + memory["reserve_gib"])
    with pytest.raises(InputError, match="this machine has no .*add --hardware detected"):
        CliRunner().invoke(plan_command, [*asked, "--profile", "t4_16gb"], catch_exceptions=False)


def test_missing_data_is_planned_with_max_length(tmp_path: Path) -> None:
    plan = planned(tmp_path / "data", BERT, {})
    (tmp_path / "data" / "train.jsonl").unlink()
    memory = plan_memory(plan, cache_folder())
    assert memory.width == 32
    assert "the data could not be read" in memory.width_source


def test_steps_have_the_shapes_of_the_micro_batches_of_the_run(tmp_path: Path) -> None:
    """In its order: 33 samples are two steps of 16, and one of the last sample."""
    sizes = {"batch": {"train": 4, "effective": 16}}
    plan = planned(tmp_path / "data", BERT, sizes, hardware=described("a card", (8, 6), 8.0))
    targets = np.array([8] * 32 + [20], np.int32)
    lengths = replace(lengths_of(plan, cache_folder()), train=np.array([8] * 32 + [32], np.int32), longest=32, targets=targets)
    plan.recipe.order = lambda lengths, *_: np.arange(len(lengths))[::-1]
    plan = replace(plan, training=plan.training.model_copy(update={"max_steps": 3}))
    first = [Shape(4, 32, 20), *[Shape(4, 8, 8)] * 3]
    assert list(lengths.steps(plan, 4, 32, most=9)) == [first, [Shape(4, 8, 8)] * 4, [Shape(1, 8, 8)]]
    assert list(replace(lengths, train=None).steps(plan, 4, 32, most=9)) == []
    assert list(lengths.steps(plan, 3, 4, most=99))[2] == [Shape(1, 4, 8)]
    assert list(lengths.steps(plan, 4, 32, most=7)) == [first]
    longer = [Shape(4, 48, 20), *first[1:]]
    assert next(lengths.steps(plan, 4, 48, most=9)) == longer, "a text that is cut today"


def test_evaluations_have_the_shapes_of_the_batches_of_each_part(tmp_path: Path) -> None:
    """The longest samples first, and one of the last if it has the widest targets."""
    sizes = {"batch": {"train": 4, "eval": 2}}
    plan = planned(tmp_path / "data", BERT, sizes, hardware=described("a card", (8, 6), 8.0))
    tokens = np.arange(1, 200, dtype=np.int32)
    lengths = replace(lengths_of(plan, cache_folder()), evaluated=((tokens, 200 - tokens), (tokens[:3], None)))
    found = lengths.evaluations(plan, 104)
    assert found[:2] == [Shape(2, 104, 2), Shape(2, 104, 4)]
    assert found[-1] == Shape(2, 3, 198)
    assert len(found) == EVALUATED + 1


def test_packed_step_is_as_large_as_the_largest_of_the_run(tmp_path: Path) -> None:
    """Not one of the longest samples alone, unless the run tries them before step 1."""
    sizes = {"batch": {"train": 4, "effective": 8}, "pack": {}}
    plan = planned(tmp_path / "data", BERT, sizes, hardware=described("a card", (8, 6), 8.0))
    lengths = replace(lengths_of(plan, cache_folder()), train=np.array([8] * 39 + [32], np.int32), longest=32)

    def largest(lengths: Lengths, rows: int, width: int) -> Shape:
        return max(lengths.largest_step(plan, rows, width), key=lambda shape: shape.tokens)

    assert largest(lengths, 4, 32) == Shape(2, 48), "seven documents beside the longest one"
    assert largest(lengths, 4, 8) == Shape(2, 16)
    for unknown in (replace(lengths, train=None), replace(lengths, train=np.full(40, 32, np.int32))):
        assert largest(unknown, 4, 32) == Shape(2, 64)
    assert largest(lengths, 16, 32) == Shape(8, 64), "rows that no step has"


def test_plan_rejects_more_ranks_than_samples(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="64 ranks for 40 training samples"):
        plan_memory(planned(tmp_path, BERT, {"batch": {"train": 64}}, world_size=64), cache_folder())
