from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hwopt.errors import PluginError
from hwopt.hardware.detect import detect_host
from hwopt.hardware.device import described
from hwopt.memory.planner import plan_memory
from hwopt.model.config import load_config
from hwopt.plugin.registry import Registry
from hwopt.testing import (
    TINY_BERT,
    TINY_LLAMA,
    apart,
    finished,
    gone_back,
    launcher,
    logged,
    plan_for,
    saved_bits,
    tiny_job,
    tiny_profile,
    write_samples,
)

Fsdp = Registry().plugin("fsdp")
CARD = described("a card", (8, 6), 24.0, detect_host())


def planned(folder: Path, ranks: int, kind: str = "causal-lm", hardware: Any = CARD, **tables: Any) -> Any:
    return plan_for(tiny_profile(**tables), tiny_job(folder, kind, samples=64), world_size=ranks, hardware=hardware)


def decision(plan: Any) -> tuple[str, str]:
    return next((entry.decision, entry.reason) for entry in plan.entries if entry.name == "fsdp")


def test_a_cpu_is_told_what_accelerate_would_do_there(tmp_path: Path) -> None:
    kind, reason = decision(planned(tmp_path, 4, hardware=detect_host(), fsdp={}))
    assert kind == "skip"
    assert "needs CUDA devices, found a CPU" in reason


