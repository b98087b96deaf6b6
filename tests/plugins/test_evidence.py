"""Rules for the evidence of every installed plugin: what it may read, and that a mutation of a library turns it inactive."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from mutations.data import DATA
from mutations.model import MODEL
from mutations.process import PROCESS
from mutations.ranks import ZERO
from mutations.update import UPDATE

from hwopt.plugin import Context, Decision, Evidence, Plugin, RunView, Stage
from hwopt.plugin.registry import Registry
from hwopt.testing.observed_run import NOT_OBSERVED, observed_evidence

IN_INTEGRATION = {"fsdp": "tests/integration/test_fsdp.py"}
"""Plugins whose mutation needs several ranks -> the file with it, in `test_evidence_of_NAME_...`."""
ASKED_FOR = {"options", *NOT_OBSERVED} - {"batch", "loss"}
"""Attributes that hold what was asked for; the other two are no others' names in these modules."""


def functions(plugin: type[Plugin]) -> Iterator[ast.FunctionDef]:
    """`evidence` of `plugin`, and the functions of its module that it calls, directly or through another one."""
    tree = ast.parse(inspect.getsource(sys.modules[plugin.__module__]))
    helpers = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    methods = [node for cls in tree.body if isinstance(cls, ast.ClassDef) and cls.name == plugin.__name__ for node in cls.body]
    waiting = [node for node in methods if isinstance(node, ast.FunctionDef) and node.name == "evidence"]
    seen: set[str] = set()
    while waiting:
        function = waiting.pop()
        yield function
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & helpers.keys() - seen
        waiting += [helpers[name] for name in sorted(names)]
        seen |= names


def reads(function: ast.FunctionDef) -> list[str]:
    """What `function` reads of the options, the plan or the recipe, with its line."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            of_run = isinstance(node.value, ast.Name) and node.value.id == "run" and node.attr in NOT_OBSERVED
            if node.attr in ASKED_FOR or of_run:
                found.append(f"{function.name}, line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Constant) and node.value in ASKED_FOR:  # getattr(run, "plan")
            found.append(f"{function.name}, line {node.lineno}: {node.value!r}")
    return found


@pytest.mark.parametrize("name", Registry().names)
def test_evidence_reads_no_options_plan_or_recipe(name: str) -> None:
    checked = list(functions(Registry().plugin(name)))
    assert checked, "the plugin has an evidence() of its own"
    assert [each for function in checked for each in reads(function)] == []


@pytest.mark.parametrize(
    "line", ["self.options.rows", "run.plan", "run.recipe.cut", 'getattr(run, "plan")', "run.training", "run.batch"]
)
def test_rule_finds_what_evidence_may_not_read(line: str) -> None:
    (function,) = ast.parse(f"def evidence(self, run):\n    return {line}").body
    assert isinstance(function, ast.FunctionDef)
    assert reads(function) != []


@pytest.mark.parametrize("name", Registry().names)
def test_every_plugin_has_a_mutation_that_turns_its_evidence_inactive(name: str) -> None:
    if name in IN_INTEGRATION:
        text = (Path(__file__).parents[2] / IN_INTEGRATION[name]).read_text(encoding="utf-8")
        assert f"def test_evidence_of_{name}_" in text
        return
    assert name in {mutation.plugin for mutation in (*DATA, *MODEL, *PROCESS, *UPDATE, *ZERO)}, (
        f"Add a Mutation for {name!r} to a table of tests/mutations: a change to the library that it uses, after which it has no "
        "effect. Its evidence must then be inactive"
    )


class Trusting(Plugin):
    name = "trusting"
    stage = Stage.LOOP

    def probe(self, context: Context) -> Decision:
        return Decision.apply("always on")

    def evidence(self, run: RunView) -> Evidence:
        return Evidence.active("on") if self.options.on else Evidence.inactive("off")


class Planned(Trusting):
    def evidence(self, run: RunView) -> Evidence:
        return Evidence.active(f"{run.plan.batch} rows")


@pytest.mark.parametrize(("plugin", "why"), [(Trusting, "reads options.on"), (Planned, "reads run.plan")])
def test_contract_test_refuses_evidence_from_what_was_asked_for(plugin: type[Plugin], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        observed_evidence(plugin(SimpleNamespace(on=True)), SimpleNamespace(plan=SimpleNamespace(batch=8)))
