"""The price of one more micro-batch. From T4 to H200 and from 5 M to 1 B parameters, a split is never slower than none."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwopt.config.job import Data, Job, Model
from hwopt.config.profile import Profile, load_profile
from hwopt.config.profile_files import profile_files
from hwopt.config.task_kinds import task_facts
from hwopt.data.batches.collate import cut_in_order
from hwopt.data.batches.step_batch import Groups
from hwopt.hardware.device import described
from hwopt.memory.shapes import Head
from hwopt.memory.trace.tracer import trace_plan
from hwopt.model.config import load_config
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.planning.capabilities import BERT_BASE
from hwopt.plugin import Context, Recipe
from hwopt.plugin.price import FASTEST, FASTEST_AMD, LAUNCHES, Price, price_of
from hwopt.testing import plan_for, tiny_job, tiny_profile
from hwopt_plugins.length_batching import LengthBatching


def bert(hidden: int, layers: int, heads: int, **more: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * hidden}
    return {"model_type": "bert"} | sizes | more


FIVE_MILLION = bert(256, 4, 4, vocab_size=8000)
LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_key_value_heads": 8, "intermediate_size": 8192}
MODELS = {
    "5 M": ("text-classification", FIVE_MILLION),
    "23 M": ("text-classification", bert(384, 6, 12)),
    "109 M": ("text-classification", {"model_type": "bert"}),
    "335 M": ("text-classification", bert(1024, 24, 16)),
    "1.1 B": ("causal-lm", LLAMA),
}
STEPS = ((16, 16), (64, 16), (128, 64), (128, 128))
"""(rows of a step, rows of a micro-batch)."""


@cache
def facts(name: str) -> ModelFacts:
    kind, config = MODELS[name]
    return model_facts(load_config(None, config), task_facts(kind), name)


@cache
def cards() -> dict[str, Profile]:
    """The profile of every card whose peak and bandwidth are known."""
    profiles = [load_profile(name, profile_files()) for name in profile_files()]
    return {
        p.card.match[0]: p for p in profiles if p.card.memory_bandwidth_gbps and any(p.card.dense_tflops.model_dump().values())
    }


JOB = Job(model=Model(name="bert"), data=Data(train="train.csv"))


def context_of(card: str, model: ModelFacts) -> Context:
    found = cards()[card].card
    return Context(described(card, found.capability, found.memory_gib, amd=found.amd or ""), {}, model, JOB, card=found)


def batches(rows: int, median: int) -> list[list[int]]:
    """Lengths of some step batches, log-normal like those of real texts."""
    random = np.random.Generator(np.random.Philox(0))
    return [np.clip(random.lognormal(np.log(median), 0.9, rows), 4, 512).astype(int).tolist() for _ in range(2)]


def seconds(lengths: list[int], groups: Groups, price: Price, host: float, device: float) -> float:
    """The time of a step, micro-batch by micro-batch: the device needs what the host has launched. Factors slow both sides."""
    launched = finished = 0.0
    for group in groups:
        launched += price.host_seconds * host
        tokens = len(group) * max(lengths[row] for row in group)
        finished = max(finished + (price.device_seconds + tokens * price.token_seconds) * device, launched)
    return finished


CARDS = ("Tesla T4", "GeForce RTX 4090", "NVIDIA H200", "AMD Instinct MI300X")
SHORT = {("Tesla T4", "109 M"), ("NVIDIA H200", "5 M"), ("NVIDIA H200", "1.1 B"), ("AMD Instinct MI300X", "23 M")}


@pytest.mark.parametrize(
    ("card", "model"),
    [pytest.param(*each, marks=() if each in SHORT else pytest.mark.soak) for each in product(CARDS, MODELS)],
)
def test_length_batching_is_never_slower_than_no_split(card: str, model: str) -> None:
    """On slow and fast hosts, and on devices that reach 80 to 20 % of their peak."""
    context, recipe = context_of(card, facts(model)), Recipe()
    price, gains = price_of(context), []
    LengthBatching(LengthBatching.Options()).apply(recipe, context)
    for (step, rows), median in ((each, median) for each in STEPS for median in (16, 64, 200)):
        for lengths in batches(step, median):
            split, plain = recipe.cut(lengths, rows), cut_in_order(lengths, rows)
            for host, device in ((1.0, 1.0), (0.3, 1.0), (1.0, 2.0), (0.3, 4.0)):
                before, after = (seconds(lengths, groups, price, host, device) for groups in (plain, split))
                assert after <= before * (1 + 1e-9), (step, rows, median, host, device)
                gains.append(before / after)
            launches = LAUNCHES * facts(model).operations
            if len(split) > len(plain):
                assert launches * len(split) * 25e-6 <= seconds(lengths, plain, price, 1.0, 1.0), "launched in the device's time"
    assert max(gains) > 1.5, "padding is saved where it is large"


def test_card_without_figures_is_priced_as_the_fastest_of_its_capability() -> None:
    unknown = Context(described("Some card", (8, 6), 12.0), {}, BERT_BASE, JOB)
    price = price_of(unknown)
    assert price.basis == "the fastest card of compute capability 8.6"
    for card in ("GeForce RTX 3060", "GeForce RTX 3070", "GeForce RTX 3090", "NVIDIA A10"):
        assert price.token_seconds <= price_of(context_of(card, BERT_BASE)).token_seconds
    for capability, expected in (((8, 7), "8.6"), ((6, 1), "6.0"), ((5, 2), "6.0"), ((12, 1), "12.0")):
        hardware = described("Some card", capability, 12.0)
        assert price_of(replace(unknown, hardware=hardware)).basis.endswith(expected)


def test_price_names_weights_that_the_job_freezes_and_knows_those_below_an_adapter() -> None:
    context = context_of("GeForce RTX 3090", facts("109 M"))
    chosen = replace(context, job=JOB.model_copy(update={"model": Model(name="bert", train_only=("classifier",))}))
    whole, part = price_of(context), price_of(chosen)
    assert (part.device_seconds, part.basis) == (whole.device_seconds, f"{whole.basis}, as if all weights were trained")
    below = price_of(replace(chosen, model=replace(context.model, frozen=True)))
    assert (below.basis, 4 * below.device_seconds) == (whole.basis, whole.device_seconds)


def test_figures_of_the_fastest_cards_bound_those_of_the_profiles() -> None:
    for profile in cards().values():
        tflops, bandwidth = FASTEST[profile.card.capability] if profile.card.capability else FASTEST_AMD
        assert max(peak for peak in profile.card.dense_tflops.model_dump().values() if peak) <= tflops
        assert (profile.card.memory_bandwidth_gbps or 0) <= bandwidth


def test_price_agrees_with_the_operations_of_a_traced_step(tmp_path: Path) -> None:
    """The trace of the memory planner: every operation takes the longer of its arithmetic and its traffic."""
    card = "GeForce RTX 3090"
    hardware = context_of(card, BERT_BASE).hardware
    tables = {"precision": {"dtype": "bf16"}, "sdpa": {}, "batch": {"train": 16, "gradient_accumulation_steps": 2}}
    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path, config=FIVE_MILLION), hardware=hardware)
    trace = trace_plan(plan, 64, Head(2)).train
    peak, bandwidth = 71e12, 936e9

    def traced(rows: int) -> tuple[float, int]:
        timeline = trace.at(rows, 64)
        part = slice(0, timeline.update)
        longer = np.maximum(timeline.flops[part] / peak, timeline.bytes_moved()[part] / bandwidth)
        return float(longer.sum()), len(longer)

    (few, operations), (many, _) = traced(16), traced(80)
    token = (many - few) / (64 * 64)
    price = price_of(replace(context_of(card, plan.model), model=plan.model))
    # the price's peak and bandwidth are 80 % of those above
    assert 0.6 < 0.8 * price.token_seconds / token <= 1.1
    assert 0.8 < 0.8 * price.device_seconds / (few - 16 * 64 * token) < 1.5
    assert operations == pytest.approx(LAUNCHES * plan.model.operations, rel=0.2)
