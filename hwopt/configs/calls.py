"""Calls in the syntax tree of a script, and what they do to a model before its trainer gets it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

TRL = "BCO|CPO|DPO|GKD|GRPO|KTO|NashMD|OnlineDPO|ORPO|PPO|PRM|Reward|RLOO|SFT|XPO"
MOVES = r"(\.(cuda|to|train)\(.*\))*"
TO_FP16 = re.compile(rf"(\w+|[\w.]+from_pretrained\(.*\)){MOVES}\.(half\(\)|to\(.*torch\.(float16|half)\b.*\)){MOVES}")


def changes(node: ast.AST, behind: Callable[[ast.expr], ast.expr]) -> Iterator[tuple[tuple[str, str], Any, int]]:
    """(key, value, line) for what the statements of a block do to a model before a trainer in it gets the model.

    Only that it becomes fp16, or has an adapter although the trainer of TRL gets `peft_config` too.
    """
    for block in (getattr(node, part, None) for part in ("body", "orelse")):
        became: dict[str, dict[str, int]] = {}  # name -> "fp16" or "adapter" -> line
        for each in block if isinstance(block, list) else ():
            match each:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                    kept = ast.unparse(call.func).startswith(f"{name}.to") or called(call) in ("get_peft_model", "cuda")
                    became[name] = became.get(name, {}) if kept else {}
                case ast.Expr(value=ast.Call() as call):
                    name = ast.unparse(call.func).partition(".")[0]
                    if called(call) == "float":
                        became[name] = {}
                case _:
                    continue
            if TO_FP16.fullmatch(ast.unparse(call)):
                became.setdefault(name, {})["fp16"] = call.lineno
            if called(call) == "get_peft_model" and not adds_adapter(call):
                became.setdefault(name, {})["adapter"] = call.lineno
            given = argument(call, "model") or next(iter(call.args), None)
            if called(call).endswith("Trainer") and isinstance(given, ast.Name):
                found, config = became.get(given.id, {}), argument(call, "peft_config")
                if "fp16" in found and "adapter" not in found:
                    yield ("model", "half"), True, found["fp16"]
                made = behind(config) if config and re.fullmatch(f"({TRL})Trainer", called(call)) else None
                if config and "adapter" in found and isinstance(made, ast.Call) and called(made).endswith("Config"):
                    yield ("Trainer", "peft_config"), "beside get_peft_model", config.lineno


def called(call: ast.Call) -> str:
    """The last part of the name of the function that `call` calls."""
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def key_of(node: ast.expr | None) -> str | None:
    """The key or name that a literal is; None if only a run knows it."""
    return str(node.value) if isinstance(node, ast.Constant) else None


def items(table: ast.expr) -> list[tuple[str | None, ast.expr]] | None:
    """The keys and values of a dictionary, or a call of `dict` or `update`; key None: not known, or `**`. None: another node."""
    if isinstance(table, ast.Dict):
        return list(zip(map(key_of, table.keys), table.values, strict=True))
    if isinstance(table, ast.Call) and called(table) in ("dict", "update"):
        first = chain.from_iterable(items(each) or [(None, each)] for each in table.args)
        return [*first, *((each.arg, each.value) for each in table.keywords)]
    return None


def argument(call: ast.expr | None, name: str) -> ast.expr | None:
    """The keyword argument `name` of a call."""
    return next((each.value for each in getattr(call, "keywords", ()) if each.arg == name), None)


def adds_adapter(call: ast.Call) -> bool:
    """Whether it is Unsloth's `get_peft_model`, which takes the arguments of LoraConfig; PEFT's takes a LoraConfig."""
    return called(call) == "get_peft_model" and any(keyword.arg == "r" for keyword in call.keywords)
