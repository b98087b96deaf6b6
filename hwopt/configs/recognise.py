"""Which tool a configuration file belongs to, by its keys, and the views of TrainingArguments and of hwopt's own files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwopt.config.aliases import SYNONYMS, job_key, plugin_aliases
from hwopt.config.job import JobFile
from hwopt.config.job_training import Training
from hwopt.config.profile import Profile
from hwopt.config.toml import MAX_BYTES, decoded
from hwopt.configs.dialects import DIALECTS
from hwopt.configs.python_file import from_python
from hwopt.configs.source_file import Entry, SourceFile, from_json, from_toml, from_yaml
from hwopt.configs.view import TOOL_NAMES, TRL_KEYS, ConfigSetting, Tool, View
from hwopt.configs.words import ARGUMENTS, FORMER_NAMES, word_of
from hwopt.errors import InputError
from hwopt.planning.inputs import Inputs
from hwopt.system.paths import read_regular_file
from hwopt.text import listing

EVALUATION_TABLES = ("eval", "evaluation", "validation", "valid", "val", "test")
EVALUATION_WORDS = {"per_device_train_batch_size": "per_device_eval_batch_size"}
"""Word -> the word for the same name in a table about evaluation."""
OTHER_LISTS = {
    "defaults": "Hydra's list of further files; only this file is read",
    "hydra": "a setting of Hydra itself",
    "profiler": "a setting of a profiler",
    "input_require_grads": "hwopt's checkpointing is never reentrant",
    "Trainer": "hwopt's tasks have their metrics, and the job names its data",
}


def read_source(path: Path) -> SourceFile:
    """The entries of a YAML, JSON, TOML or Python file. Raises InputError with file and line."""
    text, name = decoded(read_regular_file(path, MAX_BYTES), str(path)), str(path)
    if not text.strip():
        raise InputError(f"{path}: is empty; expected a configuration in YAML, JSON, TOML or Python")
    other = from_json if text.lstrip().startswith("{") else from_yaml
    return {".py": from_python, ".toml": from_toml, ".json": from_json}.get(path.suffix, other)(text, name)


def view_of(source: SourceFile, inputs: Inputs) -> View:
    """The view of a configuration file. Raises InputError if it belongs to no known tool, or is not valid."""
    if source.language == "TOML":
        if hwopt_tool(source) == "hwopt-profile":
            return profile_view(inputs.profile(source.name), source)
        job = inputs.job(Path(source.name), ())
        assert job is not None  # a path is given
        return job_view(job, source)
    if source.language == "Python":
        return trainer_view(source, listing(source.calls, 4))
    if any(entry.path[-1] == "_component_" and str(entry.value).startswith("torchtune.") for entry in source.entries):
        raise InputError(f"{source.name}: is torchtune's, which hwopt does not read; it reads: {', '.join(TOOL_NAMES.values())}")
    keys = source.top | source.values.keys()
    dialect = max(DIALECTS, key=lambda each: len(keys & each.telling))
    if (found := keys & dialect.telling) and "model" not in source.top:  # a key of LLaMA-Factory 1 and of other programs
        return dialect.read(source, listing(sorted(found), 4))
    leaves = {entry.path[-1] for entry in source.entries}
    if words := leaves & (ARGUMENTS | FORMER_NAMES.keys()) or leaves & SYNONYMS.keys():
        return trainer_view(source, listing(sorted(words), 4))
    unknown = f"none of its keys ({listing(sorted(source.top), 5)}) is known"
    raise InputError(f"{source.name}: not recognised; {unknown}. Expected a file of: {', '.join(TOOL_NAMES.values())}")


def hwopt_tool(source: SourceFile) -> Tool:
    """Whether a TOML file is a profile or a job of hwopt, by its tables. Raises InputError for other files."""
    if source.top & {"model", "data"} and not source.top & {"card", "tuned_for"}:
        return "hwopt-job"
    if source.top & {"plugins", "card", "tuned_for", "extends"}:
        return "hwopt-profile"
    known = "a profile ([plugins.NAME] tables) nor a job ([model] and [data]) of hwopt"
    raise InputError(f"{source.name}: is TOML, but neither {known}; hwopt reads configurations of other tools as YAML or JSON")


SFT_WORDS = {"dataset_text_field", "assistant_only_loss", "completion_only_loss", "packing", "eval_packing"}
"""Arguments that only TRL's SFTConfig has: the file trains a causal language model."""
TRL_WORDS = SFT_WORDS | TRL_KEYS


