"""`hwopt plugins`: the installed optimizations, built-in and third-party."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import click

from hwopt.cli.options import format_option, lister, say, say_json
from hwopt.plugin.registry import Registry


def list_plugins(format_: str) -> None:
    registry = Registry()
    rows = [plugin_row(registry, name, writes=format_ == "json") for name in registry.names]
    if format_ == "json":
        return say_json(rows)
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        columns = f"{row['name']:<{width}}  {row['stage']:<12}  {row['effect']:<8}  {row['distribution']:<14}  {row['summary']}"
        say(columns, indent=" " * (width + 2))


plugins = lister("List the plugins, or show one with its options.", list_plugins)


@plugins.command("show", help="Show a plugin's options, what it writes, and where it comes from.")
@click.argument("name")
@format_option
def show(name: str, format_: str) -> None:
    registry = Registry()
    plugin = registry.plugin(name)
    row = plugin_row(registry, name, writes=True)
    row["module"] = f"{plugin.__module__}:{plugin.__qualname__}"
    schemas = plugin.Options.model_json_schema()["properties"] if plugin.Options.model_fields else {}
    row["options"] = [option(key, field, schemas[key]) for key, field in plugin.Options.model_fields.items()]
    row["about"] = inspect.getdoc(inspect.getmodule(plugin)) or ""
    if format_ == "json":
        return say_json(row)
    for line in (f"{row['name']}  ({row['distribution']}, {row['module']})", "", *row["about"].splitlines(), ""):
        say(line, indent="")
    say(f"stage      {row['stage']}" + (f", after {', '.join(row['after'])}" if row["after"] else ""))
    say(f"effect     {row['effect']}\nwrites     {row['writes_unknown'] or ', '.join(row['writes']) or 'nothing'}")
    if row["replaces"]:
        say(f"replaces   {', '.join(row['replaces'])}")
    say(f"\n[plugins.{name}]")
    for item in row["options"] or ():
        about = f"; {item['about']}" if item["about"] else ""
        say(f"{item['name']} = {item['default']}  # {item['type']}{about}", indent="  # ")
    if not row["options"]:
        click.echo("# no options")


def plugin_row(registry: Registry, name: str, *, writes: bool) -> dict[str, Any]:
    """The row of a plugin; `writes`: with the recipe fields that it writes, for which its hooks are called."""
    from hwopt.plugin.contract import effect_by_default

    plugin = registry.plugin(name)
    about = inspect.getdoc(inspect.getmodule(plugin)) or inspect.getdoc(plugin) or ""
    written: dict[str, Any] = {}
    if writes:
        from hwopt.plugin.written import written_by

        found = written_by(plugin, f"plugin {name!r} of {registry.distribution(name)}")
        written = {"writes": None if found.fields is None else list(found.fields), "writes_unknown": found.why}
    return {
        "name": name,
        "stage": plugin.stage.name,
        "after": list(plugin.relations.after),
        "effect": effect_by_default(plugin),
        "replaces": list(plugin.relations.replaces),
        **written,
        "distribution": registry.distribution(name),
        "summary": about.splitlines()[0] if about else "",
    }


TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "text", "object": "table", "null": "absent"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def option(key: str, field: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    default = "(required)" if field.is_required() else json.dumps(field.get_default(call_default_factory=True), default=str)
    about = " ".join((field.description or "").split())
    return {"name": key, "type": accepted_values(schema), "default": default, "about": about}


def accepted_values(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema accepts, in one line: `"auto" or int >= 0`."""
    if "anyOf" in schema:
        return " or ".join(accepted_values(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {accepted_values(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[name]}" for name, sign in BOUNDS.items() if name in schema]
    return " ".join([TYPES.get(schema.get("type", ""), "any value"), *bounds])
