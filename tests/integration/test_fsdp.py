"""FSDP on two and three real ranks. Accelerate's check for a CUDA device is patched, so that it shards on CPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from integration.forks import run_ranks
from safetensors.torch import load_file

from hwopt.plugin import Decision
from hwopt.testing import TINY_BERT, TINY_LLAMA, logged, relative_error, rewound, saved_bits, write_samples
from hwopt_plugins.fsdp import Fsdp, engine

# Accelerate's check for a CUDA device is patched, so that it shards on CPUs


def on_hosts(half: bool = False) -> None:
    """Make this rank shard on the CPU."""
    by_accelerate = engine.shard_model

    def shard_model(run: Any) -> Any:
        state = run.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = run.recipe.accelerator["fsdp_plugin"]()
        if half:
            state._shared_state["_mixed_precision"] = "fp16"
            run.scaler = torch.amp.GradScaler("cpu")
        return by_accelerate(run)

    engine.shard_model = shard_model
    Fsdp.probe = lambda self, context: Decision.apply("between CPUs")  # type: ignore[method-assign]


def in_half() -> None:
    on_hosts(half=True)


def without_shards() -> None:
    """torch's fully_shard keeps the whole tensor on each rank: it replicates over all ranks, and shards over one."""
    import torch.distributed.fsdp as library
    from torch.distributed.device_mesh import init_device_mesh

    on_hosts()
    real = library.fully_shard

    def replicate(module: Any, **options: Any) -> Any:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
        return real(module, **{**options, "mesh": mesh})

    library.fully_shard = replicate


PROFILE = """name = "ranks"
{adapter}[plugins.precision]
dtype = "fp32"
{more}[plugins.batch]
train = 3
effective = 12
eval = 4
[plugins.length_batching]
[plugins.optimizer]
"""
DORA = '[plugins.adapter]\nalways = true\nr = 4\nkind = "dora"\n'


class Folder:
    """The folder of a job and its runs."""

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

    def run(
        self,
        name: str,
        ranks: int = 1,
        fsdp: str = "",
        code: int = 0,
        prepare: Callable[[], None] = on_hosts,
        resume: bool = False,
        **training: Any,
    ) -> Path:
        (self.folder / "ranks.toml").write_text(self.profile + (f"[plugins.fsdp]\n{fsdp}" if ranks > 1 else ""))
        given = [part for key, value in training.items() for part in ("--set", f"training.{key}={value}")]
        output, resumed = self.folder / f"{name}.out", ["--resume"] if resume else []
        command = ["run", "job.toml", "--profile", "./ranks.toml", "--name", name, *given, *resumed]
        codes = run_ranks(command, ranks, self.folder, output, prepare if ranks > 1 else lambda: None)
        assert codes == [code] * ranks, output.read_text()[-3000:]
        folder = self.folder / "runs" / name
        assert json.loads((folder / "status.json").read_text())["exit_code"] == code
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
        assert relative_error(weights(ours / name), weights(theirs / name)) <= 1e-6
        configs = [json.loads((run / name / "config.json").read_text()) for run in (ours, theirs)]
        assert configs[0] == configs[1]
    found = {row["name"]: row["status"] for row in json.loads((ours / "evidence.json").read_text())["plugins"]}
    assert found.pop("length_batching") != ""  # with so few rows it saves no tokens on some ranks
    assert set(found.values()) == {"active"}, found


@pytest.fixture(scope="module")
def encoder(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("fsdp"), "text-classification", TINY_BERT, more="[plugins.checkpointing]\n")
    made.run("one")
    return made


@pytest.mark.parametrize(
    ("ranks", "fsdp"),
    [
        (2, ""),
        pytest.param(2, 'reshard_after_forward = false\nreduce = "step"\n', marks=pytest.mark.soak),
        pytest.param(3, "", marks=pytest.mark.soak),
    ],
    ids=["spread", "whole", "three"],
)
def test_several_ranks_match_one_rank(ranks: int, fsdp: str, encoder: Folder, request: pytest.FixtureRequest) -> None:
    """20 steps of uneven micro-batches with a partial last step, evaluations, a checkpoint, and best weights at the end."""
    ours, one = encoder.run(request.node.callspec.id, ranks, fsdp), encoder.folder / "runs" / "one"
    best = json.loads((one / "summary.json").read_text())["best_step"]
    assert best == json.loads((ours / "summary.json").read_text())["best_step"]
    assert best < 20  # the best step must not be the last one
    check_equal(ours, one)


def test_resume_from_shards_gives_the_same_bits(encoder: Folder) -> None:
    """A resume on the same number of ranks gives the same bits. One rank resumes without sharding."""
    through = encoder.run("through", 2, save_steps=10)
    last = through / "checkpoint-20"
    rewound(through, encoder.folder / "runs" / "again", 10)
    again = encoder.run("again", 2, save_steps=10, resume=True)
    assert saved_bits(again / "final") == saved_bits(through / "final")
    assert saved_bits(again / "checkpoint-20") == saved_bits(last)
    rewound(through, encoder.folder / "runs" / "fewer", 10)
    fewer = encoder.run("fewer", 1, save_steps=10, resume=True)
    assert relative_error(weights(fewer / "checkpoint-20"), weights(last)) <= 1e-6
    assert logged(fewer, "loss") == pytest.approx(logged(through, "loss"), rel=1e-5)


def test_non_finite_gradients_end_all_ranks(encoder: Folder) -> None:
    folder = encoder.run("broken", 2, code=5, learning_rate="1e30")
    assert "not finite" in json.loads((folder / "status.json").read_text())["message"]


def test_evidence_of_fsdp_is_inactive_if_torch_shards_nothing(encoder: Folder) -> None:
    folder = encoder.run("whole-tensors", 2, prepare=without_shards, max_steps=1)
    plugins = json.loads((folder / "evidence.json").read_text())["plugins"]
    fsdp = next(row for row in plugins if row["name"] == "fsdp")
    assert fsdp["status"] == "inactive", fsdp["seen"]


@pytest.mark.soak
def test_tied_weights_and_adapters(warm: None, tmp_path: Path) -> None:
    tied = Folder(tmp_path, "causal-lm", TINY_LLAMA | {"tie_word_embeddings": True}, adapter=DORA)
    one, two = tied.run("one"), tied.run("two", 2)
    check_equal(two, one, saved=("final",))
    for saved in ("checkpoint-14", "final/adapter"):
        ours, theirs = (load_file(run / saved / "adapter_model.safetensors") for run in (two, one))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.allclose(ours[name], value, atol=1e-6), name


@pytest.mark.soak
def test_half_weights_under_a_loss_scaler_keep_fp32_shards(warm: None, tmp_path: Path) -> None:
    made = Folder(tmp_path, "causal-lm", TINY_LLAMA)
    one, two = made.run("one", max_steps=6), made.run("two", 2, prepare=in_half, max_steps=6)
    assert 0 < relative_error(weights(two / "final"), weights(one / "final")) <= 3e-3
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-3)
    seen = {row["name"]: row["seen"] for row in json.loads((two / "evidence.json").read_text())["plugins"]}
    assert "0 of" in seen["precision"]  # this profile requests fp32 matmuls
    assert "the optimizer steps on {'float32'" in seen["precision"]
