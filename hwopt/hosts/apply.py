"""`apply`: puts single plugins on a model, for a loop that uses nothing else of hwopt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hwopt.errors import PluginError
from hwopt.hosts.additivity import device_of, gives_words_to_loss, inner, replaced_part, shifts_labels
from hwopt.hosts.limits import refuse_prepared
from hwopt.hosts.script_plan import Script, plan_for
from hwopt.hosts.script_run import ScriptRun, with_lines
from hwopt.planning.plan import Plan
from hwopt.plugin.recipe import LISTS, SETTINGS, SLOTS, Recipe
from hwopt.plugin.registry import Registry
from hwopt.training.listener import Listener

MODEL_FIELDS = ("process", "model_kwargs", "model_steps", "trainer", "loss", "final_steps")
"""Fields of the recipe that concern the model and the process alone."""
MODEL_LACKS = {
    field: "apply() changes the model and the process alone; hwopt.session applies it in a loop"
    for field in (*SLOTS, *LISTS, *SETTINGS, "events")
    if field not in MODEL_FIELDS
}
"""Field of the recipe -> why the plugin that writes it is skipped."""
LOSS_WORDS = {"shift_labels", "ignore_index"}
"""Arguments of `forward` that change the model's own loss: with one of them it computes that."""
SAVED_MODEL = "it makes another model, which could not be undone; load or prepare the model with it"


class Applied(ExitStack):
    """Plugins in effect on a model, until `undo()` or the end of a `with` block."""

    def __init__(self, plan: Plan, skipped: Mapping[str, str]) -> None:
        super().__init__()
        self.plan = plan
        self.skipped = dict(skipped)
        """Plugin -> why it was not applied."""

    def undo(self) -> None:
        """Restore the process and the attributes of the model that the plugins changed, except those that changed again since."""
        self.close()


