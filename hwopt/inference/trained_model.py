"""TrainedModel: the model of a finished run, loaded for inference with the run's precision and attention."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from hwopt.config.job import Job, load_job
from hwopt.config.task_kinds import task_facts
from hwopt.config.toml import parse_assignment
from hwopt.data.sources.image_folder import split_folders
from hwopt.data.sources.location import DATASETS_FILES, locate
from hwopt.data.sources.reading import leaves, read_all
from hwopt.data.sources.rows import ReadOptions, Rows
from hwopt.errors import DoesNotFitError, InputError
from hwopt.hardware.detect import detect
from hwopt.hardware.device import Hardware
from hwopt.inference.settings import HALF, InferenceSettings, read_settings
from hwopt.model.config import load_config
from hwopt.model.facts import model_facts
from hwopt.model.remote_code import is_trusted, trust_only, trusted_models
from hwopt.model.weights import load_weights
from hwopt.plugin import dtype_name
from hwopt.records.run_files import FINAL, JOB, PLAN
from hwopt.saving.reader import list_checkpoints
from hwopt.system import garbage
from hwopt.system.paths import path_kind
from hwopt.tasks.base import Task
from hwopt.tasks.model_builder import with_head
from hwopt.tasks.prepared import Prepared, Trained
from hwopt.tasks.registry import make_task
from hwopt.text import first_line, listing, nearest

ADAPTER = "adapter_config.json"  # the file of a folder that holds an adapter for another model
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RunModel:
    """Where the model of a run is."""

    folder: Path  # the folder of the model, usually `final/`
    job: Job
    settings: InferenceSettings
    split: str | None = None  # that --set data.split names; the one of the job is of its training data

    def rows(self, source: str, options: ReadOptions) -> Rows:
        """The rows of `source`. Without `split` those of "train" if it has splits, as a note says then."""
        rows, splits = read_all(source, self.split, options), False
        for leaf in leaves(source) if self.split is None else ():
            kind, path = locate(leaf.path, None, options.format)
            splits |= (
                kind == "dataset" or (path / DATASETS_FILES[0]).is_file() or (kind == "images" and "train" in split_folders(path))
            )
        note = f"{source}: its split 'train' is read; --set data.split=NAME reads another one"
        return replace(rows, notes=(*rows.notes, note)) if splits else rows

    @property
    def is_adapter(self) -> bool:
        """Whether the folder has an adapter instead of a whole model."""
        return not (self.folder / "config.json").exists() and (self.folder / ADAPTER).exists()


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode on its device, with its task and tokenizer."""

    task: Task
    trained: Trained
    model: Any
    device: torch.device
    settings: InferenceSettings
    notes: tuple[str, ...] = ()  # lines for the user: how inference differs from the run's evaluation

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Context of every forward pass: no gradients, and the run's precision."""
        dtype = DTYPES.get(self.settings.dtype or "")
        with torch.inference_mode(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            yield


def find_run_model(path: Path, assignments: Sequence[str] = ()) -> RunModel:
    """The model of a run folder, or of the `final/` of one. `assignments` ("data.KEY=VALUE") change how its job reads data.

    Raises InputError if the run is not finished, or is not a run.
    """
    given = dict(map(parse_assignment, assignments))
    if other := next((key for key in given if key[0] != "data"), None):
        raise InputError(f"--set {'.'.join(other)}: the model is trained; only keys of [data] can be set")
    kind = path_kind(path, "RUN")
    if kind != "folder":
        what, in_runs = "no such folder" if kind == "missing" else "is a file", Path("runs") / path.name
        names = [str(each) for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        hint = f" Did you mean {str(in_runs)!r}?" if in_runs.is_dir() else nearest(str(path), names)
        raise InputError(f"{path}: {what}.{hint} Give a run folder, such as runs/NAME")
    path = path.absolute()
    if (path / PLAN).is_file():
        run, folder = path, path if (path / "README.md").is_file() else path / FINAL  # a final/ has a model card
    elif (path.parent / PLAN).is_file():  # a job.toml there can be the one of a user
        run, folder = path.parent, path
    else:
        runs = sorted(each.parent.name for each in path.glob(f"*/{PLAN}"))
        hint = f"; give one of its runs: {listing(runs)}" if runs else ""
        raise InputError(f"{path}: is not a run folder: it has no {PLAN}{hint}")
    if not folder.is_dir():
        saved = list_checkpoints(run)
        where = f", or give its newest checkpoint: {saved[0]}" if saved else ""
        raise InputError(f"{run}: the run is not finished: it has no final/. Finish it with `hwopt run --resume`{where}")
    found = RunModel(folder, load_job(run / JOB, assignments).job, read_settings(run), given.get(("data", "split")))
    if not (folder / "config.json").is_file() and not found.is_adapter:
        raise InputError(
            f"{folder}: has no config.json, so the model cannot be built from it. Its class has no save_pretrained(): "
            "build the model in Python and load model.safetensors into it"
        )
    return found


def load_trained_model(found: RunModel, cache: Path) -> TrainedModel:
    """The model that `find_run_model` found, on the GPU if there is one. Raises InputError if it cannot be loaded.

    The base of an adapter is not trained: it is loaded in the precision of the products, which takes less memory.
    """
    import transformers

    job, folder, adapter = found.job, found.folder, found.is_adapter
    if adapter and job.model.name is None:
        raise InputError(
            f"{folder}: holds an adapter for a model with random weights (model.config), which is not saved. "
            "Merge the adapter at the end of the run"
        )
    if is_trusted(job.model.name):  # save_pretrained() copied its code
        trust_only([*trusted_models(), str(folder)])
    task = make_task(job)
    hardware = detect()
    settings, notes = usable_settings(found.settings, hardware)
    try:
        base, revision = (str(job.model.name), job.model.revision) if adapter else (str(folder), None)
        config = load_config(base, None, revision)
        if adapter:
            config = with_head(config, task, Prepared(cast(Any, None), None, None, settings.labels))
        tokenizer = task.load_processing(str(folder))
        facts = model_facts(config, task.facts, base, cache / "models")
        dtype = DTYPES[settings.dtype] if adapter and settings.dtype else usable_dtype(config, hardware)
        options = {"dtype": dtype} | ({} if settings.attention is None else {"attn_implementation": settings.attention})
        auto_class = getattr(transformers, task_facts(job.task.kind).auto_class)
        model = load_weights(auto_class, base, revision, config, new_head=adapter, **options)
        model = with_adapter(model, folder) if adapter else model
    except InputError as error:
        raise InputError(str(error).removeprefix("model.name: ")) from error
    labels = settings.labels or tuple(name for _, name in sorted((getattr(config, "id2label", None) or {}).items()))
    trained = Trained(job, config, tokenizer, labels, facts.max_positions)
    device = torch.device("cuda", 0) if hardware.device_type == "cuda" else torch.device("cpu")
    try:
        model = model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"{folder}: the model does not fit into the device's memory ({first_line(error)}). Free memory that other processes "
            "use, or hide the GPU (CUDA_VISIBLE_DEVICES=) to use the CPU"
        ) from error
    garbage.collect_as_usual()
    return TrainedModel(task, trained, model, device, settings, notes)


def usable_settings(saved: InferenceSettings, hardware: Hardware) -> tuple[InferenceSettings, tuple[str, ...]]:
    """(the settings of the run, as far as this machine supports them; notes about what differs)."""
    notes = []
    if saved.dtype is not None and not (capability := hardware.can(saved.dtype)):
        notes.append(f"the run computed in {saved.dtype}, this machine computes in fp32: {capability.reason}")
        saved = replace(saved, dtype=None)
    if saved.attention is not None and "flash" in saved.attention and hardware.device_type == "cpu":
        notes.append(f"the run used {saved.attention}, which needs a GPU: taking the default attention")
        saved = replace(saved, attention=None)
    return saved, tuple(notes)


def usable_dtype(config: Any, hardware: Hardware) -> Any:
    """The dtype to load weights in: that of the file, or fp32 if the machine does not support it."""
    half = HALF.get(dtype_name(config.dtype))
    return "auto" if half is None or hardware.can(half) else torch.float32


def with_adapter(model: Any, folder: Path) -> Any:
    """The base `model` with the adapter in `folder`. Raises InputError if a part of it cannot be loaded.

    PEFT loads it: `load_adapter` of older versions of transformers leaves out weights without an error. The run may have added
    tokens, whose rows the adapter has.
    """
    tokens = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("trainable_token_indices") or {}
    rows = max((1 + token for trained in tokens.values() for token in trained), default=0)
    if rows > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(rows, mean_resizing=False)
    try:
        import peft

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            # peft 0.21 reads a property that transformers 5.23 renamed
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.* is deprecated", category=FutureWarning)
            return peft.PeftModel.from_pretrained(model, str(folder)).get_base_model()
    except (ImportError, OSError, ValueError, RuntimeError, UserWarning) as error:
        raise InputError(f"{folder}: cannot load the adapter: {first_line(error)}") from error
