"""For the tests of plugins, built-in and third-party alike: a tiny real job, and the contract that every plugin is held to.


from hwopt.testing import check_contract_of

def test_contract(tmp_path):
    check_contract_of("my_plugin", tmp_path, options={"strength": 2})
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hwopt import api
from hwopt.config.job import JobFile, make_job
from hwopt.config.profile import Profile, make_profile
from hwopt.config.toml import Document
from hwopt.hardware.detect import detect, detect_software
from hwopt.hardware.device import Hardware
from hwopt.memory.dry_run import memory_spec
from hwopt.model.config import load_config
from hwopt.model.facts import model_facts
from hwopt.planning.decisions import PluginDecision
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import resolve, write_recipe
from hwopt.plugin import Evidence
from hwopt.plugin.recipe import SLOTS
from hwopt.plugin.registry import Registry
from hwopt.runs.status import SUMMARY, write_status
from hwopt.saving import reader as resume
from hwopt.training.listener import Listener, Row

COLOURS = ("red", "green", "blue")
WORDS = (*COLOURS, "one", "two", "three", "four", "five", "up", "down", "left", "right", "hot", "cold", "old", "new", "big")

TINY_BERT = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,  # 8-bit optimizers leave tensors under 4,096 elements alone
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def write_samples(path: Path, number: int, *, pairs: bool = False, seed: int = 0) -> Path:
    """A jsonl file of `number` texts of uneven lengths; the label is whether the first word is a colour."""
    random_words = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(number):
            words = random_words.choices(WORDS, k=random_words.randint(2, 24))
            half = len(words) // 2
            row = {"text": " ".join(words[:half] if pairs else words), "label": "colour" if words[0] in COLOURS else "other"}
            if pairs:
                row["second"] = " ".join(words[half:])
            file.write(json.dumps(row) + "\n")
    return path


def tiny_job(
    folder: Path,
    kind: str = "text-classification",
    *,
    samples: int = 40,
    config: Mapping[str, Any] | None = None,
    **training: Any,
) -> JobFile:
    """A job of a few steps with a random model of `config`: by default a tiny BERT, or a tiny Llama for "causal-lm"."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "train": str(write_samples(folder / "train.jsonl", samples)),
        "eval": str(write_samples(folder / "eval.jsonl", 12, seed=1)),
        "max_length": 32,
    }
    settings = {"max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1} | training
    config = config or (TINY_BERT if kind == "text-classification" else TINY_LLAMA)
    return make_job(
        Document("a tiny job", {"model": {"config": dict(config)}, "data": data, "task": {"kind": kind}, "training": settings})
    )


def tiny_profile(**plugins: Mapping[str, Any]) -> Profile:
    """A profile of these plugin tables, over step batches of 8 rows in micro-batches of 4."""
    tables = {"batch": {"train": 4, "gradient_accumulation_steps": 2}} | {name: dict(table) for name, table in plugins.items()}
    return make_profile(Document("a tiny profile", {"name": "tiny", "plugins": tables}))


def plan_for(
    profile: Profile, job_file: JobFile, registry: Registry | None = None, *, world_size: int = 1, **options: Any
) -> Plan:
    """A plan on this machine."""
    model = job_file.job.model
    config = load_config(model.name, model.config)
    facts = model_facts(config, job_file.job.task.kind, model.label)
    hardware = options.pop("hardware", None) or detect()
    return resolve(
        profile, hardware, job_file, registry or Registry(), facts, detect_software(), world_size=world_size, **options
    )


@dataclass
class Recorder(Listener):
    """Keeps what a run said."""

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.found: list[tuple[Any, Evidence]] = []
        self.warnings: list[str] = []
        self.run: Any = None

    def started(self, run: Any) -> None:
        self.run = run

    def evidence(self, run: Any, found: list[Any]) -> None:
        self.found = found

    def row(self, run: Any, row: Row) -> None:
        self.rows.append(row)

    def warned(self, run: Any, message: str) -> None:
        self.warnings.append(message)

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]


def train_tiny(plan: Plan, folder: Path) -> Recorder:
    """Train `plan` under `folder`; returns what was heard of it."""
    recorder = Recorder()
    api.execute(plan, folder / "run", recorder, cache=folder / "cache")
    return recorder


