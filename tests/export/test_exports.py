"""Exported files work with Accelerate's launcher, on real ranks, and with transformers."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import yaml

from hwopt import api
from hwopt.cli import run_command
from hwopt.errors import InputError
from hwopt.export.accelerate import (
    FIRST_NODE,
    engine_config,
    engine_plugin,
    exports_of,
    launcher_config,
    launcher_yaml,
    refuse_contradictions,
)
from hwopt.export.files import exported
from hwopt.hardware.device import described
from hwopt.planning.plan import Plan
from hwopt.testing import TINY_BERT, plan_for, tiny_job, tiny_profile, train_tiny, write_samples

GPU = described("a GPU", (8, 6), 8)
ZERO = {"stage": 2, "offload": "none"}


def planned(folder: Path, *, max_grad_norm: float = 1.0, **options: Any) -> Plan:
    """The plan of a tiny job. Dict options are plugin tables; `plan_for` gets the other options."""
    tables = {name: options.pop(name) for name in list(options) if isinstance(options[name], Mapping)}
    return plan_for(tiny_profile(**tables), tiny_job(folder / "data", max_grad_norm=max_grad_norm), **options)


def launcher_environment(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The environment variables that Accelerate's launcher sets for `config`."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    file.write_text(launcher_yaml(config, "tiny"))
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "-m", "hwopt"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        found = launch.prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.multi_gpu or arguments.use_fsdp:
        found = launch.prepare_multi_gpu_env(arguments)
    else:
        found = launch.prepare_simple_launcher_cmd_env(arguments)[1]
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def refuse(environment: Mapping[str, str], plan: Plan) -> None:
    refuse_contradictions(environment, plan.recipe.accelerator, plan.hardware, exports_of(plan))


PLANS: list[dict[str, Any]] = [
    {},
    {"world_size": 1, "zero": {"stage": 3, "offload": "parameters"}, "max_grad_norm": 0.0},
    {"world_size": 4, "zero": {"stage": 2, "offload": "optimizer"}, "precision": {"dtype": "fp16"}, "hardware": GPU},
    {"world_size": 4, "precision": {"dtype": "fp16", "level": "O2"}, "hardware": GPU, "max_grad_norm": 0.5},
]


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_environment_of_an_exported_file_agrees_with_its_plan(number: int, tmp_path: Path) -> None:
    plan = planned(tmp_path, **PLANS[number])
    environment = launcher_environment(launcher_config(plan), tmp_path / "own.yaml")
    refuse(environment, plan)
    if "zero" in PLANS[number]:
        assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(PLANS[number]["zero"]["stage"])
        assert float(environment["ACCELERATE_GRADIENT_CLIPPING"]) == PLANS[number].get("max_grad_norm", 1.0)
        (tmp_path / "ds.json").write_text(exported(plan, "deepspeed"))
        refuse(launcher_environment(launcher_config(plan, 1, str(tmp_path / "ds.json")), tmp_path / "two.yaml"), plan)


def test_run_refuses_a_contradicting_environment_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(InputError, match="ZERO_STAGE=3 contradicts the plan, in which it is 2"):
        api.execute(planned(tmp_path, zero=ZERO), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_export_ignores_the_launcher_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, zero=ZERO)
    before = engine_config(plan)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true")
    environment = dict(os.environ)
    assert engine_config(plan) == before
    assert launcher_config(plan)["deepspeed_config"]["zero3_init_flag"] is False
    assert dict(os.environ) == environment


def test_export_for_several_nodes(tmp_path: Path) -> None:
    plan = planned(tmp_path, world_size=8, hardware=GPU, zero=ZERO)
    config = launcher_config(plan, 2)
    assert (config["num_machines"], config["num_processes"], config["machine_rank"]) == (2, 8, 0)
    assert config["main_process_ip"] == FIRST_NODE
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    text = launcher_yaml(config, "tiny")
    assert "--machine_rank 0 to 1" in text
    assert yaml.safe_load(text) == config


def test_exported_json_is_the_config_of_the_engine(tmp_path: Path) -> None:
    plan = planned(tmp_path, zero={"stage": 3, "offload": "parameters"}, precision={"dtype": "bf16"}, max_grad_norm=0.5)
    expected = json.loads(exported(plan, "deepspeed"))
    engine = train_tiny(plan, tmp_path).run.accelerator.deepspeed_config
    assert expected == {key: value for key, value in engine.items() if key != "steps_per_print"}
    assert (expected["train_batch_size"], expected["gradient_clipping"], expected["bf16"]) == (4, 0.5, {"enabled": True})


def test_accelerate_reads_the_same_fsdp_settings_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    def sharded(reshard: bool) -> Plan:
        return planned(tmp_path, fsdp={"reshard_after_forward": reshard}, world_size=2, hardware=GPU)

    plan = sharded(False)
    config = launcher_config(plan)
    assert config["distributed_type"] == "FSDP"
    environment = launcher_environment(config, tmp_path / "fsdp.yaml")
    refuse(environment, plan)
    with pytest.raises(InputError, match="FSDP_RESHARD_AFTER_FORWARD=false .* in which it is true"):
        refuse(environment, sharded(True))
    ours, before = engine_plugin(plan, "fsdp_plugin"), dict(os.environ)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    theirs = FullyShardedDataParallelPlugin()
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        if name in os.environ and name not in before:
            monkeypatch.delenv(name)  # the second variable was set by Accelerate
    assert vars(theirs) | {"param_init_fn": None} == vars(ours) | {"param_init_fn": None}


def test_export_refuses_an_engine_that_no_file_can_hold(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    plan.recipe.accelerator["megatron_lm_plugin"] = object()
    with pytest.raises(InputError, match="megatron_lm_plugin: hwopt cannot write a launcher file"):
        launcher_config(plan)


# the command line

PROFILE = (
    'name = "ranks"\n[plugins.precision]\ndtype = "bf16"\n[plugins.batch]\ntrain = 3\neffective = 12\n[plugins.length_batching]\n'
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_samples(tmp_path / "train.jsonl", 41)
    data, training = {"train": "train.jsonl", "max_length": 32}, {"max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1}
    (tmp_path / "job.toml").write_text(tomlkit.dumps({"model": {"config": TINY_BERT}, "data": data, "training": training}))
    (tmp_path / "ddp.toml").write_text(PROFILE)
    (tmp_path / "zero.toml").write_text(PROFILE + '[plugins.zero]\nstage = 2\noffload = "none"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(profile: str, *arguments: str) -> int:
    return run_command(["export", "job.toml", "--profile", f"./{profile}.toml", *arguments])


TRAINER = """
from types import SimpleNamespace
from transformers import TrainingArguments

