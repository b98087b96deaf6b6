"""Plugin decisions: whether each plugin of a profile applies on this machine, with which options, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from hwopt.config.profile import Profile
from hwopt.config.validation import validate
from hwopt.errors import InputError, PluginError, Problems
from hwopt.plugin import Context, Decision, Plugin, PluginOptions, Traits
from hwopt.plugin.guard import plugin_guard, plugin_hook
from hwopt.plugin.registry import Registry
from hwopt.text import truncate


@dataclass(frozen=True)
class PluginDecision:
    """The decision for one plugin: its options in effect, the reason, and where the values came from."""

    plugin: Plugin
    distribution: str
    decision: str
    """apply, fallback or skip."""
    reason: str
    provenance: Mapping[str, str]
    """Option -> origin of its value: file and line, "--set" or "default"."""
    place: str
    """The file and line of the plugin's table, or "--set"."""
    choices: int = 1
    """Number of options that `probe` offers to the memory planner; 1 without a choice."""
    optional: bool = False
    """Whether the first choice is to skip the plugin, and the last one is taken where nothing can be forecast."""
    replaced: bool = False
    """Whether other plugins do everything that this one does, or the host; `decision` is then "skip"."""

    @property
    def name(self) -> str:
        return self.plugin.name

    @property
    def options(self) -> Any:
        """The options in effect, of the plugin's class `Options`."""
        return self.plugin.options

    @property
    def author(self) -> str:
        """The plugin and its place, as the recipe records it."""
        return f"plugin {self.name!r} ({self.place})"

    @property
    def who(self) -> str:
        """The plugin, its place and its distribution, for error messages."""
        return f"{self.author} of {self.distribution}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "distribution": self.distribution,
            "stage": self.plugin.stage.name,
            "effect": self.plugin.effect,
            "decision": self.decision,
            "reason": self.reason,
            "options": self.options.model_dump(mode="json"),
            "provenance": dict(self.provenance),
        }


def given_options(profile: Profile, registry: Registry) -> list[tuple[type[Plugin], PluginOptions, str]]:
    """(plugin class, validated options, place) of each table in the profile. Needs no torch.

    Raises InputError for unknown plugins and options, all at once.
    """
    problems = Problems()
    found: list[tuple[type[Plugin], PluginOptions, str]] = []
    for name, table in profile.plugin_tables():
        key = ("plugins", name)
        try:
            plugin_class = registry.plugin(name, profile.place(*key))
        except InputError as error:
            problems.add(str(error))
            continue
        document = replace(profile.document, data={"plugins": {name: table}})
        with plugin_guard(f"plugin {name!r} of {registry.distribution(name)}", "validating the options"):
            options: PluginOptions | None = validate(plugin_class.Options, document, key, problems)
        if options is not None:
            found.append((plugin_class, options, profile.place(*key)))
    problems.raise_if_any()
    return found


def decide(profile: Profile, registry: Registry, context: Context, choices: Mapping[str, int]) -> tuple[PluginDecision, ...]:
    """Each plugin's decision, in the order of the plan. `choices`: plugin -> index of the options if several are offered."""
    found: list[PluginDecision] = []
    by_stage = sorted(given_options(profile, registry), key=lambda given: given[0].stage)
    for _, same_stage in groupby(by_stage, key=lambda given: given[0].stage):
        known = with_applied(context, found)
        for plugin_class, options, place in same_stage:
            distribution = registry.distribution(plugin_class.name)
            with plugin_guard(f"plugin {plugin_class.name!r} of {distribution}", "the constructor"):
                requested = PluginDecision(plugin_class(options), distribution, "apply", "", {}, place)
            found.append(probe_plugin(requested, profile, known, choices.get(plugin_class.name, 0)))
    return without_required(in_order(found), profile.chosen)


def without_required(entries: Sequence[PluginDecision], chosen: Collection[str]) -> tuple[PluginDecision, ...]:
    """`entries`, of which those that require a skipped plugin are skipped too.

    One that the user named (`chosen`) stays, and is refused later.
    """
    skipped = {entry.name: entry for entry in entries if entry.decision == "skip"}
    found = list(entries)
    for place, entry in enumerate(found):
        needed = next((skipped[name] for name in entry.plugin.relations.requires if name in skipped), None)
        if needed is not None and entry.decision != "skip" and entry.name not in chosen:
            found[place] = replace(entry, decision="skip", reason=f"needs plugin {needed.name!r}, which is skipped")
            return without_required(found, chosen)
    return tuple(found)


