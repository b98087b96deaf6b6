"""What a configuration does not say: the card, the cores, the data, the model. From the command line or from the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hwopt.config.card import Card
from hwopt.configs.check.contract import Facts
from hwopt.configs.view import View
from hwopt.errors import InputError
from hwopt.hardware.device import Hardware, described
from hwopt.planning.inputs import Inputs


@dataclass(frozen=True)
class Given(Facts):
    """What the command line says, before the card is looked up."""

    card: str | None = None
    profile: str | None = None


def facts_of(view: View, given: Given, inputs: Inputs, own: Card | None = None) -> tuple[Facts, str]:
    """(facts, the card and where it comes from as text).

    The card is that of --card, of --profile, of the profile that is checked (`own`), or of this machine, in this order.
    """
    hardware, source = card_hardware(given, inputs, own)
    facts = replace(
        given,
        hardware=None if hardware.device_type == "cpu" else hardware,
        cores=given.cores or (hardware.cpu_cores if hardware.source == "detected" else None),
        parameters=given.parameters or view.number("parameters"),
        max_length=given.max_length or int(view.number("max_length") or 0) or None,
    )
    return facts, source


def card_hardware(given: Given, inputs: Inputs, own: Card | None) -> tuple[Hardware, str]:
    if given.card is not None:
        profile = inputs.profile_of_card(given.card)
        return of_card(profile.card, given.card), f"{given.card}, by --card ({profile.name})"
    if given.profile is not None:
        profile = inputs.profile(given.profile)
        hardware = of_card(profile.card, profile.name)
        return hardware, f"{hardware.name}, by --profile {profile.name}"
    if own is not None and own.capability is not None and own.memory_gib is not None:
        hardware = of_card(own, "card")
        return hardware, f"{hardware.name}, by the file"
    from hwopt.hardware.detect import detect  # imports torch, which takes seconds
    from hwopt.system.ranks import local_rank

    machine = detect(local_rank(os.environ))
    if machine.device_type == "cuda":
        return machine, f"{machine.name}, of this machine"
    return machine, "none"


def of_card(card: Card, name: str) -> Hardware:
    if card.capability is None or card.memory_gib is None:
        raise InputError(f"--profile: {name} has no card; give one with --card NAME")
    name = card.match[0] if card.match else name
    return described(name, card.capability, card.memory_gib, multiprocessors=card.multiprocessors)
