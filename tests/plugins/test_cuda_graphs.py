"""What the plugin decides and refuses. tests/gpu/test_cuda_graphs.py trains with graphs on a CUDA device."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plugin_cases import Cases, Mutation, Refused

from hwopt import api
from hwopt.hardware.device import described
from hwopt.memory.forecast.lengths import Lengths
from hwopt.memory.forecast.planner import device_trace, fitted, run_at
from hwopt.plugin.price import Price, price_of
from hwopt.system.cache import cache_folder
from hwopt.testing import entry_of, plan_for, tiny_job, tiny_profile
from hwopt_plugins.cuda_graphs import CudaGraphs, few_rows, few_widths
from hwopt_plugins.cuda_graphs.graphed import GraphedForwardBackward

CARD = described("a card", (8, 6), 24.0)


def test_large_micro_batches_run_eagerly_by_the_forecast(tmp_path: Path) -> None:
    """Twice as many tokens on a card that computes them twice as fast; none where the weights alone take longer."""
    entry = entry_of("cuda_graphs", plan_for(tiny_profile(cuda_graphs={}), tiny_job(tmp_path), hardware=CARD))
    price = Price(host_seconds=22e-3, device_seconds=2e-3, token_seconds=1e-6, launches=1000, basis="a card")
    assert price.host_bound_tokens == pytest.approx(18_000, abs=1)
    assert replace(price, token_seconds=0.5e-6).host_bound_tokens == pytest.approx(36_000, abs=1)
    assert replace(price, device_seconds=20e-3).host_bound_tokens == 0
    assert re.search(r"of up to [\d,]+ tokens: .* ms of launches, .* ms of the device and .* us a token on", entry.reason)


def test_images_have_one_shape_and_no_limit(tmp_path: Path) -> None:
    profile = replace(tiny_profile(cuda_graphs={}), chosen=frozenset({"cuda_graphs"}))
    entry = entry_of("cuda_graphs", plan_for(profile, tiny_job(tmp_path, "image-classification"), hardware=CARD))
    assert (entry.decision, entry.options.tokens, entry.options.widths) == ("apply", 0, ())


@pytest.mark.parametrize("kind", ["image-classification", "seq2seq-lm"])
def test_tasks_with_many_shapes_or_without_a_forecast_have_graphs_only_if_the_user_says_so(kind: str, tmp_path: Path) -> None:
    entry = entry_of("cuda_graphs", plan_for(tiny_profile(cuda_graphs={}), tiny_job(tmp_path, kind), hardware=CARD))
    assert (entry.decision, "name the plugin yourself" in entry.reason) == ("skip", True)


def test_widths_waste_at_most_a_fifth_above_64_tokens() -> None:
    assert few_widths(100) == (16, 32, 48, 64, 80, 96, 100)
    widths = few_widths(4096)
    assert len(few_widths(512)) == 16
    assert all((wider - width - 1) / wider <= 0.2 for width, wider in pairwise(widths) if width >= 64)


def test_rows_are_padded_only_to_widths_that_have_a_graph(tmp_path: Path) -> None:
    tables = {"cuda_graphs": {"tokens": 128, "widths": [8, 16, 24]}, "batch": {"train": 8}}
    assert plan_for(tiny_profile(**tables), tiny_job(tmp_path), hardware=CARD).batch.widths == (8, 16)


@pytest.mark.parametrize("name", ["pack", "compile", "optimizer_in_backward"])
def test_plugin_of_the_user_comes_before_the_graphs_of_a_profile(name: str, tmp_path: Path) -> None:
    config = "{ model_type='llama', hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=4 }"
    job = [f"model.config={config}", "task.kind=causal-lm", "data.train=rows", "training.max_grad_norm=0"]
    asked = [f"plugins.{name}.enabled=true", "plugins.length_batching.enabled=false"]
    plan = api.resolve("h100_80gb", assignments=[*job, *asked], hardware="profile", cache=tmp_path)
    assert entry_of(name, plan).decision == "apply"
    assert entry_of("cuda_graphs", plan).decision == "skip"
    assert f"cannot be used with plugin '{name}' (--set)" in entry_of("cuda_graphs", plan).reason


@pytest.mark.parametrize(
    ("gib", "named", "kept"), [(24.0, False, True), (4.5, False, False), (4.5, True, True), (2.0, False, False)]
)
def test_pool_that_does_not_fit_leaves_the_graphs_out_unless_the_user_names_them(
    gib: float, named: bool, kept: bool, tmp_path: Path
) -> None:
    profile = tiny_profile(cuda_graphs={"tokens": 1 << 20, "widths": [32]}, batch={"train": 16_384})
    chosen = frozenset({"cuda_graphs"} if named else ())
    plan = plan_for(replace(profile, chosen=chosen), tiny_job(tmp_path), hardware=described("a card", (8, 6), gib))
    found, memory = fitted(plan, cache_folder(), Lengths(None, 32, 2, "this test"))
    entry = entry_of("cuda_graphs", found)
    assert (entry.decision, memory.fits) == ("apply" if kept else "skip", gib > 4 and not (named and kept))
    assert (memory.pool_gib > 0) is kept, "the shortfall is that of the plan without the pool"
    assert kept or re.search(r"its memory pool does not fit: 4.1\d of \d.\d\d GiB, 1.60 less without it", entry.reason)
    assert (found.recipe.forward_backward is None, found.batch.widths == ()) == (not kept, not kept)


@pytest.mark.parametrize(
    ("lengths", "largest"), [([32] * 64, None), ([32] * 20, (4, 32)), ([32] * 63 + [8], None), ([8] * 63 + [32], (8, 32))]
)
def test_rows_of_one_width_have_a_pool_only_if_a_step_has_few_of_them(lengths: list[int], largest: Any, tmp_path: Path) -> None:
    profile = tiny_profile(cuda_graphs={"tokens": 256, "widths": [8, 32]}, batch={"train": 16})
    plan = plan_for(replace(profile, chosen=frozenset({"cuda_graphs"})), tiny_job(tmp_path), hardware=CARD)
    known = Lengths(np.array(lengths, np.int32), 32, 2, "this test")
    assert (known.largest_within(plan, 16, 32, tokens=256) or (None,))[:2] == (largest or (None,))
    assert (run_at(plan, known, device_trace(plan, 32, known.head, cache_folder()), 16, 32)[2] is None) is (largest is None)


@pytest.mark.parametrize(("tokens", "few"), [(64, False), (1 << 20, True)])
def test_steps_that_the_host_bounds_get_few_shapes(tokens: int, few: bool, tmp_path: Path) -> None:
    """Where a graph is used for a micro-batch of mean rows, those by length have a multiple of some rows and other prices."""
    tables = {"cuda_graphs": {"tokens": tokens, "widths": [8, 16]}, "batch": {"train": 32}, "length_batching": {}}
    context = {"tokens_per_sample": lambda: 10.0}
    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path), hardware=CARD, **context)
    if not few:
        assert entry_of("cuda_graphs", plan).decision == "skip"
        tables["batch"] = {"train": 4}
        plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path), hardware=CARD, tokens_per_sample=lambda: 40.0)
    assert plan.recipe.batch.get("row_multiple") == (4 if few else None)
    cut = plan.recipe.cut
    assert (cut.keywords["multiple"], cut.keywords["host_tokens"] > 0) == ((4, False) if few else (1, True))


@pytest.mark.parametrize(("rows", "multiple"), [(1, 1), (8, 1), (15, 1), (16, 2), (32, 4), (64, 8), (100, 8), (128, 16)])
def test_rows_are_a_multiple_of_about_an_eighth_of_the_most(rows: int, multiple: int) -> None:
    assert few_rows(rows) == multiple


def test_adapters_make_a_token_and_a_micro_batch_cheaper(tmp_path: Path) -> None:
    """Frozen weights have no gradients."""
    job = tiny_job(tmp_path, "causal-lm")
    whole = plan_for(tiny_profile(), job, hardware=CARD)
    adapted = plan_for(tiny_profile(adapter={"always": True}), job, hardware=CARD)
    price, cheaper = price_of(whole.context), price_of(adapted.context)
    assert cheaper.device_seconds == price.device_seconds / 4
    assert cheaper.token_seconds < price.token_seconds


@pytest.mark.parametrize(
    ("ran", "refused", "status"),
    [
        ({"replayed": 2}, {}, "active"),
        ({"replayed": 2, "eager": 1}, {}, "active"),  # of a shape that is rarer than those with a graph
        ({"replayed": 2, "eager": 1}, {"a shape": "it waits"}, "inactive"),
        ({"replayed": 1, "eager": 2}, {"a shape": "it waits"}, "inactive"),
        ({"replayed": 1, "too large": 2}, {}, "active"),
    ],
)
def test_evidence_of_micro_batches_without_a_graph(ran: dict[str, int], refused: dict[str, str], status: str) -> None:
    passes = GraphedForwardBackward.__new__(GraphedForwardBackward)  # without a CUDA device
    vars(passes).update(calls=Counter(ran), graphs={"a": 0}, failed={}, refused=refused, out_of_memory=0, tokens=0)
    run: Any = SimpleNamespace(forward_backward=passes, step=9)
    assert CudaGraphs(CudaGraphs.Options()).evidence(run).status == status


def refused_captures(patch: pytest.MonkeyPatch) -> None:
    """The driver refuses to capture anything."""
    import torch

    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    patch.setattr(torch.cuda, "graph", refuse)


def no_graphs(patch: pytest.MonkeyPatch) -> None:
    """The loop runs the passes eagerly although the recipe replaces them."""
    from hwopt.distributed.forward_backward import ForwardBackward
    from hwopt_plugins.cuda_graphs import graphed

    class Eager:
        def __new__(cls, run: Any, passes: ForwardBackward, **_: Any) -> Any:
            return passes

    patch.setattr(graphed, "GraphedForwardBackward", Eager)


ONE_SHAPE = {"widths": [32], "tokens": 0}
"""The two micro-batches of a step have one shape, and get a graph on any card."""
CASES = Cases(
    options=ONE_SHAPE,
    whole="a test here runs some micro-batches eagerly",
    writes=frozenset({"batch", "forward_backward"}),
    hardware=CARD,
    conflicts=(
        Refused("zero", "[plugins.cuda_graphs]\n[plugins.zero]\nstage = 2", on_card=True),
        Refused("fsdp", "[plugins.cuda_graphs]\n[plugins.fsdp]", on_card=True),
        Refused("optimizer_in_backward", '[plugins.cuda_graphs]\n[plugins.optimizer_in_backward]\nclipping = "off"', 1, True),
        Refused("checkpointing", "[plugins.cuda_graphs]\n[plugins.checkpointing]\noffload = true", on_card=True),
        Refused(
            "fused_loss",
            "[plugins.cuda_graphs]\n[plugins.fused_loss]\nleast_share = 0.0",
            on_card=True,
            software={"liger-kernel": "0.8.5", "triton": "3.6.0"},
        ),
        Refused("compile", "[plugins.cuda_graphs]\n[plugins.compile]", on_card=True),
        Refused("batch", "[plugins.cuda_graphs]\n[plugins.batch]\ntrain = 900000", on_card=True),
    ),
    mutations=(
        Mutation("captures fail", refused_captures, "0 replayed", ONE_SHAPE, on_cuda=True),
        Mutation("the passes are not replaced", no_graphs, "computed by ForwardBackward", ONE_SHAPE, on_cuda=True),
    ),
)
