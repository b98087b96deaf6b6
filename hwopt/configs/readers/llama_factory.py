"""LLaMA-Factory's YAML: https://github.com/hiyouga/LLaMA-Factory/tree/main/examples. TrainingArguments with keys of its own."""

from __future__ import annotations

from hwopt.configs.readers.draft import Draft
from hwopt.configs.readers.vocabulary import Vocabulary
from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import View
from hwopt.configs.words import names

SIGNATURE = names(
    """
    stage finetuning_type cutoff_len template dataset dataset_dir lora_target lora_rank quantization_bit
    overwrite_cache preprocessing_num_workers plot_loss val_size max_samples flash_attn pure_bf16 enable_liger_kernel
    """
)
TELLING = frozenset({"finetuning_type", "cutoff_len", "lora_target", "dataset_dir", "plot_loss"})
KEYS = {
    "cutoff_len": "max_length",
    "dataset": "train_file",
    "eval_dataset": "validation_file",
    "val_size": "eval_fraction",
    "max_samples": "max_train_samples",
    "lora_rank": "lora_r",
    "enable_liger_kernel": "use_liger_kernel",
    "double_quantization": "bnb_4bit_use_double_quant",
    "pure_bf16": "pure_bf16",
    "upcast_layernorm": "",
}
REASONS = {
    "preprocessing_num_workers": "hwopt tokenizes once and keeps the result in its cache",
    "overwrite_cache": "hwopt finds tokenized data by its content",
    "plot_loss": "the report of a run shows the loss",
    "template": "hwopt takes the tokenizer's chat template; data.chat_template names another one",
    "dataset_dir": "hwopt takes a file or a hub name in data.train",
}
VOCABULARY = Vocabulary(KEYS, REASONS)
ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}


def read(source: SourceFile, recognised_by: str) -> View:
    draft = Draft(source)
    for entry in source.entries:
        match entry.key:
            case "finetuning_type":
                method(draft, entry)
            case "stage":
                stage(draft, entry)
            case "quantization_bit" if entry.value in (4, 8):
                draft.add(f"load_in_{entry.value}bit", entry, True)
            case "lora_target":
                draft.add("lora_target_modules", entry, "all-linear" if entry.value == "all" else entry.value)
            case "flash_attn" if entry.value in ATTENTION:
                draft.add("attn_implementation", entry, ATTENTION[entry.value])
            case "dataset" | "eval_dataset" if "," in str(entry.value):
                first, _, others = str(entry.value).partition(",")
                draft.add(KEYS[entry.key], entry, first.strip())
                draft.leave(Entry((*entry.path, "others"), others.strip(), entry.line), "one data set is taken over")
            case _:
                if not VOCABULARY.take(draft, entry):
                    draft.leave(entry, "a key of LLaMA-Factory without a counterpart")
    return draft.view("llama-factory", recognised_by, VOCABULARY.spelling)


def method(draft: Draft, entry: Entry) -> None:
    if entry.value == "lora":
        draft.add("use_peft", entry, True)
    elif entry.value == "full":
        draft.leave(entry, "hwopt trains all weights unless a profile has an adapter", "other")
    else:
        draft.leave(entry, "hwopt trains all weights, or LoRA and DoRA adapters")


def stage(draft: Draft, entry: Entry) -> None:
    if entry.value in ("sft", "pt"):
        draft.add("task", entry, "causal-lm")
    else:
        draft.leave(entry, "hwopt has supervised training only")
