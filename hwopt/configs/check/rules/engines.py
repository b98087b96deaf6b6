"""Quantized weights, DeepSpeed and Accelerate's files: combinations that stop or that train nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hwopt.configs.check import TRAINERS, Facts, Finding, rule
from hwopt.configs.check.rules.card import is_small
from hwopt.configs.check.rules.combinations import REENTRANT, written
from hwopt.configs.launchers import DEEPSPEED, NOTHING
from hwopt.configs.recognise import read_source
from hwopt.configs.view import View
from hwopt.configs.words import names
from hwopt.errors import InputError

QUANTIZED = ("load_in_4bit", "load_in_8bit")
ADAPTER_NAMES = ("lora", "peft", "adapter", "dora")


@rule("quantized-training", "error", words=QUANTIZED, source="transformers, Trainer: purely quantized models", tools=TRAINERS)
def quantized_training(view: View, facts: Facts) -> Iterator[Finding]:
    """Quantized weights without an adapter, which leaves nothing to train."""
    word = next(filter(view.is_on, QUANTIZED), None)
    keys = [key for key, value in view.source.values.items() if value not in NOTHING]
    named = any(part in key for key in keys for part in ADAPTER_NAMES) or view.tool != "transformers"
    if word and view.lacks("use_peft") and (view.adapter is False or not (view.adapter or named)):
        what = f"{written(view, {word: True})}, and the file has no adapter."
        why = "transformers stops: quantized weights get no gradients, so that there is nothing to train."
        fix = view.line("use_peft", True) if view.tool == "transformers" else f"remove {view.spelled(word)}, or train LoRA"
        if view.source.language == "Python":
            fix = "pass the Trainer get_peft_model(model, LoraConfig(…)), or give SFTTrainer peft_config"
        yield Finding(word, what, why, fix)


@rule("adapter-unused", "error", words=("lora_r", "lora_alpha"), source="TRL; axolotl; LLaMA-Factory", tools=TRAINERS)
def adapter_unused(view: View, facts: Facts) -> Iterator[Finding]:
    """Settings of an adapter in a file that asks for none: all weights are trained."""
    word = "lora_r" if "lora_r" in view else "lora_alpha"
    if view.adapter is False and view.value(word) and not any(map(view.is_on, QUANTIZED)):  # or `quantized-training` says it
        key = {"axolotl": "adapter", "llama-factory": "finetuning_type"}.get(view.tool) or view.spelled("use_peft")
        said = key in view.source.values  # a file may keep the settings for another run
        what = f"{view.spelled(word)} is {view.value(word)}, and {key} is {view.source.values.get(key) if said else 'not given'}."
        why = "No adapter is asked for: all weights are trained, which takes far more memory and a lower learning rate."
        asks = view.line("use_peft", True) if view.tool == "transformers" else f"{key}: lora"
        yield Finding(word, what, why, f"{asks}, or remove the adapter's settings", "information" if said else None)


@rule("adapter-task", "error", words=("from_pretrained.num_labels",), source="PEFT, LoraConfig: task_type, modules_to_save")
def adapter_task(view: View, facts: Facts) -> Iterator[Finding]:
    """An adapter for another task than the model's, which is a classification: its new head is frozen."""
    word, kind = "LoraConfig.task_type", ("SEQ_CLS", "TOKEN_CLS")
    given = view.found(word)
    named = "LoraConfig" in view.source.calls and view.lacks("modules_to_save") and (given or view.lacks(word))
    if named and str(given and given.value).upper() not in kind:
        what = f"The model has num_labels, and task_type is {given.value if given else 'not given'}."
        why = "PEFT freezes the head, which has random weights, and does not save it: a loaded model has another head."
        yield Finding(word if given else "use_peft", what, why, f'{word.partition(".")[2]}="SEQ_CLS"')


@rule("reentrant-adapter", "warning", words=(REENTRANT,), source="transformers#21381, #42489", tools=("transformers",))
def reentrant_adapter(view: View, facts: Facts) -> Iterator[Finding]:
    """Checkpointing is reentrant, and an adapter freezes the weights below it, in a script with transformers' own Trainer."""
    plain = any("TrainingArguments" in call for call in view.source.calls[:1]) and "input_require_grads" not in view.source.top
    if plain and all(view.is_on(word) for word in (REENTRANT, "use_peft", "gradient_checkpointing")):
        what = "Checkpointing is reentrant, and the adapter freezes the weights below it."
        why = "Without enable_input_require_grads() the layers get no gradient: the adapter does not train, with a warning only."
        yield Finding(REENTRANT, what, why, view.line(REENTRANT, False))


