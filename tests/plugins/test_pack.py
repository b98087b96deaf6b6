"""Packed rows give the logits, the loss and the gradients of rows with one document each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import named
from event_calls import calling
from hypothesis import given
from hypothesis import strategies as st
from plugin_cases import Cases, Chosen, Mutation, Part, Refused

import hwopt_plugins.pack.collate
from hwopt.data.batches.collate import Collate, cut_in_order
from hwopt.data.batches.step_batch import Step
from hwopt.errors import PluginError
from hwopt.hardware.device import described
from hwopt.plugin import Context
from hwopt.plugin.registry import Registry
from hwopt.testing import TINY_BERT, TINY_LLAMA, Recorder, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt_plugins.pack import pack_rows
from hwopt_plugins.pack.collate import PackedCollate

Pack = Registry().plugin("pack")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SMALL = {size: TINY_LLAMA[size] for size in SIZES} | {"max_position_embeddings": 66}
ENCODER = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODERS = {
    "llama": TINY_LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "mistral": SMALL | {"num_key_value_heads": 1, "sliding_window": 8},
    "gemma3_text": SMALL | {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8},
}
ENCODERS = {"bert": TINY_BERT, "roberta": ENCODER | {"type_vocab_size": 1}, "electra": ENCODER}
MODELS = DECODERS | ENCODERS


def job_of(folder: Path, model_type: str, config: dict[str, Any], kind: str, **training: Any) -> Any:
    data = {"prompt": "label", "completion": "text"} if kind == "causal-lm" else {}
    config = {"model_type": model_type, **config}
    return tiny_job(folder, kind, samples=41, config=config, data=data, **{"max_steps": 3, **training})


def gradients_of(plan: Any, folder: Path) -> dict[str, Any]:
    """The gradients of the first step by parameter, and its loss."""
    found: dict[str, Any] = {}

    def look(run: Any) -> None:
        if not found:
            found.update({name: p.grad.clone() for name, p in run.inner_model.named_parameters() if p.grad is not None})

    plan.recipe.events.append(calling(on_gradients=look))
    found["loss"] = train_tiny(plan, folder).losses
    return found


@pytest.mark.parametrize("model_type", named({each: each for each in MODELS}, ("gemma3_text", "bert", "roberta")))
def test_gradients_and_losses_match_unpacked_rows(model_type: str, tmp_path: Path) -> None:
    """Uneven documents, a partial last step, models with own positions or sliding windows, and an adapter (bert)."""
    kind = "causal-lm" if model_type in DECODERS else "text-classification"
    job = job_of(tmp_path / "data", model_type, MODELS[model_type], kind)
    tables = {"batch": {"train": 4, "gradient_accumulation_steps": 4}}
    tables |= {"adapter": {"always": True, "r": 4}} if model_type == "bert" else {}
    plan = plan_for(tiny_profile(**tables, pack={}), job)
    assert next(entry.decision for entry in plan.entries if entry.name == "pack") == "apply"
    packed = gradients_of(plan, tmp_path / "packed")
    plain = gradients_of(plan_for(tiny_profile(**tables), job), tmp_path / "plain")
    assert packed.pop("loss") == pytest.approx(plain.pop("loss"), rel=1e-5)
    whole = torch.cat([gradient.flatten() for gradient in plain.values()]).norm()
    difference = torch.cat([(packed[name] - plain[name]).flatten() for name in plain]).norm()
    assert difference <= 1e-6 * whole


@pytest.mark.parametrize("precision", [{}, {"dtype": "bf16", "level": "O2"}])
def test_leak_between_documents_is_refused(precision: dict[str, str], tmp_path: Path) -> None:
    """Without position ids per document, attention crosses documents: refused before step 1."""
    tables = {"pack": {}} | ({"precision": precision} if precision else {})
    plan = plan_for(tiny_profile(**tables), job_of(tmp_path / "data", "llama", TINY_LLAMA, "causal-lm"))

    def forget_positions(model: Any, run: Any) -> Any:
        forward = model.forward
        model.forward = lambda position_ids=None, **inputs: forward(**inputs)
        return model

    plan.recipe.model_steps.append(forget_positions)
    with pytest.raises(PluginError, match="does not support packed documents: .*Remove \\[plugins.pack\\]"):
        train_tiny(plan, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "config", "kind", "why"),
    [
        ("llama", TINY_LLAMA, "text-classification", "classifies the last token of a row"),
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, "causal-lm", "does not accept position ids"),
        ("mpnet", ENCODER, "text-classification", "mixes packed documents"),
    ],
)
def test_unsupported_model_is_skipped_with_a_reason(model_type: str, config: Any, kind: str, why: str, tmp_path: Path) -> None:
    """Also in bf16, whose rounding hides how far the outputs of packed documents are off."""
    profile = tiny_profile(pack={}, precision={"dtype": "bf16"})
    plan = plan_for(profile, job_of(tmp_path, model_type, config, kind))
    entry = next(entry for entry in plan.entries if entry.name == "pack")
    assert entry.decision == "skip"
    assert why in entry.reason


def test_model_whose_head_reads_no_document_is_refused(tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(pack={}), job_of(tmp_path / "data", "albert", ENCODER, "text-classification"))
    with pytest.raises(PluginError, match="does not support packed documents"):
        train_tiny(plan, tmp_path)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(60, 200))
def test_every_document_once_and_no_row_too_long(lengths: list[int], width: int) -> None:
    rows = pack_rows(lengths, width)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in row) for row in rows) <= width


def test_nearly_all_computed_tokens_are_real() -> None:
    """Log-normal lengths cut at 512, 16 x 8 rows a step: at least 98 % of the computed tokens are real."""
    collate = packed(rows=16)
    drawn = np.clip(np.random.default_rng(0).lognormal(4, 0.9, 128), 2, 512).astype(int)
    batch = collate(Step(0, 0, tuple(range(128)), 128), [sample_of(length) for length in drawn], [1] * 128)
    assert batch.tokens == drawn.sum()
    assert batch.tokens / sum(rows * width for rows, width in batch.sizes) >= 0.98
    assert max(rows * width for rows, width in batch.sizes) <= 16 * drawn.max(), "no more tokens at once than without"


def packed(rows: int, **options: Any) -> Any:
    settings = {"width": None, "flat": False, "decoder": False, "after_padding": False} | options
    return PackedCollate(Collate(cut_in_order, rows, pad_id=0, mask="prebuilt_mask"), **settings)


def sample_of(length: int) -> dict[str, Any]:
    return {"input_ids": np.full(length, length), "row_labels": np.array(length % 2)}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 6), st.integers(0, 3))
def test_micro_batches_of_any_rung_hold_every_document_once(lengths: list[int], rows: int, rung: int) -> None:
    """Labels, positions and masks stay with their documents for every split."""
    collate = packed(rows)
    batch = collate(Step(0, 0, tuple(range(len(lengths))), len(lengths)), [sample_of(n) for n in lengths], [1] * len(lengths))
    seen = []
    for micro_batch, _ in batch.micro_batches(rung):
        ids, mask = micro_batch.inputs["input_ids"], micro_batch.inputs["attention_mask"]
        starts = micro_batch.inputs["document_starts"]
        assert len(starts) == len(micro_batch.targets)
        flat, positions = ids.flatten(), micro_batch.inputs["position_ids"].flatten()
        for start, label in zip(starts.tolist(), micro_batch.targets.tolist(), strict=True):
            length = int(flat[start])
            seen.append(length)
            assert label == length % 2
            assert flat[start : start + length].tolist() == [length] * length
            assert positions[start : start + length].tolist() == list(range(length))
            row, column = divmod(start, ids.shape[1])
            attended = mask[row, 0, column].nonzero().flatten().tolist()
            assert attended == list(range(column, column + length))
    assert sorted(seen) == sorted(lengths)
    assert batch.rows == len(lengths)


def test_flat_rows_have_no_mask() -> None:
    """With the flash kernel a micro-batch is one row, as long as all of its documents."""
    batch = packed(rows=4, flat=True, decoder=True)(
        Step(0, 0, tuple(range(9)), 9), [{"input_ids": np.full(n, n), "labels": np.full(n, n)} for n in range(1, 10)], [1] * 9
    )
    assert [rows for rows, _ in batch.sizes] == [1] * len(batch.sizes)
    assert sum(width for _, width in batch.sizes) >= batch.tokens
    assert "attention_mask" not in next(batch.micro_batches())[0].inputs


def test_flash_kernel_is_used_if_available(tmp_path: Path) -> None:
    job = job_of(tmp_path, "llama", TINY_LLAMA, "causal-lm")
    model = plan_for(tiny_profile(), job).model

    def asked(capability: tuple[int, int], software: dict[str, str]) -> Any:
        return Pack(Pack.Options()).probe(Context(described("a card", capability, 24.0), software, model, job.job))

    assert asked((8, 0), {"flash-attn": "2.8"}).options[0].kernel == "flash"
    assert asked((8, 0), {}).options[0].kernel == "mask"
    assert "needs the package flash-attn" in asked((8, 0), {}).reason
    assert "needs compute capability 8.0" in asked((7, 5), {"flash-attn": "2.8"}).reason


def one_document_per_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hwopt_plugins.pack.collate, "pack_rows", lambda lengths, width: [[index] for index in range(len(lengths))])


def half_packed(patch: pytest.MonkeyPatch) -> None:
    def packed(lengths: Sequence[int], width: int) -> list[list[int]]:
        half = len(lengths) // 2
        return [*pack_rows(lengths[:half], width), *([index] for index in range(half, len(lengths)))]

    patch.setattr(hwopt_plugins.pack.collate, "pack_rows", packed)


def some_alone(patch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    """The documents of the chosen rows have a row each."""

    def packed(lengths: Sequence[int], width: int) -> list[list[int]]:
        rows = enumerate(pack_rows(lengths, width))
        return [part for number, row in rows for part in ([[at] for at in row] if chosen(number) else [row])]

    patch.setattr(hwopt_plugins.pack.collate, "pack_rows", packed)


def test_evidence_of_documents_that_leak_after_the_first_step_is_inactive(tmp_path: Path) -> None:
    class Leaks(Recorder):
        def on_evidence(self, run: Any, found: list[Any]) -> None:
            super().on_evidence(run, found)
            real = run.inner_model.forward
            run.inner_model.forward = lambda *inputs, **named: real(*inputs, **{**named, "position_ids": None})

    job = tiny_job(tmp_path, "causal-lm", max_steps=2)
    recorder = train_tiny(plan_for(tiny_profile(pack={}), job), tmp_path, Leaks())
    (_, first), (_, last) = (found[-1] for found in (recorder.found, recorder.found_at_end))
    assert (first.status, last.status) == ("active", "inactive")
    assert "outputs of packed documents differ from those in separate rows" in last.seen


CASES = Cases(
    conflicts=(
        Refused("length_batching", "[plugins.pack]\n[plugins.length_batching]"),
        Refused("compile", "[plugins.pack]\n[plugins.compile]", on_card=True),
        Refused("sdpa", '[plugins.sdpa]\n[plugins.pack]\nkernel = "flash"'),
    ),
    mutations=(
        Mutation("each document has a row", one_document_per_row, "0 of them with several documents"),
        Mutation("half of the documents have a row each", half_packed, "tokens are enough"),
    ),
    parts=(Part("documents alone in a row", some_alone),),
)
