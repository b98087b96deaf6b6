"""Conflicts in a plan: declared conflicts, missing engine capabilities, and recipe fields that two plugins set.

The checks run after all plugins have written the recipe. One error lists all conflicts, each with both lines of the profile.
docs/conflicts.md lists the conflicts of the built-in plugins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil

from hwopt.config.aliases import option_for
from hwopt.errors import InputError, PluginError, Problems
from hwopt.planning.decisions import PluginDecision, plugin_hook
from hwopt.plugin import CAPABILITIES, Capability, Conflict, Traits
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import BatchSizes
from hwopt.text import truncate

Pair = frozenset[str]
"""The authors (`PluginDecision.author`) of two plugins."""


def replacements(entries: tuple[PluginDecision, ...]) -> dict[str, str]:
    """Slot or key -> the author that replaces it. If two plugins replace the same one, it is not included: they collide."""
    found: dict[str, list[str]] = {}
    for entry in applied(entries):
        for what in entry.plugin.relations.replaces:
            found.setdefault(what, []).append(entry.author)
    return {what: authors[0] for what, authors in found.items() if len(authors) == 1}


def mark_replaced(entries: tuple[PluginDecision, ...], recipe: Recipe) -> tuple[PluginDecision, ...]:
    """`entries`, with the replacement in the reason of each replaced plugin. A plugin that writes nothing else is skipped."""
    return tuple(mark_one(entry, recipe) for entry in entries)


def mark_one(entry: PluginDecision, recipe: Recipe) -> PluginDecision:
    replaced = {} if entry.decision == "skip" else recipe.replaced(entry.author)
    if not replaced:
        return entry
    winners = ", ".join(dict.fromkeys(replaced.values()))
    if set(recipe.written_by_author(entry.author)) == set(replaced):
        return replace(entry, decision="skip", reason=f"replaced by {winners}", replaced=True)
    return replace(entry, reason=f"{entry.reason}; recipe.{', '.join(replaced)} replaced by {winners}")


def refuse_conflicts(entries: tuple[PluginDecision, ...], recipe: Recipe) -> None:
    """Raise PluginError with all pairs of plugins that cannot be used together, and all missing required plugins."""
    problems = Problems()
    for text in missing(entries):
        problems.add(text)
    refused: set[Pair] = set()
    for mine, other, why in (*declared(entries, recipe), *implied(entries, recipe)):
        pair = frozenset((mine.author, other.author))
        if pair not in refused:
            problems.add(f"{mine.author} and {other.author} cannot be used together: {why}")
        refused.add(pair)
    for collision in recipe.collisions:
        if frozenset((collision.first, collision.second)) not in refused:
            problems.add(
                f"recipe.{collision.what} is set by {recipe.named(collision.first)} and again by "
                f"{recipe.named(collision.second)}. Remove one of the two tables, or set `enabled = false` in it."
            )
    for what, author in replacements(entries).items():
        if recipe.author_of(what) != author:
            problems.add(f"{recipe.named(author)} replaces recipe.{what}, but its apply() does not set it")
    problems.raise_if_any(PluginError)


def missing(entries: tuple[PluginDecision, ...]) -> Iterator[str]:
    """A message for each required plugin that is missing or skipped."""
    found = {entry.name: entry for entry in entries}
    for entry in applied(entries):
        for name in entry.plugin.relations.requires:
            if name not in found:
                yield f"{entry.author} needs the plugin {name!r}: add a table [plugins.{name}], or remove [plugins.{entry.name}]"
            elif found[name].decision == "skip":
                without = f"To train without both set plugins.{entry.name}.enabled = false"
                yield f"{entry.author} needs {found[name].author}, which is skipped: {found[name].reason}. {without}"


def declared(entries: tuple[PluginDecision, ...], recipe: Recipe) -> Iterator[tuple[PluginDecision, PluginDecision, str]]:
    """(plugin, other plugin, reason) for each declared conflict that applies."""
    for entry in applied(entries):
        for conflict in entry.plugin.relations.conflicts:
            for other in applied(entries):
                if other is not entry and concerns(conflict, other, recipe):
                    with plugin_hook(entry, "conflicts"):
                        holds = conflict.when(entry.options, other.options)
                    if holds:
                        yield entry, other, conflict.why


def concerns(conflict: Conflict, other: PluginDecision, recipe: Recipe) -> bool:
    """Whether `conflict` names the plugin `other`, a field that it writes, or a capability that it lacks."""
    if conflict.field is not None:
        return recipe.writes(other.author, conflict.field)
    if conflict.lacks is not None:
        return conflict.lacks in lacking(other, recipe)
    return other.name == conflict.plugin


def implied(entries: tuple[PluginDecision, ...], recipe: Recipe) -> Iterator[tuple[PluginDecision, PluginDecision, str]]:
    """(plugin, plugin of the engine, reason) for each plugin that needs a capability which the engine lacks."""
    engine = next((entry for entry in applied(entries) if recipe.author_of("engine") == entry.author), None)
    if engine is None:
        return
    for entry in applied(entries):
        for capability, why in needs(entry, recipe).items():
            if entry is not engine and capability in lacking(engine, recipe):
                yield entry, engine, f"{why}, and the engine of {engine.name!r} lacks {capability}: {CAPABILITIES[capability]}"


def needs(entry: PluginDecision, recipe: Recipe) -> Mapping[Capability, str]:
    """Capability that the plugin's part of the recipe needs -> reason."""
    found: dict[Capability, str] = {}
    for field in ("masters", "scaler", "events['on_gradients']"):
        if recipe.writes(entry.author, field):
            found["whole_gradients"] = f"{entry.name!r} writes recipe.{field}"
    if recipe.writes(entry.author, "optimizer") and not traits_of(entry).elementwise:
        found["whole_parameters"] = f"the optimizer of {entry.name!r} is not elementwise"
    if recipe.writes(entry.author, "optimizer") and not traits_of(entry).per_parameter:
        found["single_update"] = f"the optimizer of {entry.name!r} is not per_parameter"
    return found


