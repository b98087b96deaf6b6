"""Propose a job for a data file and a machine: model, length, split and hyperparameters, each with the reason."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hwopt.config.new_job import job_text
from hwopt.config.task_kinds import task_class, task_facts
from hwopt.hardware.device import Hardware
from hwopt.model.config import find_model_file
from hwopt.system.hub import hub_is_out_of_reach, offline_clients
from hwopt.tasks.recognition import DataColumns
from hwopt.text import counted, printable

LETTERS_A_TOKEN = 3
"""A low estimate: English has about four. A high maximum length costs nothing for short texts, a low one cuts long texts."""
LENGTHS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048)
BLOCK = 1_024  # tokens, for texts that are joined and split into blocks
TRAINED_RATE, RANDOM_RATE = 2e-5, 5e-4
"""Peak learning rates for trained weights (the BERT paper, appendix A.3) and for small models with random weights."""
SHORTEST_GENERATED = 256
"""Tokens, for models that write text: a chat template adds tokens to each message, and a cut text loses the end of its answer."""
COVERED = 0.99  # fraction of the texts that should not be truncated


@dataclass(frozen=True)
class ProposedModel:
    name: str | None  # None: the small model of the task's family, with random weights
    why: str

    def table(self, kind: str) -> dict[str, Any]:
        return {"config": dict(task_class(kind).models.random)} if self.name is None else {"name": self.name}


def propose_model(data: DataColumns, hardware: Hardware) -> ProposedModel:
    """A model for the task, the language and the memory of the device; with random weights if the hub is out of reach."""
    name, why = task_class(data.kind).models.choose(data, hardware)
    if is_available(name):
        return ProposedModel(name, why)
    return ProposedModel(None, f"random weights, since the hub is out of reach; better: name = {name!r}, or a folder")


def is_available(name: str) -> bool:
    """Whether the hub can be reached, or the config of the model is on this machine."""
    from transformers.utils.hub import is_offline_mode

    if not (is_offline_mode() or hub_is_out_of_reach()):
        return True
    with offline_clients():
        return find_model_file(name, "config.json", None, cached_only=True) is not None


def propose_length(data: DataColumns) -> int | None:
    """A maximum length in tokens that truncates about one text of a hundred, estimated from the letters; None for images."""
    if task_facts(data.kind).inputs == "images":
        return None
    most: int = task_class(data.kind).models.max_length
    if data.joined:
        return min(BLOCK, most)
    ordered = sorted(data.lengths)
    letters = ordered[min(int(COVERED * len(ordered)), len(ordered) - 1)] if ordered else 0
    least = max(letters / LETTERS_A_TOKEN + 2, SHORTEST_GENERATED if task_facts(data.kind).decoder else 0)
    return next((length for length in LENGTHS if least <= length <= most), most)


def eval_fraction(data: DataColumns) -> float | None:
    """The fraction to hold out; None if a file for evaluation exists, or if there are too few rows."""
    if not {"eval", "eval_split"}.isdisjoint(data.held_out) or (data.rows < 10 and not (data.rows == 1 and data.joined)):
        return None
    return 0.1 if data.rows >= 100 or data.rows == 1 else 0.2


@dataclass(frozen=True)
class Proposal:
    """A job for some data, and the profile to train it with."""

    data: DataColumns
    model: ProposedModel
    max_length: int | None  # in tokens; None for images
    profile: str
    profile_why: str
    profiles: tuple[str, ...]  # the installed profiles

    def with_answers(self, *, max_length: int | None, model: str | None, profile: str) -> Proposal:
        chosen = self.model if model == self.model.name else ProposedModel(model, "chosen by the user")
        return replace(self, max_length=max_length, model=chosen, profile=profile)

    def tables(self) -> dict[str, dict[str, Any]]:
        own = dict(self.data.keys)
        if self.data.chat and self.model.name is None:
            own["chat_template"] = "chatml"
        if self.max_length is not None:
            own["max_length"] = self.max_length
        split: dict[str, Any] = dict(self.data.held_out)
        if (fraction := eval_fraction(self.data)) is not None:
            split["eval_fraction"] = fraction
        return {
            "model": self.model.table(self.data.kind),
            "task": {"kind": self.data.kind},
            "data": {"train": self.data.source, **split, **own},
            "training": {"num_train_epochs": 3, "learning_rate": RANDOM_RATE if self.model.name is None else TRAINED_RATE},
        }

    def commands(self, output: Path) -> list[str]:
        """What to do with the job at `output`."""
        file = shlex.quote(str(output))
        found = {
            f"hwopt plan {file} --sample 1": "a training sample as the model sees it",
            f"hwopt plan {file} --profile {self.profile}": "what would run, and its memory",
            f"hwopt run {file} --profile {self.profile}": "train",
            "  --set plugins.NAME.enabled=true": "adds a plugin of `hwopt plugins`",
        }
        width = max(map(len, found))
        return [f"{command:<{width}}  # {what}" for command, what in found.items()]

    def text(self, output: Path) -> str:
        said = (f"Data: {counted(self.data.rows, 'row')}; {self.data.why}.", f"Model: {self.model.why}.")
        header = [*map(printable, said), "All keys: docs/jobs.md", "", *self.commands(output)]
        return job_text(self.tables(), "\n".join(header))


def propose(data: DataColumns, hardware: Hardware, profile: tuple[str, str], profiles: Sequence[str]) -> Proposal:
    """The proposal for `data` on `hardware`. `profile`: (name, reason); `profiles`: the installed ones."""
    name, why = profile
    known = name if name in profiles else "auto"
    return Proposal(data, propose_model(data, hardware), propose_length(data), known, why, tuple(profiles))
