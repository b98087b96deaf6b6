"""Conflicts in a plan: declared conflicts, missing engine capabilities, and recipe fields that two plugins set.

The checks run after all plugins have written the recipe, on one record of what each wrote (`Part`). One error lists
all conflicts, each with both lines of the profile. docs/conflicts.md lists the conflicts of the built-in plugins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hwopt.config.aliases import option_for
from hwopt.errors import InputError, PluginError, Problems
from hwopt.planning.decisions import PluginDecision, plugin_hook
from hwopt.plugin import CAPABILITIES, Capability, Conflict, Traits
from hwopt.plugin.batch_sizes import BatchSizes
from hwopt.plugin.recipe import Collision, Recipe
from hwopt.text import truncate


@dataclass(frozen=True)
class Part:
    """What an applied plugin has in the recipe."""

    entry: PluginDecision
    written: frozenset[str]
    """Slots, keys ("batch['train']"), lists and events ("events['on_gradients']"), without what another plugin replaces."""
    traits: Traits

    def writes(self, what: str) -> bool:
        """Whether it has the field `what`, or a key of it."""
        return any(each == what or each.startswith(f"{what}[") for each in self.written)

    def lacks(self, capability: Capability) -> bool:
        """Whether it has an engine without `capability`."""
        return "engine" in self.written and capability in self.traits.lacks

    def needs(self) -> Iterator[tuple[Capability, str]]:
        """(capability of the engine that it needs, reason)."""
        name = self.entry.name
        for field in ("masters", "scaler", "events['on_gradients']"):
            if field in self.written:
                yield "whole_gradients", f"{name!r} writes recipe.{field}"
        if "optimizer" in self.written and not self.traits.elementwise:
            yield "whole_parameters", f"the optimizer of {name!r} is not elementwise"
        if "optimizer" in self.written and not self.traits.per_parameter:
            yield "single_update", f"the optimizer of {name!r} is not per_parameter"


def replacements(entries: Iterable[PluginDecision]) -> dict[str, str]:
    """Slot or key -> the author that replaces it. If two plugins replace the same one, it is not included: they collide."""
    found: dict[str, list[str]] = {}
    for entry in applied(entries):
        for what in entry.plugin.relations.replaces:
            found.setdefault(what, []).append(entry.author)
    return {what: authors[0] for what, authors in found.items() if len(authors) == 1}


def split_replaced(entries: Sequence[PluginDecision], recipe: Recipe) -> tuple[tuple[PluginDecision, ...], tuple[Part, ...]]:
    """`entries`, with what other plugins replace in their reasons, and the parts of those that still write something.

    A plugin of which everything is replaced is skipped.
    """
    winners = replacements(entries)
    marked: list[PluginDecision] = []
    parts: list[Part] = []
    for entry in entries:
        if entry.decision == "skip":
            marked.append(entry)
            continue
        written = recipe.written_by_author(entry.author)
        lost = {what: winners[what] for what in written if winners.get(what, entry.author) != entry.author}
        by = ", ".join(dict.fromkeys(lost.values()))
        if lost and len(lost) == len(written):
            marked.append(replace(entry, decision="skip", reason=f"replaced by {by}", replaced=True))
            continue
        reason = f"{entry.reason}; recipe.{', '.join(lost)} replaced by {by}" if lost else entry.reason
        marked.append(replace(entry, reason=reason))
        parts.append(Part(marked[-1], frozenset(written) - lost.keys(), traits_of(entry)))
    return tuple(marked), tuple(parts)


def traits_of(entry: PluginDecision) -> Traits:
    """The traits of a plugin with its options in effect. Raises PluginError if it returns something else."""
    with plugin_hook(entry, "traits"):
        found: object = entry.plugin.traits
    if not isinstance(found, Traits):
        raise PluginError(f"{entry.who}: `traits` is {truncate(found)}; expected a Traits(…)")
    return found


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


def refuse_lacking_engine(parts: Sequence[Part], batch: BatchSizes, world_size: int, max_grad_norm: float) -> None:
    """Raise InputError for micro-batches or clipping that the engine of a plugin lacks."""
    for part in parts:
        entry = part.entry
        if max_grad_norm and part.lacks("clipping"):
            options = ", ".join(f"plugins.{entry.name}.{name}" for name in type(entry.options).model_fields)
            raise InputError(
                f"{entry.author} cannot clip by the norm of all parameters (training.max_grad_norm = {max_grad_norm:g}). "
                f"Set training.max_grad_norm = 0{f', or {options}' if options else ''}"
            )
        if part.lacks("accumulation") and (steps := batch.accumulation(world_size)) > 1:
            per_rank = -(-batch.step // world_size)
            raise InputError(
                f"{entry.author} needs one micro-batch per step, and {batch.step} rows in micro-batches of {batch.train} are "
                f"{steps}. Set {option_for('per_device_train_batch_size')} = {per_rank}, or lower the rows of a step"
            )


def author_in(parts: Sequence[Part], what: str) -> str:
    """The plugin that wrote the slot or key `what`, for a message."""
    return next(part.entry.who for part in parts if what in part.written)


def applied(entries: Iterable[PluginDecision]) -> Iterator[PluginDecision]:
    """The entries that are not skipped."""
    return (entry for entry in entries if entry.decision != "skip")
