from __future__ import annotations

import pytest

from hwopt.errors import PluginError
from hwopt.plugin.recipe import Recipe


def test_a_slot_set_twice_names_both_authors() -> None:
    recipe = Recipe()
    with recipe.written_by("plugin 'a' (p.toml:3)"):
        recipe.optimizer = lambda groups: groups
    with recipe.written_by("plugin 'b' (p.toml:9)"), pytest.raises(PluginError, match=r"'a' \(p.toml:3\).*'b' \(p.toml:9\)"):
        recipe.optimizer = lambda groups: groups


def test_a_key_set_twice_names_both_authors() -> None:
    recipe = Recipe()
    with recipe.written_by("first"):
        recipe.batch["train"] = 4
        recipe.batch["eval"] = 8
    with recipe.written_by("second"), pytest.raises(PluginError, match=r"batch\['train'\].*first.*second"):
        recipe.batch["train"] = 8
    assert recipe.batch == {"train": 4, "eval": 8}
    assert recipe.author_of("batch['train']") == "first"
    assert recipe.author_of("cut") == "the core"


def test_the_same_author_may_change_its_mind() -> None:
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
