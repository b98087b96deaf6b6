"""The keys of axolotl and LLaMA-Factory, and the data sets of its dataset_info.json.

https://docs.axolotl.ai/docs/config-reference.html
https://github.com/hiyouga/LLaMA-Factory/tree/main/examples
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hwopt.configs.launchers import ACCELERATE, DEEPSPEED, NOTHING, Dialect, Special
from hwopt.configs.source_file import Entry
from hwopt.configs.view import View, ignored, without
from hwopt.configs.words import names
from hwopt.data.sources.messages import SHAREGPT_ROLES, TRAIN_MARKS

ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
"""LLaMA-Factory's name of a column -> the name that hwopt recognises."""
# fmt: off
TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}
# fmt: on
"""LLaMA-Factory's name of a word in messages -> the words that hwopt reads."""
WORDS = {"split": "dataset_train_split", "num_samples": "max_train_samples"}
NAMES = "columns that hwopt does not recognise under these names; data.prompt and data.completion name a pair without input"


def add_registered(view: View, word: str, entry: Entry, name: str) -> None:
    """Set `word` to the file or the hub name of the data set `name`, and its columns; to `name` itself if none is registered."""
    given = Path(str(view.source.values.get("dataset_dir", "data")))  # from the working directory, or from the file's folder
    folder = next((path for path in (given, Path(view.source.name).parent / given) if path.is_dir()), given)
    try:
        known = json.loads((folder / "dataset_info.json").read_text("utf-8"))[name]
    except (OSError, ValueError, LookupError, TypeError):
        view.add(word, entry, name)
        return
    path = folder / known["file_name"] if "file_name" in known else known.get("hf_hub_url")
    if path is None or known.get("ranking"):
        why = "preferences; train them with a trainer of TRL and hwopt.optimized" if known.get("ranking") else "has no file"
        view.leave(entry, f"{folder / 'dataset_info.json'}: {why}")
        return
    view.add(word, entry, f"{path}:{known['subset']}" if "subset" in known else str(path))
    for key, value in known.items() if word == "train_file" else ():
        part = replace(entry, path=(*entry.path, key), value=value)
        named = value if isinstance(value, dict) else {}
        sharegpt = known.get("formatting") == "sharegpt"
        wrong: dict[str, str] = {}
        if key in WORDS:
            view.add(WORDS[key], part)
        elif key == "tags":
            wrong = {each: "rename it to a word of ShareGPT or OpenAI" for each in named if named[each] not in TAGS.get(each, ())}
        elif key == "columns" and sharegpt:
            view.add("messages_column", part, named.get("messages", "conversations"))
            wrong = {each: f"rename the column to {each!r}" for each in named if each not in ("messages", named[each])}
        elif key == "columns" and any(ALPACA_COLUMNS.get(each) != column for each, column in named.items()):
            if named.keys() == {"prompt", "response"}:
                view.add("prompt_column", part, named["prompt"])
                view.add("completion_column", part, named["response"])
            else:
                view.leave(part, NAMES)
        for each, reason in wrong.items():
            view.leave(replace(part, path=(*part.path, each), value=named[each]), reason)


IS_OFF = {False: ignored("is off")}
TEMPLATES = {
    "tokenizer_default": ignored("hwopt takes the tokenizer's chat template by default"),
    "jinja": ignored("chat_template_jinja has it"),
}
ATTENTION = {"flash": "flash_attention_2", "xformers": "sdpa", "sdp": "sdpa", "flex": "flex_attention", "eager": "eager"}
CHAT_KEYS = "roles message_property_mappings message_field_role message_field_content message_field_training"
ONE_SET = "one data set is taken over, by its path; hwopt recognises its columns, or data.* names them"
FORMATS = ("json", "csv", "parquet", "text")
PROMPTS = {
    "alpaca": without("hwopt reads instruction, input and output as a chat, in the chat template instead of Alpaca's text"),
    "chat_template": ignored("hwopt renders conversations with the chat template"),
    "completion": ignored("hwopt trains all tokens of a text column"),
}
OTHER_PROMPT = without("a prompt format of axolotl; hwopt reads chats, pairs and texts")
CHAT_WORDS = {**SHAREGPT_ROLES, "from": "role", "role": "role", "value": "content", "content": "content"}
CHAT_WORDS |= dict.fromkeys(TRAIN_MARKS, "training")
"""A role, or a key of a message -> what it means."""


