"""Write models and training state to disk while training continues: one thread, one folder at a time."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hwopt.errors import StorageError
from hwopt.records.run_files import FINAL, JOB, PLAN
from hwopt.saving.reader import FORMAT, STATE, TENSORS, tensors_of
from hwopt.saving.savable_run import SavableRun
from hwopt.system.atomic_folder import GIB, staged
from hwopt.tensor_tree import HostCopies, flatten

OVERHEAD = 1.02  # bytes on disk per byte of tensors: configs, the tokenizer and the file system need some
HEARTBEAT_SECONDS = 0.5  # how long `wait` waits for the disk before it tells the watchdog that the run is alive
PLAN_FILES = (JOB, PLAN)
"""What `hwopt predict` reads of a run beside its model, so that `final/` can be copied elsewhere alone."""
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class AsyncWriter:
    """The loop waits only for copies into host memory. An error of the thread is raised by the next call."""

    def __init__(self, run: SavableRun) -> None:
        self.run = run
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="hwopt-writer")
        self.last: Future[None] | None = None
        self.target: Path | None = None  # the folder that the thread writes, or has written without a report to the run yet
        self.seconds = 0.0  # duration of the last write

    def write(
        self,
        target: Path,
        content: Mapping[str, Any],
        state: Any,
        weights: Mapping[str, Tensor],
        copies: HostCopies,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to write `target`: a model of `weights` that `from_pretrained` opens, with `content` and `state`.

        `then` runs in the thread when the folder is complete. Call `wait` first. Raises StorageError if the disk has no space.
        """
        on_host = {name: copies(weight) for name, weight in weights.items()}
        require_space(target.parent, copies.bytes, target.name)

        def write_folder() -> None:
            with staged(target, copies.bytes * OVERHEAD) as folder:
                write_model(self.run, self.run.skeleton, on_host, folder)
                write_state(folder, content, state)
            then()

        self.submit(write_folder, target)

    def submit(self, write: Callable[[], None], target: Path | None = None) -> None:
        """Run `write` in the thread. If it succeeds, the run is told that `target` is saved."""

        def timed() -> None:
            began = time.monotonic()
            write()
            self.seconds = time.monotonic() - began

        self.last, self.target = self.pool.submit(timed), target

    def wait(self, all_ranks: bool = True) -> None:
        """Wait until all is written, or raise StorageError. All ranks call it, so that a slow disk looks like a hang to none."""
        while self.run.engine.all_reduce_max(self.busy()) if all_ranks else self.busy():
            self.run.heartbeat()
        self.run.heartbeat()
        try:
            self.check()
        finally:
            self.last = None

    def busy(self) -> int:
        """1 if something is still being written after HEARTBEAT_SECONDS, else 0, as soon as nothing is."""
        return int(self.last is not None and not wait([self.last], timeout=HEARTBEAT_SECONDS).done)

    def check(self) -> None:
        """Raise the error of a failed write, tell the run of a finished one; does not wait."""
        if self.last is not None and self.last.done():
            self.last.result()
            target, self.target = self.target, None
            if target is not None:
                self.run.was_saved(target)

    def close(self) -> None:
        self.pool.shutdown(wait=True)


def require_space(place: Path, bytes_: float, what: str) -> None:
    """Raise StorageError if the disk of `place` has less free space than `what` needs."""
    free = shutil.disk_usage(place).free
    if bytes_ * OVERHEAD > free:
        raise StorageError(
            f"{place}: {what} needs {bytes_ * OVERHEAD / GIB:.3f} GiB, {free / GIB:.3f} GiB are free. "
            "Free some space, lower training.save_total_limit, or give another --output-dir"
        )


def write_state(folder: Path, content: Mapping[str, Any], state: Any) -> None:
    """Write the training state beside a model's files. Tensors that those files hold bit for bit are not written twice."""
    from safetensors.torch import save_file

    tree, tensors = flatten(state)
    with ExitStack() as stack:
        find = tensors_of(folder, stack)
        for name in [name for name in tensors if name.startswith("engine/parameters/")]:
            with suppress(KeyError):  # an adapter's, or the second name of a tied parameter
                written = find(name)
                if written.dtype == tensors[name].dtype and torch.equal(written, tensors[name]):
                    del tensors[name]
    save_file(unshared(tensors), folder / TENSORS)
    text = json.dumps({"format": FORMAT, **content, "state": tree}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` without shared memory, which safetensors refuses."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return separate


def save_final(run: SavableRun, writer: AsyncWriter, card: str) -> None:
    """Write `final/`, after the recipe's `final_steps` (merge adapters, fp32 weights). All ranks call it."""
    model = run.engine.unsharded_model()
    for step in reversed(run.recipe.final_steps):
        model = step(model, run)
    if run.is_main:
        writer.submit(partial(write_final, run, model, card))
    writer.wait()  # all ranks wait here: a barrier would time out after some minutes


def write_final(run: SavableRun, model: Any, card: str) -> None:
    weights = model.state_dict()
    with staged(run.folder / FINAL, sum(weight.nbytes for weight in weights.values())) as folder:
        if run.extras.is_dir():
            shutil.copytree(run.extras, folder, dirs_exist_ok=True)
        model.__dict__.pop("forward", None)  # Accelerate's autocast wrapper cannot be saved
        write_model(run, model, weights, folder)
        (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")
        for name in PLAN_FILES:
            if (run.folder / name).is_file():  # a run by the Python API has none
                shutil.copy(run.folder / name, folder)
    shutil.rmtree(run.extras, ignore_errors=True)


def skeleton_of(model: Any) -> Any:
    """A copy of `model` on the meta device, without hooks and forward wrappers. It can be saved while `model` trains."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        known[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
    for module in model.modules():
        known |= {id(hooks): OrderedDict() for name in HOOKS if (hooks := getattr(module, name, None)) is not None}
    skeleton = copy.deepcopy(model, known)
    skeleton.__dict__.pop("forward", None)  # Accelerate's autocast wrapper cannot be saved
    return skeleton


def write_model(run: SavableRun, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write config, `weights` and the run's tokenizer to `folder`; of a model without `save_pretrained` no config."""
    run.prepared.tokenizer.save_pretrained(folder)
    if not hasattr(model, "save_pretrained"):
        from safetensors.torch import save_file

        save_file(unshared(weights), folder / "model.safetensors")
        return
    dtype = str(next(weight for weight in weights.values() if weight.is_floating_point()).dtype).removeprefix("torch.")
    model.save_pretrained(folder, state_dict=weights)
    config = folder / "config.json"
    if config.is_file():  # an adapter has no config.json
        content = json.loads(config.read_text(encoding="utf-8"))
        # transformers writes the dtype of the model in memory (half under O2), and loads the weights in that dtype
        content["dtype"] = dtype
        content["use_cache"] = True  # off only in training; generation needs it
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