def apply(
    model: Any,
    plugins: Iterable[str],
    profile: str = "auto",
    *,
    strict: bool = True,
    listener: Listener | None = None,
    **options: Mapping[str, Any],
) -> Applied:
    """Apply `plugins` to `model`, a model of transformers, in place. `options`: plugin -> its options; else the profile's.

    A loss of a plugin is computed in calls of the training mode with `labels`: the output then has `loss`, and no `logits`.
    Raises PluginError for each plugin that is skipped, with the reason; with `strict=False`, `skipped` names it instead.
    Raises InputError as `hwopt.resolve` does.
    """
    refuse_prepared(model)
    names = list(dict.fromkeys([*([plugins] if isinstance(plugins, str) else plugins), *options]))
    tables: dict[str, Any] = dict.fromkeys(Registry().names, False) | {name: options.get(name, True) for name in names}
    plan = plan_for(model, profile, Script(1, 1, {}, lacks=MODEL_LACKS), tables).plan
    skipped = {entry.name: reason for entry in plan.entries if entry.name in names and (reason := why_not(entry, plan, model))}
    if skipped and strict:
        raise PluginError("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    applied = Applied(plan, skipped)
    run = ScriptRun(plan, device_of(model), Path(), with_lines(listener))
    with ExitStack() as stack:
        stack.enter_context(run.process())
        changes = Changes(model)
        stack.callback(changes.undo)
        for entry in plan.entries:
            decision = "skip" if entry.name in skipped else entry.decision
            run.say(f"{decision:8} {entry.name}: {skipped.get(entry.name, entry.reason)}")
            if decision == "skip":
                continue
            recipe = recipe_of(entry, plan)
            if kernel := recipe.model_kwargs.get("attn_implementation"):
                model.set_attn_implementation(kernel)
            if recipe.loss is not None:
                compute_loss_in(model, recipe.loss, recipe, run)
                continue
            for step in recipe.model_steps:
                step(model, run)
        changes.seen()
        applied.push(stack.pop_all())
    return applied


def why_not(entry: Any, plan: Plan, model: Any) -> str:
    """Why the plugin of `entry` is not applied to `model`; "" if it is."""
    written = plan.recipe.fields_of(entry.author)
    if entry.decision == "skip":
        return str(entry.reason)
    if makes_another_model(written):
        return SAVED_MODEL
    return loss_problem(model) if "loss" in written else ""


def loss_problem(model: Any) -> str:
    """Why a plugin's loss cannot stand for that of `model`; "" if it can."""
    if hasattr(model, "config") and getattr(model.config.get_text_config(), "output_router_logits", False):
        return "the model adds the load-balancing loss of its router to its own loss"
    if "liger_kernel" in getattr(model.forward, "__module__", ""):
        return "Liger computes the loss of this model already"
    return ""


def recipe_of(entry: Any, plan: Plan) -> Recipe:
    """What the plugin of `entry` alone writes."""
    recipe = Recipe()
    entry.plugin.apply(recipe, plan.context)
    return recipe


def compute_loss_of_plan(run: ScriptRun) -> None:
    """Let the model of `run` compute the plan's loss in training steps, until `run.process` ends; or leave it out and say why."""
    author, model = run.recipe.author_of("loss"), inner(run.inner_model)
    entry = next((each for each in run.plan.applied() if each.author == author), None)
    if entry is None:
        return
    recipe, changes, why = recipe_of(entry, run.plan), Changes(model), loss_problem(model)
    if own := replaced_part(model):
        why = f"{own} of the model is yours"
    elif not why and not gives_words_to_loss(model):
        why = f"{type(model).__name__} computes its loss without loss_function"
    try:
        for step in () if why else (*recipe.model_steps, *recipe.final_steps):
            step(model, run)
    except PluginError as error:  # such as an output layer that an adapter of the user's trains
        why = str(error)
    if why:
        run.leave_out({"loss": why})
        return
    compute_loss_in(model, recipe.loss, recipe, run)
    run.below_loss = model.base_model  # the loss changes the model in each call, which a compiled graph cannot
    changes.seen()
    run.stack.callback(changes.undo)


def makes_another_model(fields: Container[str]) -> bool:
    """Whether a plugin that writes these fields of the recipe changes the model that is saved."""
    return "final_steps" in fields and "loss" not in fields


def compute_loss_in(model: Any, loss_of: Any, recipe: Recipe, run: ScriptRun) -> None:
    """Let `model.forward` compute `loss_of`, the loss of `recipe`, in training, wherever it is called with labels."""
    plain = model.forward
    shifted = shifts_labels(model)

    def forward(*inputs: Any, labels: Any = None, num_items_in_batch: Any = None, **named: Any) -> Any:
        if labels is None or not model.training or named.get("return_dict") is False or LOSS_WORDS & named.keys():
            counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            return plain(*inputs, labels=labels, **counted, **named)
        for step in recipe.model_steps:
            step(model, run)
        try:
            outputs = plain(*inputs, **named)
        finally:
            for step in recipe.final_steps:
                step(model, run)
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shifted else labels
        loss, count = loss_of(outputs, targets.to(outputs.logits.device))
        outputs.loss = loss / (count if num_items_in_batch is None else num_items_in_batch)
        outputs.logits = None
        return outputs

    model.forward = ReplacedForward(plain, forward)


class ReplacedForward:
    """A `forward` in place of a model's own, `plain`. A copied or pickled model has its own."""

    def __init__(self, plain: Callable[..., Any], forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, plain)
        self.plain, self.forward = plain, forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.forward(*inputs, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


class Changes:
    """What changes in the attributes and hooks of the modules of `model` and in its config, until `seen()`."""

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        configs = {id(each.config): each.config for each in modules if hasattr(each, "config")}
        self.tables = [vars(each) for each in (*modules, *configs.values())]
        values = [each for table in self.tables for each in table.items()]
        self.tables += [value for name, value in values if name.endswith("_hooks") and isinstance(value, dict)]
        self.before = [dict(table) for table in self.tables]
        self.changed: list[tuple[dict[Any, Any], Any, Any, Any]] = []  # (table, name, value before, value now)

    def seen(self) -> None:
        for table, old in zip(self.tables, self.before, strict=True):
            found = ((table, name, old.get(name, self), table.get(name, self)) for name in {*table, *old})
            self.changed += [each for each in found if each[2] is not each[3]]

    def undo(self) -> None:
        """Restore the value before, unless it changed again since."""
        for table, name, old, new in self.changed:
            if table.get(name, self) is not new:
                continue
            if old is self:
                del table[name]
            else:
                table[name] = old
