"""`--profile auto`: the profile of this machine's card, or one derived from the nearest card, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwopt.config.profile import Profile, make_profile
from hwopt.errors import InputError
from hwopt.hardware.device import Hardware
from hwopt.planning.decisions import given_options
from hwopt.plugin.contract import effect_by_default
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry

SAME_SIZE = 0.1
"""Relative difference in memory up to which options are kept as they are: cards of one size differ by some percent."""


def choose(
    hardware: Hardware, files: Mapping[str, Path], registry: Registry, load: Callable[[str], Profile]
) -> tuple[Profile, str]:
    """The profile for `hardware` and the reason for it.

    The card's own profile if one is installed. Otherwise the nearest by architecture, then by memory, among profiles that keep
    the training method; plugins scale their options to this machine's memory (`Plugin.scale_options`).
    """
    profiles = [load(name) for name in files]
    if hardware.device_type == "cpu":
        if "cpu" not in files:
            raise InputError("--profile auto: no CUDA device, and no profile called 'cpu' is installed; name one with --profile")
        return load("cpu"), f"no CUDA device was found; this machine computes on its CPU ({hardware.name})"
    own = [profile for profile in profiles if profile.content.extends is None and fits_name(profile, hardware)]
    if own:
        best = max(own, key=lambda profile: profile.card.longest_name(hardware.name))
        return best, f"{hardware.name} with {hardware.memory_gib:g} GiB is the card of {best.name}"
    return derive(hardware, registry, [p for p in profiles if p.card.capability and keeps_method(p, registry)])


def fits_name(profile: Profile, hardware: Hardware) -> bool:
    """Whether `hardware` is the profile's card, or a variant of it with the same memory."""
    card = profile.card
    named = card.longest_name(hardware.name) > 0 and card.capability == hardware.compute_capability
    return named and card.memory_gib is not None and card.same_memory(hardware)


def keeps_method(profile: Profile, registry: Registry) -> bool:
    named = (name for name, _ in profile.plugin_tables() if name in registry.names)
    return all(effect_by_default(registry.plugin(name)) != "method" for name in named)


def derive(hardware: Hardware, registry: Registry, profiles: list[Profile]) -> tuple[Profile, str]:
    capability = hardware.compute_capability
    assert capability is not None  # a CPU was answered before

    def distance(profile: Profile) -> tuple[bool, int, float]:
        there, memory = profile.card.capability, profile.card.memory_gib
        assert there is not None
        assert memory is not None
        architecture = abs(there[0] * 10 + there[1] - capability[0] * 10 - capability[1])
        ratio = max(memory, hardware.memory_gib) / min(memory, hardware.memory_gib)
        return profile.content.extends is not None, architecture, ratio

    known = [profile for profile in profiles if profile.card.memory_gib]
    if not known:
        raise InputError("--profile auto: no installed profile describes a GPU; name one with --profile")
    nearest = min(known, key=distance)
    memory = nearest.card.memory_gib
    assert memory is not None
    why = (
        f"no profile is for {hardware.name} ({hardware.architecture}, {hardware.memory_gib:g} GiB); derived from {nearest.name} "
        f"({memory:g} GiB), the nearest by architecture and memory"
    )
    data = {key: value for key, value in nearest.document.data.items() if key not in ("extends", "card")}
    data |= {"name": f"auto-{nearest.name}", "summary": f"derived from {nearest.name}"}
    data["card"] = card_table(hardware, profiles)
    plugins = {name: dict(table) for name, table in nearest.content.plugins.items()}
    ratio = hardware.memory_gib / memory
    places = dict(nearest.document.places)
    for plugin, options, _ in given_options(nearest, registry) if abs(ratio - 1) > SAME_SIZE else ():
        with plugin_guard(f"plugin {plugin.name!r} of {registry.distribution(plugin.name)}", "scale_options()"):
            changed, what = plugin.scale_options(options, ratio)
        plugins[plugin.name] |= changed
        for key in changed:
            places["plugins", plugin.name, key] = f"{nearest.name}, scaled to the memory"
        why += f"; {what}" if what else ""
    data["plugins"] = plugins
    return make_profile(replace(nearest.document, data=data, places=places)), why


def card_table(hardware: Hardware, profiles: list[Profile]) -> dict[str, Any]:
    """The table [card] for `hardware`, with the peaks of a variant of that name if a profile has one."""
    found = {"match": [hardware.name], "memory_gib": hardware.memory_gib, "compute_capability": hardware.capability_text}
    variants = (profile.card.variant_named(hardware.name) for profile in profiles)
    known = max(filter(None, variants), key=lambda card: card.longest_name(hardware.name), default=None)
    if known is None:
        return found
    peaks = known.model_dump(include={"memory_bandwidth_gbps", "dense_tflops"}, exclude_none=True)
    return found | peaks
