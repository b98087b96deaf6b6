"""What another tool does where its file says nothing is written into the imported job and profile."""

from dataclasses import fields
from typing import Any

import pytest
from peft import LoraConfig
from transformers import TrainingArguments
from trl import ModelConfig, SFTConfig

from hwopt.configs.job_words import LORA_CONFIG, MODEL_CONFIG, SFT_CONFIG, TRAINING_ARGUMENTS, UNSLOTH, Defaults
from hwopt.configs.python_file import from_python
from hwopt.configs.recognise import view_of
from hwopt.configs.source_file import from_yaml
from hwopt.configs.translation import translate
from hwopt.planning.inputs import Inputs

INPUTS = Inputs()
OTHER_NAMES = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_target_modules": "target_modules"}


@pytest.mark.parametrize(
    ("kind", "defaults", "names"),
    [
        (TrainingArguments, TRAINING_ARGUMENTS, {}),
        (SFTConfig, {key: value for key, value in SFT_CONFIG.items() if key != "bf16"}, {}),
        (LoraConfig, {**LORA_CONFIG, "lora_target_modules": None}, OTHER_NAMES),
        (ModelConfig, {**MODEL_CONFIG, "lora_target_modules": None, "lora_r": 16, "lora_alpha": 32}, {}),
    ],
    ids=["TrainingArguments", "SFTConfig", "LoraConfig", "ModelConfig"],
)
def test_defaults_are_those_of_the_library(kind: Any, defaults: Defaults, names: dict[str, str]) -> None:
    theirs = {field.name: field.default for field in fields(kind)}
    assert {word: theirs[names.get(word, word)] for word in defaults} == defaults
    assert SFTConfig("out", use_cpu=True, gradient_checkpointing=None).bf16 is True


# fmt: off
SILENT = {
    "base_model: m\nadapter: lora\nlora_r: 8\nlearning_rate: 1e-4": {
        "batch.train": 1, "training.num_train_epochs": 1, "data.max_length": 512, "training.lr_scheduler_type": "cosine",
        "training.warmup_ratio": 0.03},
    "base_model: m\nmax_steps: 9\nwarmup_steps: 2\nlr_scheduler: cosine\ncosine_min_lr_ratio: 0.1": {
        "batch.train": 1, "data.max_length": 512},
    "stage: sft\nfinetuning_type: lora\nlora_rank: 4": {
        "batch.train": 8, "data.max_length": 2048, "adapter.lora_alpha": 8, "checkpointing.layers": "all"},
    "stage: sft\nfinetuning_type: lora\ncutoff_len: 99\ndisable_gradient_checkpointing: true": {
        "batch.train": 8, "adapter.r": 8, "adapter.lora_alpha": 16},
    "SFTConfig('out', bf16=False, fp16=True)": {
        "batch.train": 8, "training.learning_rate": 2e-5, "data.max_length": 1024, "checkpointing.layers": "all"},
    "from unsloth import FastModel\nFastModel.from_pretrained('m')\nFastModel.get_peft_model(m, r=8)\nSFTConfig(max_length=9)": {
        "batch.train": 8, "training.learning_rate": 2e-5, "precision.dtype": "bf16", "adapter.lora_alpha": 16,
        "adapter.target_modules": UNSLOTH["lora_target_modules"], "quantize.bits": 4, "checkpointing.layers": "all"},
    "SFTConfig('out', max_length=9, learning_rate=1e-4, gradient_checkpointing=False)\nLoraConfig(lora_dropout=0.1)": {
        "batch.train": 8, "precision.dtype": "bf16", "adapter.r": 8, "adapter.lora_alpha": 8,
        "adapter.target_modules": "default"},
    "packing: true\nuse_peft: true\nmax_length: 8\nlearning_rate: 1e-4\nbf16: false": {
        "batch.train": 8, "checkpointing.layers": "all", "adapter.lora_dropout": 0.05, "adapter.target_modules": "default"},
    "TrainingArguments('out', per_device_train_batch_size=4)": {},
    "fp16: true\nlearning_rate: 1e-4": {},
}
# fmt: on
"""A file -> the values that it leaves to the tool."""


@pytest.mark.parametrize("text", SILENT)
def test_silence_means_the_default_of_the_tool(text: str) -> None:
    source = from_python(text, "f.py") if "Config(" in text or "Arguments(" in text else from_yaml(text, "f.yaml", "YAML")
    translation = translate(view_of(source, INPUTS), INPUTS.registry)
    taken = translation.taken
    found = {".".join(each.key).removeprefix("plugins."): each.value for each in taken if each.setting.comment}
    assert found == SILENT[text] | ({} if text.startswith("fp16") else {"training.seed": 42})  # a script's own words have none
    trl = "SFTConfig" in text or "packing" in text
    assert ("assistant_only_loss" in [each.key for each in translation.left if not each.on_purpose]) == trl
    assert all("the default of " in each.setting.comment for each in taken if each.setting.comment)


@pytest.mark.parametrize(("evaluates", "said"), [("val_set_size: 0.1", True), ("val_set_size: 0", False), ("", False)])
def test_best_weights_instead_of_the_last_ones_are_named_where_the_file_evaluates(evaluates: str, said: bool) -> None:
    view = view_of(from_yaml(f"base_model: m\nsequence_len: 8\n{evaluates}", "f.yaml", "YAML"), INPUTS)
    left = {each.key: each.reason for each in translate(view, INPUTS.registry).left if not each.on_purpose}
    assert ("final/ holds the best weights" in left.get("load_best_model_at_end", "")) == said