def data_sets(view: View, entry: Entry) -> None:
    """Read the first data set key by key; list the others."""
    for number, each in enumerate(entry.value if isinstance(entry.value, list) else [entry.value]):
        given = each if isinstance(each, dict) else {"path": each}
        path, name, files = (given.get(key) for key in ("path", "name", "data_files"))
        source = files if path in FORMATS and files else f"{path}:{name}" if name else path
        for key, value in given.items():
            part = replace(entry, path=(*entry.path, str(number), str(key)), value=source if key == "path" else value)
            if number:
                view.leave(part, ONE_SET)
            elif key in ("name", "data_files") and str(value) in str(source):
                view.leave(part, f"the data is {source}", "other")
            else:
                AXOLOTL.take(view, part)


def chat_words(view: View, entry: Entry) -> None:
    """List the data set's names for roles and messages; hwopt reads those of OpenAI and ShareGPT."""
    given = entry.value if isinstance(entry.value, dict) else {entry.path[-1].removeprefix("message_field_"): entry.value}
    words = [(meaning, str(word)) for meaning, found in given.items() for word in (found if isinstance(found, list) else [found])]
    if other := [word for meaning, word in words if CHAT_WORDS.get(word) != meaning]:
        view.leave(entry, f"rename {', '.join(other)} to a word of OpenAI or ShareGPT")
    else:
        view.leave(entry, "hwopt reads these words", "other")


def min_rate(view: View, entry: Entry) -> None:
    """The cosine schedule, axolotl's default, ends above 0."""
    if view.source.values.get("lr_scheduler", "cosine") != "cosine":
        view.leave(entry, "for the schedule cosine alone")
    elif entry.value is None or entry.interpolated:
        view.leave(entry, "has no value", "other")
    else:
        view.add("lr_scheduler_kwargs.min_lr_rate", entry)
        given = view.settings["lr_scheduler_kwargs"]
        view.settings["lr_scheduler_type"] = replace(given, value="cosine_with_min_lr", word="lr_scheduler_type")


def causal_lm(view: View) -> None:
    """Set the task that axolotl has unless the file says another."""
    given = {entry.path[0] for entry in view.source.entries if entry.value not in NOTHING}
    if "model_name_or_path" in view and not {"rl", "reward_model"} & given:
        view.imply("task", "causal-lm", view.settings["model_name_or_path"])


# fmt: off
AXOLOTL = Dialect("axolotl",
    names("base_model micro_batch_size sequence_len sample_packing dataset_prepared_path evals_per_epoch"), {
        "base_model": "model_name_or_path", "revision_of_model": "model_revision", "tokenizer_config": "tokenizer_name",
        "optimizer": "optim", "lr_scheduler": "lr_scheduler_type", "cosine_min_lr_ratio": min_rate,
        "micro_batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size",
        "batch_size": "effective_batch_size", "num_epochs": "num_train_epochs", "val_set_size": "eval_fraction",
        "sequence_len": "max_length", "sample_packing": "packing",
        "gradient_checkpointing": ("gradient_checkpointing", {"offload": True, "offload_disk": True}),
        **{f"{part}chat_template": ("chat_template_path", TEMPLATES) for part in ("datasets.0.", "")},
        **{f"{part}chat_template_jinja": "chat_template_path" for part in ("datasets.0.", "")},
        "special_tokens.eos_token": "eos_token",
        "adapter": ("use_peft", {"lora": True, "qlora": True}), "lora_modules_to_save": "modules_to_save",
        "lora_target_linear": ("lora_target_modules", {True: "all-linear", False: None}),
        **{f"peft_{word}": word for word in names("use_dora use_rslora init_lora_weights layers_to_transform")},
        "liger_fused_linear_cross_entropy": "use_liger_kernel",
        **{f"{key}_attention": ("attn_implementation", {True: name, **IS_OFF}) for key, name in ATTENTION.items()},
        "datasets": data_sets, "datasets.0.path": "train_file",
        "datasets.0.type": lambda view, entry: view.leave(entry, *PROMPTS.get(str(entry.value), OTHER_PROMPT)),
        "datasets.0.split": ("dataset_train_split", {"train": ignored("the default of hwopt too")}),
        "datasets.0.field": "text_column", "datasets.0.field_messages": "messages_column",
        "datasets.0.roles_to_train": "roles_to_train",
        **{f"datasets.0.{key}": chat_words for key in names(CHAT_KEYS)},
        "test_datasets": data_sets, "test_datasets.0.path": "validation_file",
    }, {
        "evals_per_epoch": "hwopt evaluates at the end of each epoch; training.eval_steps sets another interval",
        "saves_per_epoch": "hwopt saves by time and keeps the best weights; training.save_steps adds a checkpoint every N steps",
        "dataset_prepared_path": "hwopt keeps tokenized data in its own cache",
        "dataset_processes": "hwopt tokenizes once and keeps the result in its cache",
        "eval_sample_packing": "hwopt packs training batches only",
        "datasets.0.ds_type": "hwopt takes the format from the extension",
        "strict": "hwopt refuses unknown keys always",
        "save_first_step": "a check of axolotl's own",
        **dict.fromkeys(names("loss_watchdog_threshold loss_watchdog_patience"), "training.loss_spike watches the loss"),
    }, "a key of axolotl without a counterpart", arguments=True, finish=causal_lm)