def with_applied(context: Context, entries: Iterable[PluginDecision]) -> Context:
    """`context` with those of `entries` that apply, and with a frozen model if one of them freezes it."""
    on = [entry for entry in entries if entry.decision != "skip"]
    frozen = context.model.frozen or any(traits_of(entry).freezes for entry in on)
    return replace(context, model=replace(context.model, frozen=frozen), applied=frozenset(entry.name for entry in on))


def traits_of(entry: PluginDecision) -> Traits:
    """The traits of a plugin with its options in effect. Raises PluginError if it returns something else."""
    with plugin_hook(entry.who, "traits"):
        found: object = entry.plugin.traits
    if not isinstance(found, Traits):
        raise PluginError(f"{entry.who}: `traits` is {truncate(found)}; expected a Traits(…)")
    return found


def probe_plugin(entry: PluginDecision, profile: Profile, context: Context, choice: int) -> PluginDecision:
    """`entry` (a plugin with the profile's options) after `probe`: with decision, reason and options in effect."""
    plugin, options = entry.plugin, entry.options
    with plugin_hook(entry.who, "probe()"):
        decision = plugin.probe(context)
        check_decision(decision, type(plugin).Options)
        choices: list[PluginOptions | None] = [None] * decision.optional + list(decision.options)
        chosen = choices[choice if decision.kind == "choose" else 0] if choices else None
        if chosen is not None:
            plugin = type(plugin)(chosen)
    provenance = {
        key: profile.place("plugins", plugin.name, key) if key in options.model_fields_set else "default"
        for key in type(options).model_fields
    }
    for key in type(options).model_fields:
        if getattr(plugin.options, key) != getattr(options, key):
            provenance[key] = f"decided here, instead of {getattr(options, key)!r} ({provenance[key]})"
    kind = decision.kind
    if kind == "choose":
        kind = "skip" if chosen is None else "apply"
    return replace(
        entry,
        plugin=plugin,
        decision=kind,
        reason=decision.reason,
        provenance=provenance,
        choices=len(choices) if decision.kind == "choose" else 1,
        optional=decision.optional,
    )


def check_decision(decision: object, options: type[PluginOptions]) -> None:
    """Raise PluginError unless `decision` is a Decision with options of the class `options`."""
    if not isinstance(decision, Decision):
        raise PluginError(f"probe() returned {truncate(decision)} instead of a Decision")
    if wrong := [given for given in decision.options if not isinstance(given, options)]:
        raise PluginError(f"probe() returned the options {truncate(wrong[0])}, expected {options.__qualname__}")


def in_order(entries: Iterable[PluginDecision]) -> tuple[PluginDecision, ...]:
    """`entries` by stage, then in the profile's order, where a plugin of the same stage named in an `after` comes first."""
    by_stage = sorted(entries, key=lambda entry: entry.plugin.stage)
    ordered: dict[str, PluginDecision] = {}
    seen: set[str] = set()

    def place(entry: PluginDecision) -> None:
        if entry.name in seen:
            return
        seen.add(entry.name)
        for other in by_stage:
            if other.plugin.stage == entry.plugin.stage and other.name in entry.plugin.relations.after:
                place(other)
        ordered[entry.name] = entry

    for entry in by_stage:
        place(entry)
    return tuple(ordered.values())


def oom_plugins(profile: Profile, registry: Registry, context: Context) -> Iterator[Plugin]:
    """Plugins with a hook `on_oom` that apply with default options and have no table in the profile.

    A table with `enabled = false` counts as a table. A broken plugin is ignored, because the profile does not use it.
    """
    for name in registry.names:
        if name in profile.content.plugins:
            continue
        with suppress(PluginError):
            found = registry.plugin(name)
            if helps_oom(found):
                with plugin_guard(f"plugin {name!r} of {registry.distribution(name)}", "probe()"):
                    plugin = found(found.Options())
                    decision = plugin.probe(context)
                check_decision(decision, found.Options)
                if decision.kind == "apply":
                    yield plugin


def helps_oom(plugin: type[Plugin]) -> bool:
    """Whether the class has a hook `on_oom` of its own."""
    return plugin.on_oom is not Plugin.on_oom
