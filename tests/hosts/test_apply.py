"""`hwopt.apply`: single plugins on a model, in a loop that knows nothing of them, until `undo()`."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.scripts import SIZES, Log, Steps, arguments, bert, farthest, llama, padded, reset, rows
from transformers import MixtralConfig, MixtralForCausalLM, Trainer

import hwopt
from hwopt.errors import PluginError

CHUNKS: dict[str, Any] = {"fused_loss": {"backend": "torch", "chunks": 3}}


def steps_of(model: Any) -> Steps:
    """A loop of torch alone."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for begin in range(0, 48, 8):
        loss = model(**padded(rows()[begin : begin + 8], classes=False)).loss
        loss.backward()
        found.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_fused_loss_trains_the_same_and_undo_puts_back_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    wanted, model = steps_of(llama()), llama()
    batch, attributes = padded(rows()[:4], classes=False), [dict(vars(each)) for each in model.modules()]
    with hwopt.apply(model, ["fused_loss"], "cpu", **CHUNKS):
        assert farthest(steps_of(model), wanted) < 1e-5
        assert model(**batch).logits is None
        wanted_sum = model(**batch).loss.item() * int((batch["labels"][:, 1:] != -100).sum())
        assert model(**batch, num_items_in_batch=7).loss.item() == pytest.approx(wanted_sum / 7)
        model.eval()
        assert model(**batch).logits.shape[-1] == 200  # an evaluation, and generate(), need the logits
        model.train()
    assert [dict(vars(each)) for each in model.modules()] == attributes
    assert model(**batch).logits.shape[-1] == 200
    assert "apply    fused_loss: torch, logits over 200 tokens in 3 chunks per micro-batch" in capsys.readouterr().out


def test_labels_that_the_script_has_shifted_are_those_of_the_loss() -> None:
    model, batch = llama(), padded(rows()[:4], classes=False)
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100).roll(1, 0)
    wanted = model(**batch).loss.item()
    with hwopt.apply(model, ["fused_loss"], "cpu", **CHUNKS):
        assert model(**batch).loss.item() == wanted


def test_fused_loss_in_a_plain_trainer(tmp_path: Path) -> None:
    def steps(*plugins: str) -> Steps:
        reset()
        model, log = llama(), Log()
        data: Any = rows()
        with hwopt.apply(model, plugins, "cpu", **CHUNKS):
            collator = partial(padded, classes=False)
            Trainer(model, arguments(tmp_path), train_dataset=data, data_collator=collator, callbacks=[log]).train()
        return log.steps

    assert farthest(steps("fused_loss"), steps()) < 1e-5


def checkpointed(model: Any) -> bool:
    return any(getattr(each, "gradient_checkpointing", False) for each in model.modules())


def test_checkpointing_and_attention_end_with_undo() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    applied = hwopt.apply(model, ["checkpointing", "sdpa"], "cpu")
    assert checkpointed(model)
    assert model.config._attn_implementation == "sdpa"
    assert farthest(steps_of(model), steps_of(llama())) < 1e-5
    applied.undo()
    assert not checkpointed(model)
    assert model.config._attn_implementation == "eager"


def routed() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=60, **experts, **SIZES))


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (bert, "fused_loss", "needs a decoder"),
        (routed, "fused_loss", "the load-balancing loss of its router"),
        (llama, "optimizer", "changes the model and the process alone"),
        (llama, "adapter", "it makes another model"),
    ],
)
def test_what_a_model_alone_cannot_take_is_named(make: Any, name: str, reason: str) -> None:
    model = make()
    with pytest.raises(PluginError, match=f"{name}: .*{reason}"):
        hwopt.apply(model, [name], "cpu")
    with hwopt.apply(model, [name, "sdpa"], "cpu", strict=False) as applied:
        assert reason in applied.skipped[name]