model = SimpleNamespace(config=SimpleNamespace(hidden_size=32))
for rows in (3, 5):
    arguments = TrainingArguments(
        output_dir="trainer", deepspeed="ds.json", per_device_train_batch_size=rows, max_grad_norm=1.0, bf16=True, use_cpu=True
    )
    try:
        arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, 3)  # raises for values that do not match
        print("stage", arguments.hf_deepspeed_config.get_value("zero_optimization.stage"))
    except ValueError as error:
        print(error)
"""


@pytest.mark.integration
def test_transformers_accepts_the_exported_json(folder: Path) -> None:
    assert export("zero", "--to", "deepspeed", "--output", "ds.json") == 0
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", TRAINER], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    taken, refused = done.stdout[done.stdout.index("stage") :].split("\n", 1)
    assert taken == "stage 2"
    assert "ds train_micro_batch_size_per_gpu=3 vs hf per_device_train_batch_size=5" in refused


def test_standard_output_holds_only_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export("zero", "--to", "deepspeed") == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 2
    assert run_command(["export", "job.toml", "--profile", "rtx3070_8gb", "--to", "accelerate"]) == 0
    found = capsys.readouterr()
    assert yaml.safe_load(found.out)["use_cpu"] is True
    assert "note: no CUDA device" in found.err
    assert "tf32: skip: needs a CUDA device" in found.err
    assert "WARNING: the file starts ranks on CPUs" in found.err
    assert "add --hardware profile" in found.err
    arguments = ["--to", "accelerate", "--hardware", "profile", "--world-size", "2"]
    assert run_command(["export", "job.toml", "--profile", "rtx3070_8gb_zero", *arguments]) == 0
    found = capsys.readouterr()
    assert "WARNING" not in found.err
    config = yaml.safe_load(found.out)
    assert (config["use_cpu"], config["deepspeed_config"]["offload_optimizer_device"]) == (False, "cpu")


def test_export_overwrites_only_with_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").write_text("mine")
    for output, code, message in (("mine", 2, "exists; give another name"), ("nowhere/x", 6, "there is no folder 'nowhere'")):
        assert export("ddp", "--to", "accelerate", "--output", output) == code
        assert f"--output {output}: {message}" in capsys.readouterr().err
    assert Path("mine").read_text() == "mine"
    assert export("ddp", "--to", "accelerate", "--output", "mine", "--force") == 0
    assert yaml.safe_load(Path("mine").read_text())["num_processes"] == 1
    assert export("ddp", "--to", "accelerate", "--output", ".", "--force") == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("profile", "arguments", "message"),
    [
        ("zero", [], "Missing option '--to'"),
        ("ddp", ["--to", "deepspeed"], "no DeepSpeed to export: add the plugin 'zero', as by --set plugins.zero.enabled=true"),
        ("ddp", ["--to", "accelerate", "--deepspeed-config-file", "ds.json"], "add the plugin 'zero'"),
        ("zero", ["--to", "deepspeed", "--set", "plugins.zero.stage=0"], "does not use it: stage 0: shards nothing"),
        ("zero", ["--to", "deepspeed", "--deepspeed-config-file", "ds.json"], "needs --to accelerate"),
        ("zero", ["--to", "accelerate", "--world-size", "3", "--nodes", "2"], "cannot be spread evenly"),
    ],
)
def test_export_refuses_bad_input(
    profile: str, arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(profile, *arguments) == 2
    found = capsys.readouterr()
    assert message in " ".join(found.err.replace("│", " ").split())
    assert not found.out
