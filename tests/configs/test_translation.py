"""Settings of other tools as a profile and a job: what is taken over, changed, left out, or without equivalent."""

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from datasets import Dataset
from trl.data_utils import pack_dataset

from hwopt.config.aliases import plugin_aliases
from hwopt.config.toml_text import inline
from hwopt.configs.imported_files import Imported, import_file, profile_name, write_imported
from hwopt.configs.recognise import read_source, view_of
from hwopt.configs.source_file import from_yaml
from hwopt.configs.translation import Translation, translate
from hwopt.errors import InputError
from hwopt.memory.forecast.lengths import prepared_data
from hwopt.memory.planned import resolve
from hwopt.planning.inputs import Inputs
from hwopt.plugin.imports import options_from
from hwopt.testing import TINY_LLAMA

INPUTS = Inputs()


def translated(text: str) -> Translation:
    return translate(view_of(from_yaml(text, "f.yaml", "YAML"), INPUTS), INPUTS.registry)


def taken(text: str) -> dict[str, Any]:
    """What the file itself says; a default of its tool has no line."""
    return {".".join(each.key): each.value for each in translated(text).taken if each.setting.line}


def left(text: str) -> dict[str, tuple[bool, str]]:
    return {each.key: (each.on_purpose, each.reason) for each in translated(text).left}


