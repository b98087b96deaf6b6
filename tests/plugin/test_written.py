"""The recipe fields that plugins write are found by calling apply, without declarations."""

import pytest
from applied import Applied
from event_calls import calling
from pydantic import Field

from hwopt.errors import PluginError
from hwopt.plugin import Context, Decision, Plugin, PluginOptions, Recipe
from hwopt.plugin.written import WrittenFields, written_by


class Base(Applied):
    name = "mine"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(print)
        recipe.events.append(calling(on_saved=print))


class Number(PluginOptions):
    number: int = Field(gt=0)


class Required(Base):
    Options = Number


class Skipped(Base):
    def probe(self, context: Context) -> Decision:
        return Decision.skip("needs a quantum computer, found two cards")


class Broken(Base):
    def apply(self, recipe: Recipe, context: Context) -> None:
        raise RuntimeError("boom")


def test_lists_and_events_count_without_a_declaration() -> None:
    assert written_by(Base, "plugin 'mine'") == WrittenFields(("model_steps", "events"))


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        (Required, "depends on its options, and number has no default; add [plugins.mine] to a profile and see `hwopt plan`"),
        (Skipped, "skipped on two cards of compute capability 9.0: needs a quantum computer, found two cards; add"),
    ],
)
def test_unknown_writes_show_the_reason(plugin: type[Plugin], why: str) -> None:
    found = written_by(plugin, "plugin 'mine'")
    assert found.fields is None
    assert found.why.startswith(why)


def test_hook_that_raises_names_the_plugin() -> None:
    with pytest.raises(PluginError, match=r"plugin 'mine' of mine 1.0: apply\(\) raised RuntimeError: boom"):
        written_by(Broken, "plugin 'mine' of mine 1.0")
