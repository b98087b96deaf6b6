from __future__ import annotations

import pytest
from event_calls import calling

from hwopt.errors import PluginError
from hwopt.plugin.recipe import Collision, Recipe


def test_slot_set_by_two_plugins_is_an_error() -> None:
    recipe = Recipe()
    for author, value in (("plugin 'a' (p.toml:3)", len), ("plugin 'b' (p.toml:9)", sorted)):
        with recipe.written_by(author):
            recipe.optimizer = value
    assert recipe.collisions == (Collision("optimizer", "plugin 'a' (p.toml:3)", "plugin 'b' (p.toml:9)"),)
    assert recipe.optimizer is not None
    assert recipe.optimizer([1]) == 1, "the first author's value is kept"


def test_key_set_by_two_plugins_is_an_error() -> None:
    recipe = Recipe()
    with recipe.written_by("first"):
        recipe.batch["train"] = 4
        recipe.batch["eval"] = 8
    with recipe.written_by("second"):
        recipe.batch["train"] = 8
    assert recipe.collisions == (Collision("batch['train']", "first", "second"),)
    assert recipe.batch == {"train": 4, "eval": 8}
    assert recipe.author_of("batch['train']") == "first"
    assert recipe.author_of("cut") == "the core"


@pytest.mark.parametrize("order", [("winner", "loser"), ("loser", "winner")])
def test_replaced_field_belongs_to_the_replacing_plugin(order: tuple[str, str]) -> None:
    values = {"winner": len, "loser": sorted}
    recipe = Recipe({"optimizer": "winner", "batch['train']": "winner"})
    for author in order:
        with recipe.written_by(author):
            recipe.optimizer = values[author]
            recipe.batch["train"] = len(author)
    assert recipe.collisions == ()
    assert recipe.author_of("optimizer") == "winner"
    assert recipe.optimizer is not None
    assert recipe.optimizer([1]) == 1
    assert recipe.batch == {"train": len("winner")}


def test_writes_of_a_plugin_are_recorded() -> None:
    recipe = Recipe()
    with recipe.written_by("it"):
        recipe.loss = len
        recipe.model_kwargs.setdefault("dtype", "float32")
        recipe.model_steps.append(len)
        recipe.events.append(calling(on_gradients=len))
        recipe.accelerator["kwargs_handlers"].append(len)
    assert recipe.fields_of("it") == ("loss", "model_kwargs", "model_steps", "events", "accelerator")
    assert "events['on_gradients']" in recipe.written_by_author("it")
    assert recipe.fields_of("another") == ()


def test_same_plugin_may_set_a_key_twice() -> None:
    recipe = Recipe()
    with recipe.written_by("only"):
        recipe.batch["train"] = 4
        recipe.batch["train"] = 5
    assert recipe.batch["train"] == 5


@pytest.mark.parametrize("name", ["optimiser", "batch", "events", "model_steps", "anything"])
def test_only_slots_can_be_assigned(name: str) -> None:
    with pytest.raises(PluginError, match="cannot be set"):
        setattr(Recipe(), name, 1)


def test_lists_and_handlers_are_shared() -> None:
    recipe = Recipe()
    for author in ("first", "second"):
        with recipe.written_by(author):
            recipe.process.append(author)  # type: ignore[arg-type]
            recipe.accelerator["kwargs_handlers"].append(author)
    assert recipe.process == recipe.accelerator["kwargs_handlers"] == ["first", "second"]
