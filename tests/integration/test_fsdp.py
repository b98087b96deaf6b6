"""FSDP on two and three real ranks. Accelerate's check for a CUDA device is patched, so that it shards on CPUs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from cases import named
from integration.ranks_folder import BATCH, FP32, check_equal, evidence, train, write_job, write_profile
from safetensors.torch import load_file

from hwopt.plugin import Decision
from hwopt.testing import TINY_BERT, TINY_LLAMA, logged, relative_error, rewound, saved_bits
from hwopt_plugins.fsdp import Fsdp, engine


def on_hosts() -> None:
    """Make this rank shard on the CPU."""
    by_accelerate = engine.shard_model

    def shard_model(run: Any) -> Any:
        state = run.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = run.recipe.accelerator["fsdp_plugin"]()
        return by_accelerate(run)

    engine.shard_model = shard_model
    Fsdp.probe = lambda self, context: Decision.apply("between CPUs")


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


DORA = {"adapter": {"always": True, "r": 4, "kind": "dora"}}
STEPS = {"max_steps": 20, "eval_steps": 7, "save_steps": 14, "weight_decay": 0.01, "max_grad_norm": 0.5}
BEST = {"metric_for_best_model": "loss", "greater_is_better": True}  # the greatest loss is that of the first evaluation


class Folder:
    """The folder of a job and its runs."""

    def __init__(self, folder: Path, config: dict[str, Any], kind: str = "text-classification", **plugins: Any) -> None:
        self.folder = folder
        before = {name: plugins.pop(name) for name in ("adapter",) if name in plugins}  # plugins apply in this order
        self.plugins = before | FP32 | plugins | {"batch": {**BATCH, "eval": 4}, "length_batching": {}, "optimizer": {}}
        write_job(folder, config, kind, **STEPS, **BEST)

    def run(
        self, name: str, ranks: int = 1, *arguments: str, code: int = 0, first: Callable[[], None] = on_hosts, **fsdp: Any
    ) -> Path:
        """The folder of the run `name`. `fsdp`: options of the plugin, which several ranks use."""
        write_profile(self.folder, self.plugins | ({"fsdp": fsdp} if ranks > 1 else {}))
        given = [word for text in arguments for word in (("--set", f"training.{text}") if "=" in text else (text,))]
        return train(self.folder, name, ranks, *given, code=code, first=first if ranks > 1 else lambda: None)


def weights(folder: Path) -> dict[str, Any]:
    found = load_file(folder / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float32}
    return found


@pytest.fixture(scope="module")
def encoder(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(tmp_path_factory.mktemp("fsdp"), TINY_BERT, checkpointing={})
    made.run("one")
    return made


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "spread": (2, {}),
    "whole": (2, {"reshard_after_forward": False, "reduce": "step"}),
    "three": (3, {}),
}


@pytest.mark.parametrize("case", named(OPTIONS, ("spread",)))
def test_several_ranks_match_one_rank(case: tuple[int, dict[str, Any]], encoder: Folder, request: pytest.FixtureRequest) -> None:
    """20 steps of uneven micro-batches with a partial last step, evaluations, a checkpoint, and best weights at the end."""
    ours, one = encoder.run(request.node.callspec.id, case[0], **case[1]), encoder.folder / "runs" / "one"
    best = json.loads((one / "summary.json").read_text())["best_step"]
    assert best == json.loads((ours / "summary.json").read_text())["best_step"]
    assert best < 20, "the weights of an earlier step are put back"
    check_equal(ours, one, case[0], ("checkpoint-14", "final"))
    assert weights(ours / "final").keys() == weights(one / "final").keys()


def test_resume_from_shards_gives_the_same_bits(encoder: Folder) -> None:
    """A resume on the same number of ranks gives the same bits. One rank resumes without sharding."""
    through = encoder.run("through", 2, "save_steps=10")
    last = through / "checkpoint-20"
    rewound(through, encoder.folder / "runs" / "again", 10)
    again = encoder.run("again", 2, "save_steps=10", "--resume")
    assert saved_bits(again / "final") == saved_bits(through / "final")
    assert saved_bits(again / "checkpoint-20") == saved_bits(last)
    rewound(through, encoder.folder / "runs" / "fewer", 10)
    fewer = encoder.run("fewer", 1, "save_steps=10", "--resume")
    assert relative_error(weights(fewer / "checkpoint-20"), weights(last)) <= 1e-6
    assert logged(fewer, "loss") == pytest.approx(logged(through, "loss"), rel=1e-5)


def test_non_finite_gradients_end_all_ranks(encoder: Folder) -> None:
    folder = encoder.run("broken", 2, "learning_rate=1e30", code=5)
    assert "not finite" in json.loads((folder / "status.json").read_text())["message"]


def test_evidence_of_fsdp_is_inactive_if_torch_shards_nothing(encoder: Folder) -> None:
    assert evidence(encoder.run("whole-tensors", 2, "max_steps=1", first=without_shards))["fsdp"] == "inactive"


@pytest.mark.soak
def test_tied_weights_and_adapters(warm: None, tmp_path: Path) -> None:
    tied = Folder(tmp_path, TINY_LLAMA | {"tie_word_embeddings": True}, "causal-lm", **DORA)
    one, two = tied.run("one"), tied.run("two", 2)
    check_equal(two, one, 2)
    for saved in ("checkpoint-14", "final/adapter"):
        ours, theirs = (load_file(run / saved / "adapter_model.safetensors") for run in (two, one))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.allclose(ours[name], value, atol=1e-6), name