def refuse_accumulation(entries: tuple[PluginDecision, ...], recipe: Recipe, batch: BatchSizes, world_size: int) -> None:
    """Raise InputError for a step of several micro-batches, if the engine of a plugin lacks `accumulation`."""
    for entry in applied(entries):
        if "accumulation" in lacking(entry, recipe) and (steps := batch.accumulation(world_size)) > 1:
            per_rank = ceil(batch.step / world_size)
            raise InputError(
                f"{entry.author} needs one micro-batch per step, and {batch.step} rows in micro-batches of {batch.train} are "
                f"{steps}. Set {option_for('per_device_train_batch_size')} = {per_rank}, or lower the rows of a step"
            )


def refuse_clipping(entries: tuple[PluginDecision, ...], recipe: Recipe, max_grad_norm: float) -> None:
    """Raise InputError for a `max_grad_norm` above 0, if the engine of a plugin lacks `clipping`."""
    for entry in applied(entries):
        if max_grad_norm and "clipping" in lacking(entry, recipe):
            options = ", ".join(f"plugins.{entry.name}.{name}" for name in type(entry.options).model_fields)
            raise InputError(
                f"{entry.author} cannot clip by the norm of all parameters (training.max_grad_norm = {max_grad_norm:g}). "
                f"Set training.max_grad_norm = 0{f', or {options}' if options else ''}"
            )


def lacking(entry: PluginDecision, recipe: Recipe) -> tuple[Capability, ...]:
    """The capabilities that the engine of the plugin lacks; none if the plugin writes no engine."""
    if not recipe.writes(entry.author, "engine"):
        return ()
    return traits_of(entry).lacks


def traits_of(entry: PluginDecision) -> Traits:
    """The traits of a plugin with its options in effect. Raises PluginError if it returns something else."""
    with plugin_hook(entry, "traits"):
        found: object = entry.plugin.traits
    if not isinstance(found, Traits):
        raise PluginError(f"{entry.who}: `traits` is {truncate(found)}; expected a Traits(…)")
    return found


def applied(entries: tuple[PluginDecision, ...]) -> Iterator[PluginDecision]:
    """The entries that are not skipped."""
    return (entry for entry in entries if entry.decision != "skip")
