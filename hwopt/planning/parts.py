"""What each applied plugin has in the recipe: the recipe is written once, and this record of it is passed down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hwopt.errors import PluginError
from hwopt.planning.decisions import PluginDecision, plugin_hook
from hwopt.plugin import Capability, Context, Traits
from hwopt.plugin.recipe import Recipe
from hwopt.text import truncate


def write_recipe(entries: tuple[PluginDecision, ...], context: Context) -> Recipe:
    """A new recipe, written by the plugins that are not skipped, in their order."""
    recipe = Recipe(replacements(entries))
    for entry in applied(entries):
        with recipe.written_by(entry.author, entry.distribution), plugin_hook(entry, "apply()"):
            entry.plugin.apply(recipe, context)
    return recipe


class HostSets(str):
    """Why a plugin is skipped that only sets arguments of the loop itself: nothing is lost, so `strict` accepts it."""


def without(lacking: Mapping[str, str], entry: PluginDecision, recipe: Recipe) -> PluginDecision:
    """`entry`, skipped if it wrote one of the fields or keys that are `lacking`."""
    written = recipe.written_by_author(entry.author) if entry.decision != "skip" else ()
    reasons = [reason for what in written if (reason := lacking.get(what) or lacking.get(what.partition("[")[0]))]
    if not reasons:
        return entry
    set_there = len(reasons) == len(written) and all(isinstance(reason, HostSets) for reason in reasons)
    return replace(entry, decision="skip", reason=str(reasons[0]), replaced=set_there)


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


def applied(entries: Iterable[PluginDecision]) -> Iterator[PluginDecision]:
    """The entries that are not skipped."""
    return (entry for entry in entries if entry.decision != "skip")
