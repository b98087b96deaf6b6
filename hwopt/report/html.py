"""Fills the templates of this folder: pages that load nothing, in a light and a dark theme. Every text is escaped."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hwopt.text import cut, printable

MAX_VALUE, MAX_NAME = 160, 60
"""Characters of a cell, and of the first cell of a row."""


def render(template: str, title: str, **values: Any) -> str:
    """The page that `template` makes of `values`. Control characters are shown."""
    environment = Environment(
        loader=PackageLoader("hwopt", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    environment.filters["shortened"] = lambda sheet: sheet.shortened(MAX_NAME, MAX_VALUE)
    return environment.get_template(template).render(title=cut(printable(title), 200), version=version("hwopt"), **values)
