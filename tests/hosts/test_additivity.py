"""The closed list: every loss on it adds up from micro-batches, with the law that it says, in double precision."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hosts.scripts import SIZES, arguments
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

import hwopt
from hwopt.data.batches.collate import cut_in_order
from hwopt.hosts.additivity import LAWS, additivity_of, without_dropout
from hwopt.hosts.collated import micro_batches

IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 1}
MODELS = {
    "BertForSequenceClassification": {},
    "DistilBertForTokenClassification": {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64},
    "RobertaForMaskedLM": {},
    "BertForMultipleChoice": {},
    "LlamaForCausalLM": {},
    "Qwen2ForSequenceClassification": {"pad_token_id": 0},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "T5ForConditionalGeneration": {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16},
    "BartForConditionalGeneration": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    "ViTForImageClassification": IMAGE,
}

COMMON = {"vocab_size": 60, "num_labels": 3, "num_key_value_heads": 2, "decoder_start_token_id": 0}


def make(name: str) -> Any:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**(COMMON | SIZES | MODELS[name]))).double().eval()


def batch_of(name: str, rows: int, width: int) -> dict[str, Any]:
    """Rows of different lengths with labels as the class `name` takes them."""
    torch.manual_seed(1)
    if "Image" in name:
        return {"pixel_values": torch.randn(rows, 1, 8, 8, dtype=torch.double), "labels": torch.randint(3, (rows,))}
    lengths = torch.linspace(2, width, rows).long()
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.randint(5, 60, (rows, width)) * mask
    labels = torch.randint(3, (rows, width)).masked_fill(mask == 0, -100)
    if name.endswith(("SequenceClassification", "MultipleChoice")):
        labels = torch.randint(2, (rows,))
    if name.endswith("MultipleChoice"):
        ids, mask = ids[:, None].expand(-1, 2, -1).contiguous(), mask[:, None].expand(-1, 2, -1).contiguous()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


CASES = [(name, counts) for name in MODELS for counts in (True, False) if counts or not name.endswith(("CausalLM", "HeadModel"))]


@pytest.mark.parametrize(("name", "counts"), CASES)
def test_listed_loss_adds_up(name: str, counts: bool, tmp_path: Path) -> None:
    model = make(name)
    trainer = Trainer(model=model, args=arguments(tmp_path))
    found = additivity_of(trainer, counts)
    assert found.law in LAWS, found.reason
    batches = [batch_of(name, 6, 9), batch_of(name, 6, 7)]
    count = torch.tensor(40) if counts else None
    with torch.no_grad():
        whole = sum(float(trainer.compute_loss(model, dict(batch), num_items_in_batch=count)) for batch in batches)
        parts = micro_batches(batches, found.law, cut_in_order, 2, 0, pad_id=0)
        losses = [float(trainer.compute_loss(model, dict(part.inputs), num_items_in_batch=count)) for part in parts]
    split = sum(loss * part.weight for loss, part in zip(losses, parts, strict=True))
    assert len(parts) >= 6
    assert split == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "BertForQuestionAnswering", "BertForPreTraining", "CLIPModel"])
def test_loss_that_is_not_listed_has_no_law(name: str, tmp_path: Path) -> None:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        router = {"output_router_logits": True} if "Mixtral" in name else {}
        model = cls(cls.config_class(**(router if "CLIP" in name else {"vocab_size": 60, **SIZES, **router})))
    assert additivity_of(Trainer(model=torch.nn.Linear(1, 1), args=arguments(tmp_path)), True).law is None
    trainer = Trainer(model=make("BertForSequenceClassification"), args=arguments(tmp_path))
    trainer.model = model
    assert additivity_of(trainer, True).law is None


@pytest.mark.parametrize(("kind", "reason"), [("dynamic", "rope_type = 'dynamic' depend on the longest"), ("linear", "")])
def test_positions_that_depend_on_the_longest_row_have_no_law(kind: str, reason: str, tmp_path: Path) -> None:
    options = {"rope_parameters": {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | SIZES | options))
    found = additivity_of(Trainer(model=model, args=arguments(tmp_path)), True)
    assert (found.law is None) == bool(reason)
    assert reason in found.reason


def test_method_of_a_loss_that_a_subclass_overrides_has_no_law(tmp_path: Path) -> None:
    from trl import DPOTrainer

    own = type("Own", (DPOTrainer,), {"_compute_loss": lambda self, model, inputs: None})
    trainer = Trainer(model=make("LlamaForCausalLM"), args=arguments(tmp_path))
    trainer.__class__ = own
    assert additivity_of(trainer, True).reason == "Own computes a loss of its own"


def test_class_made_of_hwopts_has_no_law_whatever_the_user_says(tmp_path: Path) -> None:
    made = hwopt.optimized(Trainer, "cpu", additive="rows")
    own = type("Mine", (made,), {"compute_loss": lambda self, model, inputs, **more: model(**inputs).loss})
    trainer = own(model=make("BertForSequenceClassification").float(), args=arguments(tmp_path))
    assert "make the class first, then hwopt.optimized(Mine)" in additivity_of(trainer, True, "rows").reason


def with_own_forward(model: Any) -> None:
    plain = model.forward
    model.forward = functools.wraps(plain)(lambda *inputs, **named: plain(*inputs, **named))


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        (lambda model: model.add_module("own", torch.nn.BatchNorm1d(3)), "rows", "own is a BatchNorm"),
        (lambda model: torch.nn.utils.parametrizations.spectral_norm(model.classifier), "rows", "spectral norm"),
        (lambda model: torch.nn.utils.spectral_norm(model.classifier), "rows", "spectral norm"),
        (lambda model: setattr(model.config, "model_type", "convbert"), "rows", "mix tokens with the padding"),
        (lambda model: setattr(model.config, "model_type", "nllb-moe"), "rows", "let an expert take a limited number"),
        (with_own_forward, None, "forward() of the model is yours"),
        (lambda model: setattr(model, "loss_function", torch.nn.functional.cross_entropy), None, "loss_function of the model"),
        (lambda model: model.register_forward_hook(lambda *values: None), None, "a forward hook of the model"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated:FutureWarning")
def test_part_of_a_model_that_a_script_changes_has_no_law(change: Any, given: Any, reason: str, tmp_path: Path) -> None:
    trainer: Any = Trainer(model=make("BertForSequenceClassification"), args=arguments(tmp_path))
    assert additivity_of(trainer, False).law == "rows"
    change(trainer.model)
    assert reason in additivity_of(trainer, False, given).reason


IDS = torch.tensor([[9, 9, 5, 6], [5, 6, 7, 0]])
TEXT = {"input_ids": IDS, "attention_mask": IDS.ne(0).long(), "labels": torch.zeros(2)}


@pytest.mark.parametrize(
    ("batches", "pad_id", "most", "parts"),
    [
        ([TEXT | {"pixel_values": torch.ones(2, 3, 4, 4)}], 0, 1, 1),  # both images may be of the first row
        ([TEXT | {"features": torch.ones(2, 4)}], 0, 1, 2),  # as many columns as tokens by chance
        ([{"input_values": torch.ones(2, 8), "attention_mask": torch.ones(2, 8), "labels": torch.ones(2)}], 0, 1, 2),
        ([{"pixel_values": torch.ones(2, 1, 4, width), "labels": torch.ones(2)} for width in (4, 8)], 0, 4, 2),
        ([{"input_ids": IDS, "attention_mask": IDS}, {"input_ids": IDS[:, :3], "attention_mask": IDS[:, :3]}], None, 9, 2),
        ([{"input_ids": IDS, "attention_mask": IDS}, {"input_ids": IDS[:, :3], "attention_mask": IDS[:, :3]}], 0, 9, 1),
    ],
)
def test_values_of_unknown_columns_are_not_cut_or_joined(batches: Any, pad_id: int | None, most: int, parts: int) -> None:
    found = micro_batches(batches, "rows", cut_in_order, most, 0, pad_id=pad_id)
    assert len(found) == parts
    for key in {"pixel_values", "features"} & batches[0].keys():
        assert {part.inputs[key].shape[1:] for part in found} == {batch[key].shape[1:] for batch in batches}


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    more=st.lists(st.integers(1, 12), max_size=9),
    rows=st.integers(1, 5),
    halvings=st.integers(0, 3),
    law=st.sampled_from(LAWS),
)
def test_micro_batches_hold_every_row_once(lengths: list[int], more: list[int], rows: int, halvings: int, law: Any) -> None:
    def batch(lengths: list[int], first: int) -> dict[str, Any]:
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = (torch.arange(len(lengths))[:, None] + first + 1) * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    batches = [batch(each, first) for each, first in ((lengths, 0), (more, len(lengths))) if each]
    parts = micro_batches(batches, law, cut_in_order, rows, halvings, pad_id=0)
    seen = sorted(tuple(row[row > 0].tolist()) for part in parts for row in part.inputs["input_ids"])
    assert seen == sorted((number + 1,) * length for number, length in enumerate([*lengths, *more]))
    for part in parts:
        assert part.size[0] <= max(1, rows)
        assert part.size[1] == max(part.lengths)
        assert {value.shape for value in part.inputs.values()} == {part.size}
        assert (part.inputs["labels"] == -100).equal(part.inputs["attention_mask"] == 0)
    if law != "sum":  # the means of the batches, each with weight 1
        assert sum(part.weight for part in parts) == pytest.approx(len(batches))


def test_4_bit_layers_stay_in_training_mode_while_losses_are_compared() -> None:
    """In evaluation mode, on a CPU with AVX-512 for bf16, bitsandbytes changes their weights, and training would use these."""
    from bitsandbytes.nn import Linear4bit

    model = torch.nn.Sequential(torch.nn.Dropout(0.5), Linear4bit(4, 4)).eval()
    with without_dropout(model):
        assert [module.training for module in model] == [False, True]
    assert [module.training for module in model] == [False, False]
