"""Compare predicted memory and time with published measurements of real GPUs.

    python benchmarks/published_memory.py [CASE ...] [--cases FOLDER] [--cache FOLDER] [--write]

Each folder of benchmarks/published_memory/ is a case: `job.toml` and `profile.toml` as hwopt plans them, `published.toml` with
the figure and its source. Needs no GPU. `--write` puts the table into docs/memory.md. Tracing takes a few minutes.

What a run does outside of a step changes what torch reserves. Two things are played as in the published runs: a first step, in
which the optimizer creates its state, and PEFT's preparation of a 4-bit model, which converts half-precision vocabulary matrices
to fp32 on the device.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np

from hwopt import api
from hwopt.hardware.device import GIB
from hwopt.memory.allocator.caching_allocator import CachingAllocator
from hwopt.memory.allocator.playback import STEPS, Player, played_step
from hwopt.memory.forecast.lengths import lengths_of
from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.trace import cuda_emulation as card
from hwopt.memory.trace.timeline import KINDS, Peak, Timeline
from hwopt.memory.trace.tracer import trace_plan
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Decision, Plugin, PluginOptions, Recipe, Relations, RunView, Stage
from hwopt.plugin.registry import Registry

CASES = Path(__file__).parent / "published_memory"
DOCUMENT = Path(__file__).parent.parent / "docs" / "memory.md"
BEGIN, END = "<!-- published measurements: begin -->", "<!-- published measurements: end -->"


class AsPublished(Plugin):
    """What published runs use and hwopt's plugins do not, such as outputs that are held until the update."""

    name = "as_published"
    stage = Stage.MODEL
    relations = Relations(after=("adapter", "quantize", "sdpa"))
    effect = "method"

    class Options(PluginOptions):
        trained: Literal["float32", "float16", "bfloat16"] | None = None
        """dtype of trained weights, without masters."""
        frozen: Literal["float32", "float16", "bfloat16"] | None = None
        attention: Literal["eager"] | None = None
        keep_outputs: bool = False
        """Hold the model's outputs until the update, as a loop with `out = model(…)` does."""
        expand_groups: bool = False
        """Repeat keys and values for each query head before attention."""
        optimizer: Literal["adamw_single"] | None = None
        """AdamW(foreach=False)."""

    options: Options

    def probe(self, context: Context) -> Decision:
        return Decision.apply("as in the published run")

    def apply(self, recipe: Recipe, context: Context) -> None:
        options = self.options
        if options.attention:
            recipe.model_kwargs["attn_implementation"] = options.attention
        if options.trained or options.frozen:
            recipe.model_steps.append(self.cast)
        if options.keep_outputs:
            recipe.model_steps.append(self.hold_outputs)
        if options.expand_groups:
            recipe.process.append(expanded_groups)
        if options.optimizer:
            recipe.optimizer = adamw_single

    def cast(self, model: Any, run: RunView) -> Any:
        import torch

        for parameter in model.parameters():
            name = self.options.trained if parameter.requires_grad else self.options.frozen
            if name and parameter.is_floating_point():
                parameter.data = parameter.data.to(getattr(torch, name))
        return model

    def hold_outputs(self, model: Any, run: RunView) -> Any:
        held: list[Any] = []

        def hold(module: Any, inputs: Any, outputs: Any) -> None:
            if module.training:
                held.append(outputs)

        model.register_forward_pre_hook(lambda module, inputs: held.clear())
        model.register_forward_hook(hold)
        return model


