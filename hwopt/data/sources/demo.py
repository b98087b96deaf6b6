"""The embedded demo: the job that hwopt trains if none is given. Needs no network.

The task is to classify docstrings by their package of the Python standard library. Data: the eight packages with the most
docstrings, read from the sources of the running Python and written once to the cache. Model: a small BERT with random weights and
a trained tokenizer.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hwopt.config.toml import Document
from hwopt.data.stores.token_store import write_cache_folder
from hwopt.errors import DataError

FORMAT = 2
PACKAGES = 8
CANDIDATES = 2 * PACKAGES
"""Packages that are parsed: those with the most triple quotes, which are counted ten times faster than docstrings."""
MIN_SAMPLES = 400
MIN_WORDS = 3
HELD_OUT = 5  # every fifth sample is used for evaluation
EXCLUDED = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}


def demo_document(cache: Path) -> Document:
    """The demo as a job document; its data files are written to `cache` if they do not exist.

    Raises DataError if this Python has no sources of its standard library.
    """
    folder = cache / "demo" / f"{platform.python_implementation().lower()}-{platform.python_version()}-{FORMAT}"
    files = {name: folder / f"{name}.jsonl" for name in ("train", "eval")}

    def write(staged: Path) -> None:
        for name, samples in zip(files, demo_samples(Path(sysconfig.get_path("stdlib"))), strict=True):
            lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in samples]
            (staged / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    write_cache_folder(folder, write, done="train.jsonl")
    config = {
        "model_type": "bert",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
        "vocab_size": 8_000,
        "initializer_range": 0.06,  # BERT's .02 suits a width of 768; at 128 the model then learns more slowly
    }
    data = {
        "model": {"config": config},
        "data": {"train": str(files["train"]), "eval": str(files["eval"]), "text": ["text"], "label": "label", "max_length": 64},
        "task": {"kind": "text-classification"},
        "training": {"num_train_epochs": 8, "learning_rate": 7e-4, "weight_decay": 0.01},
    }
    return Document("the embedded demo", data)


def demo_samples(library: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(train, eval) samples (docstring, package) from the sources in `library`, ordered by a hash of the texts.

    Every text is unique and belongs to one package. Raises DataError if there are too few.
    """
    owners: dict[str, set[str]] = {}
    for package, text in docstrings(candidate_files(library)):
        owners.setdefault(text, set()).add(package)
    labels = {text: next(iter(packages)) for text, packages in owners.items() if len(packages) == 1}
    counts = Counter(labels.values())
    chosen = sorted(counts, key=lambda package: (-counts[package], package))[:PACKAGES]
    samples = [(text, label) for text, label in labels.items() if label in chosen]
    if len(chosen) < PACKAGES or len(samples) < MIN_SAMPLES:
        raise DataError(
            f"the embedded demo: {library} has {len(samples):,} docstrings of {len(chosen)} packages; the demo needs "
            f"{MIN_SAMPLES} docstrings of {PACKAGES} packages. This Python has no sources of its standard library. "
            "Give your own job: hwopt run job.toml"
        )
    samples.sort(key=lambda sample: hashlib.sha256(sample[0].encode("utf-8", "replace")).digest())
    held_out = samples[::HELD_OUT]
    return [sample for index, sample in enumerate(samples) if index % HELD_OUT], held_out


def candidate_files(library: Path) -> Iterator[tuple[str, bytes]]:
    """(top-level package or module, source) of the files of the packages under `library` that have the most triple quotes."""
    sources: dict[str, list[bytes]] = {}
    quotes: Counter[str] = Counter()
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if not EXCLUDED.intersection(path.parts):
            with suppress(OSError):  # a few unreadable files do not matter
                source = file.read_bytes()
                package = path.parts[0].removesuffix(".py")
                sources.setdefault(package, []).append(source)
                quotes[package] += source.count(b'"""') + source.count(b"'''")
    for package, _ in quotes.most_common(CANDIDATES):
        yield from ((package, source) for source in sources[package])


def docstrings(files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, str]]:
    """(package, docstring) of every module, class and function in `files` (package, source) that has one."""
    for package, source in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated escapes in the library's strings
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text.split()) >= MIN_WORDS:
                    yield package, text