# fmt: off
OPTIONS: dict[str, dict[str, Any]] = {
    "data:\n  seed: 0\nseed: 7\nfp16: true": {"training.seed": 7, "plugins.precision.dtype": "fp16"},
    "fp16: true": {"plugins.precision.dtype": "fp16"},
    "bf16: auto": {"plugins.precision.dtype": "auto"},
    "fp16: false": {},
    "fp16_opt_level: O0": {"plugins.precision.dtype": "fp32"},
    "fp16_full_eval: true\nfp16_opt_level: O2": {"plugins.precision.level": "O2", "plugins.precision.full_eval": True},
    "pure_bf16: true": {"plugins.precision.dtype": "bf16", "plugins.precision.level": "pure"},
    "torch_dtype: bfloat16": {"plugins.precision.dtype": "bf16"},
    "optim: adamw_hf": {"plugins.optimizer.name": "adamw_torch"},
    "optim: paged_adamw_8bit": {"plugins.optimizer.name": "paged_adamw_8bit"},
    "attn_implementation: eager": {"plugins.sdpa.prefer": ["eager"]},
    "attn_implementation: sdpa": {"plugins.sdpa.enabled": True},
    "adapter: lora\npeft_use_rslora: true\nlora_modules_to_save: [lm_head]\nsequence_len: 64": {
        "plugins.adapter.enabled": True, "plugins.adapter.always": True, "plugins.adapter.use_rslora": True,
        "plugins.adapter.modules_to_save": ["lm_head"], "data.max_length": 64},
    "packing: true\nmax_length: 512\ngradient_accumulation_steps: 2": {
        "plugins.pack.enabled": True, "plugins.batch.effective_tokens": 8 * 2 * 512, "data.max_length": 512,
        "task.kind": "causal-lm"},
    "dataset_name: a/b\ndataset_train_split: x\ndataset_test_split: y\neval_strategy: epoch\neos_token: <e>": {
        "data.train": "a/b", "data.split": "x", "data.eval_split": "y", "data.eval": "a/b", "data.eos_token": "<e>",
        "task.kind": "causal-lm"},
    "dataset_name: a/b\ndataset_test_split: y": {"data.train": "a/b", "task.kind": "causal-lm"},
    "dataset_name: a/b\npacking: false\neval_strategy: epoch\ndataset_config: c\nprofiler:\n  warmup_steps: 3": {
        "data.train": "a/b:c", "data.eval_split": "test", "data.eval": "a/b:c",
        "task.kind": "causal-lm"},
    "lora_r: 16\ndataset_name: a/b": {"data.train": "a/b"},
    "finetuning_type: full\nlora_rank: 8\ndataset: a": {"data.train": "a", "task.kind": "causal-lm"},
    "cutoff_len: 64\nmask_history: true\ntrain_on_prompt: false": {
        "data.max_length": 64, "data.assistant_turns": "last", "task.kind": "causal-lm"},
    "base_model: m\nadapter:\nlora_r: 8\nrl:": {"model.name": "m", "task.kind": "causal-lm"},
    "use_peft: true\nload_in_4bit: true\nchat_template_path: a.jinja": {
        "plugins.adapter.enabled": True, "plugins.adapter.always": True, "plugins.quantize.bits": 4,
        "data.chat_template": "a.jinja", "task.kind": "causal-lm"},
    "base_model: m\nsequence_len: 8\nchat_template: chatml": {
        "model.name": "m", "data.max_length": 8, "data.chat_template": "chatml", "task.kind": "causal-lm"},
    "base_model: m\nsequence_len: 8\ndatasets: [{path: a, chat_template: chatml}]\nspecial_tokens: {eos_token: x}": {
        "model.name": "m", "data.max_length": 8, "data.chat_template": "chatml", "data.eos_token": "x", "data.train": "a",
        "task.kind": "causal-lm"},
    "base_model: m\nadapter: lora\nlora_target_linear: true\nflash_attention: true\nbatch_size: 16\nmicro_batch_size: 2\n"
    "gradient_checkpointing: offload\ndatasets: [{path: d, name: c, split: 'train[:9%]', type: alpaca}, {path: e}]": {
        "plugins.adapter.enabled": True, "plugins.adapter.always": True, "plugins.adapter.target_modules": "all-linear",
        "plugins.sdpa.prefer": ["flash", "efficient", "math"], "plugins.batch.effective": 16, "plugins.batch.train": 2,
        "plugins.checkpointing.layers": "all", "model.name": "m", "data.train": "d:c", "data.split": "train[:9%]",
        "task.kind": "causal-lm"},
    "lora_target: all\nlora_rank: 8\nflash_attn: fa2\nearly_stopping_steps: 3": {
        "plugins.adapter.target_modules": "all-linear", "plugins.adapter.r": 8, "training.early_stopping_patience": 3,
        "plugins.sdpa.prefer": ["flash", "efficient", "math"], "task.kind": "causal-lm"},
    '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, "bf16": {"enabled": true},'
    '"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95]}},'
    '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}': {
        "plugins.batch.effective": 64, "plugins.batch.train": 8, "training.max_grad_norm": 0.5, "plugins.precision.dtype": "bf16",
        "plugins.optimizer.name": "adamw_torch", "training.learning_rate": 3e-5, "training.adam_beta1": 0.9,
        "training.adam_beta2": 0.95, "plugins.zero.stage": 3, "plugins.zero.offload": "parameters"},
    "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: 'no'\nnum_processes: 4": {
        "plugins.fsdp.enabled": True},
    "neftune_noise_alpha: 5": {"plugins.neftune.alpha": 5},
    "train_sampling_strategy: group_by_length": {"plugins.group_lengths.enabled": True},
    "torch_compile: true\ntorch_compile_mode: reduce-overhead": {
        "plugins.compile.enabled": True, "plugins.compile.mode": "reduce-overhead"},
    "eval_steps: 50\neval_strategy: steps": {"training.eval_steps": 50},
    "save_strategy: 'no'\nfp16: false": {"training.save_minutes": 0.0},
    "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 1e-2, num_cycles: 0.5}": {
        "training.lr_scheduler_type": "cosine_with_min_lr",
        "training.lr_scheduler_kwargs": {"min_lr_rate": 0.01, "num_cycles": 0.5}},
    "warmup_steps: 0.06": {"training.warmup_ratio": 0.06},
    "warmup_steps: 100\nwarmup_ratio: 0.1": {"training.warmup_steps": 100},
    "warmup_steps: 0\nwarmup_ratio: 0.1": {"training.warmup_ratio": 0.1},
    "max_steps: -1\nnum_train_epochs: 2": {"training.num_train_epochs": 2},
    "max_steps: 10\nnum_train_epochs: 2": {"training.max_steps": 10},
    "label_smoothing: 0.1\nfp16: false": {"task.label_smoothing": 0.1},
}
# fmt: on


@pytest.mark.parametrize("text", OPTIONS, ids=lambda text: text.partition("\n")[0])
def test_setting_becomes_an_option_or_a_key_of_the_job(text: str) -> None:
    assert taken(text) == OPTIONS[text]


