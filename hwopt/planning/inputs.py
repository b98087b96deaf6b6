"""What the user gives: a job, a profile, assignments. Found, read and checked without torch, whose import takes seconds."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from hwopt.config.job import JobFile, load_job, make_job
from hwopt.config.profile import load_profile
from hwopt.config.profile_files import profile_files
from hwopt.config.toml import Document, parse_assignment
from hwopt.data.demo import demo_document
from hwopt.data.sources import locate
from hwopt.hardware.device import parse_memory_limit
from hwopt.planning.decisions import given_options
from hwopt.plugin.registry import Registry
from hwopt.system.paths import path_kind


def refuse_mistakes(profiles: Sequence[str], job: Path | None, assignments: Sequence[str], memory_limit: str | None) -> None:
    """Raise InputError or PluginError for what is wrong in what is given itself, whatever the machine and the model.

    Where the job names a model of the hub and that is out of reach, the hub's client is told so.
    """
    for profile in profiles:
        if profile != "auto":
            given_options(load_profile(profile, profile_files(), assignments), Registry())
    found = given_job(job, assignments)
    if found is not None and (model := found.job.model.name) is not None:
        with found.placing():
            nowhere = path_kind(Path(model), "model.name:") == "missing"
        if nowhere and hub_is_out_of_reach():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if memory_limit is not None:
        parse_memory_limit(memory_limit)


def refuse_missing_data(path: Path | None, assignments: Sequence[str]) -> None:
    """Raise DataError where what the job trains or evaluates on cannot be: a plan does without, a run does not."""
    if found := given_job(path, assignments):
        data = found.job.data
        locate(data.train, data.split)
        if data.eval is not None:
            locate(data.eval, data.eval_split)


def hub_is_out_of_reach() -> bool:
    """Whether there is no way to the hub, whose client would ask again and again for half a minute."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        return not getproxies() and not socket.getaddrinfo(hub, None)
    except OSError:
        return True


def given_job(path: Path | None, assignments: Sequence[str]) -> JobFile | None:
    """The job at `path`; without one `job.toml` of the working folder, or the job that `--set` spells out. None: the demo.

    Whatever goes by that name is meant to be the job: the demo in place of one that cannot be read would be a surprise.
    """
    if path is not None:
        return load_job(path, assignments)
    if os.path.lexists("job.toml"):
        return load_job(Path("job.toml"), assignments)
    if any(parse_assignment(text)[0][:2] == ("data", "train") for text in assignments):
        return make_job(Document("--set", {}), assignments)
    return None


def find_job(path: Path | None, assignments: Sequence[str], cache: Path) -> JobFile:
    """The job that is given, or the demo, whose files are made in `cache`."""
    if found := given_job(path, assignments):
        return found
    document = demo_document(cache)
    chosen = {parse_assignment(text)[0][:2] for text in assignments}
    if ("model", "name") in chosen:  # the demo's data for another model
        model = {key: value for key, value in document.data["model"].items() if key != "config"}
        document = replace(document, data=document.data | {"model": model})
    return make_job(document, assignments)
