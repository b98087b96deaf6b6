"""The core names no plugin: each plugin declares its own aliases, advice and launcher settings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hwopt
from hwopt.plugin.registry import Registry

CORE = Path(hwopt.__file__).parent
NAMES = "|".join(map(re.escape, Registry().names))
AS_PLUGIN = re.compile(rf"plugins\.({NAMES})\b|\[plugins\.({NAMES})\]|plugin `?'?\"?({NAMES})\b['\"`]")


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every string constant, docstrings and the parts of f-strings included, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_module_of_the_core_names_a_plugin() -> None:
    found = [
        f"{path.relative_to(CORE)}:{line}: {text}"
        for path in sorted(CORE.rglob("*.py"))
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if AS_PLUGIN.search(text)
    ]
    assert found == []
