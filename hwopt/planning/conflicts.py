"""Conflicts in a plan: declared conflicts, missing engine capabilities, and recipe fields that two plugins set.

The checks run after all plugins have written the recipe, on one record of what each wrote (`Part`). One error lists
all conflicts, each with both lines of the profile. docs/conflicts.md lists the conflicts of the built-in plugins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hwopt.config.aliases import option_for
from hwopt.errors import InputError, PluginError, Problems
from hwopt.planning.decisions import PluginDecision, plugin_hook
from hwopt.planning.parts import Part, applied
from hwopt.plugin import CAPABILITIES, Conflict
from hwopt.plugin.recipe import Collision

if TYPE_CHECKING:
    from hwopt.planning.plan import Plan


def refuse_conflicts(entries: Sequence[PluginDecision], parts: Sequence[Part], collisions: Iterable[Collision]) -> None:
    """Raise PluginError with all pairs of plugins that cannot be used together, and all missing required plugins."""
    problems = Problems()
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


def without_yielding(
    entries: tuple[PluginDecision, ...], parts: Sequence[Part], chosen: frozenset[str]
) -> tuple[PluginDecision, ...]:
    """`entries`, where plugins that the user did not name are skipped if they yield to another one (`Relations.yields`)."""
    why = {
        mine.entry.name: f"cannot be used with {other.entry.author}: {why}"
        for mine, other, why in declared(parts)
        if mine.entry.plugin.relations.yields and mine.entry.name not in chosen
    }
    return tuple(replace(each, decision="skip", reason=why[each.name]) if each.name in why else each for each in entries)


def missing(entries: Sequence[PluginDecision]) -> Iterator[str]:
    """A message for each required plugin that is missing or skipped."""
    found = {entry.name: entry for entry in entries}
    for entry in applied(entries):
        for name in entry.plugin.relations.requires:
            if name not in found:
                yield f"{entry.author} needs the plugin {name!r}: add a table [plugins.{name}], or remove [plugins.{entry.name}]"
            elif found[name].decision == "skip":
                without = f"To train without both set plugins.{entry.name}.enabled = false"
                yield f"{entry.author} needs {found[name].author}, which is skipped: {found[name].reason}. {without}"


def declared(parts: Sequence[Part]) -> Iterator[tuple[Part, Part, str]]:
    """(plugin, other plugin, reason) for each declared conflict that applies."""
    for part in parts:
        for conflict in part.entry.plugin.relations.conflicts:
            for other in parts:
                if other is not part and concerns(conflict, other):
                    with plugin_hook(part.entry, "conflicts"):
                        holds = conflict.when(part.entry.options, other.entry.options)
                    if holds:
                        yield part, other, conflict.why


def concerns(conflict: Conflict, other: Part) -> bool:
    """Whether `conflict` names the plugin `other`, a field that it writes, or a capability that it lacks."""
    if conflict.field is not None:
        return other.writes(conflict.field)
    if conflict.lacks is not None:
        return other.lacks(conflict.lacks)
    return other.entry.name == conflict.plugin


def implied(parts: Sequence[Part]) -> Iterator[tuple[Part, Part, str]]:
    """(plugin, plugin of the engine, reason) for each plugin that needs a capability which the engine lacks."""
    engine = next((part for part in parts if "engine" in part.written), None)
    if engine is None:
        return
    for part in parts:
        for capability, why in part.needs():
            if part is not engine and engine.lacks(capability):
                name = engine.entry.name
                yield part, engine, f"{why}, and the engine of {name!r} lacks {capability}: {CAPABILITIES[capability]}"


def refuse_untrainable(plan: Plan, parts: Sequence[Part]) -> None:
    """Raise InputError or PluginError if the plan's parts, which do not contradict each other, cannot train its job."""
    refuse_replaced_loss(plan, parts)
    refuse_lacking_engine(plan, parts)
    refuse_split_router_loss(plan, parts)


def refuse_lacking_engine(plan: Plan, parts: Sequence[Part]) -> None:
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


def refuse_replaced_loss(plan: Plan, parts: Sequence[Part]) -> None:
    """Raise PluginError if a plugin replaces the loss of the task, whose options it would ignore."""
    own = next((part for part in parts if "loss" in part.written), None)
    if own is not None and (key := next(iter(plan.job.task.loss_changes), None)):
        raise PluginError(
            f"task.{key}: {own.entry.who} computes the loss itself, without {key}. Remove it, or turn the plugin off"
        )


def refuse_split_router_loss(plan: Plan, parts: Sequence[Part]) -> None:
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


def author_in(parts: Sequence[Part], what: str) -> str:
    """The plugin that wrote the slot or key `what`, for a message."""
    return next(part.entry.who for part in parts if what in part.written)
