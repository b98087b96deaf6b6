"""The tokens of a chat template that the tokenizer lacks, and the token that ends an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DAILY
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.data.chatml import CHATML
from hwopt.data.tokenizer_training import train_bpe
from hwopt.errors import InputError
from hwopt.inference.trained_model import find_run_model, load_trained_model
from hwopt.tasks.generators import Generation, TextGenerator
from hwopt.testing import TINY_LLAMA, plan_for, tiny_profile, train_tiny

QUESTION = [{"role": "user", "content": "what"}]
ROWS = 300


def base_model(folder: Path, tied: bool) -> Path:
    """A model and a tokenizer without tokens of chats, whose texts end with <|endoftext|>."""
    from transformers import PreTrainedTokenizerFast

    trained = train_bpe(["what it is"], ROWS)
    made = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>", pad_token="<|pad|>")
    made.save_pretrained(folder)
    config = {**TINY_LLAMA, "vocab_size": len(made), "eos_token_id": made.eos_token_id, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    return folder


def trained(folder: Path, base: Path, data: dict[str, Any], **plugins: Any) -> tuple[Path, list[str]]:
    """(the folder of a run of two steps, the notes on its data)."""
    training = {"max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1}
    tables = {"model": {"name": str(base)}, "data": data, "task": {"kind": "causal-lm"}, "training": training}
    recorder = train_tiny(plan_for(tiny_profile(**plugins), make_job(Document("a job", tables))), folder)
    return folder / "run", recorder.run.prepared.notes


def trained_on_chats(folder: Path, tied: bool, **plugins: Any) -> tuple[Path, list[str]]:
    """(the folder of the run, the notes on its data)."""
    base = base_model(folder / "base", tied)
    source = folder / "chat.jsonl"
    answer = {"role": "assistant", "content": "it is"}
    source.write_text("".join(json.dumps({"messages": [*QUESTION, answer]}) + "\n" for _ in range(16)))
    return trained(folder, base, {"train": str(source), "chat_template": "chatml", "max_length": 60}, **plugins)


LORA: dict[str, Any] = {"adapter": {"always": True}}


@pytest.mark.parametrize(
    ("plugins", "tied"),
    [
        pytest.param({}, True, id="full"),
        pytest.param(LORA, False, id="LoRA"),
        pytest.param(LORA | {"quantize": {}}, True, id="QLoRA"),
        pytest.param({}, False, id="full, untied", marks=DAILY),
        pytest.param(LORA, True, id="LoRA, tied", marks=DAILY),
        pytest.param(LORA | {"quantize": {}}, False, id="QLoRA, untied", marks=DAILY),
    ],
)
def test_chatml_adds_its_tokens_and_trains_their_embeddings(plugins: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    run, notes = trained_on_chats(tmp_path, tied, **plugins)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] == [end]
    assert tokenizer.chat_template == CHATML
    assert end in model.generation_config.eos_token_id
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for new, old in zip(
        (model.get_input_embeddings(), model.get_output_embeddings()),
        (before.get_input_embeddings(), before.get_output_embeddings()),
        strict=True,
    ):
        rows = len(old.weight)
        assert len(new.weight) == rows + 2
        assert (new.weight[end] != old.weight.mean(0)).any()
        if plugins:
            assert torch.equal(new.weight[:rows], old.weight)
    assert any("<|im_start|>, <|im_end|> added" in note for note in notes)


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_of_an_adapter_has_the_new_tokens_and_their_end(tied: bool, tmp_path: Path) -> None:
    run, _ = trained_on_chats(tmp_path, tied, adapter={"always": True})
    found = load_trained_model(find_run_model(run / "checkpoint-2"), tmp_path / "cache")
    end = found.trained.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = found.trained.tokenizer("what<|im_end|>", return_tensors="pt")["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(run / "final")
    with torch.no_grad():
        torch.testing.assert_close(found.model(input_ids=ids).logits, merged(input_ids=ids).logits)
    assert end in TextGenerator(found.trained, found.model, Generation()).config.eos_token_id


@pytest.mark.parametrize("tied", [pytest.param(False, marks=DAILY), True])
def test_fused_loss_trains_the_embeddings_of_new_tokens_under_an_adapter(tied: bool, tmp_path: Path) -> None:
    adapter = {"always": True}
    plain, _ = trained_on_chats(tmp_path / "plain", tied, adapter=adapter)
    fused, _ = trained_on_chats(tmp_path / "fused", tied, adapter=adapter, fused_loss={})
    expected, found = (load_file(run / "final" / "model.safetensors") for run in (plain, fused))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


def test_eos_token_of_the_job_ends_texts_and_generation(tmp_path: Path) -> None:
    base, source = base_model(tmp_path / "base", tied=False), tmp_path / "pairs.jsonl"
    source.write_text('{"prompt": "what", "completion": "it is"}\n' * 16)
    data = {"train": str(source), "max_length": 60, "eos_token": "<|pad|>"}
    run, _ = trained(tmp_path, base, data)
    tokenizer, model = AutoTokenizer.from_pretrained(run / "final"), AutoModelForCausalLM.from_pretrained(run / "final")
    assert tokenizer.eos_token == "<|pad|>"
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id
    with pytest.raises(InputError, match=r"data\.eos_token: '<end>' is not a token"):
        trained(tmp_path, base, data | {"eos_token": "<end>"})
