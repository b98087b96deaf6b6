"""What the plugin decides and refuses. tests/gpu/test_cuda_graphs.py trains with graphs on a CUDA device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from plugin_cases import Cases, Mutation, Refused

from hwopt.hardware.device import described
from hwopt.testing import entry_of, plan_for, tiny_job, tiny_profile
from hwopt_plugins.cuda_graphs import few_widths

CARD = described("a card", (8, 6), 24.0)


def test_a_cpu_is_skipped_with_the_reason(tmp_path: Path) -> None:
    entry = entry_of("cuda_graphs", plan_for(tiny_profile(cuda_graphs={}), tiny_job(tmp_path)))
    assert (entry.decision, "need a CUDA device, found" in entry.reason) == ("skip", True)


def test_widths_waste_at_most_a_fifth_above_64_tokens() -> None:
    assert few_widths(100) == (16, 32, 48, 64, 80, 96, 100)
    widths = few_widths(4096)
    assert len(few_widths(512)) == 16
    assert all((wider - width - 1) / wider <= 0.2 for width, wider in pairwise(widths) if width >= 64)


def refused_captures(patch: pytest.MonkeyPatch) -> None:
    """The driver refuses to capture anything."""
    import torch

    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    patch.setattr(torch.cuda, "graph", refuse)


def no_graphs(patch: pytest.MonkeyPatch) -> None:
    """The loop runs the passes eagerly although the recipe replaces them."""
    import hwopt_plugins.cuda_graphs
    from hwopt.distributed.forward_backward import ForwardBackward

    patch.setattr(hwopt_plugins.cuda_graphs, "graphed_forward_backward", lambda most, run: ForwardBackward(run))


CASES = Cases(
    options={"widths": [32]},  # the two micro-batches of a step have one shape
    writes=frozenset({"batch", "forward_backward"}),
    hardware=CARD,
    conflicts=(
        Refused("zero", "[plugins.cuda_graphs]\n[plugins.zero]\nstage = 2", on_card=True),
        Refused("fsdp", "[plugins.cuda_graphs]\n[plugins.fsdp]", on_card=True),
        Refused("optimizer_in_backward", '[plugins.cuda_graphs]\n[plugins.optimizer_in_backward]\nclipping = "off"', 1, True),
        Refused("checkpointing", "[plugins.cuda_graphs]\n[plugins.checkpointing]\noffload = true", on_card=True),
    ),
    mutations=(
        Mutation("captures fail", refused_captures, "0 replayed", {"widths": [32]}, on_cuda=True),
        Mutation("the passes are not replaced", no_graphs, "computed by ForwardBackward", {"widths": [32]}, on_cuda=True),
    ),
)
