"""The text of a new job.toml, with a comment for each key, and the check that hwopt reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwopt.config.job import make_job
from hwopt.config.task_kinds import task_kinds
from hwopt.config.toml import parse_toml
from hwopt.config.toml_text import inline

COMMENTS = {
    "model.name": "a hub name, or a folder made with save_pretrained()",
    "model.config": "random weights; trained weights need far less data",
    "data.train": "a file, glob or list of files; a folder of images; or a hub name",
    "data.eval_split": "evaluated after each epoch",
    "data.test_split": "evaluated once, at the end",
    "data.image": "the column with the images, or with their paths",
    "data.eval": "evaluated after each epoch",
    "data.test": "evaluated once, at the end",
    "data.eval_fraction": "held out for evaluation",
    "data.text": "the column with the text; two columns for pairs",
    "data.label": "the column with the labels",
    "data.label_delimiter": "between the labels of a text",
    "data.prompt": "not in the loss",
    "data.completion": "in the loss",
    "data.blocks": "the texts are joined and cut into blocks of max_length; false: each row is a sample",
    "data.max_target_length": "tokens; longer targets are truncated",
    "data.messages": "the column with the conversations; the loss counts the assistant's tokens",
    "data.chat_template": "or a Jinja file",
    "data.max_length": "tokens, estimated from the letters; longer texts are truncated",
    "data.format": "recognised by the content; the extension says another one",
    "data.encoding": "recognised; the file is not UTF-8",
    "training.num_train_epochs": "passes over the training data",
    "training.learning_rate": "the peak of the schedule",
}
OPTIONAL = {"training": ("# eval_steps = 100  # default: evaluate after each epoch", "# seed = 0")}
"""Lines at the end of a table."""


def job_text(tables: Mapping[str, Mapping[str, Any]], header: str) -> str:
    """The commented TOML text of a job with `tables`, below the lines of `header`. Raises InputError if it is not a valid job."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    for table, keys in tables.items():
        lines += ["", f"[{table}]"]
        for key, value in keys.items():
            others = f"or {', '.join(kind for kind in task_kinds() if kind != value)}"
            comment = others if (table, key) == ("task", "kind") else COMMENTS.get(f"{table}.{key}")
            lines.append(f"{key} = {inline(value).as_string()}" + (f"  # {comment}" if comment else ""))
        lines += OPTIONAL.get(table, ())
    text = "\n".join(lines) + "\n"
    make_job(parse_toml(text.encode(), "the new job"))
    return text
