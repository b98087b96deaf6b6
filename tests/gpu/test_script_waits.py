"""Counted launches and waits of a Trainer's step, with `hwopt.optimized` and without: the table of docs/your-script.md."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from hosts.scripts import bert, llama, padded, reset, rows, train
from pretend_cuda.counters import Counts, report
from programs import program

import hwopt
from hwopt.errors import InputError
from hwopt.hosts.collated import sent

pytestmark = [
    pytest.mark.device("pretend"),
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),  # a default of TRL 1.16
]

SCRIPTS: Any = program("your_script")


@pytest.mark.parametrize(
    "name", ["Trainer, classes", "Trainer, stream", "Trainer, causal", "RewardTrainer", "SentenceTransformerTrainer"]
)
def test_step_launches_and_waits_no_more_than_the_unmodified_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCRIPTS, "ARGUMENTS", SCRIPTS.ARGUMENTS | SCRIPTS.CARD_ARGUMENTS)
    script = SCRIPTS.scripts()[name]
    launches, waits = SCRIPTS.per_step(script, SCRIPTS.as_it_is)
    own_launches, own_waits = SCRIPTS.per_step(script, partial(hwopt.optimized, profile="auto", **SCRIPTS.ON_CARD))
    assert own_launches <= launches + (name == "RewardTrainer")  # it adds the losses of the two micro-batches
    assert own_waits < waits


@pytest.mark.usefixtures("all_values")
@pytest.mark.parametrize(("make", "additive"), [(bert, "rows"), (llama, "labels")])
def test_accumulated_batch_launches_as_many_kernels_as_the_script_and_waits_less(make: Any, additive: str) -> None:
    def counted(accelerator: Any) -> Counts:
        """The counts of the second step."""
        model = make()
        batches = torch.utils.data.DataLoader(rows(24), 8, collate_fn=partial(padded, classes=make is bert))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        seen = []
        for batch in batches:
            if isinstance(accelerator, hwopt.Accelerator):
                accelerator.accumulate_batch(batch, lambda inputs: model(**inputs).loss)
            else:
                accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(Counter(report()["counters"]))
        accelerator.end_training()
        return Counts(seen[1] - seen[0])  # evidence looks at the first step

    plain = counted(accelerate.Accelerator())
    reset()
    whole: dict[str, Any] = {"precision": False, "tf32": False, "batch": {"train": 8}}
    changed = counted(hwopt.Accelerator(profile="rtx3090_24gb", additive=additive, length_batching=False, **whole))
    reset()
    assert changed["launch"] == plain["launch"]
    assert changed.waits < plain.waits


def test_batch_of_a_stream_that_is_on_the_card_already_stays_there() -> None:
    ids = torch.ones(2, 4, dtype=torch.long, device="cuda")
    assert sent({"input_ids": ids}, torch.device("cuda"))["input_ids"].data_ptr() == ids.data_ptr()


def test_states_of_another_optimizer_are_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(transformers.Trainer, tmp_path, save_strategy="steps", save_steps=2, use_cpu=False)
    eight_bit = hwopt.optimized(transformers.Trainer, "auto", optimizer={"name": "adamw_bnb_8bit"})
    with pytest.raises(InputError, match="the states of another optimizer than AdamW8bit: resume with optimizer=False"):
        train(eight_bit, tmp_path, resume=str(tmp_path / "checkpoint-2"), use_cpu=False)
    train(eight_bit, tmp_path, use_cpu=False)
    assert "states of AdamW8bit: your script resumes with that optim, not 'adamw_torch" in capsys.readouterr().out
