"""The recipe fields that a plugin writes, found by applying it to an empty recipe; plugins do not declare them.

The plugin is applied for two ranks on imaginary GPUs, with every package installed and a causal language model of a billion
parameters, so that few plugins skip. For the plugins of a plan see `Recipe.fields_of`, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from hwopt.config.job import Data, Job, TaskOptions
from hwopt.config.job_model import Model
from hwopt.hardware.device import described
from hwopt.model.facts import ModelFacts
from hwopt.plugin.contract import Context, Plugin
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.recipe import Recipe

LARGE_DECODER = ModelFacts(
    name="a causal language model",
    model_type="llama",
    architecture="LlamaForCausalLM",
    parameters=1_000_000_000,
    layers=24,
    hidden_size=2_048,
    vocab_size=32_000,
    max_positions=4_096,
    is_decoder=True,
    supports_sdpa=True,
    supports_flash=True,
    supports_checkpointing=True,
    prebuilt_mask=True,
    packing_problem="",
)


class AllPackages(dict[str, str]):
    """Software in which every package is installed."""

    def __missing__(self, name: str) -> str:
        return "any"

    def __contains__(self, name: object) -> bool:
        return True


TWO_CARDS = Context(
    described("a card", (9, 0), 80.0),
    AllPackages(),
    LARGE_DECODER,
    Job(model=Model(name=LARGE_DECODER.name), data=Data(train="train.csv", max_length=2_048), task=TaskOptions(kind="causal-lm")),
    world_size=2,
)
ONE_CARD = replace(TWO_CARDS, world_size=1)


@dataclass(frozen=True)
class WrittenFields:
    """The recipe fields that a plugin writes with its default options; `fields` is None if they are unknown."""

    fields: tuple[str, ...] | None
    why: str = ""
    """Why the fields are unknown, and how to see them."""
    keys: tuple[str, ...] = field(default=(), compare=False)
    """The same as slots, lists, events and keys of settings ("batch['train']")."""


def written_by(plugin_class: type[Plugin], who: str, lacking: Mapping[str, str] | None = None) -> WrittenFields:
    """What `plugin_class` writes on two cards of compute capability 9.0, or on one if two are too many for it.

    Counts all options that `probe` offers. `lacking`: what the training loop has no place for, as in `Context`.

    Raises PluginError, which names `who`, if a hook raises.
    """
    see = f"add [plugins.{plugin_class.name}] to a profile and see `hwopt plan`"
    contexts = [replace(cards, lacking=lacking or {}) for cards in (TWO_CARDS, ONE_CARD)]
    with plugin_guard(who, "probe()"):
        try:
            options = plugin_class.Options()
        except ValidationError as error:
            missing = ", ".join(str(problem["loc"][0]) for problem in error.errors() if problem["loc"])
            return WrittenFields(None, f"depends on its options, and {missing or 'one of them'} has no default; {see}")
        decisions = [plugin_class(options).probe(context) for context in contexts]
        applied = [pair for pair in zip(decisions, contexts, strict=True) if pair[0].kind != "skip"]
    if not applied:
        return WrittenFields(None, f"skipped on two cards of compute capability 9.0: {decisions[0].reason}; {see}")
    decision, context = applied[0]
    recipe = Recipe()
    with recipe.written_by(who), plugin_guard(who, "apply()"):
        for each in decision.options or (options,):
            plugin_class(each).apply(recipe, context)
    return WrittenFields(recipe.fields_of(who), keys=tuple(recipe.written_by_author(who)))