def gone_back(run: Path, target: Path, step: int) -> Path:
    """A copy of a run folder as it was after `step`, when its process was ended there."""
    shutil.copytree(run, target)
    for path in resume.list_checkpoints(target):
        if int(path.name.rsplit("-", 1)[1]) > step:
            shutil.rmtree(path)
    shutil.rmtree(target / "final", ignore_errors=True)
    (target / SUMMARY).unlink(missing_ok=True)
    write_status(target, None, "running")
    return target


def saved_bits(folder: Path) -> dict[str, str]:
    """SHA-256 of every tensor in the files of a checkpoint, or of final/."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.name}/{name}"] = hashlib.sha256(
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            ).hexdigest()
    return found


def launcher(ranks: int) -> list[str]:
    """The command that starts so many ranks of what follows it (`-m hwopt …`, or a script)."""
    settings = {
        "num_processes": ranks,
        "num_machines": 1,
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "main_process_port": 0,
    }
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", *given]


def finished(command: Sequence[str | bytes], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`command`, run on CPUs in `folder` to its end."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
    )


def logged(run: Path, key: str) -> list[float]:
    """What the run in this folder has logged under `key`, in its order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row[key] for row in rows if key in row]


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The norm of the difference of two models' weights over that of `theirs`.

    Without key.bias: its true gradient is 0, and Adam turns the rounding noise there into steps of the learning rate.
    """
    assert ours.keys() == theirs.keys()
    names = [name for name in theirs if not name.endswith("key.bias")]
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in names]).double().norm()
    return float(difference / torch.cat([theirs[name].flatten() for name in names]).double().norm())


@dataclass(frozen=True)
class ContractReport:
    """What `check_contract_of` checked."""

    plan: Plan
    checked: tuple[str, ...]
    not_checked: tuple[str, ...] = ()
    """What only a machine with the described hardware could show."""


def check_contract_of(
    name: str,
    folder: Path,
    options: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
    kind: str = "text-classification",
    beside: Mapping[str, Mapping[str, Any]] | None = None,
    hardware: Hardware | None = None,
) -> ContractReport:
    """Run the plugin `name` in a tiny training, and assert what every plugin promises.

    `kind` is the task's ("causal-lm" for a plugin that skips a classification); `beside` has the tables of plugins that it needs.
    Its decision is pure and has a reason; `apply` and `memory` are pure; the run trains and saves; its losses agree with a run
    without the plugin as `preserves` says ("bits": equal, "rounding": close); its evidence is not `inactive`; a run resumed from
    its checkpoint ends with the same bits.

    A plugin that is skipped here fails. Pass `hardware=described(...)` on which it applies, with as many ranks as its `count`:
    decision, recipe and memory are then checked for that hardware, nothing is trained, and the report says so.
    """
    registry = registry or Registry()
    job = tiny_job(folder / "data", kind, save_steps=2)
    profile = tiny_profile(**(beside or {}), **{name: dict(options or {})})
    ranks = 1 if hardware is None else hardware.count
    plan = plan_for(profile, job, registry, hardware=hardware, world_size=ranks)
    check_decision_of(name, plan, plan_for(profile, job, registry, hardware=hardware, world_size=ranks))
    check_recipe_of(name, plan)
    check_memory_of(name, plan)
    checked = ("decision", "recipe", "memory")
    if hardware is not None:
        return ContractReport(plan, checked, ("evidence", "preserves", "resume"))
    with_it = train_tiny(plan, folder / "with")
    evidence = next(evidence for found, evidence in with_it.found if found.name == name)
    assert evidence.seen, f"{name}: evidence without words"
    assert evidence.status != "inactive", f"{name} was applied, but: {evidence.seen} {with_it.warnings}"
    assert (folder / "with" / "run" / "final" / "config.json").is_file()
    # a plugin that sets hyperparameters (sizes, warm-up) makes another run by the user's choice
    preserves = entry_of(name, plan).plugin.preserves
    if preserves != "method" and not set(plan.recipe.fields_of(entry_of(name, plan).author)) <= {"batch", "training"}:
        tolerance = 0.0 if preserves == "bits" else 2e-2
        without = baseline_losses(plan_for(tiny_profile(**(beside or {})), job, registry), folder / "without")
        for ours, theirs in zip(with_it.losses, without, strict=True):
            assert math.isclose(ours, theirs, rel_tol=tolerance), f"{name} preserves {preserves}: {ours} against {theirs}"
    check_resume_of(name, plan_for(profile, job, registry), folder)
    return ContractReport(plan, (*checked, "evidence", "preserves", "resume"))


def entry_of(name: str, plan: Plan) -> PluginDecision:
    return next(entry for entry in plan.entries if entry.name == name)


def check_decision_of(name: str, plan: Plan, again: Plan) -> None:
    """`plan` and `again` come of the same input: the decisions are equal, have a reason, and the plugin is not skipped."""
    assert [e.to_dict() for e in plan.entries] == [e.to_dict() for e in again.entries], "probe() must be pure"
    entry = entry_of(name, plan)
    assert len(entry.reason.split()) >= 2, f"{name}: a decision needs a reason in words, got {entry.reason!r}"
    assert entry.decision != "skip", (
        f"{name} is skipped on {plan.hardware.name}, so that nothing is tested: {entry.reason}. "
        "Pass hardware=described(...) on which it applies"
    )
    if entry.plugin.helps_oom:
        type(entry.plugin).Options()  # it is made without a table


def check_recipe_of(name: str, plan: Plan) -> None:
    """`apply` writes something, the same each time; what it leaves for worker processes can be pickled."""
    entry = entry_of(name, plan)
    written = plan.recipe.written_by_author(entry.author)
    assert written, f"{name} was applied and writes nothing into the recipe"
    again = write_recipe(plan.entries, plan.context).written_by_author(entry.author)
    assert written == again, f"{name}: apply() must be pure, it wrote {written} and then {again}"
    for slot in ("order", "collate", "cut"):
        if slot in written:
            pickle.dumps(getattr(plan.recipe, slot))


def check_memory_of(name: str, plan: Plan) -> None:
    """`memory` is pure and gives sizes and stand-ins for slots; `memory_options` gives options of the plugin, with a cost."""
    spec, again = asdict(memory_spec(plan)), asdict(memory_spec(plan))
    stand_ins = spec.pop("stand_ins")
    assert stand_ins.keys() == again.pop("stand_ins").keys(), f"{name}: memory() must be pure"
    assert spec == again, f"{name}: memory() must be pure"
    assert stand_ins.keys() <= set(SLOTS), f"{name}: memory() gives stand-ins for {sorted(stand_ins)}, slots are {SLOTS}"
    for key, value in spec.items():
        for size in value.values() if isinstance(value, dict) else [value]:
            assert math.isfinite(size), f"{name}: memory() sets {key} to {size}"
            assert size >= 0, f"{name}: memory() sets {key} to {size}"
    plugin = entry_of(name, plan).plugin
    for present in (None, plugin.options):
        for offer in plugin.memory_options(present, plan.context):
            assert isinstance(offer.options, type(plugin).Options), f"{name}: memory_options() offers {offer.options!r}"
            assert offer.slower > 0, f"{name}: memory_options() offers {offer}"
            assert offer.cost, f"{name}: memory_options() offers {offer}"


_baselines: dict[tuple[str, str], list[float]] = {}
"""(profile, task) -> losses of a run: the same for every plugin that is compared with it in this process."""


def baseline_losses(plan: Plan, folder: Path) -> list[float]:
    """The losses of a run of `plan`, trained once for each profile and task: tiny jobs differ by their folder only."""
    key = (plan.profile.content.model_dump_json(), plan.job.task.kind)
    if key not in _baselines:
        _baselines[key] = train_tiny(plan, folder).losses
    return _baselines[key]


def check_resume_of(name: str, plan: Plan, folder: Path) -> None:
    """A run resumed from its checkpoint ends with the same bits as the uninterrupted run in `folder / "with" / "run"`."""
    through = folder / "with" / "run"
    again = gone_back(through, folder / "again", 2)
    api.execute(plan, again, cache=folder / "with" / "cache", resume=True)
    assert saved_bits(again / "final") == saved_bits(through / "final"), f"{name}: a resumed run has other weights"