@rule("packing-leak", "warning", words=("packing", "padding_free"), source="transformers#39194, axolotl#3796", tools=TRAINERS)
def packing_leak(view: View, facts: Facts) -> Iterator[Finding]:
    """packing is on, and the documents of a row are not kept apart."""
    given, name = view.source.values, str(view.value("attn_implementation"))
    apart = any(part in name for part in ("flash", "flex")) or any("flash" in key and given[key] is True for key in given)
    needed, fix = "flash attention", view.line("attn_implementation", "flash_attention_2")
    if view.tool == "axolotl":
        apart, fix = name != "None", "flash_attention: true"
    elif view.tool == "llama-factory":  # its flash attention sees the whole row, and pretraining means to join documents
        apart, needed, fix = given.get("neat_packing") is True or view.is_on("text_blocks"), "neat_packing", "neat_packing: true"
    word = next(filter(view.is_on, ("packing", "padding_free")), None)
    if word and not apart and ("attn_implementation" in view or view.lacks("attn_implementation")):
        why = "Documents of one row can attend to each other: the loss is that of another text."
        if view.tool == "transformers":  # TRL passes position_ids, and newer masks follow them; not if it packs "wrapped"
            why = f"With transformers older than July 2025, or with packing_strategy: wrapped, {why[0].lower()}{why[1:]}"
        yield Finding(word, f"{view.spelled(word)} is on without {needed}.", why, fix)


@rule("states-offload", "error", words=("optim",), source="accelerate, map_pytorch_optim_to_deepspeed", tools=TRAINERS)
def states_offload(view: View, facts: Facts) -> Iterator[Finding]:
    """An optimizer with states in 8 bit under ZeRO's offload."""
    name, theirs = str(view.value("optim")), deepspeed_view(view)
    offload: object = re.search(r"offload(?!\w*param)", str(view.value("deepspeed")).lower())
    if theirs is not None:  # the file itself, whatever its name
        kept = theirs.source.values.get("zero_force_ds_cpu_optimizer") is False
        device = theirs.source.values.get("zero_optimization.offload_optimizer.device")
        offload = device not in (None, "none") and not kept and theirs.lacks("optim")
    if offload and is_small(name):
        what = f"{name}, and the DeepSpeed configuration offloads the optimizer."
        why = "accelerate replaces it by DeepSpeed's Adam for the CPU, with states in fp32 and L2 decay instead of AdamW's."
        yield Finding("optim", what, why, view.line("optim", "adamw_torch"))


@rule("launch-processes", "error", words=("num_processes",), source="accelerate, utils/launch.py", tools=("accelerate",))
def launch_processes(view: View, facts: Facts) -> Iterator[Finding]:
    """Processes that the machines, or their cards, do not have."""
    given, cpu = view.source.values, view.is_on("use_cpu")
    processes, machines = int(view.number("num_processes") or 0), int(view.number("num_machines") or 1)
    cards, rank, each = str(given.get("gpu_ids", "all")).split(","), given.get("machine_rank"), processes // machines
    if processes % machines:
        what, why = f"{processes} processes on {machines} machines.", f"Each machine starts {each}, by whole-number division."
        yield Finding("num_processes", what, why, view.line("num_processes", max(1, each) * machines))
    elif cards[0] not in ("all", "None", "") and each > len(cards) and not cpu:
        what, why = f"{each} processes on a machine, and gpu_ids names {len(cards)}.", "The others stop: invalid device ordinal."
        yield Finding("num_processes", what, why, view.line("num_processes", len(cards) * machines))
    if isinstance(rank, int) and rank >= machines > 0:
        why = "Ranks of machines begin at 0: the launcher waits for a machine that does not exist."
        yield Finding("num_machines", f"machine_rank is {rank} of {machines} machines.", why, f"machine_rank: {machines - 1}")
    kind = view.value("distributed_type")
    if processes > 1 and kind in (("NO", "MULTI_CPU", None) if cpu else ("NO",)):
        what = f"distributed_type is {kind}{' and use_cpu is true' if cpu else ''} with {processes} processes."
        fix = "num_processes: 1, or distributed_type: MULTI_GPU, which starts CPU ranks too"
        why = "The launcher starts one process, without a warning."
        yield Finding("num_processes", what, why, fix, None if cpu else "warning")


