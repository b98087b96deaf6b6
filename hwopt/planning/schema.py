"""JSON Schemas of jobs and profiles, for editors: completion, descriptions, and unknown keys marked while typing.

The tables of the plugins are those of the installed ones. Rules over several keys are not in a schema; `hwopt plan` checks them.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from hwopt.config.job import Job
from hwopt.config.profile import Content
from hwopt.plugin import Plugin
from hwopt.plugin.registry import Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MODELS: dict[str, type[BaseModel]] = {"job": Job, "profile": Content}
NULL = {"type": "null"}
Schema = dict[str, Any]


def schema(which: Literal["job", "profile"], registry: Registry | None = None) -> Schema:
    """The JSON Schema of a job or of a profile, with a table for each plugin of `registry` (default: the installed ones)."""
    registry = registry or Registry()
    plugins = {name: registry.plugin(name) for name in registry.names}
    mode: JsonSchemaMode = "validation"
    own = tables_of(MODELS[which])
    models: list[type[BaseModel]] = [*own, *(plugin.Options for plugin in plugins.values())]
    found, shared = models_json_schema([(model, mode) for model in models], ref_template="#/$defs/{model}")
    definitions: dict[str, Schema] = shared.get("$defs", {})

    def definition(model: type[BaseModel]) -> Schema:
        return definitions[found[model, mode]["$ref"].rpartition("/")[2]]

    tables = {name: plugin_table(name, plugin, definition(plugin.Options)) for name, plugin in plugins.items()}
    root = definition(MODELS[which])
    root["properties"]["plugins"] = {
        "type": "object",
        "description": "One table for each optimization; `hwopt plugins` lists them.",
        "properties": tables,
        "additionalProperties": False,
    }
    inlined = [root, *(definition(plugin.Options) for plugin in plugins.values())]
    others = {name: part for name, part in definitions.items() if not any(part is each for each in inlined)}
    made: Schema = without_null({"$schema": DIALECT, **root, "title": f"hwopt {which}", "$defs": others})
    return made


def plugin_table(name: str, plugin: type[Plugin], options: Schema) -> Schema:
    """The schema of `[plugins.<name>]`. No option is required: it may stand in the profile, or in its parent."""
    about = inspect.getdoc(inspect.getmodule(plugin)) or inspect.getdoc(plugin) or ""
    enabled = {"type": "boolean", "default": True, "description": "false: leave the plugin out."}
    return {
        **{key: value for key, value in options.items() if key != "required"},
        "title": name,
        "description": about.split("\n\n")[0].replace("\n", " "),
        "properties": {**options.get("properties", {}), "enabled": enabled},
    }


def without_null(part: Any) -> Any:
    """`part` of a schema without null, which TOML lacks, and without the defaults of whole tables."""
    if isinstance(part, list):
        return [without_null(each) for each in part]
    if not isinstance(part, dict):
        return part
    found = {
        key: without_null(value)
        for key, value in part.items()
        if not (key == "default" and (value is None or ("$ref" in part and isinstance(value, dict))))
    }
    if NULL in found.get("anyOf", ()):
        choices = [choice for choice in found.pop("anyOf") if choice != NULL]
        found |= choices[0] if len(choices) == 1 else {"anyOf": choices}
    return found


def tables_of(model: type[BaseModel]) -> list[type[BaseModel]]:
    """`model` and the models of the tables in it."""
    found = [model]
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += tables_of(part)
    return found