# fmt: on


def bits(view: View, entry: Entry) -> None:
    if entry.value in (4, 8):
        view.add(f"load_in_{entry.value}bit", entry, True)
    else:
        view.leave(entry, "hwopt quantizes to 4 or 8 bits")


def first_set(word: str) -> Special:
    """Take the first of several data sets that commas separate; a name is looked up in dataset_info.json."""

    def take(view: View, entry: Entry) -> None:
        first, comma, others = str(entry.value).partition(",")
        add_registered(view, word, entry, first.strip())
        if comma:
            rest = replace(entry, path=(*entry.path, "others"), value=others.strip())
            view.leave(rest, "one data set is taken over")

    return take


def stage(view: View, entry: Entry) -> None:
    """Set the task; pretraining joins its texts and cuts them into blocks."""
    if entry.value not in ("sft", "pt"):
        view.leave(entry, "hwopt has supervised training only")
        return
    view.add("task", entry, "causal-lm")
    if entry.value == "pt":
        view.imply("text_blocks", True, view.settings["task"])


def supervised(view: View) -> None:
    """Set the task that LLaMA-Factory has unless the file says another stage."""
    if view.settings and "stage" not in view.source.top:
        view.imply("task", "causal-lm", next(iter(view.settings.values())))


ADAPTERS = without("hwopt trains all weights, or LoRA and DoRA adapters")
FULL = ignored("hwopt trains all weights unless a profile has an adapter")
# fmt: off
LLAMA_FACTORY = Dialect("llama-factory", names("finetuning_type cutoff_len lora_target dataset_dir plot_loss"), {
        "cutoff_len": "max_length", "val_size": "eval_fraction", "max_samples": "max_train_samples",
        "early_stopping_steps": "early_stopping_patience", "neat_packing": ("packing", IS_OFF),
        "mask_history": ("assistant_turns", {True: "last", False: ignored("hwopt trains all answers by default")}),
        "train_on_prompt": "train_on_inputs", "lora_rank": "lora_r", "additional_target": "modules_to_save",
        "pissa_init": ("init_lora_weights", {True: "pissa", False: None}),
        "lora_target": ("lora_target_modules", {"all": "all-linear"}), "enable_liger_kernel": "use_liger_kernel",
        "double_quantization": "bnb_4bit_use_double_quant", "quantization_bit": bits,
        "dataset": first_set("train_file"), "eval_dataset": first_set("validation_file"), "stage": stage,
        "finetuning_type": ("use_peft", {"lora": True, "full": FULL, "freeze": ADAPTERS, "oft": ADAPTERS}),
        "disable_gradient_checkpointing": lambda view, entry: view.leave(
            entry, "hwopt checkpoints if the profile says it", "other", "gradient_checkpointing" if entry.value is True else ""),
        "flash_attn": ("attn_implementation",
            {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager", "auto": None}),
    }, {
        "preprocessing_num_workers": "hwopt tokenizes once and keeps the result in its cache",
        "overwrite_cache": "hwopt finds tokenized data by its content",
        "plot_loss": "the report of a run shows the loss",
        "template": "hwopt takes the tokenizer's chat template; data.chat_template names another one",
        "dataset_dir": "data.train has the path of the data set that is registered there",
    }, "a key of LLaMA-Factory without a counterpart", arguments=True, finish=supervised)
# fmt: on

DIALECTS = (DEEPSPEED, ACCELERATE, AXOLOTL, LLAMA_FACTORY)
