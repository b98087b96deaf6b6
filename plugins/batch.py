"""Batch sizes: the rows of a micro-batch, of an evaluation batch and of an optimizer step.

`train` is limited by memory. An optimizer step has `train` x `gradient_accumulation_steps` rows, or `effective` rows, over all
ranks together, so more ranks run the same training in less time. hwopt computes how many micro-batches each rank needs.
`effective_tokens` gives a step in tokens, as tools do that count packed rows: its rows follow from the mean length of the data.
If a profile or `--set` changes only `train`, the rows per step stay the same.

Source: https://docs.pytorch.org/docs/stable/notes/ddp.html; effects of larger batches, Goyal et al. 2017 (arXiv:1706.02677).
Hardware: any.
Cost: memory grows with `train` and `eval`.
Numerical effect: the rows per step are part of the training method. Splitting a step into micro-batches only changes rounding,
because the loss is divided once, by the count of the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log2
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hwopt import plugin as hw
from hwopt.errors import PluginError

MOST_EVAL_RATIO = 4  # a larger evaluation batch may not fit although training does
TRAIN_ROWS = hw.BatchSizes.of({}).train
MAX_ROWS = 1_000_000  # a larger value is a typing error
TOTALS = {"effective", "effective_tokens"}
"""Options that give the size of a step over all ranks."""
UNREAD_LENGTH = 512
"""Tokens of a sample, if neither the data nor the job gives a length."""
Rows = Annotated[int, Field(gt=0, le=MAX_ROWS)]


def candidate_rows(maximum: int) -> list[int]:
    """`maximum`, then the smaller of the sizes 1, 2, 3, 4, 6, 8, 12, 16, …, in descending order."""
    steps = {1 << power for power in range(20)} | {3 << power for power in range(19)}
    return [maximum, *sorted((size for size in steps if size < maximum), reverse=True)]


def split(step: int, rows: int, number: int, options: Batch.Options) -> hw.Choice:
    """The `step` rows of an optimizer step in `number` micro-batches of up to `rows` on each rank."""
    changes = {"train": rows}
    if options.effective is None:
        steps, rest = divmod(step, rows)
        changes |= {"effective": step} if rest else {"gradient_accumulation_steps": steps}
    return hw.Choice(
        changes=changes | evaluation_for(rows, options),
        note=f"{hw.counted(number, 'micro-batch')} per step; {step} rows per step as before",
        time=1.0 + 0.03 * log2(number),
    )


def larger_step(step: int, rows: int, factor: int) -> hw.Choice:
    """`factor` times the rows of an optimizer step, in micro-batches of `factor` times the `rows`."""
    return hw.Choice(
        changes={"train": rows * factor, "effective": step * factor},
        note=f"{step * factor} rows per step instead of {step}: another effective batch and learning rate",
        alters=True,
    )


def evaluation_for(rows: int, options: Batch.Options) -> dict[str, int]:
    """The option that keeps the evaluation batch of `options` for micro-batches of `rows`, as far as it is not much larger."""
    evaluation = sizes_of(options).eval_rows()
    if evaluation > MOST_EVAL_RATIO * rows:
        return {"eval": MOST_EVAL_RATIO * rows}
    return {} if options.eval else {"eval": evaluation}


def sizes_of(options: Batch.Options) -> hw.BatchSizes:
    """The sizes that `options` ask for on one rank. No option is "auto" any more."""
    return hw.BatchSizes.of(options.model_dump(exclude_none=True))


class Batch(hw.Plugin):
    name = "batch"
    stage = hw.Stage.DATA
    effect = "rounding"  # batch sizes are hyperparameters: with equal values the results agree up to rounding
    aliases: ClassVar[Mapping[str, str]] = {
        "per_device_train_batch_size": "train",
        "per_device_eval_batch_size": "eval",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "effective_batch_size": "effective",
        "effective_tokens": "effective_tokens",
        "auto_find_batch_size": "train = 'auto'",
    }

    class Options(hw.PluginOptions):
        train: Annotated[Rows | Literal["auto"], hw.FitsMemory()] = TRAIN_ROWS
        """Rows of a training micro-batch on each rank; "auto": as many as fit into memory."""
        eval: Annotated[Rows | Literal["auto"] | None, hw.FitsMemory()] = None
        """Rows of an evaluation batch, or "auto"; default 2 x train."""
        eval_tokens: int | None = Field(default=None, gt=0)
        """Most tokens of an evaluation batch, as rows x the longest one; default no limit."""
        gradient_accumulation_steps: Rows | None = None
        """Micro-batches per optimizer step on one rank; default 1."""
        effective: Rows | None = None
        """Rows of an optimizer step over all ranks; overrides gradient_accumulation_steps."""

        effective_tokens: int | None = Field(default=None, gt=0)
        """Tokens of an optimizer step over all ranks, on average, instead of its rows."""

        @model_validator(mode="after")
        def require_step_size(self) -> Batch.Options:
            if self.effective is not None and self.effective_tokens is not None:
                raise ValueError("effective and effective_tokens both give the size of an optimizer step; remove one")
            if self.train == "auto" and self.effective is None and self.effective_tokens is None:
                raise ValueError('train = "auto" needs effective = N, the rows per optimizer step: they change the training')
            return self

        @classmethod
        def merged(cls, base: Mapping[str, Any], override: Mapping[str, Any]) -> Mapping[str, Any]:
            """`override` over `base`. If `override` changes only `train`, the step stays the same.

            If `override` gives another step, it overrides `effective` and `effective_tokens` in `base`.
            """
            merged = {**base, **override}
            if override.keys() & {*TOTALS, "gradient_accumulation_steps"}:
                return {key: value for key, value in merged.items() if key in override or key not in TOTALS}
            train, steps = base.get("train", TRAIN_ROWS), base.get("gradient_accumulation_steps", 1)
            whole = isinstance(train, int) and isinstance(steps, int) and train * steps > 0
            if whole and not base.keys() & TOTALS and override.get("train", train) != train:
                merged.pop("gradient_accumulation_steps", None)
                merged["effective"] = train * steps
            return merged

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if (tokens := self.options.effective_tokens) is None:
            return self.probe_rows(context)
        if context.task.inputs == "images":
            raise PluginError("effective_tokens counts tokens, and images have none. Set plugins.batch.effective")
        mean, of = context.tokens_per_sample(), "mean of the training data"
        if mean is None:
            mean, of = context.job.data.max_length or UNREAD_LENGTH, "assumed, because the data could not be read"
        elif context.task.target == "next_token":
            mean += 1  # the last token, which is only a label: tools count it
        rows = min(MAX_ROWS, max(1, round(tokens / mean)))
        options = self.options.changed(effective=rows, effective_tokens=None)
        decision = Batch(options).probe_rows(context)
        reason = f"{tokens:,} tokens / {mean:,.1f} per sample ({of}): {decision.reason}"
        return replace(decision, reason=reason, options=decision.options or (options,))

    def probe_rows(self, context: hw.Context) -> hw.Decision:
        """The decision for a step that is given in rows."""
        world, effective = context.world_size, self.options.effective
        if "auto" in (self.options.train, self.options.eval):
            candidates = self.candidates(world)
            if len(candidates) == 1:
                return hw.Decision.apply("one row per rank, the only possible size", candidates[0])
            return hw.Decision.choose(candidates, "the most rows that fit into memory")
        train = self.options.train
        assert train != "auto", "chosen above"
        step_rows = sizes_of(self.options).step
        source = "train x gradient_accumulation_steps" if effective is None else "effective"
        if step_rows < world:
            raise PluginError(
                f"{source} = {step_rows} rows per step over all ranks leave some of {world} ranks without a row. "
                f"Set plugins.batch.effective to at least {world} (--batch {world}); the rows per step are part of the training"
            )
        steps = sizes_of(self.options).accumulation(world)
        overridden = effective is not None and self.options.gradient_accumulation_steps is not None
        instead = f", instead of gradient_accumulation_steps = {self.options.gradient_accumulation_steps}" if overridden else ""
        ranks, each = (f" over {world} ranks", " on each") if world > 1 else ("", "")
        tokens = f", {self.options.eval_tokens:,} tokens at most" if self.options.eval_tokens else ""
        return hw.Decision.apply(
            f"{step_rows} rows per step{instead}{ranks}: {hw.counted(steps, 'micro-batch')} of up to "
            f"{min(train, ceil(step_rows / world))}{each}; {sizes_of(self.options).eval_rows()} rows in evaluation{tokens}"
        )

    def candidates(self, world_size: int) -> list[Batch.Options]:
        """Options with every value of "auto" replaced by a size, in descending order of size."""
        options = self.options
        if options.train != "auto":
            return [options.changed(eval=rows) for rows in candidate_rows(4 * max(options.train, 64))]
        evaluation = None if options.eval == "auto" else options.eval
        rank_rows = ceil((options.effective or 1) / world_size)
        return [options.changed(train=rows, eval=evaluation) for rows in candidate_rows(rank_rows)]

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        recipe.batch.update(self.options.model_dump(exclude_none=True))  # each option is a key of the same name

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """The rows of a micro-batch, with the same rows per step; more rows per step; the rows of an evaluation batch."""
        if options is None:
            return []
        step, evaluation = sizes_of(options).step, sizes_of(options).eval_rows()
        share = ceil(step / context.world_size)
        present = min(options.train, share)
        sizes = sorted({ceil(share / number) for number in candidate_rows(share)} | {present})
        rows = [split(step, size, ceil(share / size), options) for size in sizes]
        if present == share:  # one micro-batch holds all rows of a step
            rows += [larger_step(step, options.train, factor) for factor in (2, 4, 8, 16)]
        eighths = sorted({evaluation >> shift for shift in range(0, evaluation.bit_length(), 3)} | {1})
        smaller = [hw.Choice(changes={"eval": size}, note="smaller evaluation batches") for size in eighths]
        scales = [
            hw.Scale(choices=tuple(rows), present=sizes.index(present), tune=True),
            hw.Scale(choices=tuple(smaller), present=len(smaller) - 1),
        ]
        return [scale for scale in scales if len(scale.choices) > 1]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        step, sampler, world = run.last_step_batch, run.train_loader.sampler, run.world_size
        shapes = ", ".join(f"{rows} x {width}" for rows, width in step.sizes[:8]) + (", …" if len(step.sizes) > 8 else "")
        seen = f"{step.rows} rows on this rank of {world}, in {len(step.sizes)} micro-batch(es) of rows x tokens {shapes}"
        if sampler.steps_per_epoch is None and step.step.index > 0:
            return hw.Evidence.unknown(f"data without a length may end with a smaller step: {seen}")
        if sampler.steps_per_epoch is not None and (step.step.index + 1) % sampler.steps_per_epoch == 0:
            return hw.Evidence.unknown(f"the last step of an epoch may be smaller: {seen}")
        # ranks differ by one row if their number does not divide the rows of the step
        return hw.Evidence.active(seen, rows_per_step=range(step.rows * world - world + 1, step.rows * world + world))

    def expects(self) -> Mapping[str, Any]:
        return {"rows_per_step": sizes_of(self.options).step}
