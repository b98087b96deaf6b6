"""The arguments in a Python script as entries: read from its syntax tree, never executed.

Read are the keywords of the first TrainingArguments, SFTConfig or similar, of LoraConfig,
BitsAndBytesConfig and EarlyStoppingCallback, of a model's `from_pretrained`, and `model.config.use_cache = …`. Values are
literals, names and fields of classes that the script assigns once, defaults of argparse and of a function that it does not
call itself, keys of a dictionary, products and sums of them, and `**{…}`. Others are listed as not read.
"""

from __future__ import annotations

import ast
import io
import operator
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from hwopt.configs.calls import TRL, adds_adapter, argument, called, changes, items, key_of
from hwopt.configs.source_file import Entry, SourceFile, with_comments
from hwopt.errors import InputError
from hwopt.text import cut, first_line

ARGUMENTS = re.compile(rf"\w*TrainingArguments|({TRL})Config")
PARTS = ("LoraConfig", "BitsAndBytesConfig", "EarlyStoppingCallback")
PLAIN_TRAINERS = {"Trainer", "Seq2SeqTrainer"}
PATIENCE = "early_stopping_patience"
MODEL_LOADED = re.compile(r"(^|\.)(\w*Model|\w+For[A-Z])\w*\.from_pretrained$")
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
ARITHMETIC[ast.FloorDiv] = operator.floordiv
ENUMERATIONS = ("torch", "IntervalStrategy", "SaveStrategy", "SchedulerType", "OptimizerNames", "TaskType")


