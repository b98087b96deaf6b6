"""A bare PyTorch loop and the HF Trainer, which train as a run of hwopt does, and the counts of their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pretend_cuda.counters import Counts, report
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from hwopt.training.run import Run

STEPS, WARM_UP = 20, 5
"""Steps of a run; the first WARM_UP are not counted."""


@dataclass(frozen=True)
class PerStep:
    """Averages of one optimizer step."""

    launches: float
    waits: float
    products: float
    """Matrix products, of cuBLAS."""

    @classmethod
    def of(cls, steps: Callable[[int], None]) -> PerStep:
        """The averages over STEPS - WARM_UP steps, after WARM_UP uncounted ones; `steps(n)` does n steps."""
        steps(WARM_UP)
        before = report()["counters"]
        steps(STEPS - WARM_UP)
        return cls.between(before, report()["counters"])

    @classmethod
    def between(cls, before: dict[str, int], after: dict[str, int]) -> PerStep:
        """The averages over the counted steps, from the counters before and after them."""
        counts = Counts(after)
        counts.subtract(before)
        counted = STEPS - WARM_UP
        return cls(*(round(number / counted, 1) for number in (counts["launch"], counts.waits, counts["gemm"])))


def samples_of(run: Run) -> list[dict[str, Any]]:
    """The tokenised training samples of `run` as dictionaries, as the Trainer takes them."""
    train = run.prepared.train
    rows = (train.row(index) for index in range(len(train)))
    shifts = run.task.facts.target == "next_token"  # the model shifts the labels
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"] if shifts else row["row_labels"]} for row in rows]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch of `samples`, padded to the longest one."""
    tokens = [torch.as_tensor(sample["input_ids"]).long() for sample in samples]
    labels = [torch.as_tensor(sample["labels"]).long() for sample in samples]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100) if labels[0].dim() else torch.stack(labels),
    }


def make_optimizer(name: str, parameters: list[Any]) -> Any:
    """The optimizer `name` of a profile, without hwopt."""
    if name == "adamw_bnb_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=name == "adamw_torch_fused" or None)


def bare_loop(run: Run, model: Any, optimizer_name: str, dtype: torch.dtype | None) -> PerStep:
    """The counts of a PyTorch loop with autocast, accumulation, clipping and a LambdaLR, as one writes it by hand.

    Like hwopt it applies no update that is not finite, and reads the loss after the last step. `clip_grad_norm_` reads the norm
    for an optimizer that cannot skip an update itself; a loss scaler does so too.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(optimizer_name, parameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    reads_norm = not (scaler.is_enabled() or getattr(optimizer, "_step_supports_amp_scaling", False))
    accumulation = run.batch.accumulation(1)
    loader: Any = DataLoader(samples_of(run), run.batch.train, shuffle=True, drop_last=True, collate_fn=padded, pin_memory=True)
    batches = (batch for _ in range(1000) for batch in loader)
    model.train()

    def steps(number: int) -> None:
        for _ in range(number):
            for _ in range(accumulation):
                batch = {key: value.to(run.device, non_blocking=True) for key, value in next(batches).items()}
                with torch.autocast("cuda", dtype, enabled=dtype is not None):
                    loss = model(**batch).loss / accumulation
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=reads_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()

    found = PerStep.of(steps)
    optimizer.zero_grad(set_to_none=True)
    return found


def hugging_face_loop(run: Run, model: Any, optimizer_name: str, dtype: torch.dtype | None, folder: Path) -> PerStep:
    """The counts of the HF Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counter(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (WARM_UP, STEPS):
                reports.append(report()["counters"])

    reports: list[dict[str, int]] = []
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=run.batch.train,
        gradient_accumulation_steps=run.batch.accumulation(1),
        optim=optimizer_name,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, data_collator=padded, train_dataset=samples_of(run), callbacks=[Counter()])
    trainer.train()
    return PerStep.between(*reports)
