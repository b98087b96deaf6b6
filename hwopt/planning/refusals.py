"""What makes a plan impossible: conflicts between plugins, a job that its parts cannot train, and skips under `--strict`.

The checks run on one record of what each plugin wrote (`WrittenRecipe`). One error lists all conflicts, each with both lines
of the profile. docs/conflicts.md lists the conflicts of the built-in plugins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hwopt.config.aliases import option_for
from hwopt.errors import InputError, PluginError, Problems
from hwopt.planning.decisions import PluginDecision
from hwopt.planning.parts import WrittenPart, WrittenRecipe, applied, declared
from hwopt.planning.plan import Plan
from hwopt.plugin import CAPABILITIES


def refuse(plan: Plan, written: WrittenRecipe) -> None:
    """Raise PluginError or InputError if plugins of the plan contradict each other or cannot train its job."""
    refuse_conflicts(written)
    refuse_replaced_loss(plan, written.parts)
    refuse_lacking_engine(plan, written.parts)
    refuse_split_router_loss(plan, written.parts)


def refuse_conflicts(written: WrittenRecipe) -> None:
    """Raise PluginError with all pairs of plugins that cannot be used together, and all missing required plugins."""
    problems = Problems()
    entries, parts, collisions = written.entries, written.parts, written.recipe.collisions
    for text in missing(entries):
        problems.add(text)
    refused: set[frozenset[str]] = set()
    for mine, other, why in (*declared(parts), *implied(parts)):
        pair = frozenset((mine.entry.author, other.entry.author))
        if pair not in refused:
            problems.add(f"{mine.entry.author} and {other.entry.author} cannot be used together: {why}")
        refused.add(pair)
    who = {entry.author: entry.who for entry in entries}
    for collision in collisions:
        if frozenset((collision.first, collision.second)) not in refused:
            problems.add(
                f"recipe.{collision.what} is set by {who[collision.first]} and again by {who[collision.second]}. "
                "Remove one of the two tables, or set `enabled = false` in it."
            )
    collided = {collision.what for collision in collisions}
    for part in parts:
        for what in part.entry.plugin.relations.replaces:
            if what not in part.written and what not in collided:
                problems.add(f"{part.entry.who} replaces recipe.{what}, but its apply() does not set it")
    problems.raise_if_any(PluginError)


def missing(entries: Sequence[PluginDecision]) -> Iterator[str]:
    """A message for each required plugin that is missing or skipped."""
    found = {entry.name: entry for entry in entries}
    for entry in applied(entries):
        for name in entry.plugin.relations.requires:
            if name not in found:
                yield f"{entry.author} needs the plugin {name!r}: add a table [plugins.{name}], or remove [plugins.{entry.name}]"
            elif found[name].decision == "skip" and not found[name].replaced:
                without = f"To train without both set plugins.{entry.name}.enabled = false"
                yield f"{entry.author} needs {found[name].author}, which is skipped: {found[name].reason}. {without}"


def implied(parts: Sequence[WrittenPart]) -> Iterator[tuple[WrittenPart, WrittenPart, str]]:
    """(plugin, plugin of the engine, reason) for each plugin that needs a capability which the engine lacks."""
    engine = next((part for part in parts if "engine" in part.written), None)
    if engine is None:
        return
    for part in parts:
        for capability, why in part.needs():
            if part is not engine and engine.lacks(capability):
                name = engine.entry.name
                yield part, engine, f"{why}, and the engine of {name!r} lacks {capability}: {CAPABILITIES[capability]}"


def refuse_lacking_engine(plan: Plan, parts: Sequence[WrittenPart]) -> None:
    """Raise InputError for micro-batches or clipping that the engine of a plugin lacks."""
    batch, max_grad_norm = plan.batch, plan.training.max_grad_norm
    for part in parts:
        entry = part.entry
        if max_grad_norm and part.lacks("clipping"):
            options = ", ".join(f"plugins.{entry.name}.{name}" for name in type(entry.options).model_fields)
            raise InputError(
                f"{entry.author} cannot clip by the norm of all parameters (training.max_grad_norm = {max_grad_norm:g}). "
                f"Set training.max_grad_norm = 0{f', or {options}' if options else ''}"
            )
        if part.lacks("accumulation") and (steps := batch.accumulation(plan.world_size)) > 1:
            per_rank = -(-batch.step // plan.world_size)
            raise InputError(
                f"{entry.author} needs one micro-batch per step, and {batch.step} rows in micro-batches of {batch.train} are "
                f"{steps}. Set {option_for('per_device_train_batch_size')} = {per_rank}, or lower the rows of a step"
            )


def refuse_replaced_loss(plan: Plan, parts: Sequence[WrittenPart]) -> None:
    """Raise PluginError if a plugin replaces the loss of the task, whose options it would ignore."""
    own = next((part for part in parts if "loss" in part.written), None)
    if own is not None and (key := next(iter(plan.job.task.loss_changes), None)):
        raise PluginError(
            f"task.{key}: {own.entry.who} computes the loss itself, without {key}. Remove it, or turn the plugin off"
        )


def refuse_split_router_loss(plan: Plan, parts: Sequence[WrittenPart]) -> None:
    """Raise InputError if the load-balancing loss of a mixture of experts would be computed in parts: it is not their sum."""
    if not plan.router_loss:
        return
    found = [f"{part.entry.author} {why}" for slot, why in ROUTER.items() for part in parts if slot in part.written]
    if plan.batch.accumulation(plan.world_size) > 1:
        found.append(f"{plan.batch.step} rows a step are several micro-batches of {plan.batch.train}")
    if plan.world_size > 1:
        found.append("each rank would balance its own rows")
    if not plan.model.is_decoder:
        found.append("hwopt computes that loss for causal language models only")
    if found:
        raise InputError(
            f"model: {plan.model.model_type} is a mixture of experts, whose load-balancing loss needs all rows of a step "
            f"at once: {'; '.join(found)}. Set task.ignore_router_loss = true to train without that loss, or change these"
        )


ROUTER = {"cut": "splits a step by length", "collate": "packs the rows of a step", "loss": "computes the loss without it"}
"""Slot of the recipe -> what a plugin that writes it does to the load-balancing loss."""


def refuse_changes(plan: Plan, notes: Sequence[str]) -> None:
    """Raise PluginError for every fallback and skip, and for `notes`, as `--strict` requires.

    A plugin that yields (`Relations.yields`) may be skipped if the user did not name it, and one that is only used if needed.
    """
    problems = Problems()
    for entry in plan.entries:
        yielded = entry.decision == "skip" and entry.plugin.relations.yields and entry.name not in plan.profile.chosen
        if entry.decision != "apply" and not (entry.replaced or entry.optional or yielded):
            problems.add(f"--strict: {entry.author}: {entry.decision}: {entry.reason}")
    for note in notes:
        problems.add(f"--strict: {note}")
    problems.raise_if_any(PluginError)
