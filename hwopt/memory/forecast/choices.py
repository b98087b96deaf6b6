"""Decides what plugins leave to the memory planner (`Decision.choose`): the first of their options that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hwopt.errors import InputError
from hwopt.hardware.device import GIB
from hwopt.memory.forecast import planner
from hwopt.memory.forecast.known_limits import recorded_limit
from hwopt.memory.forecast.lengths import Lengths, largest_micro_batch, lengths_of
from hwopt.planning.decisions import PluginDecision
from hwopt.planning.plan import Plan

ACTIVATION_BYTES = 1.5
"""Bytes that stay for the backward pass, for each value that a forward pass reads or writes: 1.3 to 1.6 in decoders in bf16."""


class NoForecastError(InputError):
    """A plugin leaves a choice to the planner, which cannot trace the recipe."""


WithChoices = Callable[[dict[str, int]], Plan]
"""Resolves the plan with the given option number of each plugin."""


def resolve_choices(
    plan: Plan, with_choices: WithChoices, cache: Path, before: Mapping[str, Mapping[str, Any]] | None = None
) -> Plan:
    """Return `plan` with every choice (`Decision.choose`) at its first option that fits the device, and the reason.

    `before` has the options by plugin of the run that is resumed; they are kept. If no option of a plugin fits, the last one is
    taken: it needs the least memory. Raises NoForecastError if the recipe cannot be traced and a choice is not `optional`.
    """
    chosen: dict[str, int] = {}
    reasons: dict[str, str] = {}
    lengths = lengths_of(plan, cache)
    for entry in plan.entries:
        if entry.choices == 1:
            continue
        if (number := matching_choice(entry, (before or {}).get(entry.name), chosen, with_choices)) is not None:
            chosen[entry.name] = number
            plan, reasons[entry.name] = with_choices(chosen), f"{entry.reason}: as in the resumed run"
        else:
            plan, reasons[entry.name] = first_fitting_choice(entry, chosen, with_choices, lengths, cache)
    entries = tuple(replace(entry, reason=reasons.get(entry.name, entry.reason)) for entry in plan.entries)
    return replace(plan, entries=entries)


def first_fitting_choice(
    entry: PluginDecision, chosen: dict[str, int], with_choices: WithChoices, lengths: Lengths, cache: Path
) -> tuple[Plan, str]:
    """Return the plan with the first choice of `entry` that fits, or with the last one, and the reason. Adds it to `chosen`."""
    last, tried = entry.choices - 1, dict[int, Tried]()
    number = first_to_try(entry, chosen, with_choices, lengths)
    while 0 <= number <= last and number not in tried:
        plan = with_choices(chosen | {entry.name: number})
        tried[number] = tried_choice(plan, lengths, cache, is_last=number == last)
        if tried[number].not_traceable and entry.optional:
            chosen[entry.name] = last
            return with_choices(chosen), f"{entry.reason}; this model's memory cannot be forecast"
        if tried[number].not_traceable:
            what = f"hwopt cannot choose for {entry.author}: {tried[number].not_traceable}. Set its options yourself"
            raise NoForecastError(f"{entry.place}: {what}")
        number += -1 if tried[number].fits else 1
    number = chosen[entry.name] = min((number for number, each in tried.items() if each.fits), default=last)
    why = "the run fits without it" if entry.optional and number == 0 else entry.reason
    none = "" if tried[number].fits else "no option fits, the last one is used"
    said = [tried[number].used or tried[number].rejected, *(tried[each].rejected for each in {number - 1} & tried.keys())]
    return tried[number].plan, f"{none or why}: {'; '.join(dict.fromkeys(said))}"


@dataclass(frozen=True)
class Tried:
    """A choice of a plugin that the planner tried."""

    plan: Plan
    fits: bool
    used: str = ""
    """The memory that it needs, of the memory that there is."""
    rejected: str = ""
    """Why it is not taken, if it does not fit."""
    not_traceable: str = ""
    """Why its memory cannot be forecast."""


def tried_choice(plan: Plan, lengths: Lengths, cache: Path, is_last: bool) -> Tried:
    """Return whether `plan`, with a choice of a plugin, fits. One whose weights alone do not fit is traced if it `is_last`.

    What an engine keeps elsewhere is in its stand-in, not in the closed form.
    """
    limit = recorded_limit(plan, lengths, cache)
    if limit is not None and plan.batch.train > limit:
        return Tried(plan, False, rejected=f"an earlier run on this card ran out of memory with more than {limit} rows")
    at_least = planner.closed_form(plan, lengths)
    if at_least.margin_gib < 0 and not is_last and not plan.memory_spec.stand_ins:
        return Tried(plan, False, rejected=f"the option before needs more than {at_least.highest_gib:.2f} GiB")
    memory = planner.plan_memory(plan, cache, lengths)
    pool_can_go = memory.margin_gib < 0 and planner.pool_that_yields(plan)
    needed = memory.highest_gib - (memory.pool_gib if pool_can_go else 0.0)
    return Tried(
        plan,
        bool(memory.fits) or (pool_can_go and memory.fits_without_pool),
        f"{needed:.2f} of {memory.free_gib - memory.reserve_gib:.2f} GiB",
        f"the option before needs {needed:.2f} GiB",
        memory.note if memory.lower_bound else "",
    )


def first_to_try(entry: PluginDecision, chosen: dict[str, int], with_choices: WithChoices, lengths: Lengths) -> int:
    """Return the number of the choice that is tried first: 1 if a rough estimate of the activations says that 0 does not fit.

    Then a trace is saved, and the result is the same. Only the choices of an `optional` plugin need less memory one by one.
    """
    if not entry.optional:
        return 0
    plan = with_choices(chosen | {entry.name: 0})
    tokens = largest_micro_batch(plan, lengths.longest).tokens
    return int(planner.closed_form(plan, lengths).margin_gib < ACTIVATION_BYTES * plan.model.values_per_token * tokens / GIB)


def matching_choice(
    entry: PluginDecision, options: Mapping[str, Any] | None, chosen: dict[str, int], with_choices: WithChoices
) -> int | None:
    """Return the number of the choice of `entry` that has these options, or None."""
    for number in range(entry.choices) if options else ():
        plan = with_choices(chosen | {entry.name: number})
        if next(each for each in plan.entries if each.name == entry.name).options.model_dump(mode="json") == options:
            return number
    return None