NO_EQUIVALENT = {
    "chat_template_path: Qwen/Qwen3-0.6B\nfp16: true": "save that of 'Qwen/Qwen3-0.6B' as a file",
    "optim: adafactor": "plugins.optimizer.name",
    "lr_scheduler_type: reduce_lr_on_plateau": "lr_scheduler_type",
    "fp16_opt_level: O3": "has no such value",
    "torch_compile_mode: fastest": "plugins.compile.mode",
    "eval_strategy: 'no'\nfp16: true": "leave data.eval out",
    "eval_steps: 0.1": "a share of the steps",
    "save_strategy: epoch": "save_minutes",
    "load_best_model_at_end: false": "final/",
    "auto_find_batch_size: true": "needs effective",
    "learning_rate: -1": "greater than 0",
    "assistant_only_loss: false": "answers of conversations only",
    "train_on_inputs: true\nfp16: true": "answers of conversations only",
    "roles_to_train: [user]\nfp16: true": "answers of conversations only",
    "prompt_column: q\ndataset_name: a\nassistant_only_loss: true": "data.completion go together",
    "mask_history: true\ncutoff_len: 64\nstage: dpo": "belongs to task.kind = causal-lm",
    "dataloader_num_workers: -1": "greater than or equal to 0",
    "per_device_train_batch_size: 16  ← Actually 16": 'A YAML comment begins with " #"',
}


@pytest.mark.parametrize("text", NO_EQUIVALENT, ids=lambda text: text.partition("\n")[0])
def test_setting_without_equivalent_is_listed_with_the_reason(text: str) -> None:
    on_purpose, reason = left(text)[text.partition(":")[0]]
    assert not on_purpose
    assert NO_EQUIVALENT[text] in reason


def test_second_value_of_an_option_is_listed_with_the_first_ones_place() -> None:
    text = "fp16: true\nbf16: true\n"
    assert taken(text) == {"plugins.precision.dtype": "fp16"}
    assert "is 'fp16' already, by fp16 (f.yaml:1)" in left(text)["bf16"][1]


PACKED = {
    "f.yaml": "sample_packing: true\nsequence_len: 256\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n",
    "f.py": "SFTConfig(packing=True, max_length=256, per_device_train_batch_size=2, gradient_accumulation_steps=4)\n",
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_trained_in_as_many_steps_as_before(name: str, tmp_path: Path) -> None:
    random = Random(0)
    texts = [" ".join(random.choices(["row", "step", "token"], k=random.randint(2, 120))) for _ in range(2000)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / name).write_text(PACKED[name])
    model = f"model.config={inline(TINY_LLAMA | {'max_position_embeddings': 256}).as_string()}"
    assignments = [model, f"data.train={json.dumps(str(tmp_path / 't.jsonl'))}", 'task.kind="causal-lm"']
    write_imported(import_file(tmp_path / name, INPUTS, assignments=assignments), tmp_path / "new")
    plan = resolve(str(tmp_path / "new/profile.toml"), tmp_path / "new/job.toml", cache=tmp_path)
    lengths = prepared_data(plan.job, 0, plan.model, tmp_path).train.lengths
    packed = pack_dataset(Dataset.from_dict({"input_ids": [[0] * length for length in lengths]}), 256)
    assert len(lengths) / plan.batch.step == pytest.approx(len(packed) / (2 * 4), rel=0.03)
    assert plan.batch.train == 2


def test_quantization_that_a_tool_does_once_stays_so() -> None:
    found = {each.key: each.value for each in translated("use_peft: true\nload_in_4bit: true\n").taken}
    assert found["plugins", "quantize", "double"] is False
    found = {each.key: each.value for each in translated("adapter: qlora\nload_in_4bit: true\nbase_model: m\n").taken}
    assert ("plugins", "quantize", "double") not in found  # as in axolotl


def test_columns_and_words_of_a_data_set_that_have_other_names_are_listed(tmp_path: Path) -> None:
    known = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "turns", "system": "sys", "tools": "tools"}}
    known["tags"] = {"role_tag": "from", "user_tag": "me"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"name": known}))
    (tmp_path / "f.yaml").write_text(f"stage: sft\ncutoff_len: 64\ndataset: name\ndataset_dir: {tmp_path}\n")
    found = translate(view_of(read_source(tmp_path / "f.yaml"), INPUTS), INPUTS.registry)
    listed = {each.key: each.reason for each in found.left}
    assert listed["dataset.columns.system"] == "rename the column to 'system'"
    assert "ShareGPT" in listed["dataset.tags.user_tag"]
    assert "dataset.columns.tools" not in listed


