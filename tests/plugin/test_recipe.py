import pytest
from event_calls import calling

from hwopt.errors import PluginError
from hwopt.plugin.guard import guarded_context
from hwopt.plugin.recipe import LISTS, SLOTS, Collision, Recipe
from hwopt.plugin.run_view import EVENTS


def test_slot_or_key_set_by_two_plugins_is_an_error() -> None:
    recipe = Recipe()
    for author, value in (("first", len), ("second", sorted)):
        with recipe.written_by(author):
            recipe.optimizer = value
            recipe.batch["train"] = len(author)
            recipe.batch["train"] = len(author)  # the same plugin may set a key twice
    assert recipe.collisions[:2] == (Collision("optimizer", "first", "second"), Collision("batch['train']", "first", "second"))
    assert (recipe.optimizer([1]), recipe.batch) == (1, {"train": 5}), "the first author's values are kept"
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


@pytest.mark.parametrize("name", ["optimiser", "batch"])
def test_only_slots_can_be_assigned(name: str) -> None:
    with pytest.raises(PluginError, match="cannot be set"):
        setattr(Recipe(), name, 1)


def test_lists_and_handlers_are_shared() -> None:
    recipe = Recipe()
    for author in ("first", "second"):
        with recipe.written_by(author):
            recipe.process.append(author)
            recipe.accelerator["kwargs_handlers"].append(author)
    assert list(recipe.process) == list(recipe.accelerator["kwargs_handlers"]) == ["first", "second"]


class Swallowing:
    """A context that suppresses errors, and raises one itself if it is told to."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.seen = fails, ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self.seen = repr(error)
        if self.fails:
            raise RuntimeError("cannot restore")
        return True


@pytest.mark.parametrize(("fails", "expected"), [(False, "of the run"), (True, "plugin 'a': recipe.process .*cannot restore")])
def test_process_context_sees_errors_of_the_run_and_cannot_suppress_them(fails: bool, expected: str) -> None:
    recipe, context = Recipe(), Swallowing(fails)
    with recipe.written_by("plugin 'a'"):
        recipe.process.append(lambda: context)
    with pytest.raises(PluginError if fails else ValueError, match=expected), guarded_context(recipe.process[0]):
        raise ValueError("of the run")
    assert "of the run" in context.seen


def boom(*_: object) -> None:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize("field", [*SLOTS, *LISTS, *EVENTS, "accelerator"])
def test_error_of_every_callable_names_its_plugin(field: str) -> None:
    recipe = Recipe()
    with recipe.written_by("plugin 'a' (mine.toml:4)", "some-tools 1.0"):
        if field in SLOTS:
            setattr(recipe, field, boom)
        elif field in LISTS:
            getattr(recipe, field).append(boom)
        elif field in EVENTS:
            recipe.events.append(calling(**{field: boom}))
        else:
            recipe.accelerator["dataloader_config"] = boom
    found = getattr(recipe.events if field in EVENTS else recipe, field)
    with pytest.raises(PluginError, match=r"plugin 'a' \(mine\.toml:4\) of some-tools 1\.0: recipe\..*ZeroDivisionError: boom"):
        (found[0] if field in LISTS else found["dataloader_config"] if field == "accelerator" else found)()