def trainer_view(source: SourceFile, recognised_by: str) -> View:
    """TrainingArguments of any version of transformers, flat, nested by Hydra, or of a script; and names of common scripts."""
    view = View(source, "transformers", recognised_by, lambda word: spelled(word, source))
    for entry in sorted(source.entries, key=lambda each: len(each.path)):  # `seed` comes before `dataset_mixture.seed`
        word = word_at(entry)
        if entry.path[0] in OTHER_LISTS:
            view.leave(entry, OTHER_LISTS[entry.path[0]], "other")
        elif word is None:
            view.leave(entry, "no name of TrainingArguments")
        elif word == "train_sampling_strategy":
            view.add("group_by_length", entry, entry.value == "group_by_length")
        else:
            view.add(word, entry)
    telling = SFT_WORDS if source.language == "Python" else TRL_WORDS
    if source.entries and ("SFTConfig" in source.calls or telling & {part for each in source.entries for part in each.path}):
        first = source.entries[0]
        view.imply("task", "causal-lm", ConfigSetting(first.path, first.value, first.line, first.place))
    data = view.settings.get("train_file")
    if data and data.key == "dataset_name":  # of TRL's scripts
        config = next((each for each in view.unread if each.key == "dataset_config" and isinstance(each.value, str)), None)
        if config:
            data = view.settings["train_file"] = replace(data, value=f"{data.value}:{config.value}")
            view.unread[view.unread.index(config)] = config.left(f"the data is {data.value}", "other")
        if source.language != "Python" and view.value("eval_strategy", "no") != "no":
            view.imply("dataset_test_split", "test", data)
            view.imply("validation_file", data.value, view.settings["dataset_test_split"])
    return view


def word_at(entry: Entry) -> str | None:
    """The word for an entry: of its last part, or of the part that has a word with the parts below it."""
    for depth, part in enumerate(entry.path):
        below = ".".join(entry.path[depth + 1 :])
        full = f"{part}.{below}" if below else part
        if (word := word_of(full)) is not None:
            in_evaluation = any(table in EVALUATION_TABLES for table in entry.path[:depth])
            return EVALUATION_WORDS.get(word, word) if in_evaluation else word
        if below and part in ARGUMENTS and word_of(entry.path[-1]) is None:
            return full
    return None


def spelled(word: str, source: SourceFile) -> str:
    """`word` in the table in which the file has most of its arguments."""
    arguments = [entry for entry in source.entries if entry.path[-1] in ARGUMENTS]
    tables = [entry.path[:-1] for entry in arguments or source.entries if word_at(entry)]
    usual = max(dict.fromkeys(tables), key=tables.count, default=())
    return ".".join((*usual, word))


JOB_WORDS = {key: word for word in ARGUMENTS if (key := job_key(word))}
ALIAS = re.compile(r"plugins\.([\w-]+)\.(\w+)(?: = (.+))?")
Found = dict[str, tuple[Any, tuple[str, ...]]]
"""Word -> its value and the key that gives it."""


def profile_view(profile: Profile, source: SourceFile) -> View:
    """The view of a profile with its parents."""
    content = profile.content
    found = dict(words_of_options(dict(profile.plugin_tables())))
    found |= {word: (getattr(content.training, word), ("training", word)) for word in content.training.model_fields_set}
    found["summary"] = (content.summary, ("summary",))
    for table, word in (("tuned_for", "max_length"), ("data", "max_length"), ("tuned_for", "parameters")):
        if (value := getattr(getattr(content, table), word)) is not None:
            found[word] = (value, (table, word))
    return made("hwopt-profile", found, profile.place, source)


def job_view(job: JobFile, source: SourceFile) -> View:
    tables = job.job.model_dump(exclude_unset=True, exclude_none=True)
    keys = {**{("training", word): word for word in tables.get("training", {})}, **JOB_WORDS}
    found: Found = {word: (tables[key[0]][key[1]], key) for key, word in keys.items() if key[1] in tables.get(key[0], {})}
    if job.plugins is not None:
        given = {name: table for name, table in job.plugins.data["plugins"].items() if table.get("enabled", True)}
        found |= dict(words_of_options(given))
    return made("hwopt-job", found, job.place, source)


def made(tool: Tool, found: Found, place: Callable[..., str], source: SourceFile) -> View:
    """A view of what is `found`, with the comments of the keys that are in `source` itself."""
    view = View(source, tool, "its tables", key_of)
    entries = {entry.path: entry for entry in source.entries}
    for word, (value, key) in found.items():
        entry = entries.get(key, Entry(key, value, 0))
        view.settings[word] = ConfigSetting(**vars(entry) | {"value": value, "place": place(*key), "word": word})
    return view


def words_of_options(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, tuple[Any, tuple[str, ...]]]]:
    """Word -> (value, key), for each word of the vocabulary that a plugin declares for an option of its table."""
    for word, alias in plugin_aliases().items():
        found = ALIAS.fullmatch(alias)
        if found is None or word not in ARGUMENTS or found[1] not in tables:
            continue
        name, option, constant = found.groups()
        table = {key: value for key, value in tables[name].items() if key != "enabled"}
        if option == "enabled":
            yield word, (True, ("plugins", name))
        elif constant is None and option in table:
            yield word, (table[option], ("plugins", name, option))
        elif constant is not None and repr(table.get(option)) == constant:
            yield word, (True, ("plugins", name, option))


def key_of(word: str) -> str:
    if alias := plugin_aliases().get(word):
        return alias.split(" ")[0]
    if (key := job_key(word)) is not None:
        return ".".join(key)
    return f"training.{word}" if word in Training.model_fields else word
