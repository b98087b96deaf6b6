import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DAILY
from plugin_cases import Cases, Mutation, Refused
from safetensors.torch import load_file

from hwopt import api
from hwopt.errors import NonFiniteError
from hwopt.memory.forecast.planner import plan_memory
from hwopt.plugin import verify
from hwopt.plugin.registry import Registry
from hwopt.plugin.written import ONE_CARD
from hwopt.report.memory import describe_host
from hwopt.system.cache import cache_folder
from hwopt.testing import (
    TINY_LLAMA,
    Recorder,
    plan_for,
    relative_error,
    rewound,
    saved_bits,
    tiny_job,
    tiny_profile,
    train_tiny,
    write_samples,
)

Zero = Registry().plugin("zero")
STAGES = [(1, "none"), (3, "parameters")]  # other tests of this file train in stage 2, and in stage 3 without offload


def trained(folder: Path, name: str, kind: str, dtype: str, **plugins: Any) -> Any:
    """(final weights, recorder) of a run with uneven micro-batches, a partial last step and evaluations."""
    job = tiny_job(folder / "data", kind, samples=21, max_steps=3, eval_steps=3)
    tables = {"adapter": plugins.pop("adapter")} if "adapter" in plugins else {}
    plan = plan_for(tiny_profile(**tables, length_batching={}, precision={"dtype": dtype}, optimizer={}, **plugins), job)
    recorder = train_tiny(plan, folder / name)
    return load_file(folder / name / "run" / "final" / "model.safetensors"), recorder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("plain"), "plain", "text-classification", "fp32")


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_one_device_trains_the_same_model(stage: int, offload: str, plain: Any, tmp_path: Path) -> None:
    ours, recorder = trained(tmp_path, "zero", "text-classification", "fp32", zero={"stage": stage, "offload": offload})
    theirs, without = plain
    assert relative_error(ours, theirs) <= 1e-6
    assert recorder.losses == pytest.approx(without.losses, rel=1e-5)
    assert {entry.name: evidence.status for entry, evidence in recorder.found}["zero"] == "active"
    assert all(evidence.status == "active" for _, evidence in recorder.found), recorder.found


def test_evidence_names_weights_that_stage_3_keeps_whole(tmp_path: Path) -> None:
    found = []

    class Whole(Recorder):
        def on_evidence(self, run: Any, evidence: list[Any]) -> None:
            weight = run.inner_model.get_input_embeddings().weight
            shard = weight.ds_tensor
            del weight.ds_tensor
            found.extend(verify(entry.plugin, run) for entry, _ in evidence if entry.name == "zero")
            weight.ds_tensor = shard

    job = tiny_job(tmp_path / "data", "causal-lm", max_steps=1)
    train_tiny(plan_for(tiny_profile(zero={"stage": 3, "offload": "none"}), job), tmp_path, Whole())
    assert (found[0].status, "; 1 weights are not partitioned: model.embed_tokens.weight" in found[0].seen) == ("inactive", True)


def test_half_weights_keep_fp32_masters(tmp_path: Path) -> None:
    """The initial weights are not rounded, and final/ is fp32."""
    ours, recorder = trained(tmp_path, "zero", "causal-lm", "bf16", zero={"stage": 3, "offload": "none"})
    theirs, _ = trained(tmp_path, "plain", "causal-lm", "bf16")
    assert {value.dtype for value in ours.values()} == {torch.float32}
    assert relative_error(ours, theirs) <= 3e-3
    rounded = sum(bool((value.bfloat16().float() == value).all()) for value in ours.values())
    assert rounded <= 1  # norm weights that stayed 1
    assert {entry.name: evidence.status for entry, evidence in recorder.found}["precision"] == "active"


@pytest.mark.integration
def test_adapters_are_merged_and_saved_as_without_zero(tmp_path: Path) -> None:
    adapter = {"always": True, "r": 4, "kind": "dora"}
    ours, _ = trained(tmp_path, "zero", "causal-lm", "fp32", adapter=adapter, zero={"stage": 3, "offload": "none"})
    theirs, _ = trained(tmp_path, "plain", "causal-lm", "fp32", adapter=adapter)
    assert ours.keys() == theirs.keys()
    assert relative_error(ours, theirs) <= 1e-6
    saved = tmp_path / "zero" / "run" / "final" / "adapter"
    assert load_file(saved / "adapter_model.safetensors").keys() == (
        load_file(tmp_path / "plain" / "run" / "final" / "adapter" / "adapter_model.safetensors").keys()
    )