def test_one_rank_has_nothing_to_spread(tmp_path: Path) -> None:
    kind, reason = decision(planned(tmp_path, 1, fsdp={}))
    assert (kind, "--processes" in reason) == ("skip", True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "over 4 ranks; layers gathered for each pass, gradients reduced once a micro-batch"),
        ({"reshard_after_forward": False, "reduce": "step"}, "gathered once a micro-batch, gradients reduced once a step"),
    ],
)
def test_several_ranks_of_a_card_that_is_not_there(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    kind, reason = decision(planned(tmp_path, 4, fsdp=options))
    assert kind == "apply"
    assert said in reason


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"precision": {"dtype": "bf16", "level": "O2"}}, 'take level = "O1"'),
        ({"optimizer": {"name": "adamw_bnb_8bit"}}, "take adamw_torch_fused"),
        ({"optimizer": {"name": "paged_adamw_8bit"}}, "take adamw_torch_fused"),
        ({"compile": {"widths": [32]}}, 'take scope = "block"'),
        ({"adapter": {"always": True}, "quantize": {}}, "packed bytes"),
        ({"zero": {"stage": 2, "offload": "none"}}, "keep one of them"),
    ],
)
def test_what_does_not_go_together(tables: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hwopt import testing

    monkeypatch.setattr(testing, "detect_software", lambda: dict.fromkeys(["bitsandbytes", "peft", "deepspeed", "torch"], "1"))
    with pytest.raises(PluginError, match=why):
        planned(tmp_path, 2, **tables, fsdp={})


def test_what_does_go_together(tmp_path: Path) -> None:
    tables = {"adapter": {"always": True}, "precision": {"dtype": "fp16"}, "checkpointing": {}, "optimizer": {}, "fsdp": {}}
    plan = planned(tmp_path, 2, **tables)
    assert {entry.decision for entry in plan.entries} == {"apply"}
    assert {"engine", "accelerator['fsdp_plugin']"} <= set(plan.recipe.written_by_author(plan.entries[-1].author))


# memory


def parts(folder: Path, ranks: int, **tables: Any) -> Any:
    tables = {"precision": {"dtype": "bf16"}, "optimizer": {}} | tables
    batch = {"train": 4, "effective": 4 * ranks * tables.pop("accumulation", 1)}
    job = tiny_job(folder, "causal-lm", samples=64)
    assert job.job.model.config is not None
    job.job.model.config.update(hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=4)
    plan = plan_for(tiny_profile(batch=batch, **tables), job, world_size=ranks, hardware=CARD)
    memory = plan_memory(plan, folder / "cache")
    assert (memory.tier, memory.note) == ("traced", "")
    return memory


def test_a_rank_holds_its_part(tmp_path: Path) -> None:
    plain = parts(tmp_path, 1, checkpointing={}, accumulation=2)  # all gradients are there from the first on
    peaks = []
    for ranks in (2, 4, 8):
        memory = parts(tmp_path, ranks, checkpointing={}, accumulation=2, fsdp={})
        for kind in ("weights", "gradients", "optimizer_state"):
            assert memory.parts[kind] == pytest.approx(plain.parts[kind] / ranks, rel=0.02), kind
        assert memory.parts["masters"] == 0
        peaks.append((memory.peak_gib, memory.eval_peak_gib))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < (plain.peak_gib, plain.eval_peak_gib)


def test_layers_and_gradients_that_stay_whole_are_counted(tmp_path: Path) -> None:
    spread = parts(tmp_path, 4, fsdp={}, accumulation=2)
    weights = parts(tmp_path, 4, fsdp={"reshard_after_forward": False}, accumulation=2)
    gradients = parts(tmp_path, 4, fsdp={"reduce": "step"}, accumulation=2)
    layers = 2 * (4 * 256 * 256 + 3 * 256 * 704)
    assert weights.parts["activations"] - spread.parts["activations"] >= 2 * layers / 2**30  # in bf16
    assert gradients.parts["gradients"] == pytest.approx(4 * spread.parts["gradients"], rel=0.02)


def test_the_update_works_on_a_part(tmp_path: Path) -> None:
    """AdamW that is not fused makes lists as large as what it steps on."""
    updates = [parts(tmp_path, ranks, fsdp={}, optimizer={"name": "adamw_torch"}).peak_gib for ranks in (2, 16)]
    assert updates[0] > updates[1]


# the engine's own parts


def test_settings_are_those_of_the_profile_and_not_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    from hwopt_plugins.fsdp import LEFT_BEHIND, accelerate_plugin, environment_kept

    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    with environment_kept():
        settings = accelerate_plugin(True)
        assert (settings.fsdp_version, settings.reshard_after_forward) == (2, True)
        assert not isinstance(settings.cpu_offload, CPUOffloadPolicy)
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # as the Accelerator does
    assert not set(LEFT_BEHIND) & set(os.environ)


@pytest.mark.parametrize(("config", "wanted"), [(TINY_BERT, ["BertLayer"]), (TINY_LLAMA, ["LlamaDecoderLayer"])])
def test_layers_are_gathered_one_at_a_time(config: dict[str, Any], wanted: list[str]) -> None:
    from transformers import AutoModel

    from hwopt_plugins.fsdp.engine import layer_classes

    model = AutoModel.from_config(load_config(None, config))
    assert layer_classes(model) == wanted  # BertEmbeddings stands in the same list, but the embedding is sharded by itself
    model._no_split_modules = None
    with pytest.raises(PluginError, match="does not name the layers"):
        layer_classes(model)


def test_without_ranks_it_says_how_to_start_them() -> None:
    from accelerate import Accelerator

    from hwopt.training.build import reset_accelerate
    from hwopt_plugins.fsdp.engine import shard_model

    accelerator = Accelerator(cpu=True)
    try:
        with pytest.raises(PluginError, match="hwopt run --processes N"):
            shard_model(SimpleNamespace(accelerator=accelerator))
    finally:
        reset_accelerate(accelerator)


# two real ranks: Accelerate's own sharding, told that a CPU were enough for it

ON_HOSTS = """
import os, sys
import torch
from accelerate.utils import DistributedType
from hwopt.cli import main
from hwopt.plugin import Decision
from hwopt_plugins.fsdp import Fsdp, engine

by_accelerate = engine.shard_model

def on_hosts(run):
    state = run.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = run.recipe.accelerator["fsdp_plugin"]()
    if os.environ.get("HALF"):
        state._shared_state["_mixed_precision"] = "fp16"
        run.scaler = torch.amp.GradScaler("cpu")
    return by_accelerate(run)

engine.shard_model = on_hosts
Fsdp.probe = lambda self, context: Decision.apply("between CPUs")
sys.exit(main())
"""
ALONE = [sys.executable, "-m", "hwopt"]
PROFILE = """name = "ranks"
{adapter}[plugins.precision]
dtype = "fp32"
{more}[plugins.batch]
train = 3
effective = 12
eval = 4
[plugins.cut]
[plugins.optimizer]
"""
DORA = '[plugins.adapter]\nalways = true\nr = 4\nkind = "dora"\n'


class Folder:
    """A job, and runs of it."""

    def __init__(self, folder: Path, kind: str, config: dict[str, Any], adapter: str = "", more: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.profile = PROFILE.format(adapter=adapter, more=more)
        write_samples(folder / "train.jsonl", 41)  # the last step of an epoch has five rows
        write_samples(folder / "dev.jsonl", 13, seed=1)
        pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
        (folder / "job.toml").write_text(
            f'[model]\nconfig = {{ {pairs} }}\n[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
            f'[task]\nkind = "{kind}"\n'
            "[training]\nmax_steps = 20\nlearning_rate = 1e-3\nlogging_steps = 1\neval_steps = 7\nsave_steps = 14\n"
            "weight_decay = 0.01\nmax_grad_norm = 0.5\n"
        )
        (folder / "on_hosts.py").write_text(ON_HOSTS)

    def run(
        self, name: str, ranks: int = 1, fsdp: str = "", code: int = 0, half: bool = False, resume: bool = False, **training: Any
    ) -> Path:
        (self.folder / "ranks.toml").write_text(self.profile + (f"[plugins.fsdp]\n{fsdp}" if ranks > 1 else ""))
        given = [part for key, value in training.items() for part in ("--set", f"training.{key}={value}")]
        command = ALONE if ranks == 1 else [*launcher(ranks), "on_hosts.py"]
        done = finished(
            [*command, "run", "job.toml", "--profile", "./ranks.toml", "--name", name, *given, *(["--resume"] if resume else [])],
            self.folder,
            HALF="1" if half else "",
        )
        folder = self.folder / "runs" / name
        said = done.stdout[-2000:] + done.stderr[-3000:]
        assert json.loads((folder / "status.json").read_text())["exit_code"] == code, said
        return folder


def weights(folder: Path) -> dict[str, Any]:
    found = load_file(folder / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float32}
    return found


def check_equal(ours: Path, theirs: Path, saved: tuple[str, ...] = ("checkpoint-14", "final")) -> None:
    assert json.loads((ours / "plan.json").read_text())["world_size"] > 1
    for key, steps in (("loss", 20), ("grad_norm", 20), ("eval_loss", 3)):
        assert len(logged(ours, key)) == steps
        assert logged(ours, key) == pytest.approx(logged(theirs, key), rel=1e-5), key
    for name in saved:
        assert apart(weights(ours / name), weights(theirs / name)) <= 1e-6
        configs = [json.loads((run / name / "config.json").read_text()) for run in (ours, theirs)]
        assert configs[0] == configs[1]
    found = {row["name"]: row["status"] for row in json.loads((ours / "evidence.json").read_text())["plugins"]}
    assert found.pop("cut") != ""  # these few rows leave it nothing to gain on some ranks
    assert set(found.values()) == {"active"}, found


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("fsdp"), "text-classification", TINY_BERT, more="[plugins.checkpointing]\n")
    made.run("one")
    return made


@pytest.mark.parametrize(
    ("ranks", "fsdp"),
    [(2, ""), (2, 'reshard_after_forward = false\nreduce = "step"\n'), (3, "")],
    ids=["spread", "whole", "three"],
)
def test_ranks_train_the_model_of_one(ranks: int, fsdp: str, encoder: Folder, request: pytest.FixtureRequest) -> None:
    """20 steps of uneven micro-batches, a partial last one, evaluations and a checkpoint amid, the best weights at the end."""
    ours, one = encoder.run(request.node.callspec.id, ranks, fsdp), encoder.folder / "runs" / "one"
    best = json.loads((one / "summary.json").read_text())["best_step"]
    assert best == json.loads((ours / "summary.json").read_text())["best_step"]
    assert best < 20  # so that it is not the last one that is saved
    check_equal(ours, one)


def test_a_run_goes_on_from_its_shards(encoder: Folder) -> None:
    """On as many ranks to the same bits, and on a single one that spreads nothing."""
    through = encoder.run("through", 2, save_steps=10)
    last = through / "checkpoint-20"
    gone_back(through, encoder.folder / "runs" / "again", 10)
    again = encoder.run("again", 2, save_steps=10, resume=True)
    assert saved_bits(again / "final") == saved_bits(through / "final")
    assert saved_bits(again / "checkpoint-20") == saved_bits(last)
    gone_back(through, encoder.folder / "runs" / "fewer", 10)
    fewer = encoder.run("fewer", 1, save_steps=10, resume=True)
    assert apart(weights(fewer / "checkpoint-20"), weights(last)) <= 1e-6
    assert logged(fewer, "loss") == pytest.approx(logged(through, "loss"), rel=1e-5)


def test_gradients_that_are_not_finite_end_all_ranks(encoder: Folder) -> None:
    folder = encoder.run("broken", 2, code=5, learning_rate="1e30")
    assert "not finite" in json.loads((folder / "status.json").read_text())["message"]


def test_tied_weights_and_adapters(tmp_path: Path) -> None:
    tied = Folder(tmp_path, "causal-lm", TINY_LLAMA | {"tie_word_embeddings": True}, adapter=DORA)
    one, two = tied.run("one"), tied.run("two", 2)
    check_equal(two, one, saved=("final",))
    for saved in ("checkpoint-14", "final/adapter"):
        ours, theirs = (load_file(run / saved / "adapter_model.safetensors") for run in (two, one))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.allclose(ours[name], value, atol=1e-6), name


def test_half_weights_under_a_loss_scaler_keep_fp32_shards(tmp_path: Path) -> None:
    made = Folder(tmp_path, "causal-lm", TINY_LLAMA)
    one, two = made.run("one", max_steps=6), made.run("two", 2, half=True, max_steps=6)
    assert 0 < apart(weights(two / "final"), weights(one / "final")) <= 3e-3
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-3)
    seen = {row["name"]: row["seen"] for row in json.loads((two / "evidence.json").read_text())["plugins"]}
    assert "0 of" in seen["precision"]  # matmuls in fp32, which this profile asked for
    assert "the optimizer steps on {'float32'" in seen["precision"]
