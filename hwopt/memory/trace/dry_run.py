"""Dry run: one optimizer step of a plan's recipe with dummy samples, on fake or on real tensors.

The recipe and the engine of the plan run, so that the memory of any plugin is counted. The optimizer's state and what plugins
keep are created first, as they exist in every step after the first. If a step has several micro-batches, the gradients of earlier
ones are created too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from hwopt.data.batches.collate import cut_in_order
from hwopt.data.batches.step_batch import Step, StepBatch
from hwopt.data.tokenizer_training import planned_config
from hwopt.distributed.engine import Engine
from hwopt.distributed.forward_backward import ForwardBackward
from hwopt.memory.shapes import Head, Shape
from hwopt.memory.trace.tracker import MemoryTracker
from hwopt.model.packing import skip_packed_row_search
from hwopt.model.remote_code import is_trusted
from hwopt.planning.parts import write_recipe
from hwopt.planning.plan import Plan
from hwopt.plugin.guard import guarded_context
from hwopt.plugin.recipe import Recipe
from hwopt.tasks.model_builder import embed_new_tokens, in_float32, with_head
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.registry import make_task
from hwopt.training.accumulation import forward_and_backward
from hwopt.training.build import adopt_model, make_accelerator, reset_accelerate
from hwopt.training.evaluation import evaluating
from hwopt.training.loaders import default_collate
from hwopt.training.optimizer import build_optimizer
from hwopt.training.run import Run


class FakeAccelerator:
    """The part of an Accelerator that `build` uses, without processes and devices."""

    scaler = None

    def __init__(self, device: torch.device, precision: str) -> None:
        self.device, self.precision = device, precision

    def prepare_model(self, model: Any, evaluation_mode: bool = False) -> Any:
        """Return the model under autocast with fp32 outputs, as Accelerate's `prepare_model` does."""
        if self.precision not in ("fp16", "bf16"):
            return model
        from accelerate.utils import convert_outputs_to_fp32

        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        autocast = torch.autocast(self.device.type, dtype=dtype)
        model.forward = convert_outputs_to_fp32(autocast(model.forward))
        return model


def fake_recipe(plan: Plan) -> Recipe:
    """Return the plan's recipe, written again with stand-ins for what fake tensors cannot run."""
    recipe = write_recipe(plan.entries, plan.context)
    if recipe.schedule is None:
        recipe.schedule = lambda step, total: 1.0  # transformers' schedules take a second to import
    for slot, stand_in in plan.memory_spec.stand_ins.items():
        with recipe.written_by(recipe.author_of(slot)):
            setattr(recipe, slot, stand_in)
    return recipe


@contextmanager
def dry_run_of(plan: Plan, recipe: Recipe, head: Head, device: torch.device, *, real: bool = False) -> Iterator[Run]:
    """Yield a run of `recipe` without data and weights, built up to its engine. Compiles nothing and collects no evidence.

    With `real`, an engine of the recipe gets a real Accelerator.
    """
    with ExitStack() as stack:
        engine = recipe.named(recipe.author_of("engine"))
        for enter in recipe.process:
            if real or getattr(enter, "who", "") != engine:  # the contexts of an engine may need its ranks
                stack.enter_context(guarded_context(enter))
        accelerator: Any = FakeAccelerator(device, recipe.accelerator.get("mixed_precision", "no"))
        if real and recipe.engine is not None:
            accelerator = make_accelerator(replace(plan, recipe=recipe))
            stack.callback(reset_accelerate, accelerator)
        tokenizer = SimpleNamespace(pad_token_id=0)
        names = tuple(str(number) for number in range(head.labels))
        rows = cast(Any, range(plan.batch.step))
        weights = None if plan.job.task.class_weights is None else (1.0,) * head.labels  # memory does not depend on the values
        run = Run(
            plan=replace(plan, recipe=recipe),
            folder=Path(),
            task=make_task(plan.job),
            device=device,
            rank=0,
            world_size=1,
            accelerator=accelerator,
            prepared=Prepared(rows, None, tokenizer, names, class_weights=weights),
        )
        adopt_model(run, dummy_model(run, head.new_tokens))
        build_optimizer(run)
        run.scaler = None  # its memory is one number, and its overflow check reads the device
        run.engine = (recipe.engine or Engine)(run)
        run.forward_backward = ForwardBackward(run)
        if recipe.collate is None:
            stack.enter_context(skip_packed_row_search())
        yield run


def dummy_model(run: Run, new_tokens: int) -> Any:
    """Return the plan's model with constant weights, and with embeddings for `new_tokens` more."""
    import transformers
    from transformers.initialization import no_init_weights

    job = run.plan.job
    config = with_head(planned_config(job, run.task.load_config(job), run.plan.model.vocab_size), run.task, run.prepared)
    for part in (config, config.get_text_config()):
        part.use_cache = False
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None or text.pad_token_id >= text.vocab_size:
        config.pad_token_id = text.pad_token_id = 0
    auto = getattr(transformers, run.task.facts.auto_class)
    with no_init_weights():
        options = in_float32(dict(run.recipe.model_kwargs))
        model = auto.from_config(config, trust_remote_code=is_trusted(job.model.name), **options)
    model.tie_weights()  # `no_init_weights` skips it
    if new_tokens:
        first = text.vocab_size
        embed_new_tokens(model, range(first, first + new_tokens))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)  # uninitialized memory may not be finite, and the update would be skipped
    return model


