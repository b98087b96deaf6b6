"""Profiles and jobs of hwopt as views: the plugins' options under the words that the plugins declare (`Plugin.aliases`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from hwopt.config.aliases import job_key, plugin_aliases
from hwopt.config.job import JobFile
from hwopt.config.job_training import Training
from hwopt.config.profile import Profile
from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import ConfigSetting, Tool, View
from hwopt.configs.words import ARGUMENTS

JOB_WORDS = {key: word for word in ARGUMENTS if (key := job_key(word))}
"""(table, key) of a job -> its word."""
ALIAS = re.compile(r"plugins\.([\w-]+)\.(\w+)(?: = (.+))?")
Found = dict[str, tuple[Any, tuple[str, ...]]]
"""Word -> its value and the key that gives it."""


def profile_view(profile: Profile, source: SourceFile) -> View:
    """The view of a profile with its parents."""
    content = profile.content
    tables = {"data": content.data, "tuned_for": content.tuned_for}
    found = dict(words_of_options(dict(profile.plugin_tables())))
    found |= {word: (getattr(content.training, word), ("training", word)) for word in content.training.model_fields_set}
    found["summary"] = (content.summary, ("summary",))
    for word, table in (("max_length", "tuned_for"), ("max_length", "data"), ("parameters", "tuned_for")):
        if (value := getattr(tables[table], word)) is not None:
            found[word] = (value, (table, word))
    return made("hwopt-profile", found, profile.place, source)


def job_view(job: JobFile, source: SourceFile) -> View:
    tables = job.job.model_dump(exclude_unset=True, exclude_none=True)
    keys = {**{("training", word): word for word in tables.get("training", {})}, **JOB_WORDS}
    found: Found = {
        word: (tables[table][name], (table, name)) for (table, name), word in keys.items() if name in tables.get(table, {})
    }
    if job.plugins is not None:
        given = {name: table for name, table in job.plugins.data["plugins"].items() if table.get("enabled", True)}
        found |= dict(words_of_options(given))
    return made("hwopt-job", found, job.place, source)


def made(tool: Tool, found: Found, place: Callable[..., str], source: SourceFile) -> View:
    """A view of what is `found`, with the comments of the keys that are in `source` itself."""
    view = View(source, tool, "its tables", partial(spelled, plugin_aliases()))
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


def spelled(aliases: Mapping[str, str], word: str) -> str:
    """The key of hwopt for `word`."""
    if word in aliases:
        return aliases[word].split(" ")[0]
    if (key := job_key(word)) is not None:
        return ".".join(key)
    return f"training.{word}" if word in Training.model_fields else word
