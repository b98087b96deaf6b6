"""What `Task.prepare` found, kept in the cache: files with the same content are not read again, and no time goes into each row.

An entry holds the notes, the labels and the names of the token stores. It is found by the bytes of the data files, by what the
job says of data, model and task, and by the code that reads them. Data of the hub, `datasets` folders, images and mixtures are
read each time.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwopt.config.job import Data, Job
from hwopt.config.job_sources import MixedSource
from hwopt.data.sources.location import locate
from hwopt.data.sources.reading import leaves
from hwopt.data.stores.token_store import ArrayFolder, PairStore, TokenStore, fingerprint
from hwopt.data.tokenizer_training import stored_tokenizer, tokenizer_fingerprint
from hwopt.hardware.detect import version_of
from hwopt.system.atomic_folder import sha256
from hwopt.tasks.model_builder import ModelBuilder
from hwopt.tasks.preparation import pad_as_needed
from hwopt.tasks.prepared import ChatTokens, Prepared, Trained

LIBRARIES = ("tokenizers", "transformers", "pyarrow", "trl")
STORES = {kind.__name__: kind for kind in (TokenStore, PairStore)}


class PreparedCache:
    """The entry of a job. `trained`: without label names, and without a tokenizer if one is trained on the texts."""

    def __init__(self, task: type[ModelBuilder], trained: Trained, cache: Path, seed: int) -> None:
        self.trained, self.cache = trained, cache
        self.folder: Path | None = None
        job, tokenizer = trained.job, trained.tokenizer
        if trained.facts.inputs != "tokens" or (files := files_of(job.data)) is None:
            return
        # without the defaults: `data.text = "text"` in the job chooses a column, the default does not
        said = job.model_dump(mode="json", exclude={"training"}, exclude_unset=True)
        rules = tokenizer and [tokenizer_fingerprint(tokenizer), tokenizer.chat_template]
        settings = [said, trained.config.to_json_string(use_diff=False), rules, seed, trained.max_positions]
        key = fingerprint(settings, code_of(task), [[str(file), sha256(file)] for file in files])
        self.folder = cache / "prepared" / key

    def load(self, fit_tokenizer: Callable[[Any, Job, bool], ChatTokens]) -> Prepared | None:
        """The `Prepared` of the entry; None if there is no entry, or if one of its stores is incomplete.

        `fit_tokenizer`: as of `Task`.
        """
        if self.folder is None or not (entry := ArrayFolder(self.folder)).is_complete():
            return None
        meta, tokenizer = entry.meta, self.trained.tokenizer
        parts = {part: STORES[kind](self.cache / "tokens" / name) for part, (kind, name) in meta["stores"].items()}
        tokenizer = tokenizer or stored_tokenizer(self.cache, meta["tokenizer"])
        if tokenizer is None or not all(store.is_complete() for store in parts.values()):
            return None
        tokens = fit_tokenizer(tokenizer, self.trained.job, meta["chat"])
        pad_as_needed(replace(self.trained, tokenizer=tokenizer), parts)
        fields = {name: meta[name] for name in ("notes", "warnings", "bad_rows")}
        fields |= {"label_names": tuple(meta["label_names"]), "held_out": entry.array("held_out").tolist()}
        weights = meta["class_weights"] and tuple(meta["class_weights"])
        return Prepared.of(parts, tokenizer, chat_tokens=tokens, class_weights=weights, **fields)

    def save(self, prepared: Prepared) -> Prepared:
        """Write the entry of `prepared`, and return it."""
        kinds = {part: type(store).__name__ for part, store in prepared.parts.items()}
        if self.folder is None or not STORES.keys() >= set(kinds.values()):
            return prepared
        meta = {name: getattr(prepared, name) for name in ("notes", "warnings", "bad_rows", "label_names", "class_weights")}
        meta |= {"stores": {part: (kinds[part], store.folder.name) for part, store in prepared.parts.items()}}
        meta |= {"chat": prepared.chat_tokens.chat, "tokenizer": Path(prepared.tokenizer.name_or_path).name}
        ArrayFolder.cached(self.folder, lambda: ({"held_out": list(prepared.held_out)}, meta))
        return prepared


def files_of(data: Data) -> list[Path] | None:
    """The files that the job reads; None if it reads anything else, or a mixture, which is not kept."""
    if any(isinstance(part, MixedSource) for part in data.train):
        return None
    sources = [(data.train, data.split), *data.held_out.values()]
    found = [locate(leaf.path, leaf.split, data.format) for source, split in sources for leaf in leaves(source, split)]
    template = [Path(data.chat_template)] if data.chat_template and os.path.isfile(data.chat_template) else []
    return [*(path for _, path in found), *template] if {kind for kind, _ in found} == {"file"} else None


def code_of(task: type[ModelBuilder]) -> list[str]:
    """Versions and hashes of the code that decides what a file becomes."""
    root = Path(__file__).parents[1]
    own = {path for folder in ("config", "data", "tasks") for path in (root / folder).rglob("*.py")}
    others = {Path(inspect.getfile(kind)) for kind in task.__mro__ if kind is not object}
    return [sys.version, *map(version_of, LIBRARIES), *(sha256(path) for path in sorted(own | others) if path.is_file())]