FSDP1_KEYS = names("sharding_strategy backward_prefetch forward_prefetch use_orig_params sync_module_states")
SHARDS_WEIGHTS = ("FULL_SHARD", "HYBRID_SHARD", "1", "4")


@rule("fsdp-version", "warning", source="accelerate, to_fsdp2.py, launch.py", tools=("accelerate",))
def fsdp_version(view: View, facts: Facts) -> Iterator[Finding]:
    """Settings of FSDP that have no effect, by its version or by distributed_type."""
    table, kind = "fsdp_config", view.value("distributed_type", "FSDP")
    found = [each for each in view.source.entries if each.path[0] == table and each.value is not None]
    given = {each.path[-1].removeprefix("fsdp_"): each for each in found}
    view.asked |= {each.key for each in found}
    old = [given[word].path[-1] for word in given if word in FSDP1_KEYS]
    if kind != "FSDP" and given.keys() & {"version", "sharding_strategy"}:
        what, why = f"{table} is given, and distributed_type is {kind}.", "The launcher does not start FSDP, without a warning."
        yield Finding("distributed_type", what, why, f"distributed_type: FSDP, or remove {table}")
    elif old and kind == "FSDP" and "version" in given and str(given["version"].value) == "2":
        strategy = str(given["sharding_strategy"].value).upper() if "sharding_strategy" in given else "1"
        fix = (
            f"fsdp_reshard_after_forward: {str(strategy in SHARDS_WEIGHTS).lower()} instead of fsdp_sharding_strategy; no others"
        )
        what = f"{', '.join(old)} beside fsdp_version: 2."
        yield Finding(f"{table}.{old[0]}", what, "They belong to FSDP 1; accelerate ignores them with version 2.", fix)


def deepspeed_view(view: View) -> View | None:
    """The view of the DeepSpeed configuration that `view` holds or names; None without one that can be read."""
    inside = [entry for entry in view.source.entries if "deepspeed" in entry.path[:-1]]
    if inside:
        parts = (replace(entry, path=entry.path[entry.path.index("deepspeed") + 1 :]) for entry in inside)
        return DEEPSPEED.read(replace(view.source, entries=tuple(parts), replaced=()), "")
    name = str(view.value("deepspeed", ""))
    for path in (Path(name), Path(view.source.name).parent / name) if name.endswith(".json") else ():
        with suppress(InputError):
            return DEEPSPEED.read(read_source(path), "")
    return None


MATCHED = names(
    "per_device_train_batch_size gradient_accumulation_steps max_grad_norm learning_rate weight_decay adam_beta1 adam_beta2 "
    "adam_epsilon fp16 bf16"
)
"""Words whose values must be those of the DeepSpeed configuration."""
TAKEN = ("optim", "lr_scheduler_type")
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
"""AdamW with states in fp32, as DeepSpeed has it."""


@rule("deepspeed-twice", "error", source="transformers, HfTrainerDeepSpeedConfig.fill_match", tools=TRAINERS)
def deepspeed_twice(view: View, facts: Facts) -> Iterator[Finding]:
    """Other values in the DeepSpeed configuration than beside it; a warning if DeepSpeed's optimizer or schedule is taken."""
    if (theirs := deepspeed_view(view)) is None:
        return
    for word in (*TAKEN, *sorted(MATCHED)):
        ours, other = view.settings.get(word), theirs.settings.get(word)
        if not ours or not other or "deepspeed" in ours.path[:-1] or ours.value in ("auto", other.value):
            continue
        if view.tool == "transformers" and ours.path[-1] != word:  # a name of another program, which may not use the Trainer
            continue
        if word in TAKEN and not all(value in ADAMW for value in (ours.value, other.value)):
            name = theirs.source.values[other.key]
            what = f"{ours.key} is {ours.value}, and the DeepSpeed configuration has {other.key} = {name}."
            why = f"DeepSpeed's is taken; {ours.key} has no effect."
            yield Finding(word, what, why, f"remove {other.path[0]} from the DeepSpeed configuration", "warning")
        elif word in MATCHED:
            what = f"{ours.key} is {ours.value}, and the DeepSpeed configuration has {other.key} = {other.value}."
            why = "The Trainer stops: the values must match."
            yield Finding(word, what, why, f'set {other.key} to "auto" in the DeepSpeed configuration')
