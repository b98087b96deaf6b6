"""Models on disk: written beside their place, renamed when whole, opened with `from_pretrained`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from hwopt.errors import StorageError
from hwopt.storage import staged

if TYPE_CHECKING:
    from torch import Tensor

    from hwopt.build import Run


def save_checkpoint(run: Run) -> None:
    """`checkpoint-<step>/`: the model as it is now, openable with `from_pretrained`; then the oldest beyond the limit go."""
    weights = run.state_dict()
    if run.is_main:
        with staged(run.folder / f"checkpoint-{run.step}") as folder:
            _write(run, run.inner_model, weights, folder)
        if limit := run.training.save_total_limit:
            saved = sorted(run.folder.glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
            for old in saved[:-limit]:
                shutil.rmtree(old, ignore_errors=True)
    run.accelerator.wait_for_everyone()


def save_final(run: Run) -> Path:
    """Training is over: undo what only training needed (merge adapters, fp32 weights) and write `final/`."""
    target, extras = run.folder / "final", run.extras
    model = run.engine.whole_model()
    for step in reversed(run.recipe.final_steps):
        model = step(model, run)
    if run.is_main:
        with staged(target) as folder:
            if extras.is_dir():
                shutil.copytree(extras, folder, dirs_exist_ok=True)
            _write(run, model, model.state_dict(), folder)
        shutil.rmtree(extras, ignore_errors=True)
    run.accelerator.wait_for_everyone()
    return target


def _write(run: Run, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    dtype = str(next(weight for weight in weights.values() if weight.is_floating_point()).dtype).removeprefix("torch.")
    forward = model.__dict__.pop("forward", None)  # Accelerate's autocast wrapper cannot be stored
    try:
        model.save_pretrained(folder, state_dict=weights)
    finally:
        if forward is not None:
            model.forward = forward
    run.prepared.tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    if config.is_file():  # an adapter alone has none
        content = json.loads(config.read_text(encoding="utf-8"))
        # transformers writes the dtype of the model in memory, which O2 keeps in half, and loads by it
        content["dtype"] = dtype
        content["use_cache"] = True  # off for training only; generation wants it
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class BestWeights:
    """Keeps the trained weights of the best evaluation, in one safetensors file of the run folder."""

    def __init__(self, run: Run, metric: str, greater_is_better: bool) -> None:
        self.run, self.metric = run, metric
        self.sign = 1.0 if greater_is_better else -1.0
        self.value: float | None = None
        self.step = 0
        self.file = run.folder / ".best.safetensors"

    def consider(self, metrics: dict[str, float]) -> bool:
        """Keep the current weights if `metrics` are the best so far (the later one of equals loses)."""
        value = metrics[self.metric]
        better = self.value is None or not math.isfinite(self.value) or self.sign * value > self.sign * self.value
        if self.value is not None and not (better and math.isfinite(value)):
            return False
        self.value, self.step = value, self.run.step
        last = self.run.step == self.run.total_steps
        trained = {} if last else self.run.engine.snapshot()
        if self.run.is_main and not last:
            from safetensors.torch import save_file

            staging = self.file.with_suffix(".partial")
            try:
                save_file(trained, staging)
                staging.replace(self.file)
            except (OSError, SafetensorError) as error:
                raise StorageError(f"{self.file} could not be written: {error}") from error
        return True

    def restore(self) -> None:
        """Put the best weights back into the model, unless they are the current ones."""
        self.run.accelerator.wait_for_everyone()
        if self.value is not None and self.step != self.run.step:
            from safetensors.torch import load_file

            self.run.engine.restore(load_file(self.file))
        self.run.accelerator.wait_for_everyone()
        if self.run.is_main:
            self.file.unlink(missing_ok=True)
