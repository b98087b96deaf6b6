"""LLaMA-Factory's dataset_info.json: where a data set of that name is, and what its columns are called.

https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwopt.configs.source_file import Entry
from hwopt.configs.view import View

ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
"""LLaMA-Factory's name of a column -> the name that hwopt recognises."""
TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
"""LLaMA-Factory's name of a word in messages -> the words that hwopt reads."""
WORDS = {"split": "dataset_train_split", "num_samples": "max_train_samples"}
NAMES = "columns that hwopt does not recognise under these names; data.prompt and data.completion name a pair without input"


def folder_of(view: View) -> Path:
    """The folder that `dataset_dir` names: from the working directory, as LLaMA-Factory takes it, else from the file's folder."""
    given = next((str(entry.value) for entry in view.source.entries if entry.key == "dataset_dir"), "data")
    return next((path for path in (Path(given), Path(view.source.name).parent / given) if path.is_dir()), Path(given))


def add_registered(view: View, word: str, entry: Entry, name: str) -> None:
    """Set `word` to the file or the hub name of the data set `name`, and its columns; to `name` itself if none is registered."""
    folder = folder_of(view)
    listed: Any = None
    with suppress(OSError, ValueError, RecursionError):
        listed = json.loads((folder / "dataset_info.json").read_text("utf-8"))
    known = listed.get(name) if isinstance(listed, Mapping) else None
    if not isinstance(known, Mapping):
        view.add(word, entry, name)
        return
    path = folder / str(known["file_name"]) if "file_name" in known else known.get("hf_hub_url")
    if path is None or known.get("ranking"):
        why = "preferences; train them with a trainer of TRL and hwopt.optimized" if known.get("ranking") else "has no file"
        view.leave(entry, f"{folder / 'dataset_info.json'}: {why}")
        return
    subset = f":{known['subset']}" if "subset" in known else ""
    view.add(word, entry, f"{path}{subset}")
    if word != "train_file":
        return
    for key, value in known.items():
        part = replace(entry, path=(*entry.path, key), value=value)
        if key in WORDS:
            view.add(WORDS[key], part)
        elif key in ("columns", "tags") and not isinstance(value, Mapping):
            view.leave(part, "expected names by their meaning")
        elif key == "columns" and known.get("formatting") == "sharegpt":
            view.add("messages_column", part, value.get("messages", "conversations"))
            for each, column in value.items():
                if each != "messages" and column != each:
                    view.leave(replace(part, path=(*part.path, each), value=column), f"rename the column to {each!r}")
        elif key == "tags":
            for each, tag in value.items():
                if tag not in TAGS.get(each, ()):
                    view.leave(replace(part, path=(*part.path, each), value=tag), "rename it to a word of ShareGPT or OpenAI")
        elif key == "columns" and any(ALPACA_COLUMNS.get(each) != column for each, column in value.items()):
            if value.keys() == {"prompt", "response"}:
                view.add("prompt_column", part, value["prompt"])
                view.add("completion_column", part, value["response"])
            else:
                view.leave(part, NAMES)