def from_python(text: str, name: str) -> SourceFile:
    """The entries of a script. Raises InputError if it is not valid, or makes no arguments."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(f"{name}:{error.lineno or 1}: is not valid Python: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name}: cannot be read as Python: {first_line(error)}") from error
    script = PythonScript(tree)
    made = [call for call in script.calls if ARGUMENTS.fullmatch(called(call))]
    if not made:
        raise InputError(
            f"{name}: has no call of TrainingArguments, SFTConfig or another class of arguments; "
            "check the YAML or JSON file that the script reads its arguments from"
        )
    first: dict[tuple[str, ...], Entry] = {}
    for entry in (*script.assigned(made[0]), *chain(*map(script.entries, script.read(made[0])))):
        first.setdefault(entry.path, entry)
    number = Counter(map(called, script.calls)) | {called(made[0]): len(made), "from_pretrained": 1}
    read = dict.fromkeys(map(called, script.read(made[0])))
    calls = [f"{each} (the first of {number[each]} calls)" if number[each] > 1 else each for each in read]
    source = SourceFile(name, "Python", tuple(first.values()), calls=tuple(calls), keywords=tuple(script.keywords()))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {each.start[0]: each.string.lstrip("#").strip() for each in tokens if each.type == tokenize.COMMENT}
    return with_comments(source, text, comments)


class PythonScript:
    """A syntax tree with the names that it assigns once."""

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = nodes = list(ast.walk(tree))
        self.assignments = [(each, each.targets[0]) for each in nodes if isinstance(each, ast.Assign)]
        calls = [each for each in nodes if isinstance(each, ast.Call)]
        self.calls = sorted(calls, key=lambda call: (call.lineno, call.col_offset))
        own = [node for node in nodes if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("transformers")]
        self.own = {alias.asname or alias.name for node in own for alias in node.names}
        self.own |= {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        self.has_lora = any(called(call) == "LoraConfig" or adds_adapter(call) for call in self.calls)
        self.values = dict(self.names())
        fields = list(self.fields())
        once = Counter(name for name, _ in fields)
        self.attributes = {name: value for name, value in fields if value is not None and once[name] == 1}
        self.stored = self.stored_keys()

    def names(self) -> Iterator[tuple[str, ast.expr]]:
        """(name, value) of the names that the script binds once: in an assignment, or as the default of a function's argument.

        Defaults count for functions that no code of the script calls, but that fire or typer starts.
        """
        bound = Counter(node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        bound.update(node.arg for node in self.nodes if isinstance(node, ast.arg))
        bound.update(node.asname or node.name for node in self.nodes if isinstance(node, ast.alias))
        starts = [call for call in self.calls if called(call) in ("Fire", "run")]  # of fire and typer
        fired = {name.id for call in starts for name in call.args if isinstance(name, ast.Name)}
        invoked = {node.id for node in self.nodes if isinstance(node, ast.Name)} - fired
        invoked |= {"__init__", *(called(call) for call in self.calls)}
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if isinstance(targets[0], ast.Name) and len(targets) == bound[targets[0].id] == 1:
                    yield targets[0].id, node.value
            elif isinstance(node, ast.FunctionDef) and node.name not in invoked:
                plain = zip([*node.args.posonlyargs, *node.args.args][::-1], node.args.defaults[::-1], strict=False)
                given = (*plain, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
                yield from ((each.arg, value) for each, value in given if value is not None and bound[each.arg] == 1)

    def stored_keys(self) -> dict[str, dict[str | None, ast.expr]]:
        """Name of a dictionary -> its keys that a statement or `update` sets later, with the node; key None: not known."""
        stored: dict[str, dict[str | None, ast.expr]] = {}
        for node in self.nodes:
            match node:
                case ast.Subscript(ctx=ast.Store() | ast.Del()) if found := re.match(r"(\w+)\[(?:'(.*?)')?", ast.unparse(node)):
                    stored.setdefault(found[1], {})[found[2]] = node
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update")):
                    stored.setdefault(name, {}).update({key: node for key, _ in items(node) or ()})
        return stored

    def fields(self) -> Iterator[tuple[str, ast.expr | None]]:
        """(name, value) of the attributes that classes, argparse, calls and assignments set; None: not known, or no default."""
        own: dict[str, set[str]] = {}  # class of the script -> its fields
        for node in self.nodes:
            match node:
                case ast.ClassDef(name=name, bases=bases, body=body):
                    own[name] = set().union(*(own.get(ast.unparse(base), ()) for base in bases))
                    for each in body:
                        if isinstance(each, ast.Assign | ast.AnnAssign):
                            target, value = each.targets[0] if isinstance(each, ast.Assign) else each.target, each.value
                            field = isinstance(value, ast.Call) and called(value) == "field"
                            own[name].add(ast.unparse(target))
                            yield ast.unparse(target), argument(value, "default") if field else value
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=options):
                    words = (argument(node, "dest"), *sorted(options, key=lambda each: not ast.unparse(each).startswith("'--")))
                    name, value = str(next(filter(None, map(key_of, words)), "")), argument(node, "default")
                    yield name.lstrip("-").replace("-", "_"), None if key_of(value) == "None" else value
                case ast.Call(args=args, keywords=given):
                    names, theirs = {each.arg for each in given}, own.get(called(node), set())
                    some = theirs if args or None in names else names & theirs
                    changed = names if called(node) in ("replace", "set_defaults") else some
                    yield from ((str(name), None) for name in changed)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    yield name, None

    def keywords(self) -> Iterator[tuple[str, str, int]]:
        """(function with its module, keyword, line) of all calls of imported names; of an import itself, keyword "".

        Not of imports in a `try` or an `if` statement, which may ask for the version.
        """
        imported: dict[str, str] = {}
        tried = {id(each) for node in self.nodes if isinstance(node, ast.Try | ast.If) for each in ast.walk(node)}
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
                above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                imported |= {each.asname or each.name: above + each.name for each in node.names}
                if above and id(node) not in tried:
                    yield from ((above + each.name, "", node.lineno) for each in node.names if each.name != "*")
        for call in self.calls:
            name, dot, rest = ast.unparse(call.func).partition(".")
            for keyword in call.keywords if name in imported else ():
                given = self.given(keyword.arg, keyword.value, keyword.lineno)
                yield from ((imported[name] + dot + rest, word, line) for word, _, line in given if word)

    def read(self, arguments: ast.Call) -> list[ast.Call]:
        """The calls whose keywords are read: of several calls of a function, which may be alternatives, the first one."""
        parts = set(PARTS) - ({PARTS[2]} & self.own)  # many scripts have a callback of that name with other arguments
        loads = MODEL_LOADED.search
        others = [each for each in self.calls if called(each) in parts or loads(ast.unparse(each.func)) or adds_adapter(each)]
        first = {called(each): each for each in reversed(others)}
        return [arguments, *sorted(first.values(), key=others.index)]

    def entries(self, call: ast.Call) -> Iterator[Entry]:
        """The arguments of `call`; those of other calls than the main one with its name in front."""
        name = called(call)
        above = () if ARGUMENTS.fullmatch(name) else (name,)
        if name == "LoraConfig" or adds_adapter(call):
            yield Entry(("use_peft",), True, call.lineno)
        first = {"from_pretrained": "model_name_or_path", **dict.fromkeys(PARTS[:2]), PARTS[2]: PATIENCE}.get(name, "output_dir")
        for each in call.args[: first is not None and not adds_adapter(call)]:
            yield from self.entry((*above, str(first)), each, each.lineno)
        if first == PATIENCE and not call.args and not {PATIENCE, None} & {keyword.arg for keyword in call.keywords}:
            yield Entry((*above, PATIENCE), 1, call.lineno)  # the default
        for keyword in call.keywords:
            for word, value, line in self.given(keyword.arg, keyword.value, keyword.lineno):
                if word:
                    yield from self.entry((*above, word), value, line)
                else:
                    yield Entry((*above, "**"), cut(ast.unparse(value)), line, interpolated=True)

    def given(self, name: str | None, value: ast.expr, line: int) -> Iterator[tuple[str | None, ast.expr, int]]:
        """(name, value, line) of a keyword, or of each one behind `**` (`name` None); the name stays None if a run makes it."""
        table = items(self.behind(value)) if name is None else None
        if table is None:
            yield name, value, line
            return
        stored = self.stored.get(value.id, {}) if isinstance(value, ast.Name) else {}
        found: dict[str | None, tuple[ast.expr, int]] = {}
        for key, part in (*table, *stored.items()):
            known = key is not None or part in stored.values()
            for word, each, place in [(key, part, part.lineno)] if known else self.given(None, part, part.lineno):
                if word is None:  # it may change the keys before it
                    found = dict.fromkeys(found, (each, place))
                found[word] = each, place
        yield from ((word, *each) for word, each in found.items())

    def entry(self, path: tuple[str, ...], value: ast.expr, line: int) -> Iterator[Entry]:
        behind = self.behind(value)
        if isinstance(behind, ast.Call) and called(behind) in PARTS:
            return  # read on its own
        try:
            found = self.value(value)
        except (TypeError, ValueError, SyntaxError, RecursionError, ArithmeticError):
            yield Entry(path, cut(ast.unparse(value)), line, interpolated=True)
            return
        if isinstance(found, dict) and found:
            for key, part in found.items():
                yield Entry((*path, str(key)), part, line)
        else:
            yield Entry(path, found, line)

    def behind(self, node: ast.expr, depth: int = 9) -> ast.expr:
        """`node`, or what the script assigns to it if it is a name, an attribute or a key of a dictionary."""
        found = None
        match node:
            case ast.Name(id=name):
                found = self.values.get(name)
            case ast.Attribute(attr=name):
                found = self.attributes.get(name)
            case ast.Subscript(value=table, slice=ast.Constant(value=key), ctx=ast.Load()):
                found = {word: value for word, value, _ in self.given(None, table, 0)}.get(str(key))
        return node if found is None or not depth else self.behind(found, depth - 1)

    def value(self, node: ast.expr) -> Any:
        """The value of a literal, or of a name for one. Raises ValueError and others for what only a run of the script knows."""
        match self.behind(node):
            case ast.Attribute(value=ast.Name(id=base), attr=name) if base in ENUMERATIONS:
                return name.lower()
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=given):
                return {str(each.arg): self.value(each.value) for each in given}
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in ARITHMETIC:
                numbers = self.value(left), self.value(right)
                if not all(isinstance(each, int | float) for each in numbers):
                    raise ValueError(operation)
                return ARITHMETIC[type(operation)](*numbers)
            case literal:
                return ast.literal_eval(literal)

    def assigned(self, arguments: ast.Call) -> Iterator[Entry]:
        """Fields of `arguments` set later, as deep in the script; `model.config.use_cache = …`; that no trainer has metrics, or
        an eval_dataset; that inputs get gradients; and that an adapter may be there, if peft is named.
        """
        trainers = [call for call in self.calls if called(call).endswith("Trainer")]
        text = " ".join(map(ast.unparse, trainers))
        if trainers and {*map(called, trainers)} <= PLAIN_TRAINERS - self.own and "*" not in text:
            words = ("compute_metrics", "eval_dataset")[: 1 if any(call.args[4:] for call in trainers) else 2]
            yield from (Entry(("Trainer", word), "not given", trainers[0].lineno) for word in words if f"{word}=" not in text)
        made = {(ast.unparse(target), each.col_offset) for each, target in self.assignments if each.value is arguments}
        for each, target in self.assignments:
            if isinstance(target, ast.Attribute) and (ast.unparse(target.value), each.col_offset) in made:
                yield from self.entry((target.attr,), each.value, each.lineno)
        for node in self.nodes:
            yield from (Entry(path, value, line) for path, value, line in changes(node, self.behind))
            match node:
                case ast.Assign(targets=[ast.Attribute(attr="use_cache") as target], value=value):
                    yield from self.entry(("use_cache",), value, target.lineno)
                case ast.Call() if called(node) in ("enable_input_require_grads", "prepare_model_for_kbit_training"):
                    yield Entry(("input_require_grads",), True, node.lineno)
                case ast.Import() | ast.ImportFrom() | ast.Call() if not self.has_lora:
                    text = called(node) if isinstance(node, ast.Call) else ast.unparse(node)
                    if "peft" in text.lower():
                        yield Entry(("use_peft",), "peft", node.lineno, interpolated=True)
