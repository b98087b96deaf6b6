"""What each applied plugin has in the recipe: the recipe is written once, and this record of it is passed down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hwopt.planning.decisions import PluginDecision, traits_of
from hwopt.plugin import Conflict, Context, Traits
from hwopt.plugin.guard import plugin_hook
from hwopt.plugin.recipe import Recipe


@dataclass(frozen=True)
class WrittenRecipe:
    """What the plugins of a plan wrote. It is written once, and every later check reads this record of it."""

    entries: tuple[PluginDecision, ...]
    recipe: Recipe
    parts: tuple[WrittenPart, ...]
    """One for each plugin that still writes something."""


def write(entries: tuple[PluginDecision, ...], context: Context) -> WrittenRecipe:
    """The recipe, written by the plugins of `entries` that can stay.

    Skips plugins that write what the training loop lacks (`context.lacking`), then those that another one makes needless
    (`Relations.needless`), and those that yield to another one (`Relations.yields`) and that the user did not name; what is left
    writes again.
    """
    recipe = write_recipe(entries, context)
    supported = tuple(without(context.lacking, entry, recipe) for entry in entries)
    if supported != entries:
        recipe = write_recipe(supported, context)
    marked, parts = split_replaced(supported, recipe)
    needless = {part.entry.name: why for part, _, why in declared(parts, "needless")}
    if why := needless or yielding(parts, context.chosen):
        left = (
            replace(each, decision="skip", reason=why[each.name], replaced=each.name in needless) if each.name in why else each
            for each in supported
        )
        return write(tuple(left), context)
    return WrittenRecipe(marked, recipe, parts)


def write_recipe(entries: tuple[PluginDecision, ...], context: Context) -> Recipe:
    """A new recipe, written by the plugins that are not skipped, in their order."""
    writing, replaced_by = list(applied(entries)), replacements(entries)
    recipe = Recipe(replaced_by)
    for entry in writing:
        with recipe.written_by(entry.author, entry.distribution), plugin_hook(entry.who, "apply()"):
            entry.plugin.apply(recipe, context)
    return recipe


class HostSets(str):
    """Why a plugin is skipped that only sets arguments of the loop itself: nothing is lost, so `strict` accepts it."""


def why_lacking(lacking: Mapping[str, str], written: Sequence[str]) -> list[str]:
    """Why a host cannot take each of the fields and keys `written` by a plugin; "" for one that it takes.

    What a loss or arguments of a Trainer need of the model counts only where the host takes neither of them.
    """
    if "loss" in written or ("trainer" not in lacking and any(what.startswith("trainer[") for what in written)):
        written = [what for what in written if what not in ("process", "model_steps", "final_steps")]
    return [lacking.get(what) or lacking.get(what.partition("[")[0], "") for what in written]


def without(lacking: Mapping[str, str], entry: PluginDecision, recipe: Recipe) -> PluginDecision:
    """`entry`, skipped if it wrote one of the fields or keys that are `lacking`."""
    reasons = why_lacking(lacking, recipe.written_by_author(entry.author)) if entry.decision != "skip" else []
    if not any(reasons):
        return entry
    set_there = all(isinstance(reason, HostSets) for reason in reasons)
    return replace(entry, decision="skip", reason=str(next(filter(None, reasons))), replaced=set_there)


@dataclass(frozen=True)
class WrittenPart:
    """What an applied plugin has in the recipe."""

    entry: PluginDecision
    written: frozenset[str]
    """Slots, keys ("batch['train']"), lists and events ("events['on_gradients']"), without what another plugin replaces."""
    traits: Traits

    def writes(self, what: str) -> bool:
        """Whether it has the field `what`, or a key of it."""
        return any(each == what or each.startswith(f"{what}[") for each in self.written)

    def lacks(self, capability: str) -> bool:
        """Whether it has an engine without `capability`."""
        return "engine" in self.written and capability in self.traits.lacks

    def declares(self, conflicts: Iterable[Conflict], other: WrittenPart) -> Iterator[str]:
        """The reason of each of its `conflicts` that holds with `other`."""
        for conflict in conflicts:
            if concerns(conflict, other):
                with plugin_hook(self.entry.who, "conflicts"):
                    holds = conflict.when(self.entry.options, other.entry.options)
                if holds:
                    yield conflict.why

    def needs(self) -> Iterator[tuple[str, str]]:
        """(capability of the engine that it needs, reason)."""
        name = self.entry.name
        for field in ("masters", "scaler", "events['on_gradients']"):
            if field in self.written:
                yield "whole_gradients", f"{name!r} writes recipe.{field}"
        if "optimizer" in self.written and not self.traits.elementwise:
            yield "whole_parameters", f"the optimizer of {name!r} is not elementwise"
        if "optimizer" in self.written and not self.traits.per_parameter:
            yield "single_update", f"the optimizer of {name!r} is not per_parameter"


def declared(parts: Sequence[WrittenPart], relation: str = "conflicts") -> Iterator[tuple[WrittenPart, WrittenPart, str]]:
    """(plugin, other plugin, reason) for each declared conflict that applies; `relation`: the field of `Relations`."""
    for part in parts:
        conflicts = getattr(part.entry.plugin.relations, relation)
        yield from ((part, other, why) for other in parts if other is not part for why in part.declares(conflicts, other))


def yielding(parts: Sequence[WrittenPart], chosen: frozenset[str]) -> dict[str, str]:
    """Plugin -> why it is skipped: it is in a conflict, yields in conflicts, and the user did not name it.

    Where both plugins of a conflict are such, the one that declares it is skipped.
    """
    found: dict[str, str] = {}
    for mine, other, why in declared(parts):
        for one, stays in ((mine, other), (other, mine)):
            if one.entry.plugin.relations.yields and one.entry.name not in chosen and stays.entry.name not in found:
                found.setdefault(one.entry.name, f"cannot be used with {stays.entry.author}: {why}")
                break
    return found


def concerns(conflict: Conflict, other: WrittenPart) -> bool:
    """Whether `conflict` names the plugin `other`, a field that it writes, or a capability that it lacks."""
    if conflict.field is not None:
        return other.writes(conflict.field)
    if conflict.lacks is not None:
        return other.lacks(conflict.lacks)
    return other.entry.name == conflict.plugin


def replacements(entries: Iterable[PluginDecision]) -> dict[str, str]:
    """Slot or key -> the author that replaces it. If two plugins replace the same one, it is not included: they collide."""
    claims = [(what, entry.author) for entry in applied(entries) for what in entry.plugin.relations.replaces]
    counts = Counter(what for what, _ in claims)
    return {what: author for what, author in claims if counts[what] == 1}


def split_replaced(
    entries: Sequence[PluginDecision], recipe: Recipe
) -> tuple[tuple[PluginDecision, ...], tuple[WrittenPart, ...]]:
    """`entries`, with what other plugins replace in their reasons, and the parts of those that still write something.

    A plugin of which everything is replaced is skipped.
    """
    winners = replacements(entries)
    marked: list[PluginDecision] = []
    parts: list[WrittenPart] = []
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
        parts.append(WrittenPart(marked[-1], frozenset(written) - lost.keys(), traits_of(entry)))
    return tuple(marked), tuple(parts)


def applied(entries: Iterable[PluginDecision]) -> Iterator[PluginDecision]:
    """The entries that are not skipped."""
    return (entry for entry in entries if entry.decision != "skip")