def dummy_micro_batch(run: Run, shape: Shape, head: Head, *, training: bool, times: int = 1) -> StepBatch:
    """Return a step batch of `times` micro-batches of `shape`. The last sample is one token shorter, so that there is padding."""
    rows, width, target = shape.rows, shape.width, shape.target or head.target
    lengths = ([width] * (rows - 1) + [max(1, width - 1)]) * times
    config = run.inner_model.config
    samples = [run.task.placeholder(run.plan.job, config, length, target) for length in lengths]
    counts = [1] * len(lengths) if run.task.facts.target == "sample" else lengths
    step = Step(0, 0, tuple(range(len(lengths))), sum(counts))
    padded = default_collate(run)(cut=cut_in_order, max_rows=rows)
    sizes = {width, shape.target or width}
    if any(padded.widths.of(size) != size for size in sizes):  # a shape that is traced beside the one of the plan
        padded = replace(padded, widths=replace(padded.widths, fixed=(*sorted({*padded.widths.fixed, *sizes}),)))
    collate = run.recipe.collate(padded) if training and run.recipe.collate is not None else padded
    batch: StepBatch = collate(step, samples, counts)
    return batch


def make_state(run: Run, tracker: MemoryTracker) -> None:
    """Create the optimizer's state and what plugins keep, as after the first step."""
    for parameter in run.inner_model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    update(run)
    state = [value for values in run.optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    tracker.label(state, "optimizer_state")


def label_storages(run: Run, tracker: MemoryTracker) -> None:
    """Label weights, masters and the buffers of the engine, and the gradients when they are allocated."""
    own = list(run.inner_model.parameters())
    known = {id(parameter) for parameter in own}
    stepped = [p for group in run.optimizer.param_groups for p in group["params"]]
    tracker.label((p for p in stepped if id(p) not in known), "masters")
    tracker.label((*own, *run.inner_model.buffers()), "weights")
    tracker.label(getattr(run.engine, "buffers", ()), "gradients")
    for parameter in own:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: tracker.label([p.grad], "gradients"))
    tracker.zeros.append(run.engine.found_inf)  # no update is skipped
    run.engine.on_gradients = [*run.engine.on_gradients, lambda run: tracker.label((p.grad for p in stepped), "gradients")]


def train_step(run: Run, batch: StepBatch) -> None:
    """Run forward, backward and update."""
    run.recipe.events.on_step_begin(run)
    forward_and_backward(run, batch, 0, reseed=lambda *_: None, add_loss=lambda *_: None)
    update(run)


def update(run: Run) -> None:
    """Update the weights, and tell the plugins that the step has ended."""
    run.engine.update()
    run.recipe.events.on_step_end(run, run.engine.update_applied())


def add_earlier_gradients(run: Run, tracker: MemoryTracker) -> None:
    """Create the gradients that exist after the first micro-batch of a step."""
    if create := getattr(run.engine, "earlier_gradients", None):
        create()
        return
    for parameter in run.inner_model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            tracker.label([parameter.grad], "gradients")


@torch.no_grad()
def evaluation_step(run: Run, batch: StepBatch) -> None:
    """Run forward and loss of one evaluation batch, and write the last token of its texts if the task generates them."""
    tokens = run.task.generated_tokens(run.plan.job)
    with evaluating(run):
        for micro_batch, _ in batch.micro_batches():
            outputs = run.inner_model(**micro_batch.inputs)
            if tokens:
                generate_last_token(run.inner_model, micro_batch.inputs, tokens)
            run.evaluation_loss(outputs, micro_batch.targets)


def generate_last_token(model: Any, inputs: dict[str, Tensor], tokens: int) -> None:
    """Do what `generate` does for the last of `tokens` tokens of an encoder-decoder, when its cache is largest."""
    given = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    encoded = model.get_encoder()(**given)
    decode = partial(
        model,
        encoder_outputs=encoded,
        attention_mask=given["attention_mask"],
        decoder_input_ids=inputs["decoder_input_ids"][:, :1],
        use_cache=True,
    )
    cache = decode().past_key_values
    for number, layer in enumerate(cache.self_attention_cache.layers):
        rows, heads, _, size = layer.keys.shape
        earlier = layer.keys.new_empty(rows, heads, max(0, tokens - 2), size)
        cache.self_attention_cache.update(earlier, earlier, number)
    logits = decode(past_key_values=cache).logits
    logits[:, -1].to(torch.float32, copy=True).argmax(-1)
