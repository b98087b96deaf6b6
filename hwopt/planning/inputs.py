"""The user's input: a job, profiles, assignments. Found, read and checked without importing torch, which takes seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hwopt.config.job import JobFile, load_job, make_job
from hwopt.config.profile import Profile, load_profile, make_profile, update_options
from hwopt.config.profile_files import profile_files
from hwopt.config.toml import Document, parse_assignment, read_toml
from hwopt.data.sources.demo import demo_document
from hwopt.data.sources.location import MissingFileError
from hwopt.data.sources.reading import refuse_missing
from hwopt.errors import HwoptError, InputError
from hwopt.hardware.device import parse_memory_limit
from hwopt.planning.decisions import given_options
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.registry import Registry
from hwopt.system.hub import hub_is_out_of_reach
from hwopt.system.paths import path_kind
from hwopt.text import listing, nearest, truncate


def plain_name(card: str) -> str:
    return re.sub(r"[^a-z0-9]", "", card.lower())


class Inputs:
    """The profiles and the job that a command was given. Each file is read once, however often it is asked for."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = registry or Registry()
        self.files = profile_files()
        self.read = cache(read_toml)

    def profile(self, spec: str, assignments: Sequence[str] = (), job: JobFile | None = None) -> Profile:
        """The profile called `spec`, or of the file `spec`, with the plugins of `job` and `--set plugins.…` on top."""
        return load_profile(spec, self.files, assignments, self.merge_options, self.read, job.plugins if job else None)

    def profile_of_card(self, card: str) -> Profile:
        """The profile called `card`, else that of a card whose name contains `card` ("t4") or is its end ("Tesla T4").

        With more behind the name ("L40S", "Ti", "Laptop GPU") it is another card. Raises InputError for none and for two.
        """
        if card in self.files:
            return self.profile(card)
        own = [profile for profile in map(self.profile, self.files) if profile.content.extends is None]
        cards = {match: [each for each in own if match in each.card.match] for profile in own for match in profile.card.match}
        plain = plain_name(card)
        found = [match for match in cards if plain and (plain in plain_name(match) or plain.endswith(plain_name(match)))]
        if not found:
            known = f"{nearest(card, cards)} There are: {listing(sorted(cards), 30)}"
            raise InputError(f"card {truncate(card)}: no profile describes it.{known}")
        match = min(found, key=lambda match: abs(len(plain_name(match)) - len(plain)))
        return self.only_one(cards[match], match)

    def only_one(self, profiles: Sequence[Profile], card: str) -> Profile:
        """The one of the `profiles` of `card` that extends none of the others. Raises InputError if there are two."""
        names = {profile.name for profile in profiles}
        first, *others = [profile for profile in profiles if profile.content.extends not in names]
        if others:
            raise InputError(
                f"profiles {first.name!r} and {others[0].name!r} are both for {card!r} ([card] match), and neither extends the "
                f"other; name one of them, or change match in {others[0].document.name}"
            )
        return first

    def overridden(self, profile: Profile, assignments: Sequence[str], job: JobFile | None = None) -> Profile:
        """`profile` with the plugins of `job` and `--set plugins.…` on top."""
        plugins = job.plugins if job else None
        return make_profile(profile.document, assignments, self.merge_options, plugins, profile.chosen)

    def merge_options(self, name: str, base: Mapping[str, Any], override: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table `base` of the plugin `name` updated by `override`, as the plugin declares.

        A plugin that is unknown or cannot be imported is reported later, by `given_options`, with the place that names it.
        """
        try:
            plugin = self.registry.plugin(name)
        except HwoptError:
            return update_options(name, base, override)
        with plugin_guard(f"plugin {name!r} of {self.registry.distribution(name)}", "Options.merged()"):
            return dict(plugin.Options.merged(base, override))

    def job(self, path: Path | None, assignments: Sequence[str]) -> JobFile | None:
        """The job at `path`; without a path job.toml of the working folder, or the job that `--set` spells out. None: the demo.

        A file called job.toml is always taken for the job: training the demo because it cannot be read would surprise.
        """
        if path is not None:
            return load_job(path, assignments, self.read)
        if os.path.lexists("job.toml"):
            return load_job(Path("job.toml"), assignments, self.read)
        if any(parse_assignment(text)[0][:2] == ("data", "train") for text in assignments):
            return make_job(Document("--set", {}), assignments)
        return None

    def job_or_demo(self, path: Path | None, assignments: Sequence[str], folder: Path) -> JobFile:
        """The job that is given, or the demo, whose files are written to `folder`."""
        if found := self.job(path, assignments):
            return found
        document = demo_document(folder)
        chosen = {parse_assignment(text)[0][:2] for text in assignments}
        if ("model", "name") in chosen:  # the demo's data for another model
            model = {key: value for key, value in document.data["model"].items() if key != "config"}
            document = replace(document, data=document.data | {"model": model})
        return make_job(document, assignments)


SWITCHES = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_CPU_AFFINITY"),
    *("ACCELERATE_DEBUG_MODE", "ACCELERATE_ENABLE_RICH", "FORK_LAUNCHED", "USE_TORCH_XLA"),
)  # boolean variables of Accelerate; it reads some of them on import
YES, NO = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


def refuse_odd_switches(environment: Mapping[str, str]) -> None:
    """Raise InputError for a boolean variable that is neither on nor off. Accelerate's own error does not name it."""
    for name in SWITCHES:
        if name in environment and environment[name].lower() not in (*YES, *NO):
            accepted = f"expected one of {listing(YES)}, or of {listing(NO)}; set one, or unset it"
            raise InputError(f"{name}={truncate(environment[name])}: {accepted}")


def refuse_mistakes(
    inputs: Inputs, profiles: Sequence[str], job: Path | None, assignments: Sequence[str], memory_limit: str | None
) -> None:
    """Raise InputError or PluginError for mistakes that show without the machine and the model.

    If the job names a model of the hub and the hub is out of reach, its client is set to work offline.
    """
    refuse_odd_switches(os.environ)
    named = [profile for profile in profiles if profile != "auto"]
    for profile in named:
        given_options(inputs.profile(profile, assignments), inputs.registry)
    found = inputs.job(job, assignments)
    for profile in named if found is not None and found.plugins is not None else ():
        given_options(inputs.profile(profile, assignments, found), inputs.registry)
    if found is not None and (model := found.job.model.name) is not None:
        with found.placing():
            nowhere = path_kind(Path(model), "model.name:") == "missing"
        if nowhere and hub_is_out_of_reach():
            os.environ["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE") or "1"  # the client takes "" for unset
    if memory_limit is not None:
        parse_memory_limit(memory_limit)


def refuse_missing_data(job: JobFile | None) -> None:
    """Raise DataError if the job's data do not exist. A run needs them, a plan does not."""
    if job is None:
        return
    try:
        refuse_missing(job.job.data)
    except MissingFileError as error:
        folder = Path(job.document.name).parent
        if folder.resolve() == Path.cwd():
            raise
        searched = f"the folder of the job's file {str(folder)!r}, the working directory"
        raise MissingFileError(f"{error}. Searched: {searched}") from error
