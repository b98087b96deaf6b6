"""The summary of a run: its totals under the names of Hugging Face's Trainer, and the best evaluation."""

from __future__ import annotations

from dataclasses import asdict

from hwopt.hardware.monitor import peak_memory_gib
from hwopt.saving.best_model import BestModel
from hwopt.training.listener import Summary
from hwopt.training.run import Run
from hwopt.training.telemetry.telemetry import Telemetry
from hwopt.training.telemetry.use import UseMeter


def summarize(run: Run, telemetry: Telemetry, use: UseMeter, seconds: float, best: BestModel) -> Summary:
    """The totals over all ranks, of `seconds` of training, with the last metrics, the best one and the details of the best."""
    total, world = telemetry.total, run.world_size
    totals = {
        "step": run.step,
        "epoch": round(run.epoch, 4),
        "train_runtime": seconds,
        "train_loss": telemetry.mean_loss(),
        "train_steps_per_second": total.steps / seconds,
        "train_samples_per_second": total.samples * world / seconds,
    }
    if run.task.facts.inputs == "tokens":
        totals["train_tokens_per_second"] = total.tokens * world / seconds
    totals |= {"data_wait": total.wait / seconds, "peak_memory_gib": peak_memory_gib(run.device)}
    used, verdict = use.whole(), use.verdict()
    gpu = {"gpu_utilization": used["gpu_percent"]} if "gpu_percent" in used else {}
    judged = {} if verdict is None else {"verdict": asdict(verdict)}
    best_values = {} if best.value is None else {"best_step": best.step, f"best_{best.metric}": best.value}
    details = {} if best.value is None else {f"best_eval_{name}": value for name, value in best.details.items()}
    mixture = run.prepared.train.mixture
    shares = {} if mixture is None else {"mixture": list(mixture.rows())}
    return totals | gpu | shares | best.latest | best_values | details | {"use": used} | judged