@contextmanager
def expanded_groups() -> Iterator[None]:
    """Inside the block, keys and values are repeated for each query head, as transformers' `repeat_kv` does."""
    from torch.nn import functional

    attention = functional.scaled_dot_product_attention

    def expanded(query: Any, key: Any, value: Any, *args: Any, enable_gqa: bool = False, **settings: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return attention(query, key, value, *args, **settings)

    with mock.patch.object(functional, "scaled_dot_product_attention", expanded):
        yield


def adamw_single(groups: list[dict[str, Any]]) -> Any:
    import torch

    return torch.optim.AdamW(groups, foreach=False)


@dataclass(frozen=True)
class Row:
    """One case: what was published, and what hwopt predicts. GiB and seconds."""

    name: str
    published: dict[str, Any]
    allocated: float
    reserved: float
    context: float
    fits: bool
    seconds: tuple[float, float] | None
    published_seconds: float | None

    @property
    def exact(self) -> bool:
        """Whether the source states torch's own counter."""
        return bool(self.published["exact"])

    @property
    def figure(self) -> float:
        """The prediction of the published figure: of the whole card it is what torch reserves, and CUDA's context."""
        return self.reserved + self.context if self.published.get("whole_card") else self.allocated

    @property
    def off(self) -> float | None:
        """The relative error; None for a run that is published as "completed" or "out of memory" only."""
        return None if self.published.get("left_out") else self.figure / self.published["gib"] - 1

    @property
    def reserved_off(self) -> float | None:
        published = self.published.get("reserved_gib")
        return self.reserved / published - 1 if published else None

    @property
    def cells(self) -> list[str]:
        published = self.published
        if outcome := published.get("outcome"):
            size, off = {"oom": "out of memory"}.get(outcome, outcome), "fits" if self.fits else "does not fit"
        else:
            size, off = f"{published['gib']:.3f}", "" if self.off is None else f"{self.off:+.2%}"
        torch_reserves = published.get("reserved_gib")
        return [
            self.name,
            published["device"],
            published["how"],
            size,
            f"{self.figure:.3f}",
            off,
            f"{torch_reserves:.3f}" if torch_reserves else "",
            f"{self.reserved:.3f}",
            "" if self.reserved_off is None else f"{self.reserved_off:+.1%}",
            f"{self.published_seconds:.2f}" if self.published_seconds else "",
            "{:.2f} to {:.2f}".format(*self.seconds) if self.seconds and self.published_seconds else "",
        ]


COLUMNS = (
    "case",
    "device",
    "counter",
    "published GiB",
    "predicted",
    "off",
    "reserved GiB",
    "predicted",
    "off",
    "step s",
    "predicted",
)


def plan_case(folder: Path, cache: Path) -> Plan:
    registry = Registry()
    registry.add(AsPublished)
    return api.resolve(str(folder / "profile.toml"), folder / "job.toml", hardware="profile", registry=registry, cache=cache)


def compare(folder: Path, cache: Path) -> Row:
    """Plan a case and compare it with what was published."""
    published = tomllib.loads((folder / "published.toml").read_text(encoding="utf-8"))
    plan = plan_case(folder, cache)
    lengths = lengths_of(plan, cache)
    memory = plan_memory(plan, cache, lengths)
    step = trace_plan(plan, memory.width, lengths.head, cache / "memory").train.at(memory.rows, memory.width)
    converted = vocabulary_bytes(plan) if any(entry.name == "quantize" for entry in plan.applied()) else 0
    peak, reserved = (
        play(step, converted) if not published.get("first_step") else play(with_state_created(step), converted, steps=1)
    )
    # the published runs had a torch before 2.15, which keeps two workspaces of cuBLAS
    kept = 2 * card.cublas_workspace(plan.hardware) - sum(card.kept_workspaces(plan.hardware))
    return Row(
        name=folder.name,
        published=published,
        allocated=(peak.bytes + kept) / GIB,
        reserved=(reserved + kept) / GIB,
        context=published.get("context_gib", 0.0),
        fits=memory.fits and reserved / GIB <= memory.free_gib - memory.reserve_gib,
        seconds=None if memory.time is None else memory.time.step,
        published_seconds=seconds_of(published, plan, memory.width),
    )


def vocabulary_bytes(plan: Plan) -> int:
    """Return the bytes of an fp32 vocabulary matrix."""
    return plan.model.vocab_size * plan.model.hidden_size * 4


def play(timeline: Timeline, converted: int, steps: int = STEPS) -> tuple[Peak, int]:
    """Return the peak of the last of `steps` steps, and what is reserved.

    Storages of `converted` bytes existed in half precision before.
    """
    player = Player(timeline, CachingAllocator(timeline.expandable))
    halves = [player.allocator.allocate(size // 2) for size in player.sizes[: timeline.before] if size == converted]
    player.enter()
    for half in halves:
        player.allocator.release(half)
    for _ in range(steps):
        player, peak = played_step(player, [timeline] * (2 if player.summed else 1))
    return peak, player.allocator.reserved


def with_state_created(timeline: Timeline) -> Timeline:
    """Return the step in which the optimizer creates its state, when the update begins."""
    numbers = np.arange(len(timeline.sizes))
    is_state = (timeline.kinds == KINDS.index("optimizer_state")) & (numbers < timeline.before)
    first = np.flatnonzero((numbers < timeline.before) & ~is_state)
    order = np.concatenate([first, np.flatnonzero(is_state), numbers[timeline.before :]])
    renumbered = np.argsort(order)
    events = np.sign(timeline.events) * (renumbered[np.abs(timeline.events) - 1] + 1)
    update = timeline.phases[1]
    created = np.arange(len(first), timeline.before) + 1
    return replace(
        timeline,
        events=np.concatenate([np.arange(len(first)) + 1, events[timeline.before : update], created, events[update:]]),
        sizes=timeline.sizes[order],
        kinds=timeline.kinds[order],
        before=len(first),
    )


def seconds_of(published: dict[str, Any], plan: Plan, width: int) -> float | None:
    """Return the published seconds of an optimizer step, from the rate if necessary."""
    rate, units = published.get("samples_per_second"), plan.batch.step
    if tokens := published.get("tokens_per_second"):
        rate, units = tokens, plan.batch.step * width
    seconds: float | None = published.get("seconds") or (units / rate if rate else None)
    return seconds


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the errors of the exact sources, and what was missed, as lines of text."""
    lines = []
    for what, errors in (
        ("allocated, exact sources", [abs(row.off) for row in rows if row.exact and row.off is not None]),
        ("reserved", [abs(row.reserved_off) for row in rows if row.reserved_off is not None]),
        ("other sources", [abs(row.off) for row in rows if not row.exact and row.off is not None]),
    ):
        if errors:
            p95 = sorted(errors)[min(len(errors) - 1, int(0.95 * len(errors)))]
            lines.append(
                f"{what}: {len(errors)} runs, median {statistics.median(errors):.2%}, p95 {p95:.1%}, worst {max(errors):.1%}"
            )
    wrong = [row.name for row in rows if row.published.get("outcome") == "oom" and row.fits]
    lines.append(f"out of memory, but predicted to fit: {', '.join(wrong) or 'none'}")
    timed = [(row.published_seconds, *row.seconds) for row in rows if row.published_seconds and row.seconds]
    above, below = (sum(real > slow for real, _, slow in timed), sum(real < fast for real, fast, _ in timed))
    lines.append(f"step time: {len(timed)} runs, {above} slower than the slow end, {below} faster than the fast end")
    return lines


def document(rows: Sequence[Row]) -> str:
    """Return the table, its summary and its sources as Markdown."""
    devices = ", ".join(sorted({row.published["device"] for row in rows}))
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *(f"| {' | '.join(row.cells)} |" for row in rows)]
    sources = sorted({(row.published["source"], row.published["address"]) for row in rows})
    lines = [f"Checked against {len(rows)} published runs on {devices}.", "", *(f"- {line}" for line in summary(rows)), ""]
    lines += [*table, "", "Sources:", "", *(f"- {name}: {address}" for name, address in sources)]
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", metavar="CASE", help="parts of the names of cases; default: all")
    arguments.add_argument("--cases", type=Path, default=CASES)
    arguments.add_argument("--cache", type=Path, help="folder for traces")
    arguments.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    options = arguments.parse_args()
    folders = [folder.parent for folder in sorted(options.cases.glob("*/published.toml"))]
    chosen = [folder for folder in folders if not options.names or any(name in folder.name for name in options.names)]
    rows = []
    with tempfile.TemporaryDirectory() as empty:
        for folder in chosen:
            rows.append(compare(folder, options.cache or Path(empty)))
            print(" | ".join(rows[-1].cells), flush=True)
    print("\n".join(summary(rows)))
    if options.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{document(rows)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
