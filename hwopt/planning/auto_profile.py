"""`--profile auto`: the profile of this machine's card, or one derived from the nearest card, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hwopt.config.card import Card, CardVariant, is_laptop, known_card
from hwopt.config.profile import Profile, make_profile
from hwopt.errors import InputError
from hwopt.hardware.device import Hardware
from hwopt.planning.decisions import given_options
from hwopt.planning.inputs import Inputs
from hwopt.plugin.contract import effect_by_default
from hwopt.plugin.registry import Registry


@dataclass(frozen=True)
class AutoProfile:
    """The profile that `auto` stands for on a machine."""

    profile: Profile
    reason: str
    nearest: Profile
    """The installed profile that `profile` is, or that it is derived from."""


def choose(hardware: Hardware, inputs: Inputs) -> AutoProfile:
    """The profile for `hardware`.

    The card's own profile if one is installed: of several the one that the others extend. Otherwise it is
    derived from the nearest by architecture, then by memory, among those that keep the training
    method; the memory planner chooses the sizes (`FitsMemory`).
    Raises InputError if two profiles are for the card and neither extends the other.
    """
    if hardware.device_type == "cpu":
        if "cpu" not in inputs.files:
            raise InputError("--profile auto: no CUDA device, and no profile called 'cpu' is installed; name one with --profile")
        cpu = inputs.profile("cpu")
        return AutoProfile(cpu, f"no CUDA device was found; this machine computes on its CPU ({hardware.name})", cpu)
    profiles = [inputs.profile(name) for name in inputs.files]
    if own := [profile for profile in profiles if profile.card.describes(hardware)]:
        longest = max(len(profile.card.name_in(hardware.name)) for profile in own)
        best = inputs.only_one([each for each in own if len(each.card.name_in(hardware.name)) == longest], hardware.name)
        what = "is a laptop's version of" if is_laptop(hardware.name) else "is"
        return AutoProfile(best, f"{hardware.name} with {hardware.memory_gib:g} GiB {what} the card of {best.name}", best)
    return derive(hardware, [profile for profile in profiles if keeps_method(profile, inputs.registry)], inputs)


def keeps_method(profile: Profile, registry: Registry) -> bool:
    named = (name for name, _ in profile.plugin_tables() if name in registry.names)
    return all(effect_by_default(registry.plugin(name)) != "method" for name in named)


def derive(hardware: Hardware, profiles: list[Profile], inputs: Inputs) -> AutoProfile:
    capability = hardware.compute_capability or (0, 0)

    def distance(profile: Profile) -> tuple[int, float, bool]:
        major, minor = profile.card.capability or (0, 0)
        memory = profile.card.memory_gib or 0.0
        architecture = abs(major * 10 + minor - capability[0] * 10 - capability[1])
        if hardware.amd and profile.card.amd:  # hexadecimal: "gfx90a" is nearer to "gfx942" than to "gfx1100"
            architecture = abs(int(hardware.amd.removeprefix("gfx"), 16) - int(profile.card.amd.removeprefix("gfx"), 16))
        ratio = max(memory, hardware.memory_gib) / min(memory, hardware.memory_gib)
        return architecture, ratio, profile.content.extends is not None

    known = [each for each in profiles if (each.card.amd if hardware.amd else each.card.capability) and each.card.memory_gib]
    if not known:
        raise InputError("--profile auto: no installed profile describes a GPU; name one with --profile")
    nearest = min(known, key=distance)
    reason = (
        f"no profile is for {hardware.name} ({hardware.architecture}, {hardware.memory_gib:g} GiB); derived from {nearest.name} "
        f"({nearest.card.memory_gib:g} GiB), the nearest by architecture and memory; its sizes are the largest that fit"
    )
    data = {key: value for key, value in nearest.document.data.items() if key != "extends"}
    data |= {"name": f"auto-{nearest.name}", "summary": f"derived from {nearest.name}"}
    data["card"] = card_table(hardware, profiles)
    data["plugins"] = plugins = dict(nearest.content.plugins)
    places = dict(nearest.document.places)
    for plugin, _, _ in given_options(nearest, inputs.registry):
        if sizes := plugin.Options.sizes():
            plugins[plugin.name] = dict(inputs.merge_options(plugin.name, plugins[plugin.name], dict.fromkeys(sizes, "auto")))
            places |= {("plugins", plugin.name, key): f"derived from {nearest.name}" for key in plugins[plugin.name]}
    return AutoProfile(make_profile(replace(nearest.document, data=data, places=places)), reason, nearest)


def card_table(hardware: Hardware, profiles: list[Profile]) -> dict[str, Any]:
    """The table [card] for `hardware`, with the peaks of cards.toml, or of a variant of that name, if there are any."""
    found: dict[str, Any] = {"match": [hardware.name], "memory_gib": hardware.memory_gib}
    if hardware.compute_capability:
        found["compute_capability"] = hardware.capability_text
    variants = (profile.card.variant_named(hardware.name) for profile in profiles)
    known: Card | CardVariant | None = known_card(hardware)
    known = known or max(filter(None, variants), key=lambda card: len(card.name_in(hardware.name)), default=None)
    if known is None:
        return found
    facts = {"multiprocessors", "memory_bandwidth_gbps", "dense_tflops"}
    return found | known.model_dump(include=facts, exclude_none=True)
