"""Configurations of other tools in one vocabulary: what is recognised, and what each key means."""

import dataclasses
from typing import Any

import pytest

from hwopt.configs.recognise import view_of
from hwopt.configs.source_file import from_json, from_yaml
from hwopt.configs.view import View
from hwopt.configs.words import ARGUMENTS, DEPRECATED_NAMES, FORMER_NAMES, SYNONYMS, NotReadable, typed
from hwopt.planning.inputs import Inputs

INPUTS = Inputs()


def read(text: str) -> View:
    source = from_json(text, "f") if text.startswith("{") else from_yaml(text, "f", "YAML")
    return view_of(source, INPUTS)


def values(view: View) -> dict[str, Any]:
    return {word: setting.value for word, setting in view.settings.items()}


def test_hydra_tables_are_read_at_any_depth() -> None:
    view = read(
        "defaults:\n  - model: bert\nexperiment:\n  trainer:\n    per_device_train_batch_size: 16\n"
        "    optimizer:\n      name: adamw_torch\n      lr: 2e-5\n  eval:\n    batch_size: 32\n"
        "model:\n  use_torch_compile: false\npaths:\n  root: ${oc.env:HOME}\n"
    )
    assert values(view) == {
        "per_device_train_batch_size": 16, "optim": "adamw_torch", "learning_rate": 2e-5, "per_device_eval_batch_size": 32,
        "torch_compile": False,
    }  # fmt: skip
    assert view.settings["learning_rate"].place == "f:8"
    assert view.line("warmup_steps", 3) == "experiment.trainer.warmup_steps: 3"
    assert {each.key: each.kind for each in view.unread} == {"defaults": "other", "paths.root": "interpolation"}


def test_keyword_arguments_keep_the_name_of_their_argument() -> None:
    view = read("seed: 1\ngradient_checkpointing_kwargs: {use_reentrant: true}\nlr_scheduler_kwargs: {x: 1}\n")
    assert values(view) == {"seed": 1, "gradient_checkpointing_kwargs.use_reentrant": True, "lr_scheduler_kwargs": {"x": 1}}


def test_second_key_for_one_word_is_listed() -> None:
    view = read("learning_rate: 1e-5\nlr: 2e-5\n")
    assert values(view) == {"learning_rate": 1e-5}
    (left,) = view.unread
    assert (left.key, left.place) == ("lr", "f:2")
    assert "learning_rate (f:1) says the same thing" in left.reason


def test_what_a_dialect_does_not_take_over_is_listed() -> None:
    sets = "[{path: d, name: c, type: alpaca}, {path: e}]"
    keys = [each.key for each in read(f"base_model: m\nmicro_batch_size: 1\ndatasets: {sets}\n").unread]
    assert keys == ["datasets.0.name", "datasets.0.type", "datasets.1.path"]
    assert "task" not in read("base_model: m\nrl: dpo\nmicro_batch_size: 1\n")
    assert read("stage: dpo\nfinetuning_type: freeze\nlora_target: q\n").unread[0].reason.startswith("hwopt has supervised")


@pytest.mark.parametrize(
    ("keys", "reason", "kind"),
    [
        ("type: chat_template", "hwopt renders conversations", "other"),
        ("message_field_training: train", "hwopt reads these words", "other"),
        ("type: alpaca", "in the chat template instead of Alpaca's text", "unknown"),
        ("type: context_qa.load", "a prompt format of axolotl", "unknown"),
        ("roles: {user: [human], assistant: [gpt, assistant]}", "hwopt reads these words", "other"),
        ("roles: {user: [customer], assistant: [gpt]}", "rename customer to a word", "unknown"),
        ("message_property_mappings: {role: from, content: value}", "hwopt reads these words", "other"),
        ("message_field_content: body", "rename body to a word", "unknown"),
    ],
)
def test_words_of_a_data_set_of_axolotl_are_read_or_named(keys: str, reason: str, kind: str) -> None:
    (left,) = read(f"base_model: m\nmicro_batch_size: 1\ndatasets:\n  - path: d\n    {keys}\n").unread
    assert reason in left.reason
    assert left.kind == kind


def test_file_of_a_data_set_of_axolotl_is_taken_for_its_format() -> None:
    text = "base_model: m\ncosine_min_lr_ratio:\ndatasets:\n  - path: json\n    data_files: a.jsonl\n    field: body\n"
    found = values(read(text))
    assert {"train_file": "a.jsonl", "text_column": "body"}.items() <= found.items()
    assert "lr_scheduler_type" not in found  # an empty ratio changes no schedule


@pytest.mark.parametrize(
    ("word", "value", "expected"),
    [
        ("learning_rate", "2e-5", 2e-5),
        ("max_steps", "1_000", 1000),
        ("max_steps", 10.0, 10),
        ("fp16", "yes", True),
        ("fp16", 0, False),
        ("bf16", "auto", "auto"),
        ("output_dir", "none", None),
    ],
)
def test_values_get_the_type_of_their_word(word: str, value: Any, expected: Any) -> None:
    found = typed(word, value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("word", "value"), [("fp16", "x"), ("max_steps", 1.5), ("seed", True), ("seed", "1 or 2"), ("save_steps", float("inf"))]
)
def test_value_of_another_type_is_not_readable(word: str, value: Any) -> None:
    with pytest.raises(NotReadable, match="expected"):
        typed(word, value)


def test_vocabulary_has_every_training_argument_and_no_former_one() -> None:
    from transformers import TrainingArguments

    fields = {each.name for each in dataclasses.fields(TrainingArguments)}
    assert fields <= ARGUMENTS | SYNONYMS.keys() | FORMER_NAMES.keys()
    gone = {"logging_dir", "warmup_ratio"}  # transformers 5.10 still has them
    assert not fields & FORMER_NAMES.keys() - gone
    assert fields & gone or all({name, former.instead} <= fields for name, former in DEPRECATED_NAMES.items())
    named = {former.instead.split(" ")[0] for former in FORMER_NAMES.values() if "_" in former.instead.split(" ")[0]}
    assert named - fields <= {"dispatch_batches", "split_batches", "min_num_params", "transformer_layer_cls_to_wrap"}