# fmt: off
REGISTERED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alpaca": ({"file_name": "a.json", "num_samples": 7}, {"train": "DATA/a.json", "max_rows": 7}),
    "hub": ({"hf_hub_url": "a/b", "subset": "en", "split": "x"}, {"train": "a/b:en", "split": "x"}),
    "sharegpt": (
        {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "turns"}},
        {"train": "DATA/a.json", "messages": "turns"}),
    "pair": (
        {"file_name": "a.json", "columns": {"prompt": "q", "response": "a"}},
        {"train": "DATA/a.json", "prompt": "q", "completion": "a"}),
    "preferences": ({"file_name": "a.json", "ranking": True}, {}),
    "damaged": ({"file_name": "a.json", "columns": ["q", "a"], "tags": 3}, {"train": "DATA/a.json"}),
    "unknown": ({}, {"train": "name"}),
}
# fmt: on


@pytest.mark.parametrize("case", REGISTERED)
def test_name_of_llama_factory_is_looked_up_in_its_list(case: str, tmp_path: Path) -> None:
    known, expected = REGISTERED[case]
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/dataset_info.json").write_text(json.dumps({"name": known} if known else {}))
    path = tmp_path / "f.yaml"
    path.write_text("stage: sft\ncutoff_len: 64\ndataset: name\ndataset_dir: sets\n")
    found = translate(view_of(read_source(path), INPUTS), INPUTS.registry)
    data = {each.key[1]: each.value for each in found.taken if each.key[0] == "data"}
    folder = str(tmp_path / "sets")
    assert {key: str(value).replace(folder, "DATA") for key, value in data.items()} == {
        key: str(value) for key, value in {**expected, "max_length": 64}.items()
    }
    if case == "preferences":
        assert "hwopt.optimized" in next(each.reason for each in found.left if each.key.startswith("dataset"))


@pytest.mark.parametrize("word", plugin_aliases())
def test_plugins_translate_any_value_of_their_words_into_their_options(word: str) -> None:
    plugin = INPUTS.registry.plugin(plugin_aliases()[word].split(".")[1])
    translations = 0
    for value in (True, False, None, 1, 0.5, "x", "auto", "", ["x"], {"a": 1}):
        with suppress(TypeError, ValueError):  # listed as without equivalent
            options = options_from(plugin.aliases[word], value)
            assert options is None or set(options) <= plugin.Options.model_fields.keys() | {"enabled"}
            translations += 1
    assert translations


def written(text: str, folder: Path, *assignments: str) -> Imported:
    (folder / "f.yaml").write_text(text)
    return import_file(folder / "f.yaml", INPUTS, assignments=assignments)


def test_assignments_replace_keys_of_the_job_and_are_checked(tmp_path: Path) -> None:
    text = "learning_rate: 1e-5\nmodel_name: m\n"
    files = written(text, tmp_path, "model.name=n", "data.train=t.csv")
    assert 'name = "n"' in files.job
    assert files.missing == ()
    assert 'messages = "x"' in written("messages_column: x\nfp16: true\n", tmp_path, "task.kind=causal-lm").job
    with pytest.raises(InputError, match="learning_rate"):
        written(text, tmp_path, "training.learning_rate=0")
    with pytest.raises(InputError, match="expected a key of a job"):
        written(text, tmp_path, "plugins.batch.train=3")


def test_comments_with_control_characters_cannot_add_lines(tmp_path: Path) -> None:
    text = 'a: "x"\nfp16: true  # one\u202e[plugins.x]\nnote: "a\\n[plugins.y]\\nb"\n"k\\n[plugins.z]": 1\n'
    files = written(text, tmp_path)
    assert not any(f"\n[plugins.{name}]" in files.profile for name in "xyz")
    assert "\\u202e" in files.profile


def test_profile_has_a_valid_name() -> None:
    names = ["a b.yaml", "é.yaml", "x" * 90 + ".yml"]
    assert [profile_name(Path(name)) for name in names] == ["a_b", "imported", "x" * 80]


def test_training_with_preferences_is_named_and_weights_give_way_to_products(tmp_path: Path) -> None:
    path = tmp_path / "dpo.yaml"
    path.write_text("torch_dtype: float16\nbf16: true\nbeta: 0.1\ndataset_train_split: train\n")
    found = import_file(path, Inputs())
    assert 'dtype = "bf16"' in found.profile
    (change,) = dict(found.summary(tmp_path))["changes:"]
    assert change.startswith("beta: trains preferences or rewards; the job is supervised training.")
