"""axolotl's YAML: https://docs.axolotl.ai/docs/config-reference.html."""

from __future__ import annotations

from typing import Any

from hwopt.configs.readers.draft import Draft
from hwopt.configs.readers.vocabulary import Vocabulary
from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.view import View
from hwopt.configs.words import names

SIGNATURE = names(
    """
    base_model micro_batch_size sequence_len sample_packing adapter datasets dataset_prepared_path val_set_size
    num_epochs optimizer flash_attention lora_target_linear gradient_checkpointing evals_per_epoch saves_per_epoch
    wandb_project
    """
)
TELLING = frozenset(
    {"base_model", "micro_batch_size", "sequence_len", "sample_packing", "dataset_prepared_path", "evals_per_epoch"}
)
"""Keys that no other tool has."""
KEYS = {
    "base_model": "model_name_or_path",
    "revision_of_model": "model_revision",
    "tokenizer_config": "tokenizer_name",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "val_set_size": "eval_fraction",
    "peft_use_dora": "use_dora",
    "liger_fused_linear_cross_entropy": "use_liger_kernel",
    "dataset_processes": "",
}
REASONS = {
    "evals_per_epoch": "hwopt evaluates at the end of each epoch; training.eval_steps sets another interval",
    "saves_per_epoch": "hwopt saves by time and keeps the best weights; training.save_steps adds a checkpoint every N steps",
    "dataset_prepared_path": "hwopt keeps tokenized data in its own cache",
    "dataset_processes": "hwopt tokenizes once and keeps the result in its cache",
    "eval_sample_packing": "hwopt packs training batches only",
    "strict": "hwopt refuses unknown keys always",
    "save_first_step": "a check of axolotl's own",
    "loss_watchdog_threshold": "training.loss_spike watches the loss",
    "loss_watchdog_patience": "training.loss_spike watches the loss",
}
VOCABULARY = Vocabulary(KEYS, REASONS)


def read(source: SourceFile, recognised_by: str) -> View:
    draft = Draft(source)
    for entry in source.entries:
        match entry.key:
            case "adapter" if entry.value in ("lora", "qlora"):
                draft.add("use_peft", entry, True)
            case "lora_target_linear":
                draft.add("lora_target_modules", entry, "all-linear" if entry.value else None)
            case "flash_attention" | "xformers_attention" | "sdp_attention" | "eager_attention":
                attention(draft, entry)
            case "datasets":
                dataset(draft, entry, "train_file")
            case "test_datasets":
                dataset(draft, entry, "validation_file")
            case _:
                if not VOCABULARY.take(draft, entry):
                    empty = entry.value is None
                    reason = "has no value" if empty else "a key of axolotl without a counterpart"
                    draft.leave(entry, reason, "other" if empty else "unknown")
    if "model_name_or_path" in draft.settings and not {"rl", "reward_model"} & source.top:
        draft.imply("task", "causal-lm", draft.settings["model_name_or_path"])
    return draft.view("axolotl", recognised_by, VOCABULARY.spelling)


def attention(draft: Draft, entry: Entry) -> None:
    names = {"flash_attention": "flash_attention_2", "eager_attention": "eager"}
    if entry.value:
        draft.add("attn_implementation", entry, names.get(entry.key, "sdpa"))
    else:
        draft.leave(entry, "is off", "other")


def dataset(draft: Draft, entry: Entry, word: str) -> None:
    """The path of the first data set. Further ones, and the other keys of each, are listed."""
    sets: list[Any] = entry.value if isinstance(entry.value, list) else [entry.value]
    for number, each in enumerate(sets):
        table = each if isinstance(each, dict) else {"path": each}
        for key, value in table.items():
            part = Entry((*entry.path, str(number), str(key)), value, entry.line, entry.comment, entry.above, entry.below)
            if key == "path" and number == 0:
                draft.add(word, part)
            elif key == "field_messages" and number == 0:
                draft.add("messages_column", part)
            else:
                draft.leave(part, "one data set is taken over, by its path; hwopt recognises its columns, or data.* names them")
