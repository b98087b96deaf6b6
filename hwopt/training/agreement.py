"""All ranks must run one plan: a rank on another card could have decided differently, and would train something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hwopt.errors import InputError
from hwopt.planning.plan import Plan
from hwopt.text import listing

if TYPE_CHECKING:
    from accelerate import Accelerator


def refuse_different_plans(plan: Plan, accelerator: Accelerator) -> None:
    """Raise InputError on every rank if the ranks have resolved different plans, as on nodes with different cards."""
    if accelerator.num_processes == 1:
        return
    from accelerate.utils import gather_object

    own = (f"{plan.hardware.name} ({plan.hardware.memory_gib:g} GiB)", method_of(plan))
    if message := difference(gather_object([own])):
        raise InputError(message)


def method_of(plan: Plan) -> dict[str, Any]:
    """Plugin -> its options, for plugins that change what is computed.

    The sizes of micro-batches, workers and what else changes no bit may differ between ranks.
    """
    return {
        entry.name: entry.options.model_dump(mode="json")
        for entry in plan.applied()
        if entry.plugin.effect != "bits" and plan.recipe.fields_of(entry.author) != ("batch",)
    }


def difference(ranks: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """What differs between the plans of the ranks, (card, plugin -> options) each; "" if they agree."""
    card, first = ranks[0]
    for rank, (other_card, other) in enumerate(ranks):
        if other != first:
            plugins = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            return (
                f"The ranks have different plans: rank 0 runs on {card}, rank {rank} on {other_card}, and these plugins differ: "
                f"{listing(plugins)}. Choose a profile that both cards can run, or set the options of these plugins with --set"
            )
    return ""
