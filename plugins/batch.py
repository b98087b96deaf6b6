"""How many samples go into a micro-batch, an evaluation batch and an optimizer step.

`train` is what fits into memory. The optimizer sees `train` x `gradient_accumulation_steps` rows, or `effective`, over all
ranks together: more ranks do the same training in less time. The core computes the micro-batches that each rank needs.
A profile or `--set` that changes `train` alone keeps the rows of a step.
Source: https://docs.pytorch.org/docs/stable/notes/ddp.html; Goyal et al. 2017 (arXiv:1706.02677) on what a larger batch changes.
Hardware: any. Cost: memory grows with `train` and `eval`. Numerical effect: the effective batch is part of the training
method; how it is cut into micro-batches is not (the loss is divided once, by the whole step's count).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hwopt.errors import PluginError
from hwopt.plugin import Context, Decision, Evidence, MemoryOption, Plugin, PluginOptions, Recipe, RunView, Stage

MOST_ROWS = 1_000_000  # more is a slip of the hand
Rows = Annotated[int, Field(gt=0, le=MOST_ROWS)]


def micro_batches(effective: int, train: int, world_size: int) -> int:
    """Micro-batches that a rank needs at most for its share of `effective` samples, `train` at a time."""
    return -(-effective // (train * world_size))


def sizes(most: int) -> list[int]:
    """`most`, and below it 1, 2, 3, 4, 6, 8, 12, 16, …: the largest first."""
    steps = {1 << power for power in range(20)} | {3 << power for power in range(19)}
    return [most, *sorted((size for size in steps if size < most), reverse=True)]


def halves(number: int) -> list[int]:
    """`number`, half of it, and so on to 1."""
    return [number >> shift for shift in range(number.bit_length())]


class Batch(Plugin):
    name = "batch"
    stage = Stage.DATA
    preserves = "rounding"  # what it sets is a hyperparameter: with the same numbers the result is the same
    renamed_options: ClassVar[Mapping[str, str]] = {"accumulation": "gradient_accumulation_steps"}
    aliases: ClassVar[Mapping[str, str]] = {
        "batch_size": "train",
        "train_batch_size": "train",
        "eval_batch_size": "eval",
        "per_device_train_batch_size": "train",
        "per_device_eval_batch_size": "eval",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "effective_batch_size": "effective",
        "auto_find_batch_size": "train = 'auto'",
    }

    class Options(PluginOptions):
        train: Rows | Literal["auto"] = Field(
            default=8, description='Samples of a training micro-batch on each rank; "auto": the most that fits the device.'
        )
        eval: Rows | Literal["auto"] | None = Field(
            default=None, description='Samples of an evaluation batch, or "auto"; 2 x train where left out.'
        )
        gradient_accumulation_steps: int | None = Field(
            default=None, gt=0, le=MOST_ROWS, description="Micro-batches of an optimizer step on a single rank; 1 where left out."
        )
        effective: int | None = Field(
            default=None,
            gt=0,
            le=MOST_ROWS,
            description="Samples of an optimizer step over all ranks; wins over gradient_accumulation_steps.",
        )

        @model_validator(mode="after")
        def a_step_of_known_size(self) -> Batch.Options:
            if self.train == "auto" and self.effective is None:
                raise ValueError('train = "auto" needs effective = N, the samples of an optimizer step: it is part of the method')
            return self

    options: Options

    def probe(self, context: Context) -> Decision:
        train, world, effective = self.options.train, context.world_size, self.options.effective
        if "auto" in (train, self.options.eval):
            candidates = self.candidates(world)
            if len(candidates) == 1:
                return Decision.apply("one row is the least and the most", candidates[0])
            return Decision.choose(candidates, "the most rows that fit")
        assert train != "auto", "chosen above"
        assert self.options.eval != "auto", "chosen above"
        evaluation = self.options.eval or 2 * train
        whole = effective or train * (self.options.gradient_accumulation_steps or 1)
        given = "train x gradient_accumulation_steps" if effective is None else "effective"
        if whole < world:
            raise PluginError(
                f"{given} = {whole} leaves some of {world} ranks without a sample; it must be at least {world}: "
                "it is the rows of a step over all ranks"
            )
        steps = micro_batches(whole, train, world)
        both = effective is not None and self.options.gradient_accumulation_steps is not None
        instead = f", instead of gradient_accumulation_steps = {self.options.gradient_accumulation_steps}" if both else ""
        return Decision.apply(
            f"{whole} a step{instead} over {world} rank(s): "
            f"{steps} micro-batch(es) of up to {min(train, -(-whole // world))} each; {evaluation} in evaluation"
        )

    def candidates(self, world_size: int) -> list[Batch.Options]:
        """Sizes from the most rows that make sense to a single one."""
        given = self.options
        if given.train != "auto":
            return [given.model_copy(update={"eval": rows}) for rows in sizes(4 * max(given.train, 64))]
        evaluation = None if given.eval == "auto" else given.eval
        share = -(-(given.effective or 1) // world_size)
        return [given.model_copy(update={"train": rows, "eval": evaluation}) for rows in sizes(share)]

    def apply(self, recipe: Recipe, context: Context) -> None:
        assert self.options.train != "auto", "probe() has it chosen"
        assert self.options.eval != "auto", "probe() has it chosen"
        recipe.batch["train"] = self.options.train
        recipe.batch["eval"] = self.options.eval or 2 * self.options.train
        if self.options.effective is None:
            recipe.batch["accumulation"] = self.options.gradient_accumulation_steps or 1
        else:
            recipe.batch["effective"] = self.options.effective

    @classmethod
    def merge_options(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Another `train` alone keeps the rows of a step; `gradient_accumulation_steps` wins over an `effective` below."""
        merged = {**below, **above}
        if "effective" in above or above.get("enabled") is False:
            return merged
        if "gradient_accumulation_steps" in above:
            merged.pop("effective", None)
            return merged
        train, steps = below.get("train", 8), below.get("gradient_accumulation_steps", 1)
        whole = isinstance(train, int) and isinstance(steps, int) and train * steps > 0
        if "effective" not in below and whole and above.get("train", train) != train:
            merged.pop("gradient_accumulation_steps", None)
            merged["effective"] = train * steps
        return merged

    @classmethod
    def scale_options(cls, options: Batch.Options, ratio: float) -> tuple[Mapping[str, Any], str]:
        """`train` times `ratio`, rounded down to a power of two that divides the rows of a step, which stay."""
        train = options.train
        if train == "auto":
            return {}, ""
        rows = options.effective or train * (options.gradient_accumulation_steps or 1)
        scaled = max(1, min(rows, 2 ** max(0, int(train * ratio).bit_length() - 1)))
        scaled = next(size for size in range(scaled, 0, -1) if rows % size == 0)
        changed = {"train": scaled, "eval": 2 * scaled}
        if options.effective is None:
            changed["gradient_accumulation_steps"] = rows // scaled
        return changed, f"micro-batch {train} -> {scaled}, {rows} rows a step as before"

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        """Half the rows again and again in as many rows a step; then the same with smaller evaluation batches."""
        if options is None:
            return []
        assert options.train != "auto", "in effect is a number"
        assert options.eval != "auto", "in effect is a number"
        step = options.effective or options.train * (options.gradient_accumulation_steps or 1)
        cost = f"{step} rows a step as before, in finer micro-batches"
        evaluation = options.eval or 2 * options.train
        return [
            MemoryOption(cls.Options(train=rows, eval=rows_in_evaluation, effective=step), 1.0 + 0.03 * number, cost)
            for rows_in_evaluation in halves(evaluation)[::3]
            for number, rows in enumerate(halves(options.train))
        ][1:]

    def evidence(self, run: RunView) -> Evidence:
        step, train = run.last_step_batch, self.options.train
        assert train != "auto", "in effect is a number"
        cut = ", ".join(f"{rows} x {width}" for rows, width in step.sizes[:8]) + (", …" if len(step.sizes) > 8 else "")
        share = (self.options.effective or train * (self.options.gradient_accumulation_steps or 1)) / run.world_size
        seen = f"{step.rows} rows in {len(step.sizes)} micro-batch(es) of rows x tokens {cut}; asked for {share:g} rows a rank"
        if abs(step.rows - share) < 1:  # an effective batch that the ranks do not divide differs by one
            return Evidence.active(seen)
        return Evidence.unknown(f"the step was a partial one: {seen}") if step.rows < share else Evidence.inactive(seen)