def test_nonfinite_gradient_ends_the_run_before_the_update(tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", max_steps=4, learning_rate=1e30)
    plan = plan_for(tiny_profile(zero={"stage": 2, "offload": "none"}), job)
    with pytest.raises(NonFiniteError, match="not finite"):
        train_tiny(plan, tmp_path)


def decided(world_size: int = 1, **options: Any) -> Any:
    return Zero(Zero.Options(**options)).probe(replace(ONE_CARD, world_size=world_size))


def test_reason_on_one_device_says_that_sharding_saves_nothing() -> None:
    assert "on one device that saves nothing: set offload" in decided(stage=2, offload="none").reason
    assert "saves nothing" not in decided(stage=2, offload="optimizer").reason
    assert "saves nothing" not in decided(world_size=2, stage=2, offload="none").reason


@pytest.mark.parametrize(
    ("ranks", "options", "wanted"),
    [
        (1, {}, [(0, "none"), (2, "optimizer"), (3, "parameters")]),
        (4, {}, [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]),
        (4, {"stage": 2}, [(2, "none"), (2, "optimizer")]),
        (1, {"stage": 1, "offload": "auto"}, [(1, "none"), (1, "optimizer")]),
    ],
)
def test_candidates_are_ordered_by_cost(ranks: int, options: dict[str, Any], wanted: list[Any]) -> None:
    assert [(o.stage, o.offload) for o in decided(ranks, **options).options] == wanted


# memory


def resolved(folder: Path, memory_gib: float, zero: str) -> Any:
    """The plan of a decoder of about 70 M parameters on a described card."""
    (folder / "mine.toml").write_text(
        f'name = "mine"\n[card]\nmatch = ["a card"]\nmemory_gib = {memory_gib}\ncompute_capability = "8.6"\n'
        f'[plugins.precision]\ndtype = "bf16"\n[plugins.batch]\ntrain = 1\n[plugins.optimizer]\n[plugins.zero]\n{zero}'
    )
    write_samples(folder / "train.jsonl", 30)
    config = TINY_LLAMA | {"hidden_size": 1600, "intermediate_size": 4864, "num_hidden_layers": 2, "vocab_size": 1000}
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
    job = [f"model.config={{ {pairs} }}", "task.kind=causal-lm", f"data.train={folder / 'train.jsonl'}", "data.max_length=32"]
    return api.resolve(str(folder / "mine.toml"), assignments=job, hardware="profile", cache=cache_folder())


def test_auto_chooses_the_cheapest_that_fits_with_the_reason(tmp_path: Path) -> None:
    chosen = {}
    for memory_gib in (4.0, 1.5, 0.6):  # in the last case nothing fits
        entry = next(e for e in resolved(tmp_path, memory_gib, "").entries if e.name == "zero")
        chosen[memory_gib] = (entry.options.stage, entry.options.offload), entry.reason
    assert [options for options, _ in chosen.values()] == [(0, "none"), (2, "optimizer"), (3, "parameters")]
    assert "the option before needs" not in chosen[4.0][1]
    assert "the option before needs 1." in chosen[1.5][1]
    assert "on one device nothing is sharded" in chosen[1.5][1]
    assert re.match(r"no option fits, the last one is used: .* of 0\.\d+ GiB", chosen[0.6][1])


def test_offloaded_state_is_compared_with_host_memory(tmp_path: Path) -> None:
    plan = resolved(tmp_path, 8.0, 'stage = 2\noffload = "optimizer"\n')
    elsewhere = plan_memory(plan, cache_folder())
    assert elsewhere.host_gib == pytest.approx(18 * plan.model.parameters / 2**30, rel=1e-3)
    assert elsewhere.fits  # the host memory of a described machine is unknown
    for cpu_memory_gib, fits in ((2.0, True), (1.0, False)):
        hardware = replace(plan.hardware, source="detected", cpu_memory_gib=cpu_memory_gib)
        memory = plan_memory(replace(plan, hardware=hardware), cache_folder())
        assert (memory.fits, memory.margin_gib > 0) == (fits, True)
        assert ("NOT ENOUGH" in describe_host(memory)) is not fits


@pytest.mark.parametrize(
    ("zero", "beside"),
    [
        pytest.param({"stage": 2, "offload": "optimizer"}, {"precision": {"dtype": "bf16"}}, id="2-offload-bf16", marks=DAILY),
        pytest.param({"stage": 3, "offload": "parameters"}, {}, id="3-parameters"),
    ],
)
def test_resume_gives_the_same_bits(zero: dict[str, Any], beside: dict[str, Any], tmp_path: Path) -> None:
    """Two parameter groups: DeepSpeed maps optimizer state only for the first group."""
    training = {"max_steps": 4, "save_steps": 2, "weight_decay": 0.1, "learning_rate": 1e-2}
    plan = plan_for(tiny_profile(zero=zero, **beside), tiny_job(tmp_path / "data", **training))
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    again = rewound(tmp_path / "run", tmp_path / "again", 2)
    api.execute(plan, again, cache=tmp_path / "cache", resume=True)
    for part in ("final", "checkpoint-4"):
        assert saved_bits(again / part) == saved_bits(tmp_path / "run" / part)


def deepspeed_without_zero(patch: pytest.MonkeyPatch) -> None:
    """Accelerate prepares the model and the optimizer without DeepSpeed, as it does under ACCELERATE_USE_CPU."""
    import hwopt_plugins.zero

    patch.setattr(hwopt_plugins.zero.Zero, "apply", lambda self, recipe, context: None)


def lower_stage(patch: pytest.MonkeyPatch) -> None:
    """DeepSpeed uses stage 1, although its configuration asks for stage 2."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    real = DeepSpeedZeroOptimizer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **{**kwargs, "partition_grads": False})

    patch.setattr(DeepSpeedZeroOptimizer, "__init__", init)


TWO = {"stage": 2, "offload": "none"}
CASES = Cases(
    invalid=(
        ({"stage": 2, "offload": "parameters"}, "cannot be used with stage"),
        ({"stage": 0, "offload": "optimizer"}, "cannot be used with stage"),
    ),
    options=TWO,
    whole="a test here keeps some weights whole",
    writes=frozenset({"process", "accelerator", "engine"}),
    conflicts=(Refused("fsdp", "[plugins.zero]\nstage = 2\n[plugins.fsdp]", on_card=True),),
    mutations=(
        Mutation("Accelerate does not use DeepSpeed", deepspeed_without_zero, "expected stage 2, found 0", TWO),
        Mutation("DeepSpeed uses another stage", lower_stage, "expected stage 2, found 1", TWO),
    ),
)
